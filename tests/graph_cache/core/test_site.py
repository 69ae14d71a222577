"""Site results: structure, buffers across buckets and variants, and the number of real rows."""

from __future__ import annotations

import pytest
import torch

from graph_cache import BATCH, Buckets, BufferSpec, GraphCache, GraphConfigError, Site, StaticBuffers

WIDTH = 4
INPUT = {"x": BufferSpec((BATCH, WIDTH), torch.float32)}


def site_of(fn, sizes=(2, 4, 8), **options):
    return Site("site", [fn], StaticBuffers(INPUT, max(sizes), "cpu"), Buckets(sizes), **options)


def cached(fn, sizes=(2, 4, 8), **options):
    site, cache = site_of(fn, sizes, **options), GraphCache()
    cache.add_site(site)
    return site, cache


def run(site, cache, x, **statics):
    plan = cache.plan("site", len(x), **statics)
    site.buffers.load({"x": x}, len(x), plan.bucket)
    return cache.run(plan).copy()


def padded(x, bucket):
    return torch.cat((x, torch.zeros(bucket - len(x), WIDTH)))


def test_a_bucket_larger_than_its_buffers_is_refused():
    with pytest.raises(GraphConfigError, match="exceeds 4 rows"):
        Site("site", [lambda x: x], StaticBuffers(INPUT, 4, "cpu"), Buckets((8,)))


def test_warm_keys_are_every_variant_of_the_largest_bucket_first():
    site = site_of(lambda x, n: x, variants=[{"n": 1}, {"n": 2}, {"n": 3}], warm_variants=[{"n": 2}, {"n": 1}])
    assert [(key.bucket, dict(key.variant)["n"]) for key in site.warm_keys()] == [
        (8, 2),
        (8, 1),
        (4, 2),
        (4, 1),
        (2, 2),
        (2, 1),
    ]


def test_batched_outputs_share_one_buffer_across_buckets():
    site, cache = cached(lambda x: (x * 2, x.sum()))
    cache.warm()
    _, *outputs = site.static_tensors(8)
    assert [tuple(output.shape) for output in outputs] == [(8, WIDTH), ()]
    for rows in (7, 2, 3):
        x = torch.randn(rows, WIDTH)
        doubled, total = run(site, cache, x)
        assert torch.equal(doubled, x * 2) and torch.equal(total, padded(x, site.buckets.round_up(rows)).sum())


def test_an_output_that_is_as_long_as_one_bucket_by_chance_is_not_cut():
    site, cache = cached(lambda x: x.t().contiguous())  # [4, bucket]: at bucket 4 its first dimension looks batched
    cache.warm()
    for rows in (3, 4, 2, 8, 3):
        x = torch.randn(rows, WIDTH)
        assert torch.equal(run(site, cache, x), padded(x, site.buckets.round_up(rows)).t())


def test_an_output_whose_other_dimensions_follow_the_bucket_too():
    site, cache = cached(lambda x: x @ x.t(), sizes=(1, 4, 8))
    cache.warm()
    for rows in (8, 1, 3, 5):
        x = torch.randn(rows, WIDTH)
        whole = padded(x, site.buckets.round_up(rows))
        with torch.inference_mode():
            assert torch.equal(run(site, cache, x), (whole @ whole.t())[:rows])


def test_variants_may_return_different_structures_and_dtypes():
    def fn(x, what):
        if what == "pair":
            return x + 1, {"half": x.half()}
        return x * 2 if what == "float" else x.int() if what == "int" else None

    site, cache = cached(fn, variants=[{"what": what} for what in ("pair", "float", "int", "none")])
    cache.warm()
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        pair = run(site, cache, x, what="pair")
        assert torch.equal(pair[0], x + 1) and torch.equal(pair[1]["half"], x.half())
        assert torch.equal(run(site, cache, x, what="float"), x * 2)
        assert torch.equal(run(site, cache, x, what="int"), x.int())
        assert run(site, cache, x, what="none") is None
    assert sum(cache.stats.replays.values()) == 8


def test_equal_values_of_other_types_are_other_variants():
    site, cache = cached(lambda x, k: x[:, :1].int() * k, variants=[{"k": 2}, {"k": True}])
    x = torch.full((2, WIDTH), 3.0)
    assert run(site, cache, x, k=2).dtype == torch.int32
    assert run(site, cache, x, k=2.0).dtype == torch.float32
    assert run(site, cache, x, k=True).tolist() == [[3], [3]]
    assert cache.stats.fallbacks == {("site", "decode", "unknown_variant"): 1}
    assert cache.plan("site", 2, k=True).key != cache.plan("site", 2, k=1).key
    assert cache.plan("site", 2, k=True).is_graph and not cache.plan("site", 2, k=1).is_graph


def test_anything_but_tensors_among_the_outputs_fails_the_capture_and_says_what_to_do():
    _, cache = cached(lambda x: (x, 3))
    cache.warm()
    assert {row["state"] for row in cache.table()} == {"failed"}
    assert "returned a int" in cache.table()[0]["failure"] and "keywords of the key" in cache.table()[0]["failure"]


def test_results_survive_a_capture_of_another_bucket():
    site, cache = cached(lambda x: x * 2)
    x = torch.randn(2, WIDTH)
    site.buffers.load({"x": x}, 2, 2)
    borrowed = cache.run(cache.plan("site", 2))
    while cache.warm_next():
        pass
    assert torch.equal(borrowed.value, x * 2)
    assert torch.equal(site.buffers["x"][:2], x)


def test_parts_of_a_layer_scope_each_have_a_graph_and_only_the_last_returns():
    buffers = StaticBuffers(INPUT | {"hidden": BufferSpec((BATCH, WIDTH), torch.float32, pad=None)}, 4, "cpu")
    parts = [lambda x, hidden: hidden.copy_(x + 1), lambda x, hidden: hidden.mul_(2) + x]
    cache = GraphCache()
    site = cache.add_site(Site("site", parts, buffers, Buckets((4,)), scope="layer"))
    x = torch.randn(3, WIDTH)
    assert torch.equal(run(site, cache, x), (x + 1) * 2 + x)
    assert cache.table()[0]["graphs"] == 2
    assert cache.stats.replays == {("site", "layer", "decode", 4): 2}


def test_capture_leaves_every_buffer_as_the_caller_loaded_it():
    def fn(x):
        x.add_(1)
        return x * 2

    site, cache = cached(fn)
    x = torch.randn(3, WIDTH)
    site.buffers.load({"x": x}, 3, 4)
    result = cache.run(cache.plan("site", 3)).copy()
    assert torch.equal(site.buffers["x"][:3], x + 1)  # changed by one run only, although it was captured too
    assert torch.equal(result, (x + 1) * 2)
