"""This process's place among the tensor-parallel ranks: which part of a layer it holds, and the layers' collectives."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import gather_columns


class VocabPart(NamedTuple):
    """The vocabulary rows of a rank: `rows` are stored, of which the first `used` are tokens `first`, `first` + 1, …

    The rest is padding: all ranks store equally many rows.
    """

    rows: int
    first: int
    used: int


class TensorParallel(NamedTuple):
    """Rank `rank` of `size`, with the process group of all of them. Collectives do nothing if size is 1.

    A rank without a group can hold weights but can't compute: collectives need the group.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def vocab_part(self, vocab: int) -> VocabPart:
        """Return this rank's rows of a vocabulary of `vocab` tokens."""
        rows = -(-vocab // self.size)
        first = min(self.rank * rows, vocab)
        return VocabPart(rows, first, min(rows, vocab - first))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by its sum over all ranks and return it."""
        if self.size > 1:
            dist.all_reduce(x, group=self._connected())
        return x

    def gather_columns(self, local: Tensor, width: int) -> Tensor:
        """Concatenate the ranks' `local` [N, n] along dim 1 and return the first `width` columns, [N, width]."""
        if self.size == 1:
            return local
        rows, columns = local.shape
        out = local.new_empty(rows, width)
        gather_columns(local.contiguous(), local.new_empty(self.size * rows, columns), out, self._connected())
        return out

    def _connected(self) -> dist.ProcessGroup:
        if self.group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group, which a computation needs")
        return self.group


SINGLE_RANK = TensorParallel()
"""No tensor parallelism."""
