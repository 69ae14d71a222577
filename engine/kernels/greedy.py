"""Greedy sampling on CUDA: maxima of each row's tiles, then the choice among them and the next step's inputs.

Device code: step_kernels.py. Imports triton: import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.launch import cdiv, launch_options, next_power_of_2, overlaps
from engine.kernels.step_kernels import best_kernel, choose_kernel

TILE = 4096


def tile_maxima(x: Tensor, values: Tensor, tokens: Tensor) -> int:
    """Write the maximum of each TILE columns of x [M, n] and its column; return the number of tiles per row.

    `values` float32 and `tokens` int32 are flat scratch of at least M * ceil(n / TILE) elements. A NaN counts as
    infinity.
    """
    rows, width = x.shape
    tiles, pdl = cdiv(width, TILE), overlaps(x)
    best_kernel[(tiles, rows)](
        x, values, tokens, N=width, BLOCK=TILE, PDL=pdl, num_warps=8, **launch_options(pdl)
    )  # fmt: skip
    return tiles


def choose_greedy(
    values: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor | None,
    last_tokens: Tensor,
    next_tokens: Tensor,
) -> None:
    """Choose the token of each row from its tiles' maxima: values float32 and tokens int32, both [M, tiles].

    Writes next_tokens int64 [M], -1 if the maximum is not finite; the token to its slot in last_tokens, 0 instead of
    -1; and positions [M] plus 1, unless None. Rows of slot 0 are padding and change neither.
    """
    rows, tiles = values.shape
    pdl = overlaps(last_tokens)
    choose_kernel[(rows,)](
        values,
        tokens,
        slots,
        slots if positions is None else positions,
        last_tokens,
        next_tokens,
        tiles,
        BLOCK=min(4096, next_power_of_2(tiles)),
        ADVANCE=positions is not None,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
