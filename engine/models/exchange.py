"""What the ranks of a split model say to each other within a step: sums of hidden states, and logits put together.

Owns the exchange and the buffers that it needs. Knows tensors and a process group, no model. Every call is one that all
ranks make, in the same order; with NCCL all can be captured.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# Its older name, which torch 2.13 warns of, is the only one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered_columns(part: Tensor, parts: Tensor, out: Tensor, group: dist.ProcessGroup) -> None:
    """Put the ranks' columns side by side: part [N, n] of this rank -> out [N, m], m at most ranks * n: what the last
    rank has beyond it is padding. `parts` [ranks * N, n] is scratch.
    """
    _all_gather(parts, part, group=group)
    rows, width = part.shape
    for rank, columns in enumerate(parts.view(-1, rows, width)):
        place = out[:, rank * width : (rank + 1) * width]
        place.copy_(columns[:, : place.shape[1]])


class Exchange:
    """The exchange of one group, for the logits of up to max_rows rows by `head` [vocab of this rank, h]."""

    def __init__(self, group: dist.ProcessGroup, max_rows: int, head: Tensor):
        self._group = group
        self.is_first = group.rank() == 0
        self._part = head.new_empty(max_rows, len(head))
        self._parts = head.new_empty(group.size() * max_rows, len(head))

    def part(self, rows: int) -> Tensor:
        """Where this rank's columns of the logits go, [rows, vocab of this rank]."""
        return self._part[:rows]

    def gather(self, part: Tensor, logits: Tensor) -> None:
        """Logits [N, vocab] of all ranks from each one's `part`."""
        parts = self._parts[: self._group.size() * len(part)]
        gathered_columns(part, parts, logits, self._group)

    def add_up(self, hidden: Tensor) -> None:
        """hidden [T, h] becomes the sum over the ranks, the same bits on each."""
        dist.all_reduce(hidden, group=self._group)
