"""What the ranks of a split model say to each other within a step: sums of hidden states, and logits put together.

Owns the exchange and the buffers that it needs. Knows tensors and a process group, no model. Every call is one that all
ranks make, in the same order; with NCCL all can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from engine.distributed.one_shot_all_reduce import OneShotAllReduce

# Its older name, which torch 2.13 warns of, is the only one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_columns(local: Tensor, gathered: Tensor, out: Tensor, group: dist.ProcessGroup) -> None:
    """Put the ranks' columns side by side: part [N, n] of this rank -> out [N, m], m at most ranks * n: what the last
    rank has beyond it is padding. `parts` [ranks * N, n] is scratch.
    """
    _all_gather(gathered, local, group=group)
    rows, width = local.shape
    for rank, columns in enumerate(gathered.view(-1, rows, width)):
        target = out[:, rank * width : (rank + 1) * width]
        target.copy_(columns[:, : target.shape[1]])


class TensorParallelCollectives:
    """Collectives of one tensor-parallel group, for logits of up to max_rows rows by `head` [vocab of this rank, h].

    An all-reduce added to hidden [T, h] takes two calls: each rank writes its partial sum where `all_reduce_into` says,
    then calls `all_reduce_shared`. For few rows it uses the one-shot all-reduce, which has a lower latency than NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, max_rows: int, head: Tensor):
        self._group = group
        self.is_first = group.rank() == 0
        self._one_shot = _make_one_shot(group, head)
        self._local_logits = head.new_empty(max_rows, len(head))
        self._gathered = head.new_empty(group.size() * max_rows, len(head))

    def part(self, rows: int) -> Tensor:
        """Where this rank's columns of the logits go, [rows, vocab of this rank]."""
        return self._local_logits[:rows]

    def gather(self, local: Tensor, logits: Tensor) -> None:
        """Logits [N, vocab] of all ranks from each one's `part`."""
        gathered = self._gathered[: self._group.size() * len(local)]
        gather_columns(local, gathered, logits, self._group)

    def all_reduce_into(self, hidden: Tensor, buffer_index: int) -> tuple[Tensor, bool]:
        """Where this rank's share of what comes to hidden [T, h] goes, and whether it is added to what is there.

        `turn` is 0 and 1 alternately, also from step to step, and the same for `all_reduce_shared`.
        """
        if self._fits_one_shot(hidden):
            return self._one_shot.share(len(hidden), buffer_index), False
        return hidden, self.is_first

    def all_reduce_shared(self, hidden: Tensor, buffer_index: int) -> None:
        """hidden has all ranks' shares after it, the same bits on each."""
        if self._fits_one_shot(hidden):
            self._one_shot.all_reduce_shared(hidden, buffer_index)
        else:
            self.all_reduce(hidden)

    def all_reduce(self, hidden: Tensor) -> None:
        """hidden [T, h] becomes the sum of the ranks' own, the same bits on each."""
        dist.all_reduce(hidden, group=self._group)

    def abandon(self) -> None:
        """Let go of sums that wait for a rank that is gone. From any thread; NCCL's are the group's to abort."""
        if self._one_shot is not None:
            self._one_shot.abandon()

    def _fits_one_shot(self, hidden: Tensor) -> bool:
        return self._one_shot is not None and len(hidden) <= self._one_shot.max_rows


def _make_one_shot(group: dist.ProcessGroup, head: Tensor) -> OneShotAllReduce | None:
    if not head.is_cuda:
        return None
    from engine.distributed.one_shot_all_reduce import make_one_shot_all_reduce  # triton exists only where CUDA does

    return make_one_shot_all_reduce(group, head.shape[1], head.dtype, head.device)
