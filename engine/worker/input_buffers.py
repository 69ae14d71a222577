"""The static inputs of a decode step: which slot each row is, where it is in its text, and each slot's newest token
and pages.

Owns their layout in memory, and what the device is known to hold, so that a step sends only what differs. Knows no
graphs and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.metadata import SlotState
from engine.scheduling.batch import Batch
from engine.utils.async_copy import upload
from graph_cache.buffers import BATCH, BufferSpec, StaticBuffers


class Layout(NamedTuple):
    """Where each part of the state lies: one tensor, so that one small copy and one scatter change any of it."""

    max_num_seqs: int
    pages_per_slot: int

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return self.page_start + (self.max_num_seqs + 1) * self.pages_per_slot

    @property
    def token_start(self) -> int:
        return 2 * self.max_num_seqs

    @property
    def page_start(self) -> int:
        return 3 * self.max_num_seqs + 1

    def views(self, state: Any) -> SlotState:
        """The parts of a contiguous tensor or array [size], as aliases."""
        rows = self.max_num_seqs
        return SlotState(
            state[:rows],
            state[rows : 2 * rows],
            state[2 * rows : self.page_start],
            state[self.page_start :].reshape(rows + 1, self.pages_per_slot),
        )


def decode_buffers(
    layout: Layout, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> StaticBuffers:
    """The decode site's static buffers.

    state int64 [layout.size]: see SlotState; all zeros is padding. hidden [b, hidden_size]: what passes between the
    parts of a layer-scoped step. logits [b, vocab_size] and next_tokens int64 [b]: outputs; a next token is -1 where
    the row's logits are not finite.
    """
    specs = {
        "state": BufferSpec((layout.size,), torch.int64),
        "hidden": BufferSpec((BATCH, hidden_size), dtype, pad=None),
        "logits": BufferSpec((BATCH, vocab_size), dtype, pad=None),
        "next_tokens": BufferSpec((BATCH,), torch.int64, pad=None),
    }
    return StaticBuffers(specs, layout.max_num_seqs, device)


class DecodeInputs:
    """Keeps the state what the next step needs it to be. Calls come in the order of the work on the device.

    `staged`: the device is another machine, as a GPU is. Then nothing is read from it: a mirror follows what the host
    sends and what a step advances, and a load sends the differences, as (place, value) pairs in pinned memory of their
    own. That memory is used again only after the copy from it, by the allocator's own events, so no step that is still
    running can be given the next one's inputs. On a CPU, where a step is over when its call returns, the tensor is its
    own mirror, and is written directly.
    """

    def __init__(self, state: torch.Tensor, layout: Layout, page_size: int, staged: bool | None = None):
        self._state = state
        self._layout = layout
        self._page_size = page_size
        self._staged = state.device.type == "cuda" if staged is None else staged
        self._mirror = np.zeros(layout.size, np.int64) if self._staged else state.numpy()
        self._mirror_views: SlotState = layout.views(self._mirror)
        self._changes: list[tuple[np.ndarray, np.ndarray]] = []
        # By slot: which token of its sequence the newest one is (-1: none is there), and how many pages are written.
        self._token_positions = np.full(layout.max_num_seqs, -1, np.int64)
        self._num_pages = np.zeros(layout.max_num_seqs, np.int64)
        # The rows as they are: whose they are, their slots, and for how many steps more all their pages are written.
        self._leases: list[int] = []
        self._bucket = 0
        self._slots = np.zeros(0, np.int64)
        self._steps_until_pages = 0
        self._unapplied_steps = 0  # steps enqueued but not yet added to `_token_positions` and the mirror

    def assign_slot(self, slot: int) -> None:
        """A slot changes hands: nothing that it holds is its new request's."""
        self._apply_advances()
        self._token_positions[slot] = -1
        self._num_pages[slot] = 0

    def invalidate(self) -> None:
        """Take nothing for granted at the next load: something else wrote to the state, or a step broke off.

        The host must know every token by then: read what is in flight first.
        """
        self._state.zero_()
        self._mirror.fill(0)
        self._changes.clear()
        self._token_positions.fill(-1)
        self._num_pages.fill(0)
        self._leases = []
        self._unapplied_steps = 0

    def load(self, batch: Batch, bucket: int) -> None:
        """Row i becomes the batch's decode i; rows up to `bucket` become padding.

        Nothing is to be done where the last load had the same leases: each of its decodes is one place further, and so
        is its row. Else rows are sent where they differ, tokens where the device has not chosen them itself, and in
        either case pages where a row comes to need more.
        """
        if bucket != self._bucket or batch.leases != self._leases:
            self._set_rows(batch, bucket)
        if self._steps_until_pages <= 0:
            self._write_pages(batch)
        self._steps_until_pages -= 1
        if self._changes:
            self._upload_changes()

    def advance(self) -> None:
        """The decode step that was loaded last is enqueued, and moves its rows one further."""
        self._unapplied_steps += 1

    def set_sampled_positions(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """These slots' newest tokens were put into `last_tokens` on the device: those at `positions`."""
        self._apply_advances()
        self._token_positions[slots] = positions

    def _apply_advances(self) -> None:
        """Do what steps did to the state to what is known of it; a batch that stays the same needs it at its end."""
        if self._unapplied_steps:
            self._token_positions[self._slots] += self._unapplied_steps
            if self._staged:
                self._mirror_views.positions[: len(self._slots)] += self._unapplied_steps
            self._unapplied_steps = 0

    def _set_rows(self, batch: Batch, bucket: int) -> None:
        self._apply_advances()
        rows, layout = len(batch.decodes), self._layout
        self._leases, self._bucket, self._steps_until_pages = batch.leases, bucket, 0
        self._slots = slots = np.array([request.slot for request in batch.decodes], np.int64)
        new_rows = np.zeros((2, bucket), np.int64)
        new_rows[0, :rows], new_rows[1, :rows] = slots + 1, batch.positions
        for start, row in zip((0, layout.max_num_seqs), new_rows, strict=True):
            current = self._mirror[start : start + bucket]
            if self._staged and len(changed := np.flatnonzero(current != row)):
                self._changes.append((changed + start, row[changed]))
            current[:] = row
        missing = np.flatnonzero(self._token_positions[slots] != new_rows[1, :rows]).tolist()
        if missing:
            self._token_positions[slots] = new_rows[1, :rows]
            self._write(
                [layout.token_start + 1 + batch.decodes[row].slot for row in missing],
                [batch.decodes[row].token_ids[batch.positions[row]] for row in missing],
            )

    def _write_pages(self, batch: Batch) -> None:
        """Write the pages of rows that come to need more, and see how long these will do."""
        size, layout, slots = self._page_size, self._layout, self._slots
        positions = np.array(batch.positions, np.int64)
        indices: list[int] = []
        values: list[int] = []
        for row in np.flatnonzero(self._num_pages[slots] * size <= positions).tolist():
            request = batch.decodes[row]
            pages, slot = request.pages, request.slot
            start, num_written = layout.page_start + (slot + 1) * layout.pages_per_slot, int(self._num_pages[slot])
            indices += range(start + num_written, start + len(pages))
            values += pages[num_written:]
            self._num_pages[slot] = len(pages)
        if indices:
            self._write(indices, values)
        self._steps_until_pages = int((self._num_pages[slots] * size - positions).min())

    def _write(self, indices: list[int], values: list[int]) -> None:
        """Set single entries, each once."""
        self._mirror[indices] = values
        if self._staged:
            self._changes.append((np.array(indices, np.int64), np.array(values, np.int64)))

    def _upload_changes(self) -> None:
        indices, values = (np.concatenate(part) for part in zip(*self._changes, strict=True))
        self._changes.clear()
        pairs = upload(torch.from_numpy(np.stack((indices, values))), self._state.device)
        self._state.index_copy_(0, pairs[0], pairs[1])
