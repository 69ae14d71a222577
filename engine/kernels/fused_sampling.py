"""Sample tokens on CUDA in a few launches that read the logits two to five times, without a copy or a sort of them.

Implements `sample_full` and `sample_truncated` of engine/sampling/ops.py, and `sample_slots` of
engine/sampling/slot_sampling.py; exp and division are as exact as torch's. Device code: sampling_kernels.py,
top_k_top_p_kernels.py and slot_sampling_kernels.py. Imports triton: import this module only on CUDA (or under
TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels import slot_sampling_kernels as slot_kernels
from engine.kernels.launch import cdiv, next_power_of_2
from engine.kernels.sampling_kernels import sample_kernel, tile_max_kernel, tile_sum_kernel
from engine.kernels.slot_columns import SlotTensors
from engine.kernels.top_k_top_p_kernels import (
    BINS,
    NUM_TOTALS,
    SUMMED,
    bucket_sums_kernel,
    gather_buckets_kernel,
    gather_kernel,
    histogram_kernel,
    sample_candidates_kernel,
    search_kernel,
)

TILE = 4096
"""Logits per program. Does not affect which token is sampled."""

CANDIDATES = 1024
"""Most likely tokens gathered per row. A row that needs more is split into buckets; same token."""

GROUPS = 16
"""Groups of tokens per tile whose maxima bound the candidates of a small top-k."""

_WARPS = 8
_MANY_ROWS = 32  # rows that fill the GPU with programs of several tiles each
_TILES_PER_PROGRAM = 4
SAMPLES = 1024
"""Tokens of a row whose quantiles split it into buckets; at least CANDIDATES."""

SORTED = 1024
"""Tokens that are sorted at the end of a search."""


class Split(NamedTuple):
    """How rows are split into buckets. More buckets cost more per logit and leave fewer tokens to a row's search.

    A program that sums buckets handles at most `span` logits. The windows of a row may hold as many tokens as
    `window_buckets` average buckets; a row with more is searched in its logits, which takes milliseconds.
    """

    buckets: int
    span: int
    window_buckets: int


SPLITS = ((8, Split(64, 2048, 16)), (2**31, Split(16, 4096, 5)))
"""Splits by the number of rows, at most."""

ROW_LIMITS = tuple(most for most, _ in SPLITS[:-1])
"""Numbers of rows above which other kernels are launched."""

_SUM_CHUNK, _SUM_WARPS = 256, 2
_LEAST_CAPACITY = 4096  # tokens of windows: buckets of a small vocabulary differ more from the average
_SEARCH_TILE, _SEARCH_WARPS = 512, 16


def sample_rows(
    logits: Tensor, temperature: Tensor, min_p: Tensor, u: Tensor, token_ids: Tensor, tile: int = TILE
) -> None:
    """Sample a token for each row with a temperature above 0 into token_ids int64 [b]; other rows are not written.

    logits [b, V] of any float dtype and row stride, read only. temperature, min_p and u (a random number in [0, 1))
    are float64 [b] with equal strides: columns of one matrix. Writes -1 for a row that holds a NaN or +inf, or only
    -inf. Grids depend only on shapes and the host never waits, so the call can be captured.
    """
    _common_stride(temperature=temperature, min_p=min_p, u=u)
    _sample_full(_launch_tile_max(logits, temperature, tile, 0), temperature, min_p, u, token_ids)


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

    `tile` is at least 32. `candidates` is the maximum number of candidates per row; the rest is sampled from buckets of
    tokens. Neither affects the result.
    """
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "u": u}
    _common_stride(**columns)
    _sample_truncated(_launch_tile_max(logits, temperature, tile, GROUPS), columns, token_ids, candidates)


def sample_slots(
    slots_of: SlotTensors,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    next_tokens: Tensor,
    last_tokens: Tensor,
    *,
    processors: bool,
    limits: str,
    hash_constants: tuple[int, int, int],
) -> None:
    """Sample like `sample_slots` of engine/sampling/slot_sampling.py; `limits` other than "none" are alike here.

    `hash_constants` are the constants of `uniform` in engine/sampling/ops.py.

    Programs of rows that argmax is enough for, and of padding, return at once. Only `processors` makes a float32 copy
    of the active rows' logits.
    """
    (rows, vocab_size), device = logits.shape, logits.device
    values, floats = slots_of.values, slots_of.values.view(torch.float64)
    row_params = torch.empty(rows, slot_kernels.NUM_ROW_COLUMNS, dtype=torch.float64, device=device)
    slot_kernels.row_params_kernel[(rows,)](
        values, floats, slots, positions, row_params, *hash_constants, PROCESSORS=processors, num_warps=1
    )
    column = row_params.unbind(1)
    groups = 0 if limits == "none" else GROUPS
    if processors:
        launch = _launch_adjust(slots_of, logits, row_params, slots, positions, groups)
    else:
        launch = _launch_tile_max(logits, column[slot_kernels.ACTIVE], TILE, groups)
    min_p, u = column[slot_kernels.MIN_P], column[slot_kernels.UNIFORM]
    _sample_full(launch, column[slot_kernels.FULL], min_p, u, next_tokens)
    kept = slots_of.kept  # not read without truncation
    if limits != "none":
        columns = {
            "temperature": column[slot_kernels.TRUNCATED],
            "top_k": column[slot_kernels.TOP_K],
            "top_p": column[slot_kernels.TOP_P],
            "min_p": min_p,
            "u": u,
        }
        kept = _sample_truncated(launch, columns, next_tokens, CANDIDATES)
    if processors:
        slot_kernels.argmax_kernel[(rows,)](
            launch.logits, row_params, launch.tile_max, next_tokens, **launch.tile_args, **launch.row_args
        )
    slot_kernels.finish_kernel[(rows,)](
        row_params, values, slots, next_tokens, last_tokens, slots_of.counts, kept, slots_of.kept,
        V=vocab_size, PROCESSORS=processors, TRUNCATION=limits != "none", num_warps=1,
    )  # fmt: skip


class _Launch(NamedTuple):
    """Arguments common to the launches that sample the rows of `logits`, whose rows are dense.

    tile_max float32 [rows, tiles] holds the maximum of each tile, group_max float32 [rows, tiles * groups] the maxima
    of its groups; tile_sums is an uninitialised int64 [rows, tiles].
    tile_args describe one tile, row_args the tiles of a row.
    """

    logits: Tensor
    tile_max: Tensor
    group_max: Tensor
    tile_sums: Tensor
    tile_args: dict[str, Any]
    row_args: dict[str, Any]

    @property
    def grid(self) -> tuple[int, int]:
        """One program per tile of a row."""
        rows, tiles = self.tile_max.shape
        return tiles, rows


def _sample_full(launch: _Launch, temperature: Tensor, min_p: Tensor, u: Tensor, token_ids: Tensor) -> None:
    logits, tile_max, _, tile_sums, tile_args, row_args = launch
    (rows, tiles), strides = tile_max.shape, (logits.stride(0), temperature.stride(0))
    tile_sum_kernel[(tiles, rows)](logits, temperature, min_p, tile_max, tile_sums, *strides, **tile_args, **row_args)
    sample_kernel[(rows,)](
        logits, temperature, min_p, u, tile_max, tile_sums, token_ids, *strides, **tile_args, **row_args
    )


def _sample_truncated(launch: _Launch, columns: dict[str, Tensor], token_ids: Tensor, candidates: int) -> Tensor:
    """Launch the kernels of `sample_truncated_rows`; `columns` are its parameters in order.

    Returns what is kept, int64 [rows, 2]: see sample_candidates_kernel.
    """
    logits, tile_max, group_max, tile_sums, tile_args, row_args = launch
    temperature, top_k, top_p, min_p, u = columns.values()
    (rows, vocab_size), tiles, device = logits.shape, tile_max.shape[1], logits.device
    strides = (logits.stride(0), temperature.stride(0))
    bin_counts = torch.zeros(rows, BINS + 1, dtype=torch.int32, device=device)
    sort_keys = torch.empty(rows, candidates, dtype=torch.int64, device=device)
    kept = torch.empty(rows, 2, dtype=torch.int64, device=device)
    id_args = {"ID_BITS": (vocab_size - 1).bit_length()}
    groups = group_max.shape[1]
    # At least one group per thread: see _launch_tile_max.
    group_args = {"NUM_GROUPS": groups, "GROUPS_PAD": max(next_power_of_2(groups), 32 * tile_args["num_warps"])}
    grid = (cdiv(tiles, _TILES_PER_PROGRAM) if rows >= _MANY_ROWS else tiles, rows)
    histogram_kernel[grid](
        logits, temperature, top_k, tile_max, group_max, tile_sums, bin_counts, *strides,
        **tile_args, **row_args, **group_args,
    )  # fmt: skip
    gather_kernel[grid](
        logits, temperature, top_k, tile_max, bin_counts, sort_keys, *strides,
        MAX_CANDIDATES=candidates, **tile_args, **row_args, **id_args,
    )  # fmt: skip
    buckets, most_logits, window_buckets = next(split for most, split in SPLITS if rows <= most)
    # Equal logits are told apart by their span, so there are two spans per bucket also of a small vocabulary.
    span = min(most_logits, max(_SUM_CHUNK, next_power_of_2(vocab_size) // (2 * buckets)))
    bucket_args = {"V": vocab_size, "SAMPLES": SAMPLES, "BUCKETS": buckets, "SPAN": span} | row_args | id_args
    edges = torch.empty(rows, SAMPLES + 1, dtype=torch.int64, device=device)
    totals = torch.empty(rows, 2 * buckets + NUM_TOTALS, dtype=torch.int64, device=device)
    sample_candidates_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, u, tile_max, tile_sums, bin_counts, sort_keys, edges, totals,
        token_ids, kept, *strides,
        MAX_CANDIDATES=candidates, num_warps=_WARPS, **bucket_args,
    )  # fmt: skip
    bucket_sums_kernel[(cdiv(vocab_size, span), rows, cdiv(buckets, SUMMED))](
        logits, temperature, min_p, tile_max, edges, totals, token_ids, *strides,
        CHUNK=_SUM_CHUNK, num_warps=_SUM_WARPS, **bucket_args,
    )  # fmt: skip
    capacity = max(window_buckets * cdiv(vocab_size, buckets), _LEAST_CAPACITY if window_buckets else 0)
    window_keys = torch.empty(rows, capacity, dtype=torch.int64, device=device)
    spans = cdiv(vocab_size, span)
    gather_buckets_kernel[(cdiv(spans, _TILES_PER_PROGRAM) if rows >= _MANY_ROWS else spans, rows)](
        logits, temperature, top_k, top_p, u, tile_max, edges, totals, window_keys, token_ids, *strides,
        TILE=tile_args["TILE"], CAPACITY=capacity, num_warps=span // _SUM_CHUNK, **bucket_args,
    )  # fmt: skip
    scratch = torch.empty(rows, SORTED, dtype=torch.int64, device=device)
    search_kernel[(rows,)](
        logits, temperature, top_k, top_p, u, tile_max, edges, totals, window_keys, scratch, token_ids, kept, *strides,
        TILE=_SEARCH_TILE, CAPACITY=capacity, SORTED=SORTED, num_warps=_SEARCH_WARPS, **bucket_args,
    )  # fmt: skip
    return kept


def _common_stride(**columns: Tensor) -> None:
    strides = {column.stride(0) for column in columns.values()}
    if len(strides) > 1:
        names = ", ".join(columns)
        raise ValueError(f"{names} must have equal strides; found {sorted(strides)}: give columns of one matrix")


def _launch_tile_max(logits: Tensor, active: Tensor, tile: int, groups: int) -> _Launch:
    """Launch the first kernel of all samplers, for rows where `active` float64 [rows] is above 0.

    `groups` is the number of groups per tile; 0 if no row has a top-k.
    """
    logits = _dense_rows(logits)
    launch = _new_launch(logits, tile, groups)
    tile_max_kernel[launch.grid](
        logits, active, launch.tile_max, launch.group_max, logits.stride(0), active.stride(0),
        **launch.tile_args, GROUPS=groups,
    )  # fmt: skip
    return launch


def _launch_adjust(
    slots_of: SlotTensors, logits: Tensor, row_params: Tensor, slots: Tensor, positions: Tensor, groups: int
) -> _Launch:
    """Launch what `_launch_tile_max` does on logits float32 after penalties, masks, logit bias and bans."""
    logits, values = _dense_rows(logits), slots_of.values
    launch = _new_launch(torch.empty(logits.shape, dtype=torch.float32, device=logits.device), TILE, groups)
    slot_kernels.adjust_kernel[launch.grid](
        logits, row_params, values, values.view(torch.float64), slots, positions, slots_of.counts, slots_of.masks,
        slots_of.bias_ids, slots_of.bias_values, slots_of.banned_ids, launch.logits, launch.tile_max, launch.group_max,
        logits.stride(0), **launch.tile_args, GROUPS=groups,
        BIAS_WIDTH=slots_of.bias_ids.shape[1], BAN_WIDTH=slots_of.banned_ids.shape[1], enable_fp_fusion=False,
    )  # fmt: skip
    return launch


def _dense_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _new_launch(logits: Tensor, tile: int, groups: int) -> _Launch:
    rows, vocab_size = logits.shape
    tiles = cdiv(vocab_size, tile)
    tile_max = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    return _Launch(
        logits,
        tile_max,
        tile_max.new_empty(rows, tiles * groups),
        tile_max.new_empty(rows, tiles, dtype=torch.int64),
        # No more threads than logits: tl.histogram may count a value once per thread that holds a copy of it.
        {"V": vocab_size, "TILE": tile, "num_warps": max(1, min(_WARPS, tile // 32))},
        {"NUM_TILES": tiles, "TILES_PAD": next_power_of_2(tiles)},
    )
