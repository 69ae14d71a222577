"""Numbered defects of Megatron-Core's own graph system in inference, each shown to be absent here."""

from __future__ import annotations

import pytest
import torch

from graph_cache import Buckets, BufferSpec, GraphCache, GraphRunner, Manifest, Site, StaticBuffers, tune
from graph_cache.core import buffers as buffers_module
from graph_cache.core import signature as signature_module
from graph_cache.core.buckets import default_ladder
from tests.contract.models import WIDTH, net

INPUT = {"x": BufferSpec(("batch", WIDTH), torch.float32)}


def wide(x):
    return (x.unsqueeze(1) * torch.ones(2048, 1, device=x.device)).cumsum(1).sum(1)


def test_2_graphs_captured_after_a_suspend_share_the_same_pool(pool, device):
    cache = GraphCache(pool=pool)
    run = cache.graphed("wide", wide, INPUT, independent_rows=True, buckets=(1, 2, 4, 8))
    cache.warm()
    memory, together = pool.memory, cache.pool_bytes
    cache.clear()
    for rows in (8, 4, 2, 1):  # one by one, as after a server resumes
        run(x=torch.randn(rows, WIDTH, device=device))
    assert pool.memory is memory
    assert cache.pool_bytes <= 1.3 * together
    assert [row["state"] for row in cache.table()] == ["captured"] * 4


@pytest.mark.parametrize("capture_on_miss", [True, False])
def test_3_a_shape_first_seen_after_capture_is_captured_or_eager_and_never_an_error(pool, device, capture_on_miss):
    model = net(device)
    cache = GraphCache(pool=pool, capture_on_miss=capture_on_miss)
    cache.graphed("first", lambda x: model(x), INPUT, independent_rows=True, buckets=(4,), watch=model)
    cache.warm()
    run = cache.graphed("later", lambda x: model(x), INPUT, independent_rows=True, buckets=(2, 8), watch=model)
    x = torch.randn(8, WIDTH, device=device)
    with torch.inference_mode():
        assert torch.equal(run(x=x), model(x))
        assert torch.equal(run(x=x.repeat(3, 1)), model(x.repeat(3, 1)))
    assert sum(cache.stats.replays.values()) == int(capture_on_miss)
    assert cache.stats.fallbacks["later", "decode", "above_largest_bucket"] == 1
    assert cache.stats.fallbacks["later", "decode", "not_captured"] == int(not capture_on_miss)


def layered(pool, device, layers=4, buckets=(1, 2, 4, 8)):
    """Return a model, a site under layer scope and its cache: each layer writes the next one's input buffer."""
    model = net(device, layers)
    specs = INPUT | {"hidden": BufferSpec(("batch", WIDTH), torch.float32, pad=None)}

    def part(index):
        def run(x, hidden):
            hidden.copy_(model.block(index, x if index == 0 else hidden))

        return run

    site = Site(
        "layers",
        [part(index) for index in range(layers)],
        StaticBuffers(specs, max(buckets), device),
        Buckets(buckets),
        scope="layer",
    )
    cache = GraphCache(pool=pool)
    cache.add_site(site)
    return model, site, cache


def test_4_a_layers_output_is_the_next_layers_input_without_a_copy(pool, device):
    model, site, cache = layered(pool, device)
    cache.warm()
    hidden = site.buffers["hidden"]
    assert len({site.buffers.view(bucket)["hidden"].data_ptr() for bucket in site.buckets}) == 1
    x = torch.randn(8, WIDTH, device=device)
    site.buffers.load({"x": x}, 8, 8)
    cache.run(cache.plan("layers", 8))
    with torch.inference_mode():
        assert torch.equal(hidden, model(x))
    assert len(site.static_tensors(8)) == len(site.buffers)  # no output buffers


def test_6_a_capture_that_raises_restores_the_flags_and_the_current_stream(pool, device):
    def stream():
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    before = stream()
    other = type(pool)(pool.backend)  # constructing a pool changes nothing either
    assert stream() == before and not other.capturing

    def broken():
        if pool.capturing:
            raise ValueError("in the middle")

    with pytest.raises(Exception, match="in the middle"):
        GraphRunner(broken, pool, statics=lambda: []).capture()
    assert stream() == before
    assert not pool.capturing and not pool.warming and not pool.backend.is_capturing()
    value = torch.zeros(2, device=device)
    runner = GraphRunner(lambda: value.add_(1), pool, statics=lambda: [value])
    runner.capture()
    runner.replay()
    assert value.tolist() == [1, 1]


def test_7_a_replay_of_a_kept_plan_builds_no_metadata(pool, device, monkeypatch):
    model = net(device)
    cache = GraphCache(pool=pool)
    cache.graphed("net", lambda x: model(x), INPUT, independent_rows=True, buckets=(4,), watch=model)
    cache.warm()
    plan = cache.plan("net", 4)
    built = []
    for module, name in (
        (signature_module, "TensorSignature"),
        (buffers_module, "TensorSignature"),
        (buffers_module, "Signature"),
    ):
        monkeypatch.setattr(module, name, lambda *args, name=name: built.append(name))
    for _ in range(3):
        cache.run(plan)
        assert cache.plan("net", 4) is plan
    assert not built
    assert sum(cache.stats.replays.values()) == 3


def test_8_outputs_are_shared_by_buckets_and_layers(pool, device):
    cache = GraphCache(pool=pool)
    cache.graphed("wide", wide, INPUT, independent_rows=True, buckets=(1, 2, 4, 8, 16))
    cache.warm()
    x, *outputs = cache.sites["wide"].static_tensors(16)
    assert [tuple(output.shape) for output in outputs] == [(16, WIDTH)]
    alone = GraphCache(pool=type(pool)(pool.backend))
    alone.graphed("wide", wide, INPUT, independent_rows=True, buckets=(16,))
    alone.warm()
    assert cache.pool_bytes <= 1.3 * alone.pool_bytes


def test_9_a_layer_that_runs_eager_is_not_counted_as_a_replay(pool, device):
    model, site, cache = layered(pool, device, layers=3, buckets=(4,))
    whole, broken = site.parts[1], []

    def middle(x, hidden):
        if pool.capturing:
            broken.append(1)
            hidden.mul_(hidden.sum().item())
        whole(x=x, hidden=hidden)

    site.parts = (site.parts[0], middle, site.parts[2])
    x = torch.randn(4, WIDTH, device=device)
    site.buffers.load({"x": x}, 4, 4)
    cache.run(cache.plan("layers", 4))
    with torch.inference_mode():
        assert torch.equal(site.buffers["hidden"], model(x))
    assert broken
    assert not cache.stats.replays
    assert cache.stats.fallbacks == {("layers", "decode", "capture_failed"): 1}


def test_9_replays_count_every_layer_that_was_replayed(pool, device):
    _, site, cache = layered(pool, device, layers=3)
    cache.warm()
    for rows in (1, 8):
        site.buffers.load({"x": torch.randn(rows, WIDTH, device=device)}, rows, rows)
        cache.run(cache.plan("layers", rows))
    assert cache.stats.replays == {("layers", "layer", "decode", 1): 3, ("layers", "layer", "decode", 8): 3}


def test_10_small_batches_keep_small_buckets():
    histogram = {1: 50, 2: 40, 24: 3, 256: 1}
    assert Buckets(default_ladder(256)).round_up(2) == 2
    assert {1, 2, 256} <= set(tune(histogram, max_size=256, max_buckets=4).sizes)


def cached_step(device, pages=5, page=4):
    """Return a decode step with a paged cache: each row writes its value and sums the values it may read."""
    kv = torch.zeros(pages * page, WIDTH, device=device)
    whole = BufferSpec(("batch",), torch.int64)
    specs = INPUT | {"slots": whole, "lengths": BufferSpec(("batch",), torch.int64, pad=1)}

    def step(x, slots, lengths):
        kv.index_copy_(0, slots, x)
        start = (slots - lengths + 1)[:, None]
        reach = torch.arange(page, device=device)
        seen = kv.index_select(0, (start + reach).clamp(max=len(kv) - 1).view(-1)).view(len(x), page, WIDTH)
        return (seen * (reach < lengths[:, None])[:, :, None]).sum(1)

    return kv, specs, step


@pytest.mark.parametrize("way", ["clear", "invalidate", "evict"])
def test_12_recapturing_leaves_the_kv_cache_of_live_requests_alone(pool, device, way):
    kv, specs, step = cached_step(device)
    cache = GraphCache(pool=pool)
    run = cache.graphed("step", step, specs, independent_rows=True, buckets=(1, 2, 4), watch={"kv": kv})
    cache.warm()
    first = torch.randn(2, WIDTH, device=device)
    slots = torch.tensor([4, 8], device=device)  # page 0 is the scratch page for padding
    ones = torch.ones(2, dtype=torch.int64, device=device)
    run(x=first, slots=slots, lengths=ones)
    live = kv[4:].clone()
    for _ in range(3):
        if way == "clear":
            cache.clear()
        elif way == "invalidate":
            cache.invalidate("resume")
        else:
            cache.evict(cache.plan("step", 2).key)
        cache.warm()
        assert torch.equal(kv[4:], live)
    second = torch.randn(2, WIDTH, device=device)
    result = run(x=second, slots=slots + 1, lengths=ones + 1)
    assert torch.equal(result, first + second)
    assert sum(cache.stats.replays.values()) == 2


def test_12_a_capture_in_the_middle_of_serving_leaves_the_loaded_step_alone(pool, device):
    kv, specs, step = cached_step(device)
    cache = GraphCache(pool=pool, capture_on_miss=True)
    cache.graphed("step", step, specs, independent_rows=True, buckets=(2, 4), watch={"kv": kv})
    buffers = cache.sites["step"].buffers
    x = torch.randn(1, WIDTH, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    buffers.load({"x": x, "slots": one * 7, "lengths": one}, 1, 2)
    result = cache.run(cache.plan("step", 1)).copy()  # captures the largest bucket and then its own before running
    assert torch.equal(result, x)
    assert torch.equal(kv[7], x[0])
    assert not kv[4:7].any() and not kv[8:].any()


def test_a_manifest_survives_clear(pool, device, tmp_path):
    manifest = Manifest(tmp_path / "used.json", "model")
    cache = GraphCache(pool=pool, manifest=manifest)
    run = cache.graphed("wide", wide, INPUT, independent_rows=True, buckets=(1, 2, 4, 8))
    for rows in (2, 2, 2, 1):
        run(x=torch.randn(rows, WIDTH, device=device))
    cache.clear()
    assert [key.bucket for key in cache.pending()] == [8, 2, 1, 4]
