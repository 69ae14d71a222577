"""Sample tokens on CUDA in a few launches that read the logits two or three times, without a copy or a sort.

Implements `sample_full` and `sample_truncated` of engine/sampling/ops.py; exp and division are as exact as torch's.
Device code: sampling_kernels.py and top_k_top_p_kernels.py. Imports triton: import this module only on CUDA (or under
TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from engine.kernels.sampling_kernels import sample_kernel, tile_max_kernel, tile_sum_kernel
from engine.kernels.top_k_top_p_kernels import BINS, gather_kernel, histogram_kernel, sample_truncated_kernel

TILE = 4096
"""Logits per program. Does not affect which token is sampled."""

CANDIDATES = 4096
"""Most likely tokens gathered per row. If a row needs more, scanning all its logits takes milliseconds; same token."""

_WARPS = 8
# Passes of sample_truncated_kernel: whether it scans all logits or only the candidates, its tile, its warps.
PASSES = ((False, 1024, 8), (True, 2048, 16))


def sample_rows(
    logits: Tensor, temperature: Tensor, min_p: Tensor, u: Tensor, token_ids: Tensor, tile: int = TILE
) -> None:
    """Sample a token for each row with a temperature above 0 into token_ids int64 [b]; other rows are not written.

    logits [b, V] of any float dtype and row stride, read only. temperature, min_p and u (a random number in [0, 1))
    are float64 [b] with equal strides: columns of one matrix. Writes -1 for a row that holds a NaN or +inf, or only
    -inf. Grids depend only on shapes and the host never waits, so the call can be captured.
    """
    param_stride = _common_stride(temperature=temperature, min_p=min_p, u=u)
    logits, tile_max, tile_sums, tile_args, row_args = _launch_tile_max(logits, temperature, tile)
    (rows, tiles), strides = tile_max.shape, (logits.stride(0), param_stride)
    tile_sum_kernel[(tiles, rows)](logits, temperature, min_p, tile_max, tile_sums, *strides, **tile_args, **row_args)
    sample_kernel[(rows,)](
        logits, temperature, min_p, u, tile_max, tile_sums, token_ids, *strides, **tile_args, **row_args
    )


def sample_truncated_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    u: Tensor,
    token_ids: Tensor,
    tile: int = TILE,
    candidates: int = CANDIDATES,
) -> None:
    """Sample like `sample_rows`, after top-k (0: off), top-p and min-p, each float64 [b] with the common stride.

    `tile` is at least 32. `candidates` is the maximum number of tokens gathered per row. Neither affects the result.
    """
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "u": u}
    param_stride = _common_stride(**columns)
    logits, tile_max, tile_sums, tile_args, row_args = _launch_tile_max(logits, temperature, tile)
    (rows, tiles), strides = tile_max.shape, (logits.stride(0), param_stride)
    bin_counts = torch.zeros(rows, BINS + 1, dtype=torch.int32, device=logits.device)
    sort_keys = torch.empty(rows, candidates, dtype=torch.int64, device=logits.device)
    limit_args = {"MAX_CANDIDATES": candidates, "ID_BITS": (logits.shape[1] - 1).bit_length()}
    histogram_kernel[(tiles, rows)](
        logits, temperature, top_k, tile_max, tile_sums, bin_counts, *strides, **tile_args, **row_args
    )
    gather_kernel[(tiles, rows)](
        logits, temperature, top_k, tile_max, bin_counts, sort_keys, *strides, **tile_args, **row_args, **limit_args
    )
    for all_logits, pass_tile, warps in PASSES:
        tile_args |= {"TILE": pass_tile, "num_warps": warps}
        sample_truncated_kernel[(rows,)](
            logits, *columns.values(), tile_max, tile_sums, bin_counts, sort_keys, token_ids, *strides,
            **tile_args, **row_args, **limit_args, ALL_LOGITS=all_logits,
        )  # fmt: skip


def _common_stride(**columns: Tensor) -> int:
    strides = {column.stride(0) for column in columns.values()}
    if len(strides) > 1:
        names = ", ".join(columns)
        raise ValueError(f"{names} must have equal strides; found {sorted(strides)}: give columns of one matrix")
    return strides.pop()


def _launch_tile_max(
    logits: Tensor, temperature: Tensor, tile: int
) -> tuple[Tensor, Tensor, Tensor, dict[str, int], dict[str, int]]:
    """Launch the first kernel of both samplers.

    Returns the logits with dense rows, the maximum of each tile float32 [rows, tiles], an uninitialised int64
    [rows, tiles] for the tiles' sums, and the launch arguments that describe one tile and the tiles of a row.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, tile)
    # No more threads than logits: tl.histogram may count a value once per thread that holds a copy of it.
    tile_args = {"V": vocab_size, "TILE": tile, "num_warps": max(1, min(_WARPS, tile // 32))}
    tile_max = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    tile_max_kernel[(tiles, rows)](logits, temperature, tile_max, logits.stride(0), temperature.stride(0), **tile_args)
    return (
        logits,
        tile_max,
        tile_max.new_empty(rows, tiles, dtype=torch.int64),
        tile_args,
        {"NUM_TILES": tiles, "TILES_PAD": triton.next_power_of_2(tiles)},
    )
