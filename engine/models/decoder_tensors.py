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
from engine.kernels.norm_weights import NormWeights
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

    `gate_up` has the gate's rows first, or up alone where the MLP has no gate; the rows of `qkv` follow the HeadLayout.
    `attention_out_norm` and `mlp_out_norm`: of what attention and the MLP add to hidden. A layer has `gate_up` and
    `down`, or `mlp`, for an MLP that the fused kernels don't compute: a function from hidden [T, h] and the context to
    what the layer adds to hidden, its norms included. `moe`: the module of `mlp`, if that is all it computes beside
    norms and a factor.
    """

    input_norm: NormWeights | None
    qkv: LinearWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearWeight
    o_bias: Tensor | None
    post_norm: NormWeights | None
    gate_up: LinearWeight | None
    gate_up_bias: Tensor | None
    down: LinearWeight | None
    down_bias: Tensor | None
    mlp: Callable[[Tensor, ForwardContext], Tensor] | None = None
    moe: MoE | None = None
    sinks: Tensor | None = None
    attention_out_norm: NormWeights | None = None
    mlp_out_norm: NormWeights | None = None

    def named_tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, tensor) of every parameter; the scale of a quantised weight is `qkv.scale` and so on."""
        for name, value in self._asdict().items():
            if isinstance(value, LinearWeight | NormWeights):
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

    def rotary(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return the RoPE tables of decoder layer `index`, cos and sin, in the model's dtype; None: it has none.

        They are [positions, R] or [positions, 1, R], for R rotated elements of a head; see RotaryTable.
        """

    def layer(self, index: int) -> LayerTensors:
        """Return the parameters of decoder layer `index`."""

    @property
    def embedding(self) -> Tensor:
        """Embedding table [vocab of this rank, h]."""

    @property
    def embedding_scale(self) -> float | None:
        """The factor of embeddings; None: 1."""

    @property
    def norm(self) -> NormWeights:
        """The final norm."""

    @property
    def head(self) -> LinearWeight:
        """LM head weight [vocab of this rank, h]."""

    @property
    def head_bias(self) -> Tensor | None:
        """Bias of the LM head [vocab of this rank]."""


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
