"""One-shot all-reduce of few rows over the GPUs of one host, through symmetric memory and in one launch.

Holds the symmetric memory and the launch. Device code: engine/kernels/all_reduce_kernels.py. All ranks must make the
same calls in the same order, with the same number of rows. Imports triton: import this module only on CUDA.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor

from engine.kernels.all_reduce_kernels import all_reduce_kernel
from engine.kernels.launch import cdiv, launch_options, next_power_of_2, overlaps

logger = logging.getLogger(__name__)

MAX_ROWS = 128
"""With more rows, reading all partial sums takes longer than an NCCL launch."""

BLOCK, MAX_PROGRAMS = 1024, 128
NUM_BUFFERS = 2
"""Calls alternate between two buffers: a rank writes one only after all peers have read its previous contents."""

_ABANDONED = 2  # flag value that releases every waiting rank


class OneShotAllReduce:
    """One-shot all-reduce of hidden states [up to MAX_ROWS, width] over the ranks of `group`.

    Raises RuntimeError if the ranks can't share memory.
    """

    max_rows = MAX_ROWS

    def __init__(self, group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device):
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # this all-reduce only reads its peers
        import torch.distributed._symmetric_memory as symmetric

        self._rank, self._world_size = group.rank(), group.size()
        self._flag_count = MAX_PROGRAMS * self._world_size
        partials = symmetric.empty(NUM_BUFFERS * MAX_ROWS * width, dtype=dtype, device=device)
        flags = symmetric.empty(NUM_BUFFERS * self._flag_count, dtype=torch.int32, device=device)
        flags.zero_()
        torch.cuda.current_stream(device).synchronize()  # zero the flags before a peer can signal
        self._handles = symmetric.rendezvous(partials, group), symmetric.rendezvous(flags, group)
        self._partials, self._flags = partials.view(NUM_BUFFERS, MAX_ROWS, width), flags
        buffer_ptrs, flag_ptrs = (torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64) for handle in self._handles)
        buffer_bytes = MAX_ROWS * width * partials.element_size()
        self._partial_addresses = [(buffer_ptrs + index * buffer_bytes).to(device) for index in range(NUM_BUFFERS)]
        self._flag_addresses = flag_ptrs.to(device)

    def share(self, rows: int, buffer_index: int) -> Tensor:
        """Return the buffer [rows, width] for this rank's partial sum.

        `buffer_index` must alternate between 0 and 1, also from step to step.
        """
        return self._partials[buffer_index, :rows]

    def all_reduce_shared(self, hidden: Tensor, buffer_index: int) -> None:
        """Add the partial sums of all ranks in this buffer to hidden [rows, width]. One launch; can be captured."""
        count, pdl = hidden.numel(), overlaps(hidden)
        block = max(BLOCK, next_power_of_2(cdiv(count, MAX_PROGRAMS)))
        all_reduce_kernel[(cdiv(count, block),)](
            hidden,
            self._partial_addresses[buffer_index],
            self._flag_addresses,
            buffer_index * self._flag_count,
            count,
            RANK=self._rank,
            WORLD_SIZE=self._world_size,
            BLOCK=block,
            PDL=pdl,
            **launch_options(pdl),
        )

    def abandon(self) -> None:
        """Release launches that wait for a dead rank; their results are invalid. Thread-safe."""
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(self._flags.device, priority=-1)):
            self._flags.fill_(_ABANDONED)


def make_one_shot_all_reduce(
    group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device
) -> OneShotAllReduce | None:
    """Return a OneShotAllReduce; None on all ranks, with a warning, if any rank can't share memory."""
    one_shot, is_shared = None, torch.ones(1, device=device)
    try:
        one_shot = OneShotAllReduce(group, width, dtype, device)
    except RuntimeError as error:
        logger.warning("rank %d can't share memory with its peers; all ranks use NCCL: %s", group.rank(), error)
        is_shared.zero_()
    dist.all_reduce(is_shared, dist.ReduceOp.MIN, group=group)
    return one_shot if bool(is_shared) else None
