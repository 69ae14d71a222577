"""Pad batches of images of one size to token budgets, so that one graph per layer serves every microbatch.

For transformers' towers that take pixel values [images, channels, height, width] (CLIP, SigLIP). Hooks on the tower add
images of zeros and cut its outputs back. Images don't attend to each other, so no mask is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from engine.training.vision.padding import cut_rows
from graph_cache.adapters.megatron.vision import ABOVE_LARGEST

ARGUMENT_PER_IMAGE = "argument_per_image"


def takes_images_of_one_size(tower: nn.Module) -> bool:
    """Whether a tower of transformers computes each image of a batch by itself, in patches of a size that it has."""
    config = getattr(tower, "config", None)
    return (
        getattr(tower, "main_input_name", None) == "pixel_values"
        and getattr(config, "patch_size", None) is not None
        and not any(isinstance(one, _BatchNorm) for one in tower.modules())  # its statistics cover the padding
    )


class PaddedImageBatches:
    """Pad a tower's batches to as many images as the smallest of `budgets` holds, between `begin` and `end`.

    `budgets`: patches per microbatch, ascending. A batch above the largest, or with other tensors that have a row per
    image, is not padded: `unpadded(reason)` is called.
    """

    def __init__(self, tower: nn.Module, budgets: Sequence[int], unpadded: Callable[[str], None] = lambda _: None):
        self._tower: Any = tower
        self._budgets, self._unpadded = tuple(budgets), unpadded
        self._handles: list[RemovableHandle] = []
        self._images: tuple[int, int] | None = None  # images of the current batch, and those that it is padded to

    def begin(self) -> None:
        """Start padding, for eager calls too, so that they compute the same as a replay."""
        self._handles = [
            self._tower.register_forward_pre_hook(self._pad, with_kwargs=True),
            self._tower.register_forward_hook(self._cut),
        ]

    def end(self) -> None:
        """Stop padding."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _pad(self, tower: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        self._images = None
        given = dict(zip(("pixel_values",), args, strict=False)) | kwargs
        pixels = given.get("pixel_values")
        if not isinstance(pixels, Tensor) or pixels.dim() != 4:
            return None
        count, _, height, width = pixels.shape
        size = tower.config.patch_size
        rows, columns = (size, size) if isinstance(size, int) else size
        patches = (height // rows) * (width // columns)
        capacities = [budget // patches for budget in self._budgets]
        at = bisect_left(capacities, count)
        if at == len(capacities):
            self._unpadded(ABOVE_LARGEST)
            return None
        others = [*args[1:], *(value for name, value in kwargs.items() if name != "pixel_values")]
        if any(isinstance(one, Tensor) and one.dim() and len(one) == count for one in others):
            self._unpadded(ARGUMENT_PER_IMAGE)
            return None
        self._images = count, capacities[at]
        padded = F.pad(pixels, (0, 0, 0, 0, 0, 0, 0, capacities[at] - count))
        return ((padded, *args[1:]), kwargs) if args else (args, kwargs | {"pixel_values": padded})

    def _cut(self, tower: nn.Module, args: tuple, output: Any) -> Any:
        if self._images is None:
            return output
        (count, capacity), self._images = self._images, None
        return cut_rows(output, {capacity: count})
