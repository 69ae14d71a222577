"""What each decoder layer stores between steps, and how layers with equal needs share one page table.

A model lists one spec per layer. `group_layers` puts the layers into groups; every group has its own page table per
request, and all groups take their pages from one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    """Keys and values of every earlier token. `scale` multiplies the attention scores; None: head_dim ** -0.5."""

    kv_heads: int
    head_dim: int
    scale: float | None = None

    @property
    def window(self) -> int | None:
        """The number of tokens that a query attends to, itself included; None: all."""
        return None

    @property
    def softmax_scale(self) -> float:
        """The factor of the attention scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last `size` tokens: a query at position p attends to positions p - size + 1 to p."""

    size: int

    @property
    def window(self) -> int | None:
        return self.size


CacheSpec = FullAttentionSpec | SlidingWindowSpec


class CacheGroup(NamedTuple):
    """Layers that share a page table: a page holds `page_size` tokens of each of them."""

    window: int | None
    layers: tuple[int, ...]


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Group layers by window into groups of equal size, so that one page of memory serves any group.

    The size of a group is the number of layers of the rarest window; the last group of a window may be smaller, which
    leaves part of its pages unused. Raises ModelError if the layers' keys differ in size, because pages would too.
    """
    shapes = {(spec.kv_heads, spec.head_dim) for spec in specs}
    if len(shapes) > 1:
        found = ", ".join(f"{heads} x {dim}" for heads, dim in sorted(shapes))
        raise ModelError(f"all layers must have the same KV heads and head size, found {found}")
    layers: dict[int | None, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec.window, []).append(index)
    size = min(map(len, layers.values()))
    return tuple(
        CacheGroup(window, tuple(indices[start : start + size]))
        for window, indices in layers.items()
        for start in range(0, len(indices), size)
    )
