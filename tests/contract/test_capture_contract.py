"""Contract of every backend: replay equals eager, failures leave no trace, moved storage is never replayed."""

from __future__ import annotations

import gc
import sys
import threading
from unittest import mock

import pytest
import torch

from graph_cache import (
    AddressBook,
    Buckets,
    BufferSpec,
    CaptureError,
    GraphCache,
    GraphClosed,
    GraphConfig,
    GraphRunner,
    HostRing,
    RunnerState,
    SignatureMismatch,
    Site,
    StaticBuffers,
)
from graph_cache.errors import CaptureRefused, GraphError
from tests.contract.models import WIDTH, net

INPUT = {"x": BufferSpec(("batch", WIDTH), torch.float32)}


def padded(model, x, bucket):
    """Return the eager result on the same padded batch, which a replay must equal bit for bit."""
    whole = torch.zeros(bucket, *x.shape[1:], device=x.device)
    whole[: len(x)] = x
    with torch.inference_mode():
        return model(whole)[: len(x)]


def graphed_net(pool, device, buckets=(1, 2, 4, 8), **options):
    model = net(device)
    cache = GraphCache(pool=pool, **options)
    return (
        model,
        cache,
        cache.graphed("net", lambda x: model(x), INPUT, independent_rows=True, buckets=buckets, watch=model),
    )


def test_replay_equals_eager_bit_for_bit_with_buckets_interleaved(pool, device):
    model, cache, run = graphed_net(pool, device)
    cache.warm()
    for rows in (8, 1, 3, 2, 7, 1, 5, 4):
        x = torch.randn(rows, WIDTH, device=device)
        assert torch.equal(run(x=x), padded(model, x, cache.plan("net", rows).bucket))
    assert sum(cache.stats.replays.values()) == 8
    assert not cache.stats.fallbacks


def test_replay_runs_none_of_the_models_python(pool, device):
    model, cache, run = graphed_net(pool, device)
    cache.warm()
    x = torch.randn(2, WIDTH, device=device)
    run(x=x)
    codes = []
    sys.setprofile(lambda frame, event, _: codes.append(frame.f_code))
    try:
        run(x=x)
    finally:
        sys.setprofile(None)
    assert codes and type(model).forward.__code__ not in codes


def test_results_are_overwritten_by_the_next_run_unless_copied(pool, device):
    model, cache, _ = graphed_net(pool, device)
    cache.warm()
    plan = cache.plan("net", 2)
    buffers = cache.sites["net"].buffers
    buffers.load({"x": torch.ones(2, WIDTH, device=device)}, 2, 2)
    borrowed = cache.run(plan)
    kept = borrowed.copy()
    buffers.load({"x": torch.full((2, WIDTH), 2.0, device=device)}, 2, 2)
    cache.run(plan)
    assert not torch.equal(borrowed.value, kept)
    assert torch.equal(kept, padded(model, torch.ones(2, WIDTH, device=device), 2))


def test_memory_follows_the_largest_graph_in_every_warm_up_order(device):
    from graph_cache.backends import backend_for
    from graph_cache.core.pool import GraphPool

    def wide(x):
        return (x.unsqueeze(1) * torch.ones(2048, 1, device=x.device)).cumsum(1).sum(1)

    sizes = tuple(range(1, 65, 7)) + (128,)
    for capture in ("full", "background", "lazy"):
        pool = GraphPool(backend_for(device))
        cache = GraphCache(pool=pool, capture_on_miss=capture == "lazy")
        run = cache.graphed("wide", wide, INPUT, independent_rows=True, buckets=sizes)
        if capture == "full":
            cache.warm()
        while capture == "background" and cache.warm_next():
            pass
        for size in sizes if capture == "lazy" else ():
            run(x=torch.randn(size, WIDTH, device=device))
        alone = GraphPool(backend_for(device))
        largest = GraphCache(pool=alone)
        largest.graphed("wide", wide, INPUT, independent_rows=True, buckets=(128,))
        largest.warm()
        assert cache.warm_ratio() == 1.0
        assert largest.pool_bytes > 0
        assert cache.pool_bytes <= 1.3 * largest.pool_bytes, capture


def test_largest_bucket_is_captured_first_also_on_a_miss(pool, device):
    ran = mock.Mock()  # called with the rows of each run of the callable, and whether a capture makes it
    cache = GraphCache(pool=pool)
    run = cache.graphed(
        "double",
        lambda x: (ran(len(x), pool.warming or pool.capturing), x * 2)[1],
        INPUT,
        independent_rows=True,
        buckets=(1, 2, 4, 8),
    )
    run(x=torch.randn(1, WIDTH, device=device))
    assert list(dict.fromkeys(call.args[0] for call in ran.mock_calls if call.args[1])) == [8, 1]
    assert {row["bucket"] for row in cache.table() if row["state"] == "captured"} == {8, 1}


def test_manifest_orders_captures_by_use_after_the_largest(pool, device, tmp_path):
    from graph_cache import Manifest

    manifest = Manifest(tmp_path / "used.json", "model")
    manifest.observe("net", "decode", 2, (), 50)
    manifest.observe("net", "decode", 1, (), 9)
    _, cache, _ = graphed_net(pool, device, manifest=manifest)
    assert [key.bucket for key in cache.pending()] == [8, 2, 1, 4]


def test_above_the_largest_bucket_runs_eager_with_a_reason(pool, device):
    model, cache, run = graphed_net(pool, device)
    x = torch.randn(9, WIDTH, device=device)
    assert torch.equal(run(x=x), padded(model, x, 9))
    assert cache.stats.fallbacks == {("net", "decode", "above_largest_bucket"): 1}


def test_background_serves_eager_without_padding_until_captured(pool, device):
    model, cache, run = graphed_net(pool, device, capture_on_miss=False)
    x = torch.randn(3, WIDTH, device=device)
    with torch.no_grad():
        assert torch.equal(run(x=x), model(x))
    assert cache.stats.fallbacks == {("net", "decode", "not_captured"): 1}
    while cache.warm_next():
        pass
    assert torch.equal(run(x=x), padded(model, x, 4))
    assert cache.stats.replays == {("net", "block", "decode", 4): 1}


def test_graphs_off_runs_eager_with_a_reason(pool, device):
    model = net(device)
    config = GraphConfig(inference_scope="none")
    cache = GraphCache(config, pool=pool)
    run = cache.graphed("net", lambda x: model(x), INPUT, independent_rows=True, buckets=(4,))
    cache.warm()
    run(x=torch.randn(2, WIDTH, device=device))
    assert cache.stats.fallbacks == {("net", "decode", "graphs_off"): 1}
    assert not cache.table()


def test_a_python_value_is_part_of_the_key(pool, device):
    site = Site(
        "scale",
        [lambda x, factor: x * factor],
        StaticBuffers(INPUT, 4, device),
        Buckets((4,)),
        variants=[{"factor": 2}, {"factor": 3}],
    )
    cache = GraphCache(pool=pool)
    cache.add_site(site)
    x = torch.randn(4, WIDTH, device=device)
    for factor in (2, 3, 2):
        site.buffers.load({"x": x}, 4, 4)
        assert torch.equal(cache.run(cache.plan("scale", 4, factor=factor)).copy(), x * factor)
    site.buffers.load({"x": x}, 4, 4)
    assert torch.equal(cache.run(cache.plan("scale", 4, factor=5)).copy(), x * 5)
    assert cache.stats.fallbacks == {("scale", "decode", "unknown_variant"): 1}


def test_signature_mismatch_lists_every_difference_at_once(pool, device):
    _, cache, run = graphed_net(pool, device)
    with pytest.raises(SignatureMismatch) as caught:
        run(x=torch.randn(2, WIDTH + 1, device=device, dtype=torch.float64), y=torch.ones(2, device=device))
    assert len(caught.value.differences) == 3
    assert not cache.stats.replays


@pytest.mark.parametrize("moves", [1, 3])
def test_moved_tensors_are_all_named_and_never_replayed(pool, device, moves):
    model, cache, run = graphed_net(pool, device)
    cache.warm()
    x = torch.randn(4, WIDTH, device=device)
    run(x=x)
    held = [layer.weight.data for layer in model.ups[:moves]]  # keeps the old storage from being reused
    for layer in model.ups[:moves]:
        layer.weight.data = layer.weight.data + 1.0
    assert held
    before = sum(cache.stats.replays.values())
    moved = cache.check_addresses()
    assert sorted(one.name for one in moved) == sorted(f"ups.{index}.weight" for index in range(moves))
    assert torch.equal(run(x=x), padded(model, x, 4))
    assert sum(cache.stats.replays.values()) == before + 1
    assert cache.stats.captures["net", "block", "stale_address"] == 2  # the largest first, then the requested one
    assert cache.stats.invalidations == {"stale_address": 4}  # every bucket's graph


def test_a_replaced_parameter_object_is_noticed(pool, device):
    model, cache, run = graphed_net(pool, device)
    cache.warm()
    old = model.downs[0].weight
    model.downs[0].weight = torch.nn.Parameter(torch.randn_like(old), requires_grad=False)
    assert [one.name for one in cache.check_addresses()] == ["downs.0.weight"]


def test_in_place_updates_keep_every_graph(pool, device):
    model, cache, run = graphed_net(pool, device)
    cache.warm()
    with torch.no_grad():
        model.ups[0].weight.add_(1.0)
    x = torch.randn(4, WIDTH, device=device)
    assert torch.equal(run(x=x), padded(model, x, 4))
    assert sum(cache.stats.captures.values()) == 4
    assert not cache.stats.invalidations


@pytest.mark.parametrize("broken", ["item", "nonzero", "exception", "mask"])
def test_a_failed_capture_leaves_the_process_healthy_and_eager(pool, device, broken):
    model = net(device)
    seen = mock.Mock()

    def fn(x):
        y = model(x)
        seen((pool.warming, pool.capturing))
        if broken == "item":
            return y * float(y.sum().item() > 1e9 or 1.0)
        if broken == "nonzero":
            return y + (y > 1e9).nonzero().sum()
        if broken == "mask":
            return y + y[y > 1e9].sum()
        if pool.capturing:
            raise ValueError("not inside a capture")
        return y

    cache = GraphCache(pool=pool)
    run = cache.graphed("broken", fn, INPUT, independent_rows=True, buckets=(4,))
    x = torch.randn(2, WIDTH, device=device)
    with torch.no_grad():
        assert torch.equal(run(x=x), model(x))  # without padding
    assert mock.call((False, True)) in seen.mock_calls or broken == "exception"
    assert mock.call((True, False)) in seen.mock_calls
    assert not cache.capturing and not cache.warming
    assert gc.isenabled()
    assert cache.stats.fallbacks == {("broken", "decode", "capture_failed"): 1}
    assert cache.table()[0]["state"] == "failed"
    assert not pool.backend.is_capturing()
    other = cache.graphed("healthy", lambda x: model(x), INPUT, independent_rows=True, buckets=(4,))
    assert torch.equal(other(x=x), padded(model, x, 4))
    assert cache.stats.replays == {("healthy", "block", "decode", 4): 1}


def test_a_failed_capture_leaves_live_graphs_and_their_pool_alone(pool, device):
    model, cache, run = graphed_net(pool, device)
    cache.warm()
    before = cache.pool_bytes
    broken = cache.graphed("broken", lambda x: x * x.sum().item(), INPUT, independent_rows=True, buckets=(8,))
    x = torch.randn(8, WIDTH, device=device)
    broken(x=x)
    assert cache.stats.failed_captures == {("broken", "block"): 1}
    assert torch.equal(run(x=x), padded(model, x, 8))
    more = cache.graphed("more", lambda x: model(x) * 2, INPUT, independent_rows=True, buckets=(8,), watch=model)
    assert torch.equal(more(x=x), padded(model, x, 8) * 2)
    assert torch.equal(run(x=x), padded(model, x, 8))
    assert cache.stats.replays["more", "block", "decode", 8] == 1
    assert cache.pool_bytes <= 1.3 * before


def test_a_refused_capture_closes_the_runner(pool, device):
    statics = [torch.ones(4, device=device)]
    runner = GraphRunner(lambda: statics[0].mul_(statics[0].sum().item()), pool, statics=lambda: statics)
    with pytest.raises(CaptureRefused):
        runner.capture()
    assert runner.state is RunnerState.CLOSED
    with pytest.raises(GraphClosed):
        runner.replay()


def test_warm_up_and_capture_leave_static_tensors_and_generators_as_they_were(pool, device):
    generator = torch.Generator(device).manual_seed(7)
    counter = torch.zeros(4, device=device)
    before = generator.get_state()

    def count():
        counter.add_(torch.rand(4, device=device, generator=generator).ceil())

    runner = GraphRunner(count, pool, statics=lambda: [counter], generators=[generator])
    runner.capture()
    assert counter.tolist() == [0, 0, 0, 0]
    assert torch.equal(generator.get_state(), before)
    runner.replay()
    runner.replay()
    assert counter.tolist() == [2, 2, 2, 2]


def test_a_key_that_has_run_needs_no_warm_up_run_on_a_gpu(pool, device):
    calls = []

    def double(x, y):
        calls.append(len(x))
        torch.mul(x, 2, out=y)

    specs = {name: BufferSpec(("batch", WIDTH), torch.float32) for name in ("x", "y")}
    cache = GraphCache(pool=pool)
    site = cache.add_site(Site("double", [double], StaticBuffers(specs, 4, device), Buckets((2, 4))))
    larger, smaller = cache.pending()
    for key in (larger, smaller):  # the first key of a site is always warmed up
        site.run_eager(key)
        site.ran.add(key)
    cache.warm()
    assert calls.count(4) > 2
    assert calls.count(2) - 1 == (3 if pool.backend.capture_runs else 1)  # a CPU's check with noise is a run too
    assert not site.ran
    x = torch.randn(2, WIDTH, device=device)
    site.buffers.load({"x": x, "y": torch.zeros_like(x)}, 2, 2)
    ran = cache.run(cache.plan("double", 2))
    assert ran.is_graph and torch.equal(site.buffers["y"][:2], x * 2)
    cache.evict(smaller)
    calls.clear()
    cache.warm()  # the site has a graph, so one warm-up run is enough
    assert len(calls) == (3 if pool.backend.capture_runs else 2)


def test_a_registered_generator_draws_fresh_numbers_as_eager_would(pool, device):
    generator = torch.Generator(device).manual_seed(3)
    out = torch.zeros(8, device=device)
    runner = GraphRunner(
        lambda: out.copy_(torch.rand(8, device=device, generator=generator)),
        pool,
        statics=lambda: [out],
        generators=[generator],
    )
    runner.capture()
    draws = []
    for _ in range(3):
        runner.replay()
        draws.append(out.clone())
    twin = torch.Generator(device).manual_seed(3)
    for draw in draws:
        assert torch.equal(draw, torch.rand(8, device=device, generator=twin))
    assert not torch.equal(draws[0], draws[1])


def test_another_threads_allocations_do_not_break_a_capture(pool, device):
    model, cache, run = graphed_net(pool, device)
    stop, trouble = threading.Event(), []

    def allocate():
        try:
            while not stop.is_set():
                torch.empty(1 << 20, device=device).fill_(1.0).sum().item()
        except Exception as error:
            trouble.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        cache.warm()
    finally:
        stop.set()
        thread.join()
    assert not trouble
    assert {row["state"] for row in cache.table()} == {"captured"}
    x = torch.randn(3, WIDTH, device=device)
    assert torch.equal(run(x=x), padded(model, x, 4))


def test_deleting_and_recapturing_gives_memory_back_and_uses_the_same_pool(pool, device):
    model, cache, run = graphed_net(pool, device)
    memory, used = pool.memory, []
    x = torch.randn(8, WIDTH, device=device)
    for _ in range(5):
        cache.warm()
        assert torch.equal(run(x=x), padded(model, x, 8))
        used.append(cache.pool_bytes)
        cache.clear()
        assert cache.pool_bytes == 0
        assert cache.plan("net", 8).reason == "evicted"
    assert pool.memory is memory
    assert len(set(used)) == 1
    assert used[0] > 0


def test_evicting_one_graph_leaves_the_others(pool, device):
    _, cache, run = graphed_net(pool, device, capture_on_miss=False)
    cache.warm()
    key = cache.plan("net", 4).key
    assert cache.evict(key)
    assert not cache.evict(key)
    run(x=torch.randn(4, WIDTH, device=device))
    run(x=torch.randn(8, WIDTH, device=device))
    assert cache.stats.fallbacks == {("net", "decode", "evicted"): 1}
    assert cache.stats.replays == {("net", "block", "decode", 8): 1}


def test_layer_scope_equals_block_scope(pool, device):
    model = net(device)
    specs = INPUT | {"hidden": BufferSpec(("batch", WIDTH), torch.float32, pad=None)}

    def part(index):
        def run(x, hidden):
            hidden.copy_(model.block(index, x if index == 0 else hidden))

        return run

    buffers = StaticBuffers(specs, 4, device)
    cache = GraphCache(pool=pool)
    cache.add_site(Site("layers", [part(index) for index in range(3)], buffers, Buckets((2, 4)), scope="layer"))
    x = torch.randn(3, WIDTH, device=device)
    buffers.load({"x": x}, 3, 4)
    cache.run(cache.plan("layers", 3))
    assert torch.equal(buffers["hidden"][:3], padded(model, x, 4))
    assert cache.stats.replays == {("layers", "layer", "decode", 4): 3}  # one replay per layer


def test_only_padding_rows_are_filled_with_the_pad_value(pool, device):
    specs = {"x": BufferSpec(("batch",), torch.int64, pad=7)}
    buffers = StaticBuffers(specs, 8, device)
    buffers.load({"x": torch.arange(3, device=device)}, 3, 4)
    assert buffers["x"].tolist() == [0, 1, 2, 7, 7, 7, 7, 7]
    buffers["x"].fill_(1)
    buffers.load({"x": torch.arange(3, device=device)}, 3, 4)
    assert buffers["x"].tolist() == [0, 1, 2, 7, 1, 1, 1, 1]


def test_outputs_reach_the_host_in_order_with_a_step_enqueued_ahead(pool, device):
    value = torch.zeros(4, device=device)
    runner = GraphRunner(lambda: value.add_(1), pool, statics=lambda: [value])
    runner.capture()
    ring = HostRing(pool.backend, 4, torch.float32, depth=2)
    runner.replay()
    first = ring.push(value[:2])
    runner.replay()
    second = ring.push(value)
    with pytest.raises(GraphError, match="not read"):
        ring.push(value)
    assert first.read().tolist() == [1, 1]
    assert second.read().tolist() == [2, 2, 2, 2]
    with pytest.raises(GraphError, match="read once"):
        second.read()


def test_a_deleted_tensor_fails_the_address_check(pool, device):
    table = {"bias": torch.ones(WIDTH, device=device)}
    book = AddressBook()
    book.watch(table)
    assert book.unchanged()
    del table["bias"]
    assert not book.unchanged()
    assert [str(one.now) for one in book.moved()] == ["None"]


def test_a_runner_captures_once(pool, device):
    out = torch.zeros(2, device=device)
    runner = GraphRunner(lambda: out.add_(1), pool, statics=lambda: [out])
    runner.capture()
    with pytest.raises(CaptureError, match="once"):
        runner.capture()
    runner.close()
    with pytest.raises(GraphClosed):
        runner.replay()


def test_outputs_of_any_shape_come_back_by_structure(pool, device):
    cache = GraphCache(pool=pool)

    def fn(x):
        return {"rows": x * 2, "total": x.sum(), "pair": (x[:, 0], x.t().contiguous())}

    run = cache.graphed("tree", fn, INPUT, independent_rows=True, buckets=(4,))
    x = torch.randn(4, WIDTH, device=device)
    for _ in range(2):
        result = run(x=x)
        assert torch.equal(result["rows"], x * 2)
        assert torch.equal(result["total"], x.sum())
        assert torch.equal(result["pair"][0], x[:, 0])
        assert torch.equal(result["pair"][1], x.t())
