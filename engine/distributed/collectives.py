"""Tensor-parallel collectives of a step: all-reduce of hidden states and all-gather of logits, with their buffers.

All ranks must make the same calls in the same order. With NCCL every call can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from engine.distributed.one_shot_all_reduce import OneShotAllReduce

# torch 2.13 deprecates all_gather_into_tensor, but earlier versions have only this name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_columns(local: Tensor, gathered: Tensor, out: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather columns: concatenate each rank's `local` [N, n] along dim 1 to out [N, m], on all ranks.

    m is at most ranks * n; the columns beyond it are padding and are dropped. `gathered` [ranks * N, n] is scratch.
    """
    _all_gather(gathered, local, group=group)
    rows, width = local.shape
    for rank, columns in enumerate(gathered.view(-1, rows, width)):
        target = out[:, rank * width : (rank + 1) * width]
        target.copy_(columns[:, : target.shape[1]])


class TensorParallelCollectives:
    """Collectives of one tensor-parallel group, for logits of up to max_rows rows from `head` [local vocab, h].

    Adding an all-reduced sum to hidden [T, h] takes two calls: write this rank's partial sum to the tensor returned by
    `all_reduce_into`, then call `all_reduce_shared`. Few rows use the one-shot all-reduce, which has lower latency than
    NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, max_rows: int, head: Tensor, logits_dtype: torch.dtype):
        self._group = group
        self.is_first = group.rank() == 0
        self._one_shot = _make_one_shot(group, head)
        self._local_logits = head.new_empty(max_rows, len(head), dtype=logits_dtype)
        self._gathered = head.new_empty(group.size() * max_rows, len(head), dtype=logits_dtype)

    def part(self, rows: int) -> Tensor:
        """Return the buffer for this rank's columns of the logits, [rows, local vocab]."""
        return self._local_logits[:rows]

    def gather(self, local: Tensor, logits: Tensor) -> None:
        """All-gather the ranks' `local` columns into logits [N, vocab]."""
        gathered = self._gathered[: self._group.size() * len(local)]
        gather_columns(local, gathered, logits, self._group)

    def all_reduce_into(self, hidden: Tensor, buffer_index: int) -> tuple[Tensor, bool]:
        """Return the tensor [T, h] for this rank's partial sum, and whether to add to its contents or overwrite them.

        `buffer_index` must alternate between 0 and 1, also from step to step. Pass the same value to
        `all_reduce_shared`.
        """
        one_shot = self._one_shot_for(hidden)
        if one_shot is not None:
            return one_shot.share(len(hidden), buffer_index), False
        return hidden, self.is_first

    def all_reduce_shared(self, hidden: Tensor, buffer_index: int) -> None:
        """Add the partial sums of all ranks to hidden; the result is bitwise equal on all ranks."""
        one_shot = self._one_shot_for(hidden)
        if one_shot is not None:
            one_shot.all_reduce_shared(hidden, buffer_index)
        else:
            self.all_reduce(hidden)

    def all_reduce(self, hidden: Tensor) -> None:
        """Replace hidden [T, h] by its sum over all ranks, bitwise equal on all ranks."""
        dist.all_reduce(hidden, group=self._group)

    def abandon(self) -> None:
        """Release one-shot all-reduces that wait for a dead rank. Thread-safe.

        NCCL collectives are released by aborting the process group.
        """
        if self._one_shot is not None:
            self._one_shot.abandon()

    def _one_shot_for(self, hidden: Tensor) -> OneShotAllReduce | None:
        one_shot = self._one_shot
        return one_shot if one_shot is not None and len(hidden) <= one_shot.max_rows else None


def _make_one_shot(group: dist.ProcessGroup, head: Tensor) -> OneShotAllReduce | None:
    if not head.is_cuda:
        return None
    from engine.distributed.one_shot_all_reduce import make_one_shot_all_reduce  # triton is installed only with CUDA

    return make_one_shot_all_reduce(group, head.shape[1], head.dtype, head.device)
