"""Tokens drawn from whole distributions on CUDA in three launches that read the logits twice.

The rule of weights_of and draw_whole in engine/draw.py, with exp and division as exact as torch's. Device code:
draw_kernels.py. Imports triton: import it only where the device is CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from engine.kernels.draw_kernels import peak_kernel, pick_kernel, weigh_kernel

TILE = 4096
"""Logits per program; a token doesn't depend on it."""

_WARPS = 8


def draw_rows(
    logits: Tensor, temperature: Tensor, min_p: Tensor, u: Tensor, token_ids: Tensor, tile: int = TILE
) -> None:
    """Draw a token of each row whose temperature is above 0 into token_ids int64 [b]; leave the others as they are.

    logits [b, V] of any float type and row stride, not written to. temperature, min_p and u (the random number in
    [0, 1)) float64 [b], all of one stride: columns of one matrix. Writes -1 where a row holds a NaN or +inf, or only
    -inf. Grids depend on shapes alone and nothing waits, so it can be captured.
    """
    steps = {temperature.stride(0), min_p.stride(0), u.stride(0)}
    if len(steps) > 1:
        raise ValueError(f"temperature, min_p and u must have one stride; found {sorted(steps)}: give columns of one "
                         "matrix")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, tile)
    peaks = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    strides, sizes = (logits.stride(0), temperature.stride(0)), {"V": vocab_size, "TILE": tile, "num_warps": _WARPS}
    across = {"TILES": tiles, "WIDTH": triton.next_power_of_2(tiles)}
    peak_kernel[(tiles, rows)](logits, temperature, peaks, *strides, **sizes)
    weigh_kernel[(tiles, rows)](logits, temperature, min_p, peaks, sums, *strides, **sizes, **across)
    pick_kernel[(rows,)](logits, temperature, min_p, u, peaks, sums, token_ids, *strides, **sizes, **across)
