"""Digests of graphs: equal after a recapture, and different for other code, sizes and numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from tests.contract.training_models import WIDTH, attached, batches, mlp, train, twins

INPUT = {"x": BufferSpec(("batch", WIDTH), torch.float32)}


def digests_of(cache):
    return {row["bucket"]: row["digest"] for row in cache.table()}


def warm_cache(pool, function, watch=None):
    cache = GraphCache(pool=pool)
    cache.graphed("function", function, INPUT, independent_rows=True, buckets=(2, 4), watch=watch)
    cache.warm()
    return cache


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Softmax(-1)).to(device).eval()


def test_a_digest_is_equal_after_a_recapture(pool, device, model):
    cache = warm_cache(pool, lambda x: model(x), model)
    first = digests_of(cache)
    cache.clear()
    held = torch.ones(1000, device=device)  # other addresses are free now
    cache.warm()
    assert len(held) == 1000
    assert digests_of(cache) == first and all(len(digest) == 16 for digest in first.values())
    assert all(row["nodes"] >= 4 for row in cache.table())


def test_an_argument_without_contents_is_left_out_of_the_digest(pool, device):
    """A kernel of `torch.where` has a function object without contents: what is passed for it differs each time."""
    cache = warm_cache(pool, lambda x: torch.where(x < 0, x.neg(), x))
    first, held = digests_of(cache), []
    for count in range(5):
        held.append(bytearray(1000 * count))  # other addresses are free on the host's heap
        cache.clear()
        cache.warm()
        assert digests_of(cache) == first


def test_the_same_code_in_another_cache_has_the_same_digests(pool, device, model):
    first, second = warm_cache(pool, lambda x: model(x), model), warm_cache(pool, lambda x: model(x), model)
    assert digests_of(first) == digests_of(second)


FUNCTIONS = {
    "other operation": lambda model, x: model(x).relu(),
    "other number": lambda model, x: model(x) * 2,
    "other argument": lambda model, x: model[1:](x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_code_and_other_sizes_have_other_digests(pool, device, model, name):
    one = warm_cache(pool, lambda x: model(x), model)
    other = warm_cache(pool, lambda x: FUNCTIONS[name](model, x), model)
    found = [*digests_of(one).values(), *digests_of(other).values()]
    assert len(set(found)) == 4


def test_a_pair_of_training_graphs_has_a_digest_that_a_recapture_repeats(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, ["0", "1", "2"], pool)
    data = batches(4, device, micro=1)
    found = []
    for _ in range(2):
        train(graphed, data)
        found.append([row["digest"] for row in graphs.table()])
        graphs.clear()
    assert len(found[0]) == 3 and all(found[0]) and found[0] == found[1]


def test_a_key_that_has_no_graph_has_no_digest(pool, device, model):
    cache = GraphCache(pool=pool)
    cache.graphed("function", lambda x: model(x), INPUT, independent_rows=True, buckets=(2, 4), watch=model)
    assert set(digests_of(cache).values()) == {""}
