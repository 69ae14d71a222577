"""The static inputs of a decode step: every load equals a naive fill and uploads only what changed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.metadata import SlotState
from engine.protocol.request import EngineRequest, SamplingParams
from engine.scheduling.batch import Batch
from engine.scheduling.request import Request
from engine.worker.decode_graphs import shared_buckets
from engine.worker.input_buffers import DecodeInputs, Layout, decode_buffers
from engine.worker.prefix_groups import MIN_MEMBERS, max_groups_of
from graph_cache.core.buckets import Buckets

ROWS, PAGES, PAGE_SIZE = 8, 6, 4
BUCKETS = Buckets((1, 2, 4, 8))
LAYOUT = Layout(ROWS, PAGES)


class Device:
    """The decode state, its DecodeInputs, and a simulated decode step in which each row's token becomes `token + 1`."""

    def __init__(self) -> None:
        self.buffers = decode_buffers(LAYOUT, ROWS, 4, 10, torch.float32, torch.device("cpu"), torch.float32)
        self.state: SlotState = LAYOUT.views(self.buffers["state"])
        self.inputs = DecodeInputs(LAYOUT, PAGE_SIZE)

    def step(self, bucket: int) -> None:
        slots = self.state.slots[:bucket]
        self.state.last_tokens.index_copy_(0, slots, self.state.last_tokens[slots] + 1)
        self.state.last_tokens[0] = 0
        self.state.positions[:bucket] += slots > 0

    def sent(self) -> list[tuple[int, int]]:
        """Return what the last load uploaded, as (index in the state, value) pairs."""
        return self._sent

    def load(self, batch: Batch) -> None:
        changes = self.inputs.changes(batch)
        self._sent: list[tuple[int, int]] = []
        if changes is not None:
            indices, values = torch.from_numpy(changes)
            assert len(indices.unique()) == len(indices)
            self.buffers["state"].index_copy_(0, indices, values)
            self._sent = sorted(zip(indices.tolist(), values.tolist(), strict=True))


def a_request(name: str, slot: int, pages: list[int], length: int) -> Request:
    ids = list(range(1, length + 1))
    request = Request(EngineRequest(request_id=name, prompt_token_ids=ids, params=SamplingParams()))
    request.slot, request.page_tables, request.num_computed = slot, [pages], length - 1
    request.lease = id(request)
    return request


def batch_of(requests: list[Request]) -> Batch:
    return Batch(
        decodes=requests,
        positions=[request.num_computed for request in requests],
        leases=[request.lease for request in requests],
    )


def check(state: SlotState, requests: list[Request], bucket: int) -> None:
    """Compare with a naive fill. A slot's page table beyond its request's pages is 0."""
    for row in range(bucket):
        slot, position = int(state.slots[row]), int(state.positions[row])
        if row < len(requests):
            request = requests[row]
            assert (slot, position) == (request.slot + 1, request.num_computed)
            assert state.last_tokens[slot] == request.token_ids[position]
            used = position // PAGE_SIZE + 1
            table, known = state.page_tables[0, slot].tolist(), request.page_tables[0]
            assert table[:used] == known[:used]
            assert not any(table[len(known) :]), "attention over a padded context reads another request's page"
        else:
            assert slot == position == 0
    assert state.last_tokens[0] == 0
    assert state.page_tables[0, 0].tolist() == [0] * PAGES, "padding refers to pages of requests"


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1, max_size=ROWS),  # slots that decode, by row
        st.sampled_from(["run"] * 4 + ["takeover", "host token", "prefill", "invalidate", "capture"]),
        st.randoms(use_true_random=False),
    ), min_size=1, max_size=25,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_after_any_sequence_of_steps_the_state_equals_a_naive_fill(steps):
    device = Device()
    live: dict[int, Request] = {}
    for slots, what, random in steps:
        for slot in slots:
            request = live.get(slot)
            if request is None or what == "takeover" or len(request.token_ids) >= PAGES * PAGE_SIZE - 1:
                length = random.randint(1, PAGES * PAGE_SIZE - 3)
                pages = [random.randint(1, 99) for _ in range(-(-length // PAGE_SIZE))]
                live[slot] = a_request(f"{slot}", slot, pages, length)
                device.inputs.assign_slot(slot)
        requests = [live[slot] for slot in slots]
        if what == "host token":  # only the host has the newest token
            for request in requests:
                request.token_ids.append(random.randint(1, 9))
                request.num_computed += 1
                request.lease += 1
                device.inputs.assign_slot(request.slot)
        if what == "prefill":  # the device sampled these tokens
            for request in requests:
                request.token_ids.append(random.randint(1, 9))
                request.num_computed += 1
                request.lease += 1
                device.state.last_tokens[request.slot + 1] = request.token_ids[-1]
            device.inputs.set_sampled_positions(slots, [request.num_computed for request in requests])
        for request in requests:
            if len(request.page_tables[0]) * PAGE_SIZE < len(request.token_ids):
                request.page_tables[0] += [random.randint(1, 99)]
        if what == "capture":
            saved = device.buffers.snapshot(ROWS)
            device.buffers.fill_dummy()
            device.buffers.restore(saved)
        if what == "invalidate":
            device.buffers["state"].fill_(random.randint(1, 99))  # something else wrote there
            device.buffers["state"].zero_()
            device.inputs.reset()
        bucket = BUCKETS.round_up(len(requests))
        batch = batch_of(requests)
        device.load(batch)
        check(device.state, requests, ROWS)
        device.step(bucket)
        device.inputs.advance()
        for request in requests:
            request.token_ids.append(request.token_ids[-1] + 1)
            request.num_computed += 1


def advance(device: Device, requests: list[Request], bucket: int) -> None:
    """Run a step and update its requests like the scheduler; the host doesn't read the token."""
    batch = batch_of(requests)
    device.load(batch)
    device.step(bucket)
    device.inputs.advance()
    for request in requests:
        request.num_computed += 1


def test_a_step_of_the_same_batch_sends_only_pages_that_it_comes_to_need():
    device = Device()
    one, two = a_request("one", 3, [5, 6], 7), a_request("two", 0, [7], 3)
    advance(device, [one, two], 4)
    advance(device, [one, two], 4)  # neither token is known to the host
    assert device.sent() == []
    one.page_tables[0] += [9]
    two.page_tables[0] += [8]
    advance(device, [one, two], 4)
    table = LAYOUT.page_start
    assert device.sent() == [(table + 1 * PAGES + 1, 8), (table + 4 * PAGES + 2, 9)]
    check(device.state, [], 0)


def test_a_row_that_leaves_moves_the_others_but_none_of_their_pages():
    device = Device()
    requests = [a_request(f"{i}", i, [2 * i + 1, 2 * i + 2], 3 + i) for i in range(4)]
    advance(device, requests, 4)
    advance(device, requests[1:], 4)
    assert all(place < LAYOUT.token_start for place, _ in device.sent())
    assert device.state.slots[:4].tolist() == [2, 3, 4, 0] and device.state.positions[:4].tolist() == [5, 6, 7, 0]
    advance(device, requests[3:], 1)
    assert device.state.slots[:1].tolist() == [4]


def test_a_reused_slot_gets_the_new_requests_token_and_pages_at_the_same_position():
    device = Device()
    advance(device, [a_request("old", 2, [3, 4], 5)], 1)
    new = a_request("new", 2, [8, 9], 6)  # its token is at the position of the old request's next one
    new.token_ids[5] = 77
    device.inputs.assign_slot(2)
    device.load(batch_of([new]))
    check(device.state, [new], ROWS)


def test_a_token_that_neither_device_nor_host_knows_is_an_error_not_a_guess():
    device = Device()
    request = a_request("a", 0, [1], 2)
    advance(device, [request], 1)
    device.inputs.reset()
    with pytest.raises(IndexError):
        device.load(batch_of([request]))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_buffers_are_the_shapes_that_the_decode_site_reads(rows):
    buffers = decode_buffers(LAYOUT, ROWS, 16, 32, torch.bfloat16, torch.device("cpu"), torch.float32)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.view(rows).items()}
    assert shapes == {
        "state": ((8 + 8 + 9 + 9 * PAGES,), torch.int64),
        "hidden": ((rows, 16), torch.bfloat16), "logits": ((rows, 32), torch.float32),
        "next_tokens": ((rows,), torch.int64),
    }  # fmt: skip
    parts = LAYOUT.views(buffers["state"])
    assert [tuple(part.shape) for part in parts] == [(8,), (8,), (9,), (1, 9, PAGES), (0,), (0, 0), (0,)]
    buffers["state"].copy_(torch.arange(LAYOUT.size))
    assert torch.cat([part.reshape(-1) for part in parts]).tolist() == list(range(LAYOUT.size))


def test_tables_of_two_groups_may_differ_in_length_and_lose_their_beginnings():
    layout = Layout(ROWS, PAGES, 2)
    buffers = decode_buffers(layout, ROWS, 4, 10, torch.float32, torch.device("cpu"), torch.float32)
    inputs = DecodeInputs(layout, PAGE_SIZE, (None, PAGE_SIZE))
    state = layout.views(buffers["state"])
    request = a_request("one", 3, [5, 6], PAGE_SIZE)  # the full group has the next page already
    request.page_tables, request.num_freed = [[5, 6], [7]], [0, 0]
    for tables, freed in (([[5, 6], [7]], [0, 0]), ([[5, 6], [7, 8]], [0, 0]), ([[5, 6], [0, 8]], [0, 1])):
        request.page_tables, request.num_freed = tables, freed
        indices, values = torch.from_numpy(inputs.changes(batch_of([request])))
        buffers["state"].index_copy_(0, indices, values)
        used = request.num_computed // PAGE_SIZE + 1
        for group, table in enumerate(tables):
            assert state.page_tables[group, 4, :used].tolist() == table[:used]
        inputs.advance()
        request.num_computed += 1


def test_rows_that_share_their_first_pages_are_grouped_while_sharing_saves_enough():
    layout = Layout(ROWS, PAGES, prefix_members=4)
    buffers = decode_buffers(layout, ROWS, 4, 10, torch.float32, torch.device("cpu"), torch.float32)
    inputs = DecodeInputs(layout, PAGE_SIZE, min_saved=3 * 2 * PAGE_SIZE)
    state = layout.views(buffers["state"])

    def load(requests: list[Request]) -> None:
        changes = inputs.changes(batch_of(requests))
        if changes is not None:
            buffers["state"].index_copy_(0, *torch.from_numpy(changes))
        inputs.advance()

    alike = [a_request(f"{slot}", slot, [5, 6, 10 + slot], 2 * PAGE_SIZE + 1) for slot in (1, 3, 4, 6)]
    other = a_request("other", 0, [20, 21, 22], 2 * PAGE_SIZE + 2)
    rows = [alike[0], other, *alike[1:]]
    load(rows)
    assert inputs.shares_prefixes
    assert state.shared_keys.tolist() == [8, 0, 8, 8, 8, 0, 0, 0]
    assert state.prefix_members.tolist() == [[1, 3, 4, 5], [0, 0, 0, 0]] and state.num_prefix_groups.tolist() == [1]
    for request in rows:
        request.token_ids.append(7)
        request.num_computed += 1
    assert inputs.changes(batch_of(rows)) is None and inputs.shares_prefixes  # the same rows, one step later
    inputs.advance()
    for request in rows:
        request.token_ids.append(8)
        request.num_computed += 1
    load(rows[:3])
    assert not inputs.shares_prefixes  # two rows alike save less than is asked for
    load(rows)
    assert inputs.shares_prefixes and state.num_prefix_groups.tolist() == [1]
    inputs.reset()
    buffers["state"].zero_()
    load(rows)
    assert inputs.shares_prefixes and state.shared_keys.tolist() == [8, 0, 8, 8, 8, 0, 0, 0]


PREFIXES = st.lists(st.integers(0, 7), min_size=1, max_size=24)  # of each row, by number


@settings(max_examples=200, deadline=None)
@given(
    batches=st.lists(PREFIXES, min_size=1, max_size=4), branches=st.lists(st.integers(0, 7), min_size=8, max_size=8),
    width=st.sampled_from([2, 4, 16]), max_rows=st.sampled_from([24, 40]),
)  # fmt: skip
def test_the_graph_of_any_bucket_reads_the_groups_of_all_rows_that_share(batches, branches, width, max_rows):
    """Of a row with keys in a group that no program computes, attention would merge the result of an earlier step."""
    layout = Layout(max_rows, 12, prefix_members=width)
    buffers = decode_buffers(layout, max_rows, 4, 10, torch.float32, torch.device("cpu"), torch.float32)
    inputs, state = DecodeInputs(layout, PAGE_SIZE, min_saved=PAGE_SIZE), layout.views(buffers["state"])
    ladder = shared_buckets(Buckets.for_limit(max_rows))
    prefixes: list[list[int]] = []  # each continues an earlier one
    for number, branch in enumerate(branches):
        prefixes.append([*(prefixes[branch % number][:9] if number and branch else []), 1000 + number])
    lease = 0
    for rows in batches:
        requests = []
        for slot, prefix in enumerate(rows):
            pages = [*prefixes[prefix], 1 + slot]
            requests.append(a_request(f"{slot}", slot, pages, (len(pages) - 1) * PAGE_SIZE + 1))
            requests[-1].lease = lease = lease + 1
            inputs.assign_slot(slot)
        changes = inputs.changes(batch_of(requests))
        if changes is not None:
            buffers["state"].index_copy_(0, *torch.from_numpy(changes))
        inputs.advance()
        if not inputs.shares_prefixes:
            continue
        read = state.prefix_members[: max_groups_of(ladder.round_up(len(rows)))]
        assert sorted(read[read > 0].tolist()) == (state.shared_keys.nonzero().squeeze(1) + 1).tolist()
        assert int(state.num_prefix_groups) == int((read[:, 0] > 0).sum())
        for line in read.tolist():
            shared = {(int(state.shared_keys[row - 1]), *rows_pages(state, row - 1)) for row in line if row}
            assert len(shared) <= 1


def rows_pages(state: SlotState, row: int) -> list[int]:
    """Return the pages that a row shares."""
    return state.page_tables[0, int(state.slots[row]), : int(state.shared_keys[row]) // PAGE_SIZE].tolist()


def test_buckets_of_shared_prefixes_hold_few_padding_rows():
    for sizes in (None, (1, 2, 24, 48, 100)):
        ladder = shared_buckets(Buckets.for_limit(1024 if sizes is None else 100, sizes))
        assert ladder.max == (1024 if sizes is None else 100) and min(ladder.sizes) >= MIN_MEMBERS
    assert shared_buckets(Buckets.for_limit(100, (1, 2, 24, 48, 100))).sizes == (24, 48, 100)
    wide = shared_buckets(Buckets.for_limit(1024)).sizes
    assert len(wide) < 25 and all(larger <= 1.5 * size for size, larger in zip(wide[2:], wide[3:], strict=False))
    assert shared_buckets(Buckets.for_limit(2)).sizes == (2,)


def test_rows_share_no_pages_of_groups_with_a_window():
    layout = Layout(ROWS, PAGES, 2, prefix_members=4)
    assert DecodeInputs(layout, PAGE_SIZE, (PAGE_SIZE, None)).prefix_group == 1
    assert DecodeInputs(layout, PAGE_SIZE, (PAGE_SIZE, PAGE_SIZE)).prefix_group is None
    assert DecodeInputs(Layout(ROWS, PAGES), PAGE_SIZE).prefix_group is None
