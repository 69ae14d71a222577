"""Sums over the GPUs of one host through memory that the ranks map of each other: of few rows, in one launch of ours.

Owns that memory and its one launch; device code: engine/kernels/all_reduce_kernels.py. All ranks make the same
calls in the same order, with the same number of rows. Imports triton: import it only where the device is CUDA.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from engine.kernels.all_reduce_kernels import all_reduce_kernel
from engine.kernels.launch import launch_options, overlaps

logger = logging.getLogger(__name__)

MAX_ROWS = 128
"""Above it what is read of the others takes longer than a library's launch costs."""

BLOCK, MAX_PROGRAMS = 1024, 128
NUM_BUFFERS = 2
"""Two in turn: a rank that writes one has read the other ranks' other one, so nobody reads what is being written."""

_ABANDONED = 2  # a flag's value from which nobody waits any more


class OneShotAllReduce:
    """Where the ranks of `group` leave their shares of hidden states [up to MAX_ROWS, width], for each other to read.

    Raises RuntimeError where memory can't be shared.
    """

    max_rows = MAX_ROWS

    def __init__(self, group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device):
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of no use to a sum that reads
        import torch.distributed._symmetric_memory as symmetric

        self._rank, self._world_size = group.rank(), group.size()
        self._flag_count = MAX_PROGRAMS * self._world_size
        partials = symmetric.empty(NUM_BUFFERS * MAX_ROWS * width, dtype=dtype, device=device)
        flags = symmetric.empty(NUM_BUFFERS * self._flag_count, dtype=torch.int32, device=device)
        flags.zero_()
        torch.cuda.current_stream(device).synchronize()  # before another rank can tell anything
        self._handles = symmetric.rendezvous(partials, group), symmetric.rendezvous(flags, group)
        self._partials, self._flags = partials.view(NUM_BUFFERS, MAX_ROWS, width), flags
        buffer_ptrs, flag_ptrs = (torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64) for handle in self._handles)
        buffer_bytes = MAX_ROWS * width * partials.element_size()
        self._partial_addresses = [(buffer_ptrs + index * buffer_bytes).to(device) for index in range(NUM_BUFFERS)]
        self._flag_addresses = flag_ptrs.to(device)

    def share(self, rows: int, buffer_index: int) -> Tensor:
        """Where this rank's share [rows, width] goes; `turn` is 0 and 1 alternately, also from step to step."""
        return self._partials[buffer_index, :rows]

    def all_reduce_shared(self, hidden: Tensor, buffer_index: int) -> None:
        """hidden [rows, width] += the sum of all ranks' shares of this turn. One launch; can be captured."""
        count, pdl = hidden.numel(), overlaps(hidden)
        block = max(BLOCK, triton.next_power_of_2(triton.cdiv(count, MAX_PROGRAMS)))
        all_reduce_kernel[(triton.cdiv(count, block),)](
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
        """Let go of launches that wait for a rank that is gone; what they give then is of no use. From any thread."""
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(self._flags.device, priority=-1)):
            self._flags.fill_(_ABANDONED)


def make_one_shot_all_reduce(
    group: dist.ProcessGroup, width: int, dtype: torch.dtype, device: torch.device
) -> OneShotAllReduce | None:
    """The memory, or None where some rank can't share: then no rank does, and the log says why."""
    one_shot, is_shared = None, torch.ones(1, device=device)
    try:
        one_shot = OneShotAllReduce(group, width, dtype, device)
    except RuntimeError as error:
        logger.warning("rank %d can't share memory with the others, so all sums are NCCL's: %s", group.rank(), error)
        is_shared.zero_()
    dist.all_reduce(is_shared, dist.ReduceOp.MIN, group=group)
    return one_shot if bool(is_shared) else None
