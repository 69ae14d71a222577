"""Compilation in a pool: cache, hostile constraints, and the checking processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.errors import RequestError
from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars import compiler as compiler_module
from engine.text.grammars import matcher as matcher_module
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.grammars.matcher import CompiledGrammar, MatcherPool, forbid, forbid_rows, mask_words
from engine.utils.processes.child import running_children
from tests.support.waiting import PATIENCE

HOSTILE = {"type": "integer", "multipleOf": 999_983}  # takes seconds and 400 MB


@pytest.fixture(scope="module")
def compiler(source):
    one = GrammarCompiler(source, max_workers=2, check_seconds=1.0)
    yield one
    one.close()


def compiled(compiler, **constraint):
    return compiler.compile(StructuredOutputs(**constraint)).result(PATIENCE)


def test_a_constraint_is_compiled_once(compiler):
    first = compiler.compile(StructuredOutputs(regex="abc", field="regex"))
    assert compiler.compile(StructuredOutputs(regex="abc")) is first
    assert first.result(PATIENCE) is not compiled(compiler, regex="abcd")


def test_the_cache_holds_no_more_bytes_than_allowed_and_the_newest_constraint(source, monkeypatch):
    compiler = GrammarCompiler(source, max_workers=1)
    sizes = [compiled(compiler, choice=tuple(f"{turn}-{number}" for number in range(500))).nbytes for turn in range(3)]
    assert min(sizes) > 2_000
    futures = [compiler.compile(StructuredOutputs(choice=(f"kept {turn}",))) for turn in range(2)]
    assert [compiler.compile(StructuredOutputs(choice=(f"kept {turn}",))) for turn in range(2)] == futures
    monkeypatch.setattr(compiler_module, "MAX_CACHED_BYTES", 1)
    newest = compiler.compile(StructuredOutputs(regex="new"))
    assert newest.result(PATIENCE) and compiler.compile(StructuredOutputs(regex="new")) is newest
    assert compiler.compile(StructuredOutputs(choice=("kept 1",))) is not futures[1]
    compiler.close()


def test_failures_name_the_field_of_each_caller(compiler):
    for field in ("regex", "structured_outputs.regex"):
        with pytest.raises(RequestError, match=rf"^{field}: .*unclosed group"):
            compiled(compiler, regex="a(", field=field)


def test_a_hostile_schema_times_out_alone(compiler):
    hostile = compiler.compile(StructuredOutputs(json=HOSTILE))
    began = time.monotonic()
    assert compiled(compiler, regex="[a-c]+")
    assert not hostile.done() or time.monotonic() - began > 1.0
    with pytest.raises(RequestError, match=r"structured_outputs\.json: takes "):
        hostile.result(PATIENCE)
    assert compiled(compiler, regex="[a-d]+")


def test_time_in_which_the_checking_process_waits_for_the_processor_does_not_count(source):
    compiler, others = GrammarCompiler(source, max_workers=1, check_seconds=0.5), running_children()
    assert compiled(compiler, regex="a")
    [checker] = [child for child in running_children() if child not in others]
    os.kill(checker.pid, signal.SIGSTOP)
    waiting = compiler.compile(StructuredOutputs(regex="b"))
    time.sleep(1.0)
    assert not waiting.done()
    os.kill(checker.pid, signal.SIGCONT)
    assert waiting.result(PATIENCE)
    compiler.close()


def test_a_constraint_that_takes_much_memory_is_refused(source):
    compiler = GrammarCompiler(source, max_workers=1, check_seconds=60.0)
    with pytest.raises(RequestError, match=r"takes (too much memory|\d+ MiB)"):
        compiled(compiler, json=HOSTILE)
    assert compiled(compiler, regex="a")
    compiler.close()


def test_closing_ends_the_checking_processes(source):
    compiler = GrammarCompiler(source, max_workers=1)
    before = len(running_children())
    assert compiled(compiler, regex="a") and len(running_children()) == before + 1
    compiler.close()
    assert len(running_children()) == before


def test_masks_computed_in_the_background_equal_those_of_one_thread(compiler):
    grammar = compiled(compiler, regex="[a-z]+ [0-9]+")
    matchers, words = [grammar.start() for _ in range(9)], mask_words(compiler.source.size)
    pool = MatcherPool(2)
    found, expected = (np.zeros((12, words), dtype=np.int32) for _ in range(2))
    rows = [11, 0, 5, 1, 9, 2, 8, 3, 7]
    for _ in range(6):
        pool.start_fill(matchers, found, rows)
        pool.wait()
        pool.wait()  # returns at once
        for matcher, row in zip(matchers, rows, strict=True):
            pool.fill([matcher], expected, [row])
        assert (found == expected).all() and found[rows].any(axis=1).all()
        allowed = [np.unpackbits(found[row].view(np.uint8), bitorder="little").nonzero()[0] for row in rows]
        pool.accept(matchers, [int(ids[index % len(ids)]) for index, ids in enumerate(allowed)])
        assert not any(matcher.has_error for matcher in matchers)
    pool.close()


@pytest.mark.parametrize("seconds", [1.0, 0.0, 1e-5], ids=["serial", "parallel", "both"])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_matchers_of_a_pool_follow_those_advanced_alone(compiler, vocabulary, count, seconds, monkeypatch):
    grammar = compiled(compiler, regex="[a-f]{4}")
    ours, theirs = ([grammar.start() for _ in range(count)] for _ in range(2))
    pool, words = MatcherPool(2), mask_words(compiler.source.size)
    found, expected = (np.zeros((count, words), dtype=np.int32) for _ in range(2))
    tokens = [vocabulary.greedy_tokenize(char)[0] for char in "abcdefabc"][:count]
    for step in range(4):
        finished = pool.accept(ours, tokens)
        monkeypatch.setattr(matcher_module, "SERIAL_SECONDS", seconds)
        pool.start_fill(ours, found, range(count))
        assert seconds != 0.0 or pool.is_computing == (count > 0)
        for matcher, token in zip(theirs, tokens, strict=True):
            matcher.accept(token)
        monkeypatch.setattr(matcher_module, "SERIAL_SECONDS", 1.0)
        MatcherPool(1).fill(theirs, expected)
        pool.wait()
        assert (found == expected).all() and not pool.is_computing
        assert finished == [step == 3] * count == [matcher.is_finished for matcher in theirs]
    assert not any(matcher.has_error for matcher in ours)
    pool.close()


@given(
    st.lists(st.integers(0, 11), unique=True, min_size=1),
    st.lists(st.integers(0, 95), unique=True, max_size=6),
    st.randoms(use_true_random=False),
)
def test_tokens_forbidden_in_many_rows_are_those_forbidden_in_each(rows, token_ids, random):
    masks = np.array([[random.getrandbits(32) - 2**31 for _ in range(3)] for _ in range(12)], dtype=np.int32)
    expected = masks.copy()
    changed = [row for row in rows if forbid(expected[row], token_ids)]
    assert forbid_rows(masks, rows, token_ids) == changed
    assert (masks == expected).all()


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 1.0])
def test_closing_while_checks_start_ends_their_processes(source, seconds):
    before = len(running_children())
    compiler = GrammarCompiler(source, max_workers=4)
    futures = [compiler.compile(StructuredOutputs(regex=f"a{{{n}}}")) for n in range(1, 9)]
    time.sleep(seconds)
    compiler.close()
    assert len(running_children()) == before
    assert all(future.done() for future in futures)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(" * 5000 + ")" * 5000},
        {"regex": "|".join(map(str, range(10_000)))},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": 'start: start start | "a" |'},
        {"json": {"$ref": "#"}},
        {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(10)]} for i in range(10)]}},
        {"json": {"enum": [str(number) * 3 for number in range(5000)]}},
        {"json": '{"type":"array","items":' * 1000 + "{}" + "}" * 1000},
        {"json": {"type": "string", "maxLength": 10**9, "pattern": "^(a|b)*c(a|b){30}$"}},
    ],
)
def test_a_large_or_deep_constraint_compiles_or_is_refused_quickly(compiler, constraint):
    compiled(compiler, regex="ready")
    began = time.process_time()  # the checking process has a limit
    try:
        matcher = compiled(compiler, **constraint).start()
    except RequestError as refusal:
        assert len(str(refusal)) < 600
    else:
        assert not matcher.error
    assert time.process_time() - began < 10.0


def test_masks_are_filled_for_many_matchers_and_copies_are_independent(compiler, vocabulary, source):
    grammar = compiled(compiler, regex="(ab|cd)e")
    a, b, e = (vocabulary.greedy_tokenize(char)[0] for char in "abe")
    first, second = grammar.start(), grammar.start()
    first.accept(a)
    masks = np.full((3, mask_words(source.size)), -1, dtype=np.int32)
    MatcherPool(2).fill([first, second], masks)
    allowed = [set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))) for mask in masks]
    assert b in allowed[0] and a not in allowed[0]
    assert a in allowed[1] and b not in allowed[1] and e not in allowed[1]
    assert (masks[2] == -1).all()
    forbid(masks[2], [0, 31, 32, 70])
    bits = np.unpackbits(masks[2].view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits == 0)) == {0, 31, 32, 70}


def test_sequences_of_one_grammar_share_locks_only_if_they_must(source, vocabulary):
    grammar = CompiledGrammar([LLMatcher(vocabulary, LLMatcher.grammar_from_regex("[ab]+")) for _ in range(3)])
    first = grammar.start().lock_id
    assert grammar.start().lock_id == first  # the one before has ended
    several = [grammar.start() for _ in range(6)]
    assert sorted(Counter(one.lock_id for one in several).values()) == [2, 2, 2]
    masks = np.zeros((6, mask_words(source.size)), dtype=np.int32)
    MatcherPool(2).fill(several, masks)
    assert masks[0].any() and (masks == masks[0]).all()


def test_a_matcher_knows_when_its_grammar_is_complete(compiler, vocabulary):
    fixed, open_ = compiled(compiler, regex="ab").start(), compiled(compiler, regex="ab*").start()
    a, b = (vocabulary.greedy_tokenize(char)[0] for char in "ab")
    states = []
    for token in (a, b):
        for matcher in (fixed, open_):
            matcher.accept(token)
            states.append((matcher.may_finish, matcher.is_finished))
    assert states == [(False, False), (True, False), (True, True), (True, False)]
    open_.accept(a)
    assert open_.has_error and "doesn't satisfy the grammar" in open_.error and not open_.is_finished


def test_one_clients_slow_constraints_hold_up_another_for_one_of_them_at_most(source):
    compiler = GrammarCompiler(source, max_workers=2, check_seconds=1.0)
    compiler.compile(StructuredOutputs(regex="a")).result(PATIENCE)  # the vocabulary is loaded
    slow = [
        compiler.compile(StructuredOutputs(json={"type": "integer", "multipleOf": 999_983 - 2 * turn}), client="many")
        for turn in range(10)
    ]
    time.sleep(0.2)
    assert compiler.compile(StructuredOutputs(regex="b"), client="other").result(PATIENCE)
    assert sum(future.done() for future in slow) <= 5
    compiler.close()
