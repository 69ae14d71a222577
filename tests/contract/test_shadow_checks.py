"""Shadow checks: faults that no guard notices are found, and the call returns what eager returns."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from unittest import mock

import pytest
import torch
from torch import Tensor

from graph_cache import BATCH, Buckets, BufferSpec, GraphCache, GraphConfig, Site, StaticBuffers
from graph_cache.config import DEFAULT_SHARE
from graph_cache.core.cache import CacheEntry
from graph_cache.core.shadow import Rows
from tests.support.waiting import PATIENCE

ROWS, WIDTH = 4, 32
ALWAYS = GraphConfig(shadow_check_share=1.0)


def graphed(device, function, *, config=None, **options):
    cache = GraphCache(config, device)
    specs = {"x": BufferSpec((BATCH, WIDTH), torch.float32)}
    run = cache.graphed("net", function, specs, buckets=(ROWS,), **options)
    cache.warm()
    return cache, run


def inputs(device, seed=0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def outcomes(cache) -> dict[str, int]:
    return {labels[-1]: count for labels, count in cache.stats.snapshot()["shadow_checks"]}


def row(cache) -> dict:
    [found] = cache.table()
    return found


def damage(monkeypatch, before=lambda: None, after=lambda: None) -> None:
    """Let replays write something else than what was captured."""
    replay = CacheEntry.replay

    def damaged(entry) -> None:
        before()
        replay(entry)
        after()

    monkeypatch.setattr(CacheEntry, "replay", damaged)


def check_found(cache, run, x, expected, caplog, named) -> None:
    """Call twice: the first compares, and the second finds that eager is the same again, and drops the graph."""
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            assert torch.equal(run(x), expected())
    assert outcomes(cache) == {"differs": 1}
    assert cache.stats.snapshot()["shadow_mismatches"] == [(("net", "decode"), 1)]
    assert row(cache)["state"] == "failed" and named in row(cache)["failure"]
    assert cache.stats.fallbacks["net", "decode", "capture_failed"] == 3
    [record] = [record for record in caplog.records if "differed from an eager run" in record.getMessage()]
    assert named in record.getMessage()


def test_a_replay_that_equals_eager_is_checked_once_and_then_replayed(device):
    cache, run = graphed(device, lambda x: x.softmax(1))
    x = inputs(device)
    for _ in range(5):
        assert torch.equal(run(x), x.softmax(1))
    assert outcomes(cache) == {"equal": 1} and cache.stats.replays.total() == 5
    assert (row(cache)["shadow"], row(cache)["shadow_checks"]) == ("equal", 1)
    assert "shadow checks    1        net decode equal: 1" in str(cache.stats)


# ---- injected faults -----------------------------------------------------------------------------------------------


def test_a_wrong_tile_is_found(device, monkeypatch, caplog):
    weight = torch.randn(WIDTH, WIDTH, device=device)
    cache, run = graphed(device, lambda x: x @ weight)
    [result] = [tensor for tensor in cache.sites["net"].static_tensors(ROWS) if tensor is not None][1:]
    damage(monkeypatch, after=lambda: result[:2, 16:].mul_(1.0000002))
    check_found(cache, run, inputs(device), lambda: inputs(device) @ weight, caplog, "result 0")


def test_a_moved_address_is_found(device, caplog):
    held = mock.Mock(weight=torch.ones(WIDTH, device=device))  # objects of the standard library are not searched
    cache, run = graphed(device, lambda x: x * held.weight)
    held.weight = torch.full((WIDTH,), 3.0, device=device)
    check_found(cache, run, inputs(device), lambda: inputs(device) * 3, caplog, "result 0")


def test_a_changed_c_state_is_found(device, caplog):
    threshold, *others = gc.get_threshold()
    cache, run = graphed(device, lambda x: x * gc.get_threshold()[0])
    try:
        gc.set_threshold(threshold + 11, *others)
        check_found(cache, run, inputs(device), lambda: inputs(device) * (threshold + 11), caplog, "result 0")
    finally:
        gc.set_threshold(threshold, *others)


def test_a_page_off_by_one_is_found_and_its_rows_are_restored(device, monkeypatch, caplog):
    pages = torch.zeros(8, 4, WIDTH, device=device)  # [pages, slots, width]
    slots = pages.view(-1, WIDTH)
    specs = {"x": BufferSpec((BATCH, WIDTH), torch.float32), "at": BufferSpec((BATCH,), torch.int64)}
    buffers = StaticBuffers(specs, ROWS, device)

    def step(x: Tensor, at: Tensor) -> Tensor:
        slots.index_copy_(0, at, x)
        return slots.index_select(0, at) * 2

    cache = GraphCache(device=device)
    cache.add_site(
        Site("net", [step], buffers, Buckets((ROWS,)), writes=lambda rows: [Rows("pages", slots, buffers["at"][:rows])])
    )
    cache.warm()
    pages.zero_()
    damage(monkeypatch, before=lambda: buffers["at"].add_(4), after=lambda: buffers["at"].sub_(4))
    at, plan = torch.arange(8, 8 + ROWS, device=device), cache.plan("net", ROWS)
    with caplog.at_level(logging.ERROR):
        for seed in range(4):
            x = inputs(device, seed)
            buffers.load({"x": x, "at": at}, ROWS, ROWS)
            assert torch.equal(cache.run(plan).copy(), x * 2) and torch.equal(slots[at], x)
    assert outcomes(cache) == {"differs": 1} and "pages" in row(cache)["failure"]


def test_a_wrong_seed_is_found(device, monkeypatch, caplog):
    generator, reference = torch.Generator(device).manual_seed(3), torch.Generator(device).manual_seed(3)

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=generator, device=x.device)

    cache, run = graphed(device, noisy, generators=[generator])
    damage(monkeypatch, before=lambda: generator.manual_seed(4))
    x = inputs(device)
    check_found(cache, run, x, lambda: x + torch.rand(x.shape, generator=reference, device=device), caplog, "result 0")
    assert "generators" in row(cache)["failure"]


def test_a_capture_beside_a_registered_generator_is_equal(device):
    generator, reference = torch.Generator(device).manual_seed(3), torch.Generator(device).manual_seed(3)
    cache, run = graphed(
        device, lambda x: x + torch.rand(x.shape, generator=generator, device=x.device),
        generators=[generator], config=ALWAYS,
    )  # fmt: skip
    for _ in range(6):
        x = inputs(device)
        assert torch.equal(run(x), x + torch.rand(x.shape, generator=reference, device=device))
    assert set(outcomes(cache)) == {"equal"}


# ---- what a check leaves -------------------------------------------------------------------------------------------


def test_state_of_a_function_advances_once_per_call(device):
    state = {"count": torch.zeros(WIDTH, device=device)}

    def add(x: Tensor) -> Tensor:
        state["count"].add_(1)
        return x + state["count"]

    cache, run = graphed(device, add, config=ALWAYS, watch=state)
    x = torch.zeros(ROWS, WIDTH, device=device)
    for count in range(1, 9):
        assert run(x).eq(count).all() and state["count"].eq(count).all()
    assert set(outcomes(cache)) == {"equal"} and outcomes(cache)["equal"] >= 1


def test_later_replays_are_sampled_and_a_fault_that_begins_later_is_found(device, caplog):
    held = mock.Mock(weight=torch.ones(WIDTH, device=device))
    cache, run = graphed(device, lambda x: x * held.weight, config=ALWAYS)
    x = inputs(device)
    while outcomes(cache).get("equal", 0) < 3:  # half of the time is spent on checks
        run(x)
    held.weight = torch.full((WIDTH,), 3.0, device=device)
    while row(cache)["state"] == "captured":
        found = run(x)
    assert torch.equal(found, x * 3) and torch.equal(run(x), x * 3)


def test_a_share_of_0_compares_nothing(device):
    assert DEFAULT_SHARE == 0.002 == GraphConfig().shadow_check_share
    cache, run = graphed(device, torch.sin, config=GraphConfig(shadow_check_share=0.0))
    for _ in range(3):
        run(inputs(device))
    assert not outcomes(cache) and row(cache)["shadow"] == "unchecked"


def test_eager_that_differs_from_itself_marks_the_site_and_keeps_its_graph(device, caplog):
    class Draw:  # reached through a mock alone, which is not searched
        noise, clock = 0.0, itertools.count(1)

        def __call__(self):
            return self.noise and float(next(self.clock))

    held = mock.Mock(draw=Draw())
    cache, run = graphed(device, lambda x: x + held.draw())
    held.draw.noise = 1.0
    x = inputs(device)
    for _ in range(5):
        run(x)
    assert outcomes(cache) == {"not_deterministic": 1} and not cache.stats.shadow_mismatches
    assert (row(cache)["state"], row(cache)["shadow"]) == ("captured", "not_deterministic")
    assert torch.equal(run(x), x)  # the graph, which is not compared any more
    assert [record for record in caplog.records if "not deterministic" in record.getMessage()]


def test_eager_that_raises_is_not_hidden_by_a_replay(device):
    held = mock.Mock(scale=2.0)
    cache, run = graphed(device, lambda x: x * held.scale)
    held.scale = None
    with pytest.raises(TypeError):
        run(inputs(device))
    assert "eager raised TypeError" in row(cache)["failure"]
    with pytest.raises(TypeError):
        run(inputs(device))


def test_a_key_whose_memory_is_too_large_to_copy_stays_unchecked(device, monkeypatch):
    cache, run = graphed(device, torch.cos)
    monkeypatch.setattr("graph_cache.core.shadow.MAX_COPIED_BYTES", 100)
    x = inputs(device)
    for _ in range(3):
        assert torch.equal(run(x), x.cos())
    assert set(outcomes(cache)) == {"unchecked"} and row(cache)["shadow"] == "unchecked"


def test_a_recaptured_key_is_checked_again(device):
    cache, run = graphed(device, torch.cos)
    x = inputs(device)
    run(x)
    cache.invalidate("weights moved")
    for _ in range(3):
        run(x)
    assert outcomes(cache) == {"equal": 2}


def test_a_difference_on_another_rank_drops_the_graph_on_this_one(device):
    cache, run = graphed(device, torch.cos)
    others = iter([1, 1, 0])  # what the other rank finds: first replay, second replay, eager beside itself

    def agree(flags: Tensor) -> Tensor:
        return flags + next(others)

    cache.shadows.agree = agree
    x = inputs(device)
    for _ in range(3):
        assert torch.equal(run(x), x.cos())
    assert outcomes(cache) == {"differs": 1} and row(cache)["state"] == "failed"


def test_sampled_checks_keep_to_their_share_of_the_time(device):
    share = 0.05
    cache, run = graphed(device, torch.cos, config=GraphConfig(shadow_check_share=share))
    x, checks = inputs(device), cache.shadows
    spent, compare = [], checks._compare  # noqa: SLF001

    def timed(*args) -> None:
        begin = time.perf_counter()
        compare(*args)
        spent.append(time.perf_counter() - begin)

    checks._compare = timed  # noqa: SLF001
    run(x)
    begin = time.perf_counter()
    while len(spent) < 4 and time.perf_counter() - begin < PATIENCE:
        run(x)
    assert len(spent) >= 2  # they are sampled
    assert sum(spent[1:-1]) <= 2 * share * (time.perf_counter() - begin)
