"""Device code of the one-shot all-reduce: a sum over the GPUs of one host, in one launch through peer-mapped memory.

Each rank writes its partial sum to memory that its peers can read, signals them, waits for their signals, and adds all
partial sums in rank order, so the result is bitwise equal on all ranks. Imports triton at the top: for CUDA (or
Triton's interpreter) only.
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
    """Add the partial sums of all ranks to hidden [count].

    partials int64 [WORLD_SIZE]: the address, on this rank, of each rank's partial sum. flags int64 [WORLD_SIZE]: the
    address of each rank's int32 flags. The flags of this launch start at first_flag, WORLD_SIZE per program. A flag is
    0 before and after the launch, 1 from a peer's signal until this rank consumes it, and 2 after `abandon`: a rank
    never waits for it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    program_flags = first_flag + program * WORLD_SIZE
    # The previous launch wrote the partial sum. A system-scope release makes it visible to peers that acquire the flag.
    for peer in tl.static_range(WORLD_SIZE):
        if peer != RANK:
            flags = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32))
            # Replace only 0: overwriting a 2 would make an abandoned rank wait again.
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
