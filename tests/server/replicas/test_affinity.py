"""The replica that a request prefers."""

from __future__ import annotations

from collections import Counter

import pytest

from server.replicas.affinity import affinity_of, preferred


def chat(*texts: str, system: str = "Be brief.") -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *messages]}


def test_a_conversation_keeps_its_affinity_as_it_grows():
    first = affinity_of(chat("What is a graph?"))
    assert first == affinity_of(chat("What is a graph?", "A capture.", "Of what?") | {"temperature": 0.5})
    assert first != affinity_of(chat("What is a replay?"))
    assert first != affinity_of(chat("What is a graph?", system="Be long."))


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({"prompt": "a" * 5000 + "b"}, {"prompt": "a" * 5000 + "c"}, {"prompt": "b" * 5000}),
        ({"prompt": ["red", "fox"]}, {"prompt": "red"}, {"prompt": ["fox", "red"]}),
        ({"prompt": [1, 2, 3]}, {"prompt": [[1, 2, 3], [4]]}, {"prompt": [1, 2, 4]}),
        ({"text": "red"}, {"text": ["red"]}, {"text": "fox"}),
        ({"input_ids": list(range(300))}, {"input_ids": list(range(400))}, {"input_ids": [1]}),
        (
            {"input": "red", "instructions": "Be brief."},
            {"input": "red", "instructions": "Be brief.", "max_output_tokens": 5},
            {"input": "red", "instructions": "Be long."},
        ),
        (
            {"input": [{"role": "user", "content": "red"}]},
            {"input": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "fox"}]},
            {"input": [{"role": "user", "content": "fox"}]},
        ),
        (
            {"system": [{"type": "text", "text": "Be brief."}], "messages": [{"role": "user", "content": "red"}]},
            {"messages": [{"role": "user", "content": "red"}], "system": [{"text": "Be brief.", "type": "text"}]},
            {"system": [{"type": "text", "text": "Be long."}], "messages": [{"role": "user", "content": "red"}]},
        ),
    ],
)
def test_prompts_that_begin_alike_have_the_same_affinity(one, same, other):
    assert affinity_of(one) == affinity_of(same) != affinity_of(other)


@pytest.mark.parametrize(
    "body", [None, [], "red", {}, {"model": "tiny"}, {"prompt": ""}, {"messages": []}, {"input": []}]
)
def test_a_body_without_a_prompt_has_no_affinity(body):
    assert affinity_of(body) == b""


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [None, 3, {"role": 1}]}, {"prompt": [[]]}, {"prompt": [None]}, {"prompt": {"a": 1}},
        {"input": [[{}]]}, {"messages": [{"role": "user", "content": "\ud800"}]}, {"system": 3, "messages": [[]]},
    ],
)  # fmt: skip
def test_a_malformed_prompt_is_left_to_the_replica_to_refuse(body):
    assert isinstance(affinity_of(body), bytes)


def test_the_same_affinity_prefers_the_same_replica_and_others_spread():
    idle = dict.fromkeys("abcd", 0)
    firsts = Counter(preferred(f"prompt {number}".encode(), idle)[0] for number in range(400))
    assert all(60 < firsts[name] < 140 for name in "abcd")
    assert preferred(b"prompt", idle) == preferred(b"prompt", dict(reversed(idle.items())))


def test_only_requests_of_a_lost_replica_move():
    idle = dict.fromkeys("abcd", 0)
    without = dict.fromkeys("abd", 0)
    for number in range(200):
        first, second, *_ = preferred(f"prompt {number}".encode(), idle)
        assert preferred(f"prompt {number}".encode(), without)[0] == (second if first == "c" else first)


def test_the_load_of_a_preferred_replica_is_bounded():
    loads = dict.fromkeys("abcd", 0)
    for _ in range(100):
        loads[preferred(b"the same prompt", loads)[0]] += 1
    assert max(loads.values()) <= 32  # 1.25 times the mean, rounded up
    loads[preferred(b"the same prompt", dict.fromkeys("abcd", 0))[0]] = 10**6
    assert preferred(b"the same prompt", loads)[-1] == max(loads, key=loads.get)


def test_without_affinity_the_least_loaded_replica_is_first():
    assert preferred(b"", {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]
