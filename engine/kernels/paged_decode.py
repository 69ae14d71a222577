"""Paged decode attention on CUDA, written in Triton: one query token per sequence.

Holds the launches: split-K over the keys, tiles, scratch and checks. Device code: paged_decode_kernels.py. The kernels
read lengths and page tables from device memory and grids depend only on shapes, so a captured graph serves any
positions. Imports triton at the top: import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from engine.kernels.launch import cdiv, launch_options, next_power_of_2, overlaps
from engine.kernels.paged_decode_kernels import decode_kernel, merge_kernel, prefix_kernel
from engine.kernels.shared_prefixes import SharedPrefixes

MAX_SPLITS = 64
"""Maximum splits of one sequence's keys."""

MAX_PARTIALS = 2048
"""Maximum partial results of a head over all rows of a launch. Bounds the scratch."""

RESIDENT_WARPS_PER_SM = 8
"""Warps of this kernel that an SM holds at once, by their registers."""

SINGLE_ROW_WARPS_PER_SM = 4
"""Warps per SM that a single row is split into, in programs of two: fewer partial results. Other small batches are
split into as many as are resident, which hide the latency of memory best.
"""

UNSPLIT_PROGRAMS_PER_SM = 1.5
"""With more unsplit programs per SM, the batch alone fills the device, and only long rows are split."""

MAX_SPLIT_KEYS = ((1, 512), (2, 1024), (8, 2048), (math.inf, 1024))
"""(maximum unsplit programs per SM, maximum keys of a split). Bounds how long one long row runs after the others."""

MERGED_HEADS = 40
"""The last split of a row to arrive merges up to so many partial results of heads; `merge_kernel` merges more."""

TURNS = 2
"""Programs of the grid, in multiples of what the device holds at once. The device assigns them to free SMs, so that a
program with little work makes room for the next one.
"""

ROW_COUNTS = (32, 256)
"""Rows that kernels have room for, so that most batches share one. A larger batch takes the next power of two."""

STAGES = ((1.5, 2), (3.5, 3), (4.5, 2), (6, 3), (math.inf, 2))
"""(maximum unsplit programs per SM, pipeline stages). An SM holds 6 programs of one warp with 3 stages, and 8 with 2.

Measured on an H100 and an H200 in graphs of attention alone (benchmarks/kernels/attention_decode.py). Inside a decode
step, between two GEMMs, the shared memory that this kernel takes limits which kernels can share the SM: next to the
single-row GEMMs, which take no shared memory, two stages make a step of Qwen3-8B's shape 6.5% faster than four
(benchmarks/step/decode_step.py).
"""

TWO_WARP_GROUP = 4
"""Query heads per KV head from which a single row takes programs of two warps: these leave half as much to merge."""

PREFIX_ROWS = 64
"""Query heads of a group's rows that one program attends with to their shared prefix: a tile of the tensor cores."""

PREFIX_SPLITS = ((64, 8), (256, 4), (math.inf, 2))
"""(maximum rows, maximum splits of a shared prefix): many rows have many groups, and each split of each row scratch."""

PREFIX_PROGRAMS_PER_SM = 2
"""Programs per SM that the shared prefixes of a step are split into."""

_INTERPRETER_SMS = 132
_LOG2_E = 1.4426950408889634


FP8_PAGES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of caches beside the dtype of q."""


class Tiling(NamedTuple):
    """Static shape of a launch: keys per loop iteration, warps, pipeline stages. See `choose_tiling`."""

    block_keys: int
    num_warps: int
    num_stages: int


class Splits(NamedTuple):
    """How the keys of a row are split, in blocks of the tiling's keys.

    A row has `target` splits, or, if splits of at most `max_blocks` blocks are at least 1.5 times as many, that number.
    It has at most `limit`. They follow from its own length, so other rows don't change its result. `merges`: the last
    split to arrive merges them.
    """

    target: int
    max_blocks: int
    limit: int
    merges: bool


class NormRope(NamedTuple):
    """Head norms and rotary embedding that `paged_decode` applies to raw queries and new keys, in this order.

    cos and sin are [positions, R] (or [positions, 1, R]) for the first R elements of a head, with the sine of each
    pair's first element negated, see layers/rotary.py; None: no rotary embedding. A pair is i and i + R / 2, or two
    neighbours if `interleaved`. q_norm and k_norm [D] are RMSNorm weights with `eps`, or None; with `weight_offset` the
    factor is 1 + weight.
    """

    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    interleaved: bool = False
    weight_offset: bool = False

    @property
    def norm_mode(self) -> int:
        """The constant NORM of the kernels: 0 without norms, 1 with weights, 2 with 1 + weights."""
        return 0 if self.q_norm is None else 1 + self.weight_offset

    @property
    def rotated(self) -> int:
        """The constant ROPE of the kernels: how many elements of a head are rotated."""
        return 0 if self.cos is None else self.cos.shape[-1]


class DecodeWorkspace(NamedTuple):
    """Scratch of `paged_decode` for one batch shape. Launches on one stream may share it.

    `acc` [b, H, splits, D] and `lse` [b, H, splits] are float32 and need no initialisation; splits of a shared prefix
    come first. `arrivals` [b, KV] int32 must be zero before the first launch; every launch resets it to zero.
    """

    acc: torch.Tensor
    lse: torch.Tensor
    arrivals: torch.Tensor


def choose_splits(batch: int, kv_heads: int, group: int, max_keys: int, num_sms: int, tiling: Tiling) -> Splits:
    """Return the splits for sequences of up to `max_keys` keys. Depends only on shapes, so it is fixed in a capture."""
    per_sm = batch * kv_heads / num_sms
    limit = max(1, min(MAX_SPLITS, MAX_PARTIALS // batch, cdiv(max_keys, tiling.block_keys)))
    target = 1
    if per_sm <= UNSPLIT_PROGRAMS_PER_SM:
        warps = SINGLE_ROW_WARPS_PER_SM if batch == 1 and tiling.num_warps > 1 else RESIDENT_WARPS_PER_SM
        target = min(limit, max(1, warps // tiling.num_warps) * num_sms // (batch * kv_heads))
    max_split_keys = next(keys for programs, keys in MAX_SPLIT_KEYS if per_sm <= programs)
    return Splits(max(1, target), max_split_keys // tiling.block_keys, limit, group * target <= MERGED_HEADS)


def prefix_members(group: int) -> int:
    """Return how many rows share a program that reads their prefix, for `group` query heads per KV head; 0 if none."""
    members = PREFIX_ROWS // next_power_of_2(group)
    return members if members > 1 else 0


def prefix_block(k_cache: torch.Tensor) -> int:
    """Return the keys per iteration of a program that attends to a shared prefix."""
    row_bytes = next_power_of_2(k_cache.shape[3]) * max(2, k_cache.element_size())  # fp8 is converted to 16 bits
    return max(16, min(64, 16384 // row_bytes))


def choose_tiling(head_dim: int, dtype: torch.dtype, rows: int, kv_heads: int, group: int, num_sms: int) -> Tiling:
    """Return the tile for a launch of `rows` rows. Programs of one warp need no barriers in their loop."""
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    stages = next(stages for programs, stages in STAGES if rows * kv_heads <= programs * num_sms)
    if row_bytes > 256:
        return Tiling(max(16, 8192 // row_bytes), 2, stages)
    if rows == 1 and group >= TWO_WARP_GROUP:
        return Tiling(64, 2, stages)
    return Tiling(min(64, 8192 // row_bytes), 1, stages)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    new_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    slots: torch.Tensor | None = None,
    rotation: NormRope | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    shared: SharedPrefixes | None = None,
    num_splits: int | None = None,
    tiling: Tiling | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q K^T) V for one query token per row, over keys 0..positions[i] of its pages: [b, H, D].

    - `q`: [b, H, D] with H a multiple of KV (query head h reads KV head h // (H/KV)), or [b, KV, H/KV, D] if the query
      groups are strided.
    - `k_cache`, `v_cache`: [num_pages, page_size, KV, D].
    - `page_table`: [b, P], int32 or int64. With `slots`, row i uses row slots[i] of the table.
    - `positions`: int64 [b]. Positions beyond the table are not detected.
    - `new_kv`: (k, v), each [b, KV, D], rows may be strided. The same launch writes them into the caches at `positions`
      before it attends.
    - `slots`: int64 [b].
    - `rotation`: q and the new keys are raw projections; norm and rotate them first.
    - `window`: attend only to the last `window` keys, the newest included. Earlier pages are not read, their page-table
      entries may be 0.
    - `sinks`: contiguous [H], one more score per query head in the softmax, with a value of 0.
    - `softcap`: scores are softcap * tanh(scores / softcap); None: unbounded.
    - `shared`: read the keys that rows share once per group. Not with `window`.
    - `out`: contiguous [b, H, D]; None allocates it in q's dtype.
    - `workspace`: from `decode_workspace` for the same shapes, `num_splits` and `shared`; None allocates it.

    One launch on the current stream, one more with `shared`, and one more if many partial results are merged. Grids are
    fixed by shapes: safe to capture. Raises ValueError if shapes do not match.
    """
    _, page_size, kv_heads, _ = k_cache.shape
    check_window(window)
    q = by_kv_head(q, kv_heads)
    batch, _, group, dim = q.shape
    _check_cache(k_cache, v_cache, kv_heads, dim, page_table, positions, None if slots is not None else batch)
    _check_rows("q", q, (batch, kv_heads, group, dim))
    k_new, v_new = new_kv if new_kv is not None else (q, q)
    if new_kv is not None:
        _check_rows("new_kv[0]", k_new, (batch, kv_heads, dim))
        _check_rows("new_kv[1]", v_new, (batch, kv_heads, dim))
    if shared is not None:
        _check_shared(shared, batch, group, window)
    check_sinks(sinks, kv_heads * group)
    out = _output(out, q)
    tiling = tiling or _tiling(q)
    splits = _splits(q, page_table.shape[1] * page_size, tiling, num_splits)
    own_splits, prefix_splits = _split_places(batch, splits.limit, shared is not None)
    workspace = _workspace(workspace, q, own_splits + prefix_splits)
    norm_rope = rotation or NormRope(None, None)
    cos, sin = (q if table is None else table for table in (norm_rope.cos, norm_rope.sin))
    pdl = overlaps(q)
    table = (page_table, positions if slots is None else slots, positions)
    keys, members, num_groups = shared or (positions, positions, positions)
    weights = [q if weight is None else weight for weight in (norm_rope.q_norm, norm_rope.k_norm)]
    numbers = (scale * _LOG2_E, norm_rope.eps, own_splits + prefix_splits)
    programs = PREFIX_PROGRAMS_PER_SM * _num_sms(q.device)
    block = prefix_block(k_cache)
    strides = (*k_cache.stride()[:3], page_table.stride(0))
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "DIM_PAD": max(16, next_power_of_2(dim)),
        "PAGE": page_size, "PREFIX_SPLITS": prefix_splits, "BY_SLOT": slots is not None,
        "NORM": norm_rope.norm_mode, "ROPE": norm_rope.rotated, "PDL": pdl,
        "INTERLEAVED": norm_rope.interleaved, "SOFTCAP": (softcap or 0.0) * _LOG2_E,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee",  # three passes give float32 accuracy
    } | launch_options(pdl)  # fmt: skip
    if shared is not None:
        prefix_kernel[(kv_heads, len(members), prefix_splits)](
            q, k_cache, v_cache, *table, keys, members, num_groups, workspace.acc, workspace.lse,
            weights[0], cos, sin, *numbers, programs, *q.stride()[:3], *strides,
            GROUP_PAD=next_power_of_2(group), MEMBERS=members.shape[1], BLOCK=block,
            num_warps=4, num_stages=2, **constants,
        )  # fmt: skip
    dim_pad = max(16, next_power_of_2(dim))
    max_places = own_splits + prefix_splits
    split_sizes = (splits.target, splits.max_blocks, programs)
    merged_heads = min(next_power_of_2(group), 8)
    resident = max(1, RESIDENT_WARPS_PER_SM // tiling.num_warps) * _num_sms(q.device)
    decode_kernel[(min(batch * kv_heads * own_splits, TURNS * resident),)](
        q, k_new, v_new, k_cache, v_cache, *table, keys, num_groups, out, *workspace,
        *weights, cos, sin, q if sinks is None else sinks, *numbers, batch, *split_sizes,
        *q.stride()[:3], *k_new.stride()[:2], *v_new.stride()[:2], *strides,
        GROUP_PAD=max(16, next_power_of_2(group)), BLOCK=tiling.block_keys, PREFIX_BLOCK=block,
        HEADS=merged_heads, TILE=max(1, 2048 * tiling.num_warps // (merged_heads * dim_pad)),
        APPEND=new_kv is not None, WINDOW=window or 0, SINKS=sinks is not None, MERGES=splits.merges,
        ROWS_PAD=next((count for count in ROW_COUNTS if batch <= count), next_power_of_2(batch)),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **constants,
    )  # fmt: skip
    if not splits.merges:
        merge_kernel[(kv_heads * group, batch)](
            positions, keys, num_groups, out, workspace.acc, workspace.lse, max_places, *split_sizes,
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, DIM_PAD=dim_pad, BLOCK=tiling.block_keys,
            TILE=max(1, 4096 // dim_pad), PDL=pdl, WINDOW=window or 0, PREFIX_SPLITS=prefix_splits, PREFIX_BLOCK=block,
            num_warps=4, **launch_options(pdl),
        )  # fmt: skip
    return out


def decode_workspace(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    *,
    num_splits: int | None = None,
    tiling: Tiling | None = None,
    shared: bool = False,
) -> DecodeWorkspace:
    """Return scratch for `paged_decode` calls of these shapes, `shared`: that share prefixes.

    Reads only shapes, dtypes and devices of the tensors.
    """
    _, page_size, kv_heads, dim = k_cache.shape
    q = by_kv_head(q, kv_heads)
    tiling = tiling or _tiling(q)
    splits = _splits(q, page_table.shape[1] * page_size, tiling, num_splits)
    return _allocate(q, sum(_split_places(len(q), splits.limit, shared)))


class DecodeScratch:
    """Workspaces for launches of 1 to `max_rows` rows on one stream, all in the memory of the largest.

    `shared`: of rows that share prefixes.
    """

    def __init__(
        self, max_rows: int, q: torch.Tensor, k_cache: torch.Tensor, page_table: torch.Tensor, shared: bool = False
    ) -> None:
        _, page_size, kv_heads, dim = k_cache.shape
        q = by_kv_head(q, kv_heads)
        self._heads, self._kv_heads, self._dim = kv_heads * q.shape[2], kv_heads, dim
        keys, num_sms = page_table.shape[1] * page_size, _num_sms(q.device)
        self._splits = []
        for rows in range(1, max_rows + 1):
            tiling = choose_tiling(dim, q.dtype, rows, kv_heads, q.shape[2], num_sms)
            limit = choose_splits(rows, kv_heads, q.shape[2], keys, num_sms, tiling).limit
            self._splits.append(sum(_split_places(rows, limit, shared)))
        partial_rows = [self._heads * rows * count for rows, count in enumerate(self._splits, 1)]
        max_combined = max(
            (part for part, count in zip(partial_rows, self._splits, strict=True) if count > 1), default=0
        )
        self._acc = torch.empty(max_combined * dim, dtype=torch.float32, device=q.device)
        self._lse = torch.empty(max(partial_rows), dtype=torch.float32, device=q.device)
        self._arrivals = torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=q.device)

    def of(self, rows: int) -> DecodeWorkspace:
        """Return the workspace for a launch of `rows` rows."""
        splits = self._splits[rows - 1]
        partial_rows = rows * self._heads * splits
        lse = self._lse[:partial_rows].view(rows, self._heads, splits)
        arrivals = self._arrivals[: rows * self._kv_heads].view(rows, self._kv_heads)
        if splits == 1:  # nothing is combined
            return DecodeWorkspace(lse, lse, arrivals)
        return DecodeWorkspace(
            self._acc[: partial_rows * self._dim].view(rows, self._heads, splits, self._dim), lse, arrivals
        )


def by_kv_head(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return queries [T, H, D] viewed as [T, KV, H/KV, D]; that shape is returned unchanged. Raises ValueError."""
    if q.dim() == 4 and q.shape[1] == kv_heads:
        return q
    if q.dim() != 3 or q.shape[1] % kv_heads:
        raise ValueError(
            f"{q.shape[1]} query heads can't share {kv_heads} KV heads evenly; give [T, H, D] with H a "
            f"multiple of {kv_heads}, or [T, {kv_heads}, H/{kv_heads}, D]; found {tuple(q.shape)}"
        )
    return q.unflatten(1, (kv_heads, q.shape[1] // kv_heads))


def check_window(window: int | None) -> None:
    """Raise ValueError if `window` is a number below 1."""
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; give the number of keys that a query reads, at least 1, or None for all")


def check_sinks(sinks: torch.Tensor | None, heads: int) -> None:
    """Raise ValueError if `sinks` are not one number per query head."""
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous [{heads}], found {tuple(sinks.shape)}")


def _tiling(q: torch.Tensor) -> Tiling:
    batch, kv_heads, group, dim = q.shape
    return choose_tiling(dim, q.dtype, batch, kv_heads, group, _num_sms(q.device))


def _splits(q: torch.Tensor, max_keys: int, tiling: Tiling, num_splits: int | None) -> Splits:
    if num_splits is not None:
        if not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits is {num_splits}; give 1 to {MAX_SPLITS}")
        return Splits(num_splits, max_keys, num_splits, q.shape[2] * num_splits <= MERGED_HEADS)
    batch, kv_heads, group, _ = q.shape
    return choose_splits(batch, kv_heads, group, max_keys, _num_sms(q.device), tiling)


def _split_places(rows: int, splits: int, shared: bool) -> tuple[int, int]:
    """Return the maximum numbers of partial results per row: for the row's own keys, and for its prefix."""
    if not shared:
        return splits, 0
    of_prefix = next(places for limit, places in PREFIX_SPLITS if rows <= limit)
    return min(splits, MAX_SPLITS - of_prefix), of_prefix


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return _INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _output(out: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """Return `out`, or a new tensor if it is None. Raises ValueError if it does not fit q [b, KV, H/KV, D]."""
    batch, kv_heads, group, dim = q.shape
    shape = (batch, kv_heads * group, dim)
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape}, found {tuple(out.shape)} with strides {out.stride()}")
    return out


def _workspace(workspace: DecodeWorkspace | None, q: torch.Tensor, splits: int) -> DecodeWorkspace:
    """Return `workspace`, or a new one if it is None. Raises ValueError if it is for another number of splits."""
    if workspace is None:
        return _allocate(q, splits)
    shape = (len(q), q.shape[1] * q.shape[2], splits)
    if workspace.lse.shape != shape:
        raise ValueError(
            f"workspace is for {tuple(workspace.lse.shape)} (rows, heads, splits), this call needs {shape}; take it "
            "from decode_workspace with the same arguments"
        )
    return workspace


def _allocate(q: torch.Tensor, splits: int) -> DecodeWorkspace:
    batch, kv_heads, group, dim = q.shape
    heads = kv_heads * group
    lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    if splits == 1:  # programs write `out` directly: no combine, so arrivals need no zeroing launch
        return DecodeWorkspace(lse, lse, torch.empty((batch, kv_heads), dtype=torch.int32, device=q.device))
    acc = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
    return DecodeWorkspace(acc, lse, torch.zeros((batch, kv_heads), dtype=torch.int32, device=q.device))


def _check_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(rows.shape) != shape or rows.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {shape} with a dense last dimension, found {tuple(rows.shape)} strides {rows.stride()}"
        )


def _check_shared(shared: SharedPrefixes, batch: int, group: int, window: int | None) -> None:
    if window is not None:
        raise ValueError(f"window is {window} and prefixes are shared: a window leaves out leading keys")
    keys, members, num_groups = shared
    wanted = prefix_members(group)
    if len(keys) < batch or members.dim() != 2 or members.shape[1] != wanted or not members.is_contiguous():
        raise ValueError(
            f"shared must have keys of at least {batch} rows and contiguous members [groups, {wanted}], found "
            f"{tuple(keys.shape)} and {tuple(members.shape)}"
        )
    if {tensor.dtype for tensor in shared} != {torch.int64}:
        raise ValueError(f"shared must be int64, found {keys.dtype}, {members.dtype} and {num_groups.dtype}")


def _check_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_heads: int,
    dim: int,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    batch: int | None,
) -> None:
    if k_cache.shape[2:] != (kv_heads, dim) or k_cache.stride(-1) != 1:
        raise ValueError(f"k_cache must be [pages, page_size, {kv_heads}, {dim}], found {tuple(k_cache.shape)}")
    if v_cache.shape != k_cache.shape or v_cache.stride() != k_cache.stride() or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"v_cache must match k_cache in shape, strides and dtype: {tuple(v_cache.shape)} {v_cache.dtype} "
            f"against {tuple(k_cache.shape)} {k_cache.dtype}"
        )
    rows = page_table.shape[0] if batch is None else batch  # None: one table row per slot
    if page_table.shape[0] != rows or page_table.stride(-1) != 1 or positions.shape != (batch or positions.numel(),):
        raise ValueError(
            f"page_table must be [{batch}, pages] and positions [{batch}], found {tuple(page_table.shape)} and "
            f"{tuple(positions.shape)}"
        )
