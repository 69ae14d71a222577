"""Regions of memory: what is kept and what is discarded over a release, and graphs that read the memory afterwards."""

from __future__ import annotations

import random

import pytest
import torch

from graph_cache.backends import backend_for, region_for
from graph_cache.backends.byte_ranges import Range, range_of, without
from graph_cache.core.buffers import BATCH, BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.pool import GraphPool

BIG = 3 << 20  # elements: several physical pages


def make(region, device, *sizes):
    with region.allocation():
        return [torch.randn(size, device=device) for size in sizes]


def test_kept_tensors_come_back_and_discarded_ones_are_zero_at_the_same_addresses(device):
    region = region_for(device)
    kept, discarded, small, part = make(region, device, BIG, BIG, 100, BIG)
    before = [tensor.clone() for tensor in (kept, small, part)]
    addresses = [tensor.data_ptr() for tensor in (kept, discarded, small, part)]
    half = part[: BIG // 2]
    for _ in range(2):
        discarded.fill_(7.0)
        half.fill_(7.0)
        released = region.release([discarded, half])
        assert released > discarded.nbytes // 2 and region.release([kept]) == 0
        region.restore()
        region.restore()
        assert [tensor.data_ptr() for tensor in (kept, discarded, small, part)] == addresses
        assert torch.equal(kept, before[0]) and torch.equal(small, before[1])
        assert torch.equal(part[BIG // 2 :], before[2][BIG // 2 :])
        assert discarded.count_nonzero() == 0 and half.count_nonzero() == 0


def test_a_region_without_tensors_and_a_discarded_empty_tensor(device):
    region = region_for(device)
    assert region.release() == 0
    region.restore()
    assert region.release([torch.empty(0, device=device)]) == 0
    region.restore()


def test_a_tensor_with_gaps_is_refused_before_anything_is_released(device):
    region = region_for(device)
    [tensor] = make(region, device, BIG)
    before = tensor.clone()
    with pytest.raises(ValueError, match="strides"):
        region.release([tensor.view(2, -1).T])
    assert torch.equal(tensor, before)


def test_the_graphs_of_a_pool_replay_after_its_memory_was_released(device):
    region = region_for(device)
    [weight] = make(region, device, 1 << 20)
    weight = weight.view(1024, 1024)
    pool = GraphPool(backend_for(device), releasable=True)
    cache = GraphCache(device=device, pool=pool)

    def body(x):
        constant = torch.full((8, 1024), 2.0, device=x.device)  # written by each replay
        return (x[:, None, :] * constant[None]).sum(1) @ weight

    call = cache.graphed(
        "f",
        body,
        {"x": BufferSpec((BATCH, 1024), torch.float32)},
        independent_rows=True,
        buckets=[4],
        watch={"weight": weight},
    )
    x = torch.randn(4, 1024, device=device)
    expected = call(x)
    digests = [row["digest"] for row in cache.table()]
    captures = cache.stats.captures.total()
    assert torch.allclose(expected, 16 * x @ weight, rtol=1e-3, atol=1e-2)
    for _ in range(2):
        assert pool.site_memory.release() > 0 and region.release() >= 0
        region.restore()
        pool.site_memory.restore()
        assert torch.equal(call(x), expected)
    assert cache.stats.captures.total() == captures and [row["digest"] for row in cache.table()] == digests
    cache.clear()


def test_ranges_without_others_equal_the_same_on_single_bytes():
    generator = random.Random(5)
    for _ in range(300):
        points = sorted(generator.sample(range(100), 2 * generator.randint(0, 6)))
        ranges = [Range(start, end - start) for start, end in zip(points[::2], points[1::2], strict=True)]
        holes = [Range(generator.randrange(100), generator.randrange(30)) for _ in range(generator.randint(0, 6))]
        found = without(ranges, holes)
        expected = {byte for one in ranges for byte in range(one.start, one.end)}
        expected -= {byte for one in holes for byte in range(one.start, one.end)}
        assert sorted(expected) == [byte for one in found for byte in range(one.start, one.end)]
        assert found == sorted(found) and all(one.size > 0 for one in found)


def test_the_range_of_a_tensor():
    tensor = torch.zeros(10, dtype=torch.int32)
    assert range_of(tensor[2:5]) == (tensor.data_ptr() + 8, 12)
