"""Merging of deltas for a slow reader: tokens, order and finish reasons are kept."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.client.async_client import make_client
from engine.client.output_queue import OutputQueue, deltas_until_end, merge_deltas
from engine.protocol.outputs import OutputDelta
from engine.protocol.request import SamplingParams, TokenLogprob


def delta(text: str, *ids: int, child: str = "a", **more) -> OutputDelta:
    return OutputDelta(request_id="r", child_id=child, text_delta=text, token_ids=list(ids), **more)


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, {})


def test_merged_delta_keeps_the_first_metadata_and_the_last_finish_reason():
    [merged] = merge_deltas(
        [
            delta("x", 1, logprobs=[logprob(1)], queue_time=0.5, cached_tokens=16, prompt_logprobs=[None]),
            delta("", 2, logprobs=[logprob(2)]),
            delta("yz", 3, logprobs=[logprob(3)], finish_reason="stop", stop_reason="z", abort=True),
        ]
    )
    assert (merged.text_delta, merged.token_ids) == ("xyz", [1, 2, 3])
    assert [found.token_id for found in merged.logprobs] == [1, 2, 3]
    assert (merged.queue_time, merged.cached_tokens, merged.prompt_logprobs) == (0.5, 16, [None])
    assert (merged.finish_reason, merged.stop_reason, merged.abort) == ("stop", "z", True)


def test_hidden_states_are_merged_in_order_and_reported_as_they_arrive():
    rows = [np.full((count, 2), float(count), np.float32) for count in (1, 2)]
    deltas = [delta("a", 1), delta("b", 2, hidden_state_parts=rows[:1]), delta("c", 3, hidden_state_parts=rows[1:])]
    seen = []
    queue = OutputQueue(on_hidden_states=seen.extend)
    assert all(queue.add(one) for one in deltas) and seen == rows
    [merged] = merge_deltas(deltas)
    assert np.concatenate(merged.hidden_state_parts).tolist() == [[1, 1], [2, 2], [2, 2]]


def test_deltas_of_different_sequences_are_merged_separately():
    last = delta("d", 4, child="b", finish_reason="length")
    found = merge_deltas([delta("a", 1), delta("b", 2, child="b"), delta("c", 3), last])
    assert [(one.child_id, one.text_delta, one.token_ids, one.finish_reason) for one in found] == [
        ("a", "ac", [1, 3], None), ("b", "bd", [2, 4], "length"),
    ]  # fmt: skip


@pytest.mark.parametrize("origin", [{"weight_version": "new"}, {"graph_bucket": 8}])
def test_deltas_of_different_weights_or_buckets_are_not_merged(origin):
    found = merge_deltas([delta("a", 1), delta("b", 2, **origin), delta("c", 3, **origin)])
    assert [one.token_ids for one in found] == [[1], [2, 3]]


async def test_a_slow_reader_gets_the_same_answer_in_fewer_deltas(config):
    client = make_client(config(), in_process=True)
    await client.start()
    try:
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, n=2)
        answers = []
        for pause in (0.0, 0.05):
            texts, ids, pieces = ["", ""], [[], []], 0
            async for one in client.generate("r", prompt_token_ids=[5, 9, 200], params=params):
                texts[one.index] += one.text_delta
                ids[one.index] += one.token_ids
                pieces += 1
                await asyncio.sleep(pause)
            answers.append((texts, ids, pieces))
        (texts, ids, _), (slow_texts, slow_ids, slow_pieces) = answers
        assert ids == slow_ids and texts == slow_texts and [len(one) for one in ids] == [100, 100]
        assert slow_pieces < 100
    finally:
        await client.close()


async def test_a_delta_is_offered_while_the_reader_waits_and_not_read_once_taken():
    offered: list[OutputDelta] = []

    def take(one: OutputDelta) -> bool:
        offered.append(one)
        return one.text_delta != "b"

    queue = OutputQueue(on_delta=take)
    queue.add(delta("before", 1))
    assert [one.text_delta for one in await queue.take()] == ["before"] and not offered
    reader = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    for number, text in enumerate("abc"):
        assert queue.add(delta(text, number))
    assert [one.text_delta for one in await reader] == ["b", "c"]  # "c" comes after "b", which was not taken
    assert [one.text_delta for one in offered] == ["a", "b"]


async def test_what_a_taker_raises_reaches_the_reader():
    def fail(_: OutputDelta) -> bool:
        raise ValueError("no")

    queue = OutputQueue(on_delta=fail)
    reader = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert queue.add(delta("a", 1))
    deltas, error = deltas_until_end(await reader, {"a"})
    assert not deltas and isinstance(error, ValueError)


async def test_nothing_is_offered_once_the_reader_was_cancelled():
    offered: list[OutputDelta] = []
    queue = OutputQueue(on_delta=lambda one: not offered.append(one))
    reader = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.sleep(0)
    queue.add(delta("a", 1))
    assert not offered
