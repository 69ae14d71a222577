"""Interface between models and the fused kernels: the tensors of a decoder, for any model and memory layout.

Defines the tensors' names and the layout of heads in a fused QKV projection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.kernels.linear_weight import LinearWeight
from engine.layers.moe import MoE
from engine.layers.weight_slot import Slot
from engine.models.config import ModelConfig
from engine.models.interface import ForwardContext


class HeadLayout(NamedTuple):
    """Layout of a row of the fused QKV projection.

    By default all q heads, then all k heads, then all v heads. With `by_group`, KV head by KV head: its queries, its
    key, its value.
    """

    heads: int
    kv_heads: int
    dim: int
    by_group: bool

    @property
    def width(self) -> int:
        """Number of elements in a row."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    def cut(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv [T, width] into views: q [T, KV, H/KV, D], k and v [T, KV, D]."""
        tokens, group_size = len(qkv), self.heads // self.kv_heads
        if self.by_group:
            groups = qkv.view(tokens, self.kv_heads, group_size + 2, self.dim)
            return groups[:, :, :group_size], groups[:, :, group_size], groups[:, :, group_size + 1]
        rows = qkv.view(tokens, self.heads + 2 * self.kv_heads, self.dim)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q.unflatten(1, (self.kv_heads, group_size)), k, v


class LayerTensors(NamedTuple):
    """The parameters of a decoder layer; None: the layer has no such parameter.

    `gate_up` has the gate's rows first; the rows of `qkv` follow the HeadLayout. A layer has `gate_up` and `down`, or
    `mlp`, for an MLP that the fused kernels don't compute: a function from hidden [T, h] and the context to what the
    layer adds to hidden, its norm included. `moe`: the module of `mlp`, if that is all it computes but the norm.
    """

    input_norm: Tensor
    qkv: LinearWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearWeight
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: LinearWeight | None
    gate_up_bias: Tensor | None
    down: LinearWeight | None
    down_bias: Tensor | None
    mlp: Callable[[Tensor, ForwardContext], Tensor] | None = None
    moe: MoE | None = None
    sinks: Tensor | None = None

    def named_tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, tensor) of every parameter; the scale of a quantised weight is `qkv.scale` and so on."""
        for name, value in self._asdict().items():
            if isinstance(value, LinearWeight):
                yield from value.named_tensors(name)
            elif name not in ("mlp", "moe"):
                yield name, value


class DecoderTensors(Protocol):
    """The tensors of a model. Parameters are looked up at each access, so replaced parameters are noticed.

    With a `group` of several ranks, they are this rank's shard: heads, columns of the MLP, and vocabulary rows from
    `first_token` on, in both the embedding and the head. The outputs of `o` and `down` must be all-reduced.
    """

    config: ModelConfig
    heads: HeadLayout
    first_token: int

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def cos(self) -> Tensor:
        """RoPE table, [positions, D] or [positions, 1, D], in the model's dtype."""

    @property
    def sin(self) -> Tensor:
        """RoPE table like `cos`, with the first half negated."""

    def layer(self, index: int) -> LayerTensors:
        """Return the parameters of decoder layer `index`."""

    @property
    def embedding(self) -> Tensor:
        """Embedding table [vocab of this rank, h]."""

    @property
    def norm(self) -> Tensor:
        """Weight of the final norm, [h]."""

    @property
    def head(self) -> LinearWeight:
        """LM head weight [vocab of this rank, h]."""


def require_formats(tensors: DecoderTensors, supported: Collection[str]) -> None:
    """Raise ModelError for the first linear layer whose weight format is not in `supported`."""
    for index in range(tensors.config.num_layers):
        for name, value in tensors.layer(index)._asdict().items():
            if isinstance(value, LinearWeight):
                value.require(supported, f"{name} of layer {index}")
    tensors.head.require(supported, "the LM head")


class FusableModel(Protocol):
    """What the fused kernels use of a model beside its tensors; see engine/models/interface.py."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_len: int

    @property
    def module(self) -> nn.Module: ...

    def layer_kinds(self) -> Sequence[Hashable]: ...

    def final_norm(self, hidden: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...

    def weight_slots(self) -> dict[str, Slot]: ...

    def close(self) -> None: ...
