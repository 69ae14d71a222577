"""Device-side inputs of a step: tokens, positions and page tables of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from engine.kernels.shared_prefixes import SharedPrefixes


class SlotState(NamedTuple):
    """Per-slot state on the device, as views of one int64 tensor (or array). Slot s is entry s + 1; entry 0 is padding.

    - slots [max_num_seqs]: the entry of each row.
    - positions [max_num_seqs]: the position of each row's token in its sequence.
    - last_tokens [max_num_seqs + 1]: the newest token of each entry.
    - page_tables [groups, max_num_seqs + 1, pages]: the page table of each cache group.
    - shared_keys [max_num_seqs], prefix_members [G, M], num_prefix_groups [1]: see SharedPrefixes. Without elements if
      no rows share prefixes.

    The first b rows of slots and positions are the inputs of bucket b; a decode step advances the positions (see
    engine/worker/decode_graphs.py). Entry 0 stays 0 (scratch page, token 0), so that padded rows are deterministic.
    """

    slots: Any
    positions: Any
    last_tokens: Any
    page_tables: Any
    shared_keys: Any
    prefix_members: Any
    num_prefix_groups: Any


class DecodeMetadata(NamedTuple):
    """One token per row, b rows: row i is at `positions[i]` and attends to the pages of entry `rows[i]`.

    `page_tables` [groups, entries, P] and `rows`, `positions` [b] are int64 on the device. `context` bounds the tokens
    that a backend without dynamic lengths reads; None: P pages. `shared`: which rows share their first pages in the
    cache group `prefix_group`, for a backend with `prefix_members`.
    """

    page_tables: Tensor
    rows: Tensor
    positions: Tensor
    context: int | None = None
    shared: SharedPrefixes | None = None
    prefix_group: int | None = None


class PrefillMetadata(NamedTuple):
    """T tokens in C chunks of prompts, one after the other. Tensors are int64 on the device.

    - page_tables [groups, entries, P]: entry 0 is padding.
    - positions [T]: each token's position in its sequence.
    - token_rows [T]: the page-table entry of each token's sequence; 0 for padding tokens.
    - ends [C]: number of tokens up to the end of each chunk. An empty chunk has no tokens.
    - starts [C]: number of tokens of the sequence before each chunk.
    - rows [C]: the page-table entry of each chunk.
    - spans: (start, length) of each chunk on the host, for backends that loop over chunks; None in a capture.
    """

    page_tables: Tensor
    positions: Tensor
    token_rows: Tensor
    ends: Tensor
    starts: Tensor
    rows: Tensor
    spans: Sequence[tuple[int, int]] | None = None
