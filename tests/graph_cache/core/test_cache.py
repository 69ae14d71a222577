"""GraphCache beyond the contract suite: misses, kept plans, the self-check, the loop fallback, and counters."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from torch import nn

from graph_cache import (
    BATCH,
    AddressBook,
    Buckets,
    BufferSpec,
    GraphCache,
    GraphConfig,
    GraphConfigError,
    Manifest,
    SignatureMismatch,
    Site,
    StaticBuffers,
)
from graph_cache.backends import cpu as cpu_backend
from graph_cache.backends.cpu import CpuBackend
from graph_cache.core.pool import GraphPool
from graph_cache.errors import CaptureError

WIDTH = 4
INPUT = {"x": BufferSpec((BATCH, WIDTH), torch.float32)}


def graphed(fn, buckets=(2, 4), inputs=INPUT, name="fn", **options):
    cache = GraphCache(**{key: options.pop(key) for key in ("config", "capture_on_miss", "manifest") if key in options})
    return cache, cache.graphed(name, fn, inputs, independent_rows=True, buckets=buckets, **options)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: GraphCache(devise="cpu"), "no argument 'devise'; did you mean 'device'"),
        (lambda: GraphCache().graphed("fn", abs, INPUT, bucket=(1,)), "no argument 'bucket'; did you mean 'buckets'"),
    ],
)
def test_a_misspelt_argument_names_the_nearest(call, named):
    with pytest.raises(TypeError, match=named):
        call()


def test_names_of_sites_are_unique():
    cache, _ = graphed(lambda x: x)
    with pytest.raises(GraphConfigError, match="registered already"):
        cache.graphed("fn", lambda x: x, INPUT, independent_rows=True, buckets=(1,))


class Doubling:
    """A site of two buckets that counts its runs by rows, in a cache as on a GPU: a capture has no effects of a run."""

    def __init__(self, monkeypatch, fails_at=0):
        self.runs, self.fails_at = [], fails_at
        specs = {name: BufferSpec((BATCH, WIDTH), torch.float32) for name in ("x", "y")}
        self.cache = GraphCache()
        monkeypatch.setattr(self.cache.pool.backend, "capture_runs", False)
        buffers = StaticBuffers(specs, 4, torch.device("cpu"))
        self.site = self.cache.add_site(Site("double", [self.double], buffers, Buckets((2, 4))))
        self.keys = self.cache.pending()
        self.site.ran.update(self.keys)

    def double(self, x, y):
        if len(x) == self.fails_at:
            raise ZeroDivisionError
        self.runs.append((len(x), self.cache.warming))
        torch.mul(x, 2, out=y)

    def warmed_up(self):
        """Return whether the captures of 4 and 2 rows had warm-up runs, in this `warm`."""
        self.runs.clear()
        self.cache.warm()
        return [(rows, True) in self.runs for rows in (4, 2)]


def test_a_key_that_has_run_is_captured_without_a_warm_up_run(monkeypatch):
    site = Doubling(monkeypatch)
    assert site.warmed_up() == [True, False]  # the first of a site loads what captures must not
    site.cache.evict(site.keys[1])
    assert site.warmed_up() == [False, True]  # it was captured since it ran


def test_a_capture_has_a_warm_up_run_if_an_earlier_one_failed(monkeypatch):
    assert Doubling(monkeypatch, fails_at=4).warmed_up() == [False, True]


def test_a_capture_has_a_warm_up_run_after_an_invalidation(monkeypatch):
    site = Doubling(monkeypatch)
    site.cache.warm_next(site.keys[0])
    site.cache.invalidate("test")
    assert site.warmed_up() == [True, True]


def test_captures_of_several_ranks_have_a_warm_up_run(monkeypatch):
    site = Doubling(monkeypatch)
    site.cache.must_capture = True
    assert site.warmed_up() == [True, True]


def test_a_kept_plan_is_reevaluated_after_an_eviction():
    cache, run = graphed(lambda x: x * 2, capture_on_miss=False)
    cache.warm()
    kept = cache.plan("fn", 2)
    assert kept.is_graph
    cache.run(kept)
    cache.evict(kept.key)
    cache.run(kept)
    assert cache.stats.fallbacks == {("fn", "decode", "evicted"): 1}
    cache.warm()
    cache.run(kept)
    assert cache.stats.replays == {("fn", "block", "decode", 2): 2}
    assert cache.stats.captures["fn", "block", "evicted"] == 1


def test_plans_are_remembered_until_graphs_come_or_go():
    cache, _ = graphed(lambda x: x)
    before = cache.plan("fn", 1)
    assert cache.plan("fn", 1) is before and before.reason == "not_captured"
    cache.warm()
    assert cache.plan("fn", 1).is_graph
    assert cache.invalidate("test") == 2
    assert cache.plan("fn", 1).reason == "stale_address"
    assert cache.stats.invalidations == {"test": 2}  # graphs, not calls
    assert cache.invalidate("test") == 0 and cache.stats.invalidations == {"test": 2}


def test_a_run_says_what_ran():
    cache, _ = graphed(lambda x: x * 2, buckets=(2, 4), capture_on_miss=False)
    plan = cache.plan("fn", 3)
    eager = cache.run(plan)
    assert (eager.key, eager.bucket, eager.is_graph, eager.reason) == (plan.key, 4, False, "not_captured")
    cache.capture_on_miss = True
    replayed = cache.run(plan)  # the plan says eager, but the miss captures
    assert not plan.is_graph and replayed.is_graph and replayed.reason is None and replayed.value.shape == (3, WIDTH)
    cache.capture_on_miss = False
    cache.invalidate("test")
    assert cache.run(plan).reason == "stale_address"


def test_a_run_says_that_its_capture_failed():
    cache, _ = graphed(lambda x: x * x.sum().item(), buckets=(2,))
    ran = cache.run(cache.plan("fn", 2))
    assert (ran.is_graph, ran.reason) == (False, "capture_failed")


def test_a_dropped_graph_that_fails_to_capture_again_is_pending_after_the_next_drop():
    refuse = []
    cache, _ = graphed(lambda x: x * (x.sum().item() if refuse else 2), buckets=(2,))
    cache.warm()
    cache.evict(cache.plan("fn", 2).key)
    refuse.append(True)
    assert [cache.run(cache.plan("fn", 2)).reason for _ in range(2)] == ["capture_failed"] * 2
    refuse.clear()
    assert cache.evict(cache.plan("fn", 2).key)
    assert cache.plan("fn", 2).reason == "not_captured" and cache.run(cache.plan("fn", 2)).is_graph
    assert cache.table()[0]["failure"] is None and cache.table()[0]["replays"] == 1


def test_a_key_with_a_graph_is_not_captured_again():
    cache, _ = graphed(lambda x: x * 2, buckets=(2,))
    cache.warm()
    assert cache.warm_next(cache.plan("fn", 2).key)
    assert cache.stats.captures.total() == 1


def test_invalidating_one_site_leaves_the_others():
    cache, _ = graphed(lambda x: x + 1)
    cache.graphed("other", lambda x: x * 2, INPUT, independent_rows=True, buckets=(2,))
    cache.warm()
    assert cache.invalidate("reload", "fn") == 2
    assert cache.plan("other", 2).is_graph and not cache.plan("fn", 2).is_graph


def test_above_the_largest_bucket_the_callable_gets_its_keywords_and_the_memory_it_writes():
    def fn(x, hidden, factor):
        hidden.copy_(x * factor)
        return hidden + 1

    specs = INPUT | {"hidden": BufferSpec((BATCH, WIDTH), torch.float32, pad=None)}
    cache = GraphCache()
    cache.add_site(Site("fn", [fn], StaticBuffers(specs, 2, "cpu"), Buckets((2,)), variants=[{"factor": 3}]))
    plan = cache.plan("fn", 5, factor=3)
    assert (plan.bucket, plan.reason) == (None, "above_largest_bucket")
    x = torch.randn(5, WIDTH)
    assert torch.equal(cache.run_unpadded(plan, {"x": x}), x * 3 + 1)
    with pytest.raises(GraphConfigError, match="run_unpadded"):
        cache.run(plan)


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(9, WIDTH, dtype=torch.float64)},
        {"x": torch.zeros(9, WIDTH + 1)},
        {"x": [1.0]},
        {},
        {"x": torch.tensor(1.0)},
        {"x": torch.zeros(2, WIDTH), "y": torch.zeros(2)},
    ],
)
def test_inputs_that_differ_are_refused_at_every_size(wrong):
    cache, run = graphed(lambda x: x)
    with pytest.raises(SignatureMismatch):
        run(**wrong)
    assert not cache.stats.fallbacks and not cache.stats.batch_rows


def test_an_empty_batch_runs_eager():
    cache, run = graphed(lambda x: (x + 1, x[:1]))
    assert [tuple(result.shape) for result in run(x=torch.zeros(0, WIDTH))] == [(0, WIDTH)] * 2
    assert cache.stats.fallbacks == {("fn", "decode", "unchecked_rows"): 1}


def test_results_are_copies_owned_by_the_caller():
    _, run = graphed(lambda x: x * 2)
    first = run(x=torch.ones(2, WIDTH))
    run(x=torch.zeros(2, WIDTH))
    assert first.eq(2).all()
    first.requires_grad_(True).sum().backward()  # an ordinary tensor, usable outside inference mode


def test_parameters_that_need_gradients_are_replayed_fast():
    layer = nn.Linear(WIDTH, WIDTH)
    cache, run = graphed(lambda x: layer(x), watch=layer)
    x = torch.randn(2, WIDTH)
    assert torch.equal(run(x=x), layer(x))
    assert {row["engine"] for row in cache.table()} == {"torchscript"}


def test_a_graph_stays_at_the_addresses_it_was_captured_with():
    weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    held = mock.Mock(weight=weight)  # objects of the standard library are not searched, so the move is not noticed
    cache, run = graphed(lambda x: x * held.weight)
    cache.warm()
    run(x=torch.ones(2, WIDTH))  # the first replay is compared with eager
    weight.data = torch.full((WIDTH,), 5.0)
    assert run(x=torch.ones(2, WIDTH)).eq(1).all()  # like a CUDA graph, it reads the old memory


def test_calls_unsupported_by_torchscript_fall_back_to_the_loop_with_a_warning(caplog):
    cache, run = graphed(lambda x: ((x > 0) * True).float() + x)  # the IR has no product with a bool
    with caplog.at_level(logging.WARNING, logger="graph_cache"):
        cache.warm()
    x = torch.randn(2, WIDTH)
    assert torch.equal(run(x=x), (x > 0).float() + x)
    engines = {row["engine"] for row in cache.table()}
    assert engines == {"loop"} and "replaying by a loop instead" in caplog.text


@pytest.mark.parametrize("fault", [TypeError("no such binding"), RuntimeError("no such argument")])
def test_any_failure_to_build_the_torchscript_program_falls_back_to_the_loop(monkeypatch, caplog, fault):
    def broken(calls):
        raise fault

    monkeypatch.setattr(cpu_backend, "torchscript_program", broken)
    cache, run = graphed(lambda x: x * 2)
    with caplog.at_level(logging.WARNING, logger="graph_cache"):
        cache.warm()
    assert torch.equal(run(x=torch.ones(2, WIDTH)), torch.full((2, WIDTH), 2.0))
    assert {row["engine"] for row in cache.table()} == {"loop"}
    assert str(fault) in caplog.text and "replaying by a loop instead" in caplog.text


def test_a_torchscript_replay_wrong_only_for_nonzero_inputs_is_detected_at_capture(monkeypatch, caplog):
    """Padding rows are zeros: a program that is right only for zeros must fail the check."""
    right = cpu_backend.torchscript_program

    def wrong(calls):
        return right([call for call in calls if "mul" not in call.func._schema.name])

    monkeypatch.setattr(cpu_backend, "torchscript_program", wrong)
    cache, run = graphed(lambda x: (x * 2).relu())
    with caplog.at_level(logging.WARNING, logger="graph_cache"):
        cache.warm()
    assert "differed from eager" in caplog.text
    assert {row["engine"] for row in cache.table()} == {"loop"}
    assert run(x=torch.ones(2, WIDTH)).eq(2).all()


def test_the_call_runs_eager_if_both_replay_programs_are_wrong(monkeypatch):
    monkeypatch.setattr(cpu_backend, "torchscript_program", lambda calls: lambda: None)
    monkeypatch.setattr(cpu_backend, "loop_program", lambda calls: lambda: None)
    cache, run = graphed(lambda x: x * 2)
    assert run(x=torch.ones(2, WIDTH)).eq(2).all()
    assert cache.stats.fallbacks == {("fn", "decode", "capture_failed"): 1}
    assert "outputs that differ from eager" in cache.table()[0]["failure"]


def test_a_callable_that_depends_on_earlier_runs_is_not_captured():
    state = mock.Mock(last=torch.zeros(WIDTH))  # not searched

    def fn(x):
        y = x + state.last
        state.last = y[0] + 1
        return y

    cache, run = graphed(fn)
    run(x=torch.ones(2, WIDTH))
    assert "two eager runs from the same inputs differ" in cache.table()[0]["failure"]


def test_a_callable_that_rejects_noise_is_checked_on_padding_only():
    def fn(x):
        return torch.linalg.cholesky(x.t() @ x * 0 + torch.eye(WIDTH) - x[0, 0] * 1e9 * torch.eye(WIDTH))

    cache, run = graphed(fn, buckets=(2,))
    cache.warm()
    assert [row["state"] for row in cache.table()] == ["captured"]
    assert torch.equal(run(x=torch.zeros(2, WIDTH)), torch.eye(WIDTH))


def test_graphs_off_in_the_configuration_capture_nothing_even_on_a_miss():
    config = GraphConfig(inference_scope="none")
    cache, run = graphed(lambda x: x * 2, config=config)
    run(x=torch.ones(2, WIDTH))
    assert not cache.warm_next() and cache.warm_ratio() == 1.0
    assert cache.stats.fallbacks == {("fn", "decode", "graphs_off"): 1} and not cache.table()


def test_warm_ratio_and_table_follow_the_captures():
    cache, _ = graphed(lambda x: x * 2, buckets=(1, 2, 4, 8))
    seen = [cache.warm_ratio()]
    assert {row["state"] for row in cache.table()} == {"not_captured"}
    while cache.warm_next():
        seen.append(cache.warm_ratio())
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [row["bucket"] for row in cache.table()] == [1, 2, 4, 8]
    assert all(row["capture_seconds"] > 0 for row in cache.table())
    assert sum(cache.stats.capture_seconds_counts) == 4


def test_progress_is_reported_after_every_capture_largest_first():
    cache, _ = graphed(lambda x: x * 2, buckets=(1, 2, 4))
    reported = []
    cache.warm(lambda done, total, key: reported.append((done, total, key.bucket)))
    assert reported == [(1, 3, 4), (2, 3, 2), (3, 3, 1)]


def test_a_failure_is_tried_once_and_again_only_after_an_invalidation():
    calls = []

    def fn(x):
        calls.append(1)
        return x * x.sum().item()

    cache, run = graphed(fn, buckets=(2,))
    run(x=torch.ones(2, WIDTH))
    first = len(calls)
    run(x=torch.ones(2, WIDTH))
    assert len(calls) == first + 1  # only the eager run
    assert cache.stats.failed_captures == {("fn", "block"): 1}
    cache.invalidate("reload")
    assert cache.plan("fn", 2).reason == "not_captured"
    assert not cache.stats.invalidations["reload"]  # there was no graph


def test_padding_and_replays_are_counted_per_graph():
    cache, run = graphed(lambda x: x * 2)
    for rows in (3, 1, 4):
        run(x=torch.ones(rows, WIDTH))
    rows = {row["bucket"]: (row["replays"], row["padded_rows"]) for row in cache.table()}
    assert rows == {2: (1, 1), 4: (2, 1)}
    assert cache.stats.real_tokens == {"decode": 8} and cache.stats.padded_tokens == {"decode": 2}


def test_used_keys_beyond_the_warm_ones_are_captured_ahead_by_a_restart(tmp_path):
    def build(manifest):
        cache = GraphCache(manifest=manifest)
        cache.add_site(
            Site(
                "fn",
                [lambda x, n: x * n],
                StaticBuffers(INPUT, 2, "cpu"),
                Buckets((1, 2)),
                variants=[{"n": 1}, {"n": 2}],
                warm_variants=[{"n": 1}],
            )
        )
        return cache

    manifest = Manifest(tmp_path / "used.json", "model")
    first = build(manifest)
    assert [(key.bucket, dict(key.variant)["n"]) for key in first.pending()] == [(2, 1), (1, 1)]
    first.run(first.plan("fn", 1, n=2))
    again = build(manifest)
    assert (1, 2) in [(key.bucket, dict(key.variant)["n"]) for key in again.pending()]


def test_two_caches_share_one_pool_and_its_memory():
    pool = GraphPool(CpuBackend())

    def wide(x):
        return (x[:, :, None] * torch.ones(512)).cumsum(2).sum(2)

    caches = [GraphCache(pool=pool), GraphCache(pool=pool)]
    runs = [cache.graphed("fn", wide, INPUT, independent_rows=True, buckets=(4,)) for cache in caches]
    x = torch.randn(4, WIDTH)
    assert torch.equal(runs[0](x=x), runs[1](x=x))
    assert caches[0].pool_bytes == caches[1].pool_bytes == pool.nbytes() > 0
    caches[0].clear()
    assert pool.nbytes() == caches[1].pool_bytes
    assert torch.equal(runs[1](x=x), runs[0](x=x))


def test_eager_steps_without_a_site_are_counted_in_the_same_place():
    cache = GraphCache()
    cache.count_eager("prefill", "prefill", 17, "eager_by_design")
    assert cache.stats.fallbacks == {("prefill", "prefill", "eager_by_design"): 1}
    assert cache.stats.real_tokens == {"prefill": 17}


def test_two_caches_capture_the_same_keys_when_one_dictates_the_order(tmp_path):
    """The order of pending keys depends on the traffic seen when it is computed."""
    one, run = graphed(
        lambda x: x * 2, buckets=(1, 2, 4), capture_on_miss=False, manifest=Manifest.load(tmp_path / "one", "f")
    )
    other, same = graphed(
        lambda x: x * 2, buckets=(1, 2, 4), capture_on_miss=False, manifest=Manifest.load(tmp_path / "other", "f")
    )
    one.pending()
    for _ in range(3):
        run(x=torch.ones(1, WIDTH)), same(x=torch.ones(1, WIDTH))
    assert [key.bucket for key in one.pending()] != [key.bucket for key in other.pending()]
    while one.pending():
        key = one.pending()[0]
        one.warm_next(key), other.warm_next(key)
        assert one.stats.captures == other.stats.captures
        assert {row["bucket"] for row in one.table() if row["state"] == "captured"} == {
            row["bucket"] for row in other.table() if row["state"] == "captured"
        }
    fresh, _ = graphed(lambda x: x * 2, buckets=(1, 2, 4), capture_on_miss=False)
    fresh.warm(wanted=[key for key in fresh.pending() if key.bucket != 2])
    assert {row["bucket"] for row in fresh.table() if row["state"] == "captured"} == {1, 4}


def test_a_failed_capture_raises_when_must_capture_is_set():
    cache, _ = graphed(lambda x: x + x[x > 1e9].sum())
    cache.must_capture = True
    with pytest.raises(CaptureError, match="depends on data"):
        cache.warm()
    assert cache.stats.failed_captures.total() == 0 and not cache.pool.capturing


def test_sites_that_share_an_address_book_both_lose_their_graphs_when_a_tensor_moves():
    weight = {"w": torch.ones(4)}
    book = AddressBook()
    book.watch(weight)
    cache = GraphCache()
    for name in ("one", "two"):
        buffers = StaticBuffers({"x": BufferSpec(("batch", 4), torch.float32)}, 2, "cpu")
        cache.add_site(Site(name, [lambda x: x * weight["w"]], buffers, Buckets((2,)), addresses=book))
    cache.warm()
    assert not cache.check_addresses() and cache.plan("one", 2).is_graph and cache.plan("two", 2).is_graph
    weight["w"] = torch.ones(4)
    assert [moved.name for moved in cache.check_addresses()] == ["w"]
    assert not cache.plan("one", 2).is_graph and not cache.plan("two", 2).is_graph
    assert not cache.check_addresses()


def test_rows_are_checked_once_also_if_the_callable_rejects_the_checks_inputs():
    calls = []

    def double(x):
        calls.append(len(x))
        if bool((x != 1).any()):
            raise ValueError("only ones")
        return x * 2

    cache = GraphCache(GraphConfig(inference_scope="none"))
    doubled = cache.graphed(
        "double", double, {"x": BufferSpec(("batch", 3), torch.float32)}, independent_rows=True, buckets=(2, 4)
    )
    doubled(x=torch.ones(4, 3))
    checks = len(calls)
    for _ in range(5):
        assert doubled(x=torch.ones(4, 3)).eq(2).all()
    assert len(calls) == checks + 5


def test_inputs_may_be_given_by_position():
    inputs = {"x": BufferSpec((BATCH, 3), torch.float32), "y": BufferSpec((BATCH,), torch.float32)}
    _, run = graphed(lambda x, y: x * 2 + y[:, None], inputs=inputs)
    x, y = torch.randn(3, 3), torch.randn(3)
    for _ in range(2):
        assert torch.equal(run(x, y), run(x=x, y=y)) and torch.equal(run(x, y=y), x * 2 + y[:, None])
    with pytest.raises(SignatureMismatch, match="x by position and by name; its inputs are x, y"):
        run(x, x=x, y=y)
    with pytest.raises(SignatureMismatch, match="3 inputs by position"):
        run(x, y, y)


def test_the_table_lists_variants_by_value():
    cache = GraphCache(capture_on_miss=False)
    widths = (1024, 256, 512)
    buffers = StaticBuffers(INPUT, 1, "cpu")
    variants = [{"context": width} for width in widths]
    cache.add_site(Site("fn", [lambda x, context: x * context], buffers, Buckets((1,)), variants=variants))
    assert [row["statics"]["context"] for row in cache.table()] == sorted(widths)


def test_a_device_in_place_of_the_configuration_is_refused():
    with pytest.raises(GraphConfigError, match="give a GraphConfig, and the device as device='cuda'"):
        GraphCache("cuda")


def test_a_call_checks_what_its_own_site_watches_and_leaves_the_rest_to_the_other_sites():
    cache, weights, runs = GraphCache(), {}, {}
    for name in ("one", "two"):
        weights[name] = {"w": torch.full((4,), 2.0)}
        spec = {"x": BufferSpec(("batch", 4), torch.float32)}
        runs[name] = cache.graphed(
            name,
            lambda x, name=name: x * weights[name]["w"],
            spec,
            independent_rows=True,
            buckets=(2,),
            watch=weights[name],
        )
    cache.warm()
    weights["two"]["w"] = torch.full((4,), 3.0)
    assert torch.equal(runs["one"](torch.ones(2, 4)), torch.full((2, 4), 2.0))
    assert cache.stats.invalidations.total() == 0 and cache.plan("one", 2).is_graph
    assert torch.equal(runs["two"](torch.ones(2, 4)), torch.full((2, 4), 3.0))
    assert cache.stats.invalidations.total() == 1
