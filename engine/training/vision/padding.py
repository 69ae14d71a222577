"""Pad packed images of a vision tower to a token budget, so that one graph per layer serves every microbatch.

For transformers' Qwen2.5-VL and Qwen3-VL towers. Hooks on the tower pad its patches and positions, and cut its outputs
back; the padding patches form a separate image, so no attention crosses into them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import vision_utils
from transformers.utils import ModelOutput

from engine.training.vision.towers import interpolates, is_windowed
from engine.training.vision.varlen_attention import register
from graph_cache.adapters.megatron.vision import ABOVE_LARGEST, TOO_MANY_IMAGES


class PaddedImages:
    """Pad a tower's microbatches to the smallest of `budgets` that holds them, between `begin` and `end`.

    `budgets`: patches per microbatch, ascending multiples of the square of the spatial merge size. `max_images`: images
    (frames of a video) per microbatch. A microbatch beyond one of them is not padded: `unpadded(reason)` is called.
    """

    def __init__(
        self,
        tower: nn.Module,
        budgets: Sequence[int],
        max_images: int,
        unpadded: Callable[[str], None] = lambda _: None,
    ):
        self._tower: Any = tower
        self._budgets, self._max_images, self._unpadded = tuple(budgets), max_images, unpadded
        self._handles: list[RemovableHandle] = []
        self._implementation: str | None = None
        self._patches: tuple[int, int] | None = None  # patches of the current microbatch, and its budget

    def begin(self) -> None:
        """Start padding, for eager calls too, and attention without host reads."""
        config = self._tower.config
        self._implementation, config._attn_implementation = config._attn_implementation, register()
        self._handles = [
            self._tower.register_forward_pre_hook(self._pad, with_kwargs=True),
            self._tower.register_forward_hook(self._cut),
        ]

    def end(self) -> None:
        """Restore the tower."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._tower.config._attn_implementation = self._implementation
        self._handles = []

    def _pad(self, tower: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self._patches = None
        given = dict(zip(("hidden_states", "grid_thw"), args, strict=False)) | kwargs
        patches, grid = given.pop("hidden_states"), given.pop("grid_thw")
        count = patches.shape[0]
        cu_seqlens = vision_utils.get_vision_cu_seqlens(grid, kwargs=given)
        at = bisect_left(self._budgets, count)
        if at == len(self._budgets) or len(cu_seqlens) - 1 > self._max_images:
            self._unpadded(ABOVE_LARGEST if at == len(self._budgets) else TOO_MANY_IMAGES)
            return None
        budget = self._budgets[at]
        extra = budget - count
        positions = vision_utils.get_vision_position_ids(grid, tower.spatial_merge_size, kwargs=given)
        given |= {
            "cu_seqlens": _extended(cu_seqlens, [budget], self._max_images + 2),
            "max_seqlen": budget,
            "position_ids": F.pad(positions, (0, 0, 0, extra)),
        }
        if interpolates(tower):
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
                kwargs=given,
            )
            given["interp_indices"] = F.pad(indices, (0, 0, 0, extra))
            given["interp_weights"] = F.pad(weights, (0, 0, 0, extra))
        if is_windowed(tower):
            given |= self._windows(tower, grid, count, budget, given)
        self._patches = count, budget
        return (F.pad(patches, (0, 0, 0, extra)), grid), given

    def _windows(self, tower: Any, grid: Tensor, count: int, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return the window arguments, with the padding patches in separate windows at the end."""
        unit = tower.spatial_merge_size**2
        side = tower.window_size // tower.spatial_merge_size // tower.patch_size
        longest = side * side * unit
        index, cu_windows = vision_utils.get_vision_window_index(
            grid, tower.spatial_merge_size, tower.window_size, tower.patch_size, kwargs=given
        )
        # An image of h x w merged patches has at most 4hw / side² windows, 2hw / side if one edge is shorter than a
        # window, or 1. The padding's windows come on top.
        merged = budget // unit
        most = max(4 * merged // side**2, 2 * merged // side) + self._max_images + budget // longest + 1
        ends = [*range(count + longest, budget, longest), budget]
        return {
            "window_index": torch.cat([index, torch.arange(count // unit, budget // unit, device=index.device)]),
            "cu_window_seqlens": _extended(cu_windows, ends, most + 1),
            "max_window_seqlen": longest,
        }

    def _cut(self, tower: nn.Module, args: tuple, output: Any) -> Any:
        """Cut each output back to the patches of the images, including merged patches and deepstack outputs."""
        if self._patches is None:
            return output
        (count, budget), self._patches = self._patches, None
        unit = self._tower.spatial_merge_size**2
        return cut_rows(output, {budget // unit: count // unit, budget: count})


def cut_rows(value: Any, rows: Mapping[int, int]) -> Any:
    """Cut tensors of one of these numbers of rows, in transformers' outputs and in containers."""
    if isinstance(value, Tensor):
        return value[: rows[len(value)]] if value.dim() and len(value) in rows else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: cut_rows(one, rows) for name, one in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)([cut_rows(one, rows) for one in value])
    return value


def _extended(cu_seqlens: Tensor, ends: Sequence[int], length: int) -> Tensor:
    """Return cu_seqlens with further sequences that end at `ends`, and empty ones up to `length` entries."""
    ends = [*ends, *[ends[-1]] * (length - len(cu_seqlens) - len(ends))]
    return torch.cat([cu_seqlens, torch.tensor(ends, dtype=cu_seqlens.dtype, device=cu_seqlens.device)])
