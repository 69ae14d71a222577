"""Device-side inputs of a decode step: the newest token, position and page table of every sequence slot."""

from __future__ import annotations

from typing import Any, NamedTuple


class SlotState(NamedTuple):
    """Per-slot state on the device, as views of one int64 tensor (or array). Slot s is entry s + 1; entry 0 is padding.

    - slots [max_num_seqs]: the entry of each row.
    - positions [max_num_seqs]: the position of each row's token in its sequence.
    - last_tokens [max_num_seqs + 1]: the newest token of each entry.
    - page_table [max_num_seqs + 1, pages].

    The first b rows of slots and positions are the inputs of bucket b; a decode step advances the positions (see
    engine/worker/decode_graphs.py). Entry 0 stays 0 (scratch page, token 0), so that padded rows are deterministic.
    """

    slots: Any
    positions: Any
    last_tokens: Any
    page_table: Any
