"""What each decoder layer stores between steps, and how layers with equal needs share one page table.

A model lists one spec per layer:

- FullAttentionSpec, SlidingWindowSpec, LatentSpec: tensors per token, in pages.
- RecurrentStateSpec: tensors of a fixed size per sequence, without pages.

`group_layers` puts the paged layers into groups; every group has its own page table per request, and all groups take
their pages from one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    """Keys and values of every earlier token.

    `scale` multiplies the attention scores; None: head_dim ** -0.5. `softcap` bounds the scaled scores, as
    softcap * tanh(scores / softcap); None: unbounded. `sinks`: each query head has one more score, its sink, in the
    softmax; its value is 0, so it only takes weight.
    """

    kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def window(self) -> int | None:
        """The number of tokens that a query attends to, itself included; None: all."""
        return None

    @property
    def softmax_scale(self) -> float:
        """The factor of the attention scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def token_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes (heads, size) of the tensors stored per token: a key and a value."""
        return ((self.kv_heads, self.head_dim),) * 2


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last `size` tokens: a query at position p attends to positions p - size + 1 to p."""

    size: int

    @property
    def window(self) -> int | None:
        return self.size


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """One vector of `width` elements per token, the key of all query heads (multi-head latent attention).

    Its first `value_width` elements are the value; None: all of them. `scale` multiplies the attention scores.
    """

    width: int
    scale: float
    value_width: int | None = None

    @property
    def head_dim(self) -> int:
        return self.width

    @property
    def window(self) -> None:
        return None

    @property
    def softcap(self) -> None:
        return None

    @property
    def sinks(self) -> bool:
        return False

    @property
    def softmax_scale(self) -> float:
        return self.scale

    @property
    def token_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shape (1, width) of the one tensor stored per token."""
        return ((1, self.width),)


@dataclass(frozen=True, kw_only=True)
class RecurrentStateSpec:
    """Tensors of these shapes per sequence, whatever its length (Mamba, linear attention).

    A sequence's state starts as zeros. `dtype` None: the model's.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None = None


PagedSpec = FullAttentionSpec | SlidingWindowSpec | LatentSpec
CacheSpec = PagedSpec | RecurrentStateSpec


class CacheGroup(NamedTuple):
    """Layers that share a page table: a page holds `page_size` tokens of each of them."""

    window: int | None
    layers: tuple[int, ...]


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Group paged layers by window into groups of equal size, so that one page of memory serves any group.

    The size of a group is the number of layers of the rarest window; the last group of a window may be smaller, which
    leaves part of its pages unused. Without paged layers there is no group. Raises ModelError if the layers store
    tensors of different shapes per token, because pages would differ in size too.
    """
    paged = paged_layers(specs)
    shapes = {spec.token_shapes for spec in paged.values()}
    if len(shapes) > 1:
        found = ", ".join(_describe(one) for one in sorted(shapes))
        raise ModelError(f"all layers must have the same KV heads and head size, found {found}")
    layers: dict[int | None, list[int]] = {}
    for index, spec in paged.items():
        layers.setdefault(spec.window, []).append(index)
    size = min(map(len, layers.values()), default=1)
    return tuple(
        CacheGroup(window, tuple(indices[start : start + size]))
        for window, indices in layers.items()
        for start in range(0, len(indices), size)
    )


def paged_layers(specs: Sequence[CacheSpec]) -> dict[int, PagedSpec]:
    """Return the specs of the layers that store tensors in pages, by layer index."""
    return {index: spec for index, spec in enumerate(specs) if not isinstance(spec, RecurrentStateSpec)}


def recurrent_layers(specs: Sequence[CacheSpec]) -> dict[int, RecurrentStateSpec]:
    """Return the specs of the layers with recurrent state, by layer index."""
    return {index: spec for index, spec in enumerate(specs) if isinstance(spec, RecurrentStateSpec)}


def _describe(token_shapes: tuple[tuple[int, int], ...]) -> str:
    heads, size = token_shapes[0]
    return f"{heads} x {size}" if len(token_shapes) == 2 else f"a latent vector of {size}"
