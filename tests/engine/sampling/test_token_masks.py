"""Masks of constrained slots: which rows of the device a write changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.token_masks import MAX_COPIES, TokenMasks, consecutive
from engine.utils.async_copy import upload_buffer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 100


@given(st.lists(st.integers(0, 40), unique=True))
def test_runs_of_slots_cover_each_slot_once(slots):
    covered = [(first + k, slot + k) for first, slot, count in consecutive(slots) for k in range(count)]
    assert covered == list(enumerate(slots))
    runs = consecutive(slots)
    assert all(before[1] + before[2] != after[1] for before, after in zip(runs, runs[1:], strict=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "slots", [[], [3], [0, 1, 2], [5, 6, 7, 1, 2], list(range(0, 4 * MAX_COPIES, 2)), [7, 6, 5]], ids=str
)
def test_a_write_changes_the_rows_of_its_slots_alone(device, slots):
    device = torch.device(device)
    masks = TokenMasks(40, VOCAB, device)
    before = torch.randint(-(2**31), 2**31 - 1, masks.masks.shape, dtype=torch.int32)
    masks.masks.copy_(before)
    host = upload_buffer(40, masks.masks.shape[1], device)
    host[:] = torch.randint(-(2**31), 2**31 - 1, host.shape, dtype=torch.int32).numpy()
    expected = before.clone()
    for row, slot in enumerate(slots):
        expected[slot + 1] = torch.from_numpy(host[row])
    masks.write(slots, host[: len(slots)])
    assert torch.equal(masks.masks.cpu(), expected)
