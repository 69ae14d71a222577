"""Paged decode attention on CUDA, written in Triton: one query token per sequence.

Holds the launches: split-K over the keys, tiles, scratch and checks. Device code: paged_decode_kernels.py. The kernel
reads lengths and page tables from device memory and the grid depends only on shapes, so a captured graph serves any
positions. Imports triton at the top: import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from engine.kernels.launch import cdiv, launch_options, next_power_of_2, overlaps
from engine.kernels.paged_decode_kernels import decode_kernel, prefix_kernel
from engine.kernels.shared_prefixes import SharedPrefixes

MAX_SPLITS = 32
"""Maximum splits of one sequence's keys; the combining program holds that many partial rows in registers."""

SPLIT_PROGRAMS_PER_SM = 4
"""Programs per SM that a small batch is split into; more cost more to combine than they gain."""

UNSPLIT_PROGRAMS_PER_SM = 1.5
"""With more than this many unsplit programs per SM, the batch alone fills the device."""

BALANCE_KEYS = 4096
"""When the batch fills the device, one split per this many keys bounds the longest program."""

BALANCE_SPLITS = 4
"""Maximum splits in that case: programs without work still cost time."""

STAGES = ((900, 3), (math.inf, 2))
"""(maximum programs, pipeline stages) for batches of two or more rows; a single row uses SINGLE_ROW_STAGES.

Measured inside a decode step, between two GEMMs (benchmarks/step/decode_step.py), not in isolation: the shared
memory that this kernel takes limits which kernels can share the SM. Next to the single-row GEMMs, which take no shared
memory, two stages make a step of Qwen3-8B's shape 6.5% faster than four.
"""

SINGLE_ROW_STAGES = 2

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
    """How a sequence's keys are split: at most `limit` splits, each except the last of at least `min_keys` keys."""

    limit: int
    min_keys: int


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


def choose_splits(batch: int, kv_heads: int, max_keys: int, num_sms: int, block_keys: int) -> Splits:
    """Return the splits for sequences of up to `max_keys` keys. Depends only on shapes, so it is fixed in a capture."""
    programs = batch * kv_heads
    if programs > UNSPLIT_PROGRAMS_PER_SM * num_sms:
        return Splits(max(1, min(BALANCE_SPLITS, max_keys // BALANCE_KEYS)), BALANCE_KEYS // 2)
    blocks = max(1, cdiv(max_keys, block_keys))
    return Splits(min(MAX_SPLITS, SPLIT_PROGRAMS_PER_SM * num_sms // programs, blocks), block_keys)


def prefix_members(group: int) -> int:
    """Return how many rows share a program that reads their prefix, for `group` query heads per KV head; 0 if none."""
    members = PREFIX_ROWS // next_power_of_2(group)
    return members if members > 1 else 0


def prefix_block(k_cache: torch.Tensor) -> int:
    """Return the keys per iteration of a program that attends to a shared prefix."""
    row_bytes = next_power_of_2(k_cache.shape[3]) * max(2, k_cache.element_size())  # fp8 is converted to 16 bits
    return max(16, min(64, 16384 // row_bytes))


def choose_tiling(head_dim: int, dtype: torch.dtype, rows: int, kv_heads: int) -> Tiling:
    """Return the tile for a launch of `rows` rows, measured on an H200 (benchmarks/kernels/attention_decode.py).

    Many one-warp programs per SM hide memory latency best. With few programs, each keeps more tiles in flight.
    """
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    block_keys = max(16, min(64, 8192 // row_bytes))
    stages = SINGLE_ROW_STAGES if rows == 1 else next(stages for limit, stages in STAGES if rows * kv_heads <= limit)
    return Tiling(block_keys, 1 if row_bytes <= 256 else 2, stages)


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

    One launch on the current stream, or two with `shared`, with a grid fixed by shapes: safe to capture. Raises
    ValueError if shapes do not match.
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
    tiling = tiling or choose_tiling(dim, q.dtype, batch, kv_heads)
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
    decode_kernel[(kv_heads, batch, own_splits)](
        q, k_new, v_new, k_cache, v_cache, *table, keys, num_groups, out, *workspace,
        *weights, cos, sin, q if sinks is None else sinks, *numbers,
        cdiv(splits.min_keys, tiling.block_keys), programs,
        *q.stride()[:3], *k_new.stride()[:2], *v_new.stride()[:2], *strides,
        GROUP_PAD=max(16, next_power_of_2(group)), BLOCK=tiling.block_keys, PREFIX_BLOCK=block,
        SPLITS_PAD=MAX_SPLITS, APPEND=new_kv is not None, WINDOW=window or 0, SINKS=sinks is not None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **constants,
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
    tiling = tiling or choose_tiling(dim, q.dtype, len(q), kv_heads)
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
            block_keys = choose_tiling(dim, q.dtype, rows, kv_heads).block_keys
            limit = choose_splits(rows, kv_heads, keys, num_sms, block_keys).limit
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


def _splits(q: torch.Tensor, max_keys: int, tiling: Tiling, num_splits: int | None) -> Splits:
    if num_splits is not None:
        if not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits is {num_splits}; give 1 to {MAX_SPLITS}")
        return Splits(num_splits, tiling.block_keys)
    return choose_splits(q.shape[0], q.shape[1], max_keys, _num_sms(q.device), tiling.block_keys)


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
