"""A dense decoder as its tensors: what kernels of our own need of a model, whoever built it and however it lies.

Owns the names of those tensors and where heads lie in a joint projection. Knows no kernel and no forward pass.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.models.config import ModelConfig


class HeadLayout(NamedTuple):
    """How a row of the joint projection of q, k and v is cut: all q, all k, all v, each in order of heads; or
    `by_group` one KV head after the other, each with its queries before its key and its value.
    """

    heads: int
    kv_heads: int
    dim: int
    by_group: bool

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    def cut(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of qkv [T, width]: q [T, KV, H/KV, D], k and v [T, KV, D]."""
        tokens, group_size = len(qkv), self.heads // self.kv_heads
        if self.by_group:
            groups = qkv.view(tokens, self.kv_heads, group_size + 2, self.dim)
            return groups[:, :, :group_size], groups[:, :, group_size], groups[:, :, group_size + 1]
        rows = qkv.view(tokens, self.heads + 2 * self.kv_heads, self.dim)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q.unflatten(1, (self.kv_heads, group_size)), k, v


class LayerTensors(NamedTuple):
    """The parameters of a decoder layer. Matrices are [outputs, inputs]; `gate_up` has the gate's rows first, `qkv` its
    rows as a HeadLayout says. None: the layer has no such thing.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class DenseTensors(Protocol):
    """The tensors of a model. Parameters are read from it at each access: they are where the model has them then.

    With a `group` of several ranks they are this rank's: heads, columns of the MLP, and rows of the vocabulary from
    `first_token` on, in both the embedding and the head. What `o` and `down` give is to be added up over the ranks.
    """

    config: ModelConfig
    heads: HeadLayout
    group: dist.ProcessGroup | None
    first_token: int
    cos: Tensor
    sin: Tensor
    """Of each position, [positions, D] (or [positions, 1, D]) in the model's dtype, the first half of sin negated."""

    def layer(self, index: int) -> LayerTensors:
        """The tensors of decoder layer `index`."""

    @property
    def embedding(self) -> Tensor:
        """[vocab of this rank, h]"""

    @property
    def norm(self) -> Tensor:
        """The last norm's weight [h]."""

    @property
    def head(self) -> Tensor:
        """[vocab of this rank, h]"""


class FusableModel(Protocol):
    """A model that can hand its parameters to the fused kernels."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def tensors(self) -> DenseTensors:
        """The parameters. Raises ModelError if the model computes something else than a dense decoder."""
