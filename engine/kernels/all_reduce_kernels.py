"""Device code of a sum over the GPUs of one host through memory that they map of each other: one launch, no library.

Each rank leaves its share where the others can read it, tells them, waits for theirs, and adds all up in order of rank:
the same bits everywhere. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def all_reduce_kernel(
    hidden_ptr, partials_ptr, flags_ptr, first_flag, count,
    RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [count] += the sum of all ranks' shares. shares int64 [RANKS]: the address of each rank's share here.

    flags int64 [RANKS]: the address of each rank's flags, of which this exchange's begin at first_flag: for each
    program one of each rank, 0 before and after, 1 from a rank's telling to its being heard, 2 where nobody waits any
    more.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    program_flags = first_flag + program * WORLD_SIZE
    # The share was written by the launch before. Releasing to the system makes it readable for who acquires the flag.
    for peer in tl.static_range(WORLD_SIZE):
        if peer != RANK:
            flags = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32))
            # Only a 0: a 2 stays, or a rank that was let go would wait again.
            tl.atomic_cas(flags + program_flags + RANK, 0, 1, sem="release", scope="sys")
    flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD_SIZE):
        if peer != RANK:
            while tl.atomic_cas(flags + program_flags + peer, 1, 0, sem="acquire", scope="sys") == 0:
                pass
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    total = tl.load(hidden_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(WORLD_SIZE):
        partial = tl.load(partials_ptr + rank).to(tl.pointer_type(hidden_ptr.dtype.element_ty))
        total += tl.load(tl.multiple_of(partial, 16) + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + offsets, total.to(hidden_ptr.dtype.element_ty), mask=mask)
