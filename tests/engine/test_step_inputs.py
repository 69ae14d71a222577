"""The static inputs of a decode step: every load leaves what a naive fill would, and writes no more than changed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import EngineRequest, Request, SamplingParams
from engine.step_inputs import StepInputs, decode_buffers
from graph_cache.buckets import Buckets

ROWS, PAGES, PAGE_SIZE = 8, 6, 4
BUCKETS = Buckets((1, 2, 4, 8))


def fresh() -> tuple[StepInputs, dict[str, torch.Tensor]]:
    buffers = decode_buffers(ROWS, PAGES, 4, 10, torch.float32, torch.device("cpu"))
    return StepInputs(buffers), buffers


def a_request(name: str, pages: list[int], length: int) -> Request:
    ids = list(range(1, length + 1))
    request = Request(EngineRequest(request_id=name, prompt_token_ids=ids, params=SamplingParams()))
    request.pages, request.num_computed = pages, length - 1
    return request


def check(buffers, requests, bucket) -> None:
    """Against a fill from nothing. A row's table beyond its request's pages is masked, so it may hold anything."""
    for row in range(bucket):
        if row < len(requests):
            request = requests[row]
            assert buffers["tokens"][row] == request.token_ids[-1]
            assert buffers["positions"][row] == request.num_computed
            assert buffers["page_table"][row, : len(request.pages)].tolist() == request.pages
        else:
            assert buffers["tokens"][row] == buffers["positions"][row] == 0
            assert buffers["page_table"][row].tolist() == [0] * PAGES, f"padding row {row} names pages of others"


LIVE = st.lists(st.sampled_from("abcdefghij"), unique=True, min_size=1, max_size=ROWS)
STEPS = st.lists(
    st.tuples(LIVE, st.sampled_from(["run"] * 3 + ["preempt", "forget", "capture"]), st.randoms(use_true_random=False)),
    min_size=1, max_size=25,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_after_any_sequence_of_loads_the_buffers_are_as_a_naive_fill_leaves_them(steps):
    inputs, buffers = fresh()
    live: dict[str, Request] = {}
    for names, what, random in steps:
        live = {name: request for name, request in live.items() if name in names}  # the others ended
        for name in names:
            if name not in live or what == "preempt":
                length = random.randint(1, PAGES * PAGE_SIZE - 3)
                live[name] = a_request(name, [random.randint(1, 99) for _ in range(-(-length // PAGE_SIZE))], length)
            elif len(live[name].token_ids) < PAGES * PAGE_SIZE:  # a decode: one token more, and a page if it needs one
                request = live[name]
                request.token_ids.append(random.randint(1, 9))
                request.num_computed += 1
                if len(request.pages) * PAGE_SIZE < len(request.token_ids):
                    request.pages += [random.randint(1, 99)]
        if what == "capture":
            saved = buffers.snapshot(ROWS)
            buffers.fill_dummy()
            buffers.restore(saved)
        if what == "forget":
            buffers["page_table"].fill_(random.randint(1, 99))  # something else wrote there
            inputs.forget()
        requests = [live[name] for name in names]
        bucket = BUCKETS.round_up(len(requests))
        inputs.load(requests, bucket)
        check(buffers, requests, bucket)


def test_a_step_writes_only_the_page_table_entries_that_changed():
    inputs, buffers = fresh()
    one, two = a_request("one", [5, 6], 7), a_request("two", [7], 3)
    inputs.load([one, two], 4)
    buffers["page_table"].fill_(-1)  # marks what the next loads leave alone
    inputs.load([one, two], 4)
    assert (buffers["page_table"] == -1).all()
    one.pages += [9]
    inputs.load([one, two], 4)
    changed = buffers["page_table"] != -1
    assert changed.nonzero().tolist() == [[0, 2]] and buffers["page_table"][0, 2] == 9
    inputs.load([two], 1)  # another request in row 0: all its pages are written, and nothing else
    assert (buffers["page_table"] != -1).nonzero().tolist() == [[0, 0], [0, 2]]
    assert buffers["page_table"][0, 0] == 7


def test_rows_that_become_padding_are_cleared_once():
    inputs, buffers = fresh()
    inputs.load([a_request(f"{i}", [i + 1], 2) for i in range(4)], 4)
    inputs.load([a_request("x", [9], 2)], 4)
    assert buffers["page_table"][:4].tolist() == [[9, *[0] * 5]] + [[0] * PAGES] * 3
    buffers["page_table"][1:].fill_(-1)
    inputs.load([a_request("y", [9], 2)], 4)
    assert (buffers["page_table"][1:] == -1).all()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_buffers_are_the_shapes_that_the_decode_site_reads(rows):
    buffers = decode_buffers(8, PAGES, 16, 32, torch.bfloat16, torch.device("cpu")).view(rows)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.items()}
    assert shapes == {
        "tokens": ((rows,), torch.int64), "positions": ((rows,), torch.int64),
        "page_table": ((rows, PAGES), torch.int64),
        "hidden": ((rows, 16), torch.bfloat16), "logits": ((rows, 32), torch.bfloat16),
        "next_tokens": ((rows,), torch.int64),
    }  # fmt: skip
