"""What one checkpoint matrix has: the part of a layer's storage that is its own, and its tensors in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Where a rank stores its part of a checkpoint's matrix W [outputs, inputs].

    - layer, expert, start, rows, columns: the part is rows [start, start + rows) of the layer's storage, of an expert
      if it has experts, with `columns` inputs.
    - first_output, first_input: where the part begins in W.
    """

    layer: Any
    expert: int | None
    start: int
    rows: int
    columns: int
    outputs: int
    inputs: int
    first_output: int = 0
    first_input: int = 0

    def split(self, dim: int, rank: int, size: int) -> Region:
        """Return the region of a rank of `size` that split W along its outputs (0) or its inputs (1)."""
        if dim == 0:
            return replace(self, outputs=self.outputs * size, first_output=rank * self.rows)
        return replace(self, inputs=self.inputs * size, first_input=rank * self.columns)

    def narrow(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor [outputs, inputs] that is stored here, as a view."""
        rows = whole.narrow(0, self.first_output, self.rows)
        return rows.narrow(1, self.first_input, self.columns)


class CheckpointTensor(NamedTuple):
    """A tensor of a quantised matrix in a checkpoint.

    - shapes: the accepted shapes of the whole tensor, the usual one first. dtypes: the accepted dtypes.
    - store: writes the part of this rank of a whole tensor.
    - load: returns the tensor, of this rank's part; None: nothing is kept of it, or another tensor has it.
    - check: returns what is wrong with the values of a tensor of a right shape, or None.
    - required: whether every checkpoint has it, or one of `others`: the last parts of the names that some programs give
      it.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    store: Callable[[Tensor], None]
    load: Callable[[], Tensor] | None
    check: Callable[[Tensor], str | None] = lambda tensor: None
    required: bool = True
    others: tuple[str, ...] = ()
