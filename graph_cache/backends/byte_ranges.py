"""Ranges of memory addresses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class Range(NamedTuple):
    """`size` bytes from the address `start` on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def range_of(tensor: torch.Tensor) -> Range:
    """Return the range of a contiguous tensor's values."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor {list(tensor.shape)} with strides {list(tensor.stride())} is not one range")
    return Range(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def without(ranges: Iterable[Range], removed: Iterable[Range]) -> list[Range]:
    """Return the parts of `ranges` that are in none of `removed`, ascending. `ranges` must not overlap each other."""
    left: list[Range] = []
    holes = sorted(one for one in removed if one.size)
    index = 0
    for start, size in sorted(ranges):
        end = start + size
        while start < end:
            while index < len(holes) and holes[index].end <= start:
                index += 1
            hole = holes[index] if index < len(holes) else Range(end, 0)
            if hole.start > start:
                left.append(Range(start, min(hole.start, end) - start))
            start = max(start, min(hole.end, end)) if hole.start < end else end
    return left
