"""The static inputs of a decode step: each row's slot and position, and each slot's last token and pages.

Defines their memory layout and tracks what the device holds, so that a step uploads only what changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.metadata import SlotState
from engine.scheduling.batch import Batch
from engine.worker.prefix_groups import group_by_prefix, max_groups_of
from graph_cache.core.buffers import BATCH, BufferSpec, StaticBuffers


class Layout(NamedTuple):
    """Layout of the decode state in one tensor, so that one small copy and one scatter update any part of it.

    `prefix_members`: rows that may share a prefix, 0 if none do.
    """

    max_num_seqs: int
    pages_per_slot: int
    groups: int = 1
    prefix_members: int = 0

    @property
    def size(self) -> int:
        """Number of elements in total."""
        shared = self.max_num_seqs + 1 + self.prefix_groups * self.prefix_members if self.prefix_members else 0
        return self.shared_start + shared

    @property
    def token_start(self) -> int:
        return 2 * self.max_num_seqs

    @property
    def page_start(self) -> int:
        return 3 * self.max_num_seqs + 1

    @property
    def table_size(self) -> int:
        """Number of elements of one group's page tables."""
        return (self.max_num_seqs + 1) * self.pages_per_slot

    @property
    def prefix_groups(self) -> int:
        """Maximum number of groups of rows that share a prefix."""
        return max_groups_of(self.max_num_seqs) if self.prefix_members else 0

    @property
    def shared_start(self) -> int:
        return self.page_start + self.groups * self.table_size

    def views(self, state: Any) -> SlotState:
        """Return the parts of a contiguous tensor or array [size] as views."""
        rows = self.max_num_seqs
        shared = state[self.shared_start :]
        keys = shared[: rows if self.prefix_members else 0]
        return SlotState(
            state[:rows],
            state[rows : 2 * rows],
            state[2 * rows : self.page_start],
            state[self.page_start : self.shared_start].reshape(self.groups, rows + 1, self.pages_per_slot),
            keys,
            shared[len(keys) + 1 :].reshape(self.prefix_groups, self.prefix_members),
            shared[len(keys) : len(keys) + 1],
        )


def decode_buffers(
    layout: Layout,
    max_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    logits_dtype: torch.dtype,
) -> StaticBuffers:
    """Create the decode site's static buffers. Prefill shares the outputs, which have `max_rows` rows.

    - state, int64 [layout.size]: see SlotState; all zeros means padding.
    - hidden, `dtype` [b, hidden_size]: passed between the parts of a layer-scoped step; see DecodeStep.
    - logits, `logits_dtype` [b, vocab_size], and next_tokens int64 [b]: outputs. A next token is -1 if the row's logits
      are not finite.
    """
    specs = {
        "state": BufferSpec((layout.size,), torch.int64),
        "hidden": BufferSpec((BATCH, hidden_size), dtype, pad=None),
        "logits": BufferSpec((BATCH, vocab_size), logits_dtype, pad=None),
        "next_tokens": BufferSpec((BATCH,), torch.int64, pad=None),
    }
    return StaticBuffers(specs, max_rows, device)


class DecodeInputs:
    """Computes what a step must write to the decode state. Calls must come in the order of the work on the device.

    Nothing is read back from the device: a host mirror tracks what was uploaded and what steps advanced, and `changes`
    returns the differences. `windows` are the cache groups' windows, None for full attention. `min_saved`: rows share
    prefixes if attention then reads this many tokens less.
    """

    def __init__(
        self, layout: Layout, page_size: int, windows: Sequence[int | None] = (None,), min_saved: int = sys.maxsize
    ):
        self._layout = layout
        self._page_size = page_size
        self._min_saved = min_saved
        # The cache group whose pages rows share: attention within a window leaves out the first ones.
        self.prefix_group = list(windows).index(None) if layout.prefix_members and None in windows else None
        self.shares_prefixes = False
        """Whether the rows of the last `changes` share prefixes: its step may read them from the state."""
        self._window_groups = [group for group, window in enumerate(windows) if window is not None]
        self._mirror = np.zeros(layout.size, np.int64)
        self._mirror_views: SlotState = layout.views(self._mirror)
        self._changes: list[tuple[np.ndarray, np.ndarray]] = []
        # By slot: the position of the token in `last_tokens` (-1: none), the number of pages written, and for each
        # group the number of leading pages that were freed.
        self._token_positions = np.full(layout.max_num_seqs, -1, np.int64)
        self._num_pages = np.zeros(layout.max_num_seqs, np.int64)
        self._num_freed = np.zeros((layout.groups, layout.max_num_seqs), np.int64)
        # The current rows: their leases and slots, and for how many more steps their pages suffice.
        self._leases: list[int] = []
        self._slots = np.zeros(0, np.int64)
        self._steps_until_pages = 0
        self._unapplied_steps = 0  # steps enqueued but not yet added to `_token_positions` and the mirror

    def assign_slot(self, slot: int) -> None:
        """Forget a slot's token and pages because it was given to another request."""
        self._apply_advances()
        self._token_positions[slot] = -1
        self._num_pages[slot] = 0
        self._num_freed[:, slot] = 0

    def forget_tokens(self, slots: Sequence[int]) -> None:
        """Forget the slots' tokens and the current rows: another phase computes them, and the host knows the results.

        Their next decodes take token and position from the host.
        """
        self.forget_rows()
        self._token_positions[slots] = -1

    def reset(self) -> None:
        """Forget everything: the state on the device was zeroed.

        The next step takes tokens from the host, so read the steps in flight first.
        """
        self._mirror.fill(0)
        self._changes.clear()
        self._token_positions.fill(-1)
        self._num_pages.fill(0)
        self._num_freed.fill(0)
        self._leases = []
        self._slots = np.zeros(0, np.int64)
        self._unapplied_steps = 0

    def changes(self, batch: Batch) -> np.ndarray | None:
        """Return what makes row i the batch's decode i, and all other rows padding.

        The result is int64 [2, n], unique indices and values, or None. If the leases equal the last call's leases, the
        rows are already right: the step itself advanced them. Otherwise the rows that differ change, and the tokens
        that the device didn't sample itself. In both cases new pages of rows that need more are written.
        """
        has_new_rows = batch.leases != self._leases
        if has_new_rows:
            self._set_rows(batch)
        if self._steps_until_pages <= 0:
            self._write_pages(batch)
        if has_new_rows and self.prefix_group is not None:
            self._group_rows(self.prefix_group, np.array(batch.positions, np.int64))
        self._steps_until_pages -= 1
        if self._window_groups:
            self._clear_freed_pages(batch)
        if not self._changes:
            return None
        indices, values = (np.concatenate(part) for part in zip(*self._changes, strict=True))
        self._changes.clear()
        return np.stack((indices, values))

    def advance(self) -> None:
        """Record that the step of the last `changes` is enqueued; it advances its rows by one position."""
        self._unapplied_steps += 1

    def forget_rows(self) -> None:
        """Forget the current rows, which another phase advances: the next `changes` compares them all."""
        self._apply_advances()
        self._leases = []

    def set_sampled_positions(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Record that the device wrote the slots' tokens at `positions` to `last_tokens`."""
        self._apply_advances()
        self._token_positions[slots] = positions

    def _apply_advances(self) -> None:
        """Apply enqueued steps to the host's state. Deferred until the batch changes, to keep steady steps cheap."""
        if self._unapplied_steps:
            self._token_positions[self._slots] += self._unapplied_steps
            self._mirror_views.positions[: len(self._slots)] += self._unapplied_steps
            self._unapplied_steps = 0

    def _set_rows(self, batch: Batch) -> None:
        self._apply_advances()
        rows, layout = len(batch.decodes), self._layout
        count = max(rows, len(self._slots))  # those after are padding already
        self._leases, self._steps_until_pages = batch.leases, 0
        self._slots = slots = np.array([request.slot for request in batch.decodes], np.int64)
        new_rows = np.zeros((2, count), np.int64)
        new_rows[0, :rows], new_rows[1, :rows] = slots + 1, batch.positions
        for start, row in zip((0, layout.max_num_seqs), new_rows, strict=True):
            self._replace(start, row)
        missing = np.flatnonzero(self._token_positions[slots] != new_rows[1, :rows]).tolist()
        if missing:
            self._token_positions[slots] = new_rows[1, :rows]
            self._write(
                [layout.token_start + 1 + batch.decodes[row].slot for row in missing],
                [batch.decodes[row].token_ids[batch.positions[row]] for row in missing],
            )

    def _write_pages(self, batch: Batch) -> None:
        """Write the new pages of rows that need more, and compute for how many steps the pages suffice.

        A slot's first pages replace all pages of its previous request. Attention over a padded context reads the whole
        table, and another request that owns such a page now may have written NaN there: 0 * NaN is NaN.
        """
        if not self._layout.groups:
            self._steps_until_pages = sys.maxsize
            return
        size, slots = self._page_size, self._slots
        positions = np.array(batch.positions, np.int64)
        indices: list[int] = []
        values: list[int] = []
        for row in np.flatnonzero(self._num_pages[slots] * size <= positions).tolist():
            tables, slot = batch.decodes[row].page_tables, batch.decodes[row].slot
            num_written, num_pages = int(self._num_pages[slot]), min(map(len, tables))  # all hold this position
            for group, pages in enumerate(tables):
                start = self._table_start(group, slot)
                indices += range(start + num_written, start + num_pages)
                values += pages[num_written:num_pages]
                if not num_written:
                    rest = start + num_pages
                    stale = np.flatnonzero(self._mirror[rest : start + self._layout.pages_per_slot]) + rest
                    indices += stale.tolist()
                    values += [0] * len(stale)
            self._num_pages[slot] = num_pages
        if indices:
            self._write(indices, values)
        self._steps_until_pages = int((self._num_pages[slots] * size - positions).min())

    def _group_rows(self, group: int, positions: np.ndarray) -> None:
        """Find rows that share their first pages and write their groups, if sharing them saves enough."""
        self.shares_prefixes = False
        if len(positions) * positions.max(initial=0) < self._min_saved:
            return
        layout, views = self._layout, self._mirror_views
        tables = views.page_tables[group, self._slots + 1, : positions.max(initial=0) // self._page_size + 1]
        found = group_by_prefix(tables, positions, self._page_size, layout.prefix_groups, layout.prefix_members)
        if found.saved >= self._min_saved:
            self.shares_prefixes = True
            keys = np.zeros(layout.max_num_seqs, np.int64)
            keys[: len(found.keys)] = found.keys
            self._replace(layout.shared_start, np.concatenate((keys, [found.num_groups], found.members.ravel())))

    def _clear_freed_pages(self, batch: Batch) -> None:
        """Set the table entries of pages that left a window to 0: another request may own those pages now."""
        for group in self._window_groups:
            for request in batch.decodes:
                freed, known = request.num_freed[group], int(self._num_freed[group, request.slot])
                if freed > known:
                    start = self._table_start(group, request.slot)
                    stale = [entry for entry in range(start + known, start + freed) if self._mirror[entry]]
                    if stale:
                        self._write(stale, [0] * len(stale))
                    self._num_freed[group, request.slot] = freed

    def _table_start(self, group: int, slot: int) -> int:
        layout = self._layout
        return layout.page_start + group * layout.table_size + (slot + 1) * layout.pages_per_slot

    def _replace(self, start: int, values: np.ndarray) -> None:
        """Set the entries of the state from `start` on that differ from the values."""
        current = self._mirror[start : start + len(values)]
        if len(changed := np.flatnonzero(current != values)):
            self._changes.append((changed + start, values[changed]))
        current[:] = values

    def _write(self, indices: list[int], values: list[int]) -> None:
        """Set single entries of the state. Indices must be unique within a step."""
        self._mirror[indices] = values
        self._changes.append((np.array(indices, np.int64), np.array(values, np.int64)))
