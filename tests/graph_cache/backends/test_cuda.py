"""CUDA captures: copies of pageable host memory, and measuring the allocator's segments."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from graph_cache.backends import backend_for
from graph_cache.backends.cuda import segments_of
from graph_cache.core.pool import GraphPool
from graph_cache.core.runner import GraphRunner
from graph_cache.errors import CaptureRefused

pytestmark = pytest.mark.gpu


@pytest.fixture
def pool():
    return GraphPool(backend_for(torch.device("cuda")))


def runner(pool, fn, *statics):
    return GraphRunner(fn, pool, statics=lambda: list(statics))


def enqueue(name, *arguments):
    """Enqueue a copy by the driver API: PyTorch's own copies refuse pageable memory, those of libraries do not."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments, ctypes.c_size_t(4000), stream) == 0


def test_a_copy_from_pageable_memory_is_refused_and_the_device_stays_usable(pool):
    target, host = torch.zeros(1000, device="cuda"), (ctypes.c_float * 1000)(*[3.0] * 1000)

    def fn():
        enqueue("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(target.data_ptr()), host)

    with pytest.raises(CaptureRefused, match=r"copies 4000 bytes from 0x\w+: pageable memory of the host"):
        runner(pool, fn, target).capture()
    assert target.sum() == 0  # unchanged by the warm-up
    again = runner(pool, lambda: target.add_(1.0), target)
    again.capture()
    again.replay()
    assert target.sum() == 1000


def test_a_copy_to_pageable_memory_is_refused(pool):
    source, host = torch.ones(1000, device="cuda"), (ctypes.c_float * 1000)()

    def fn():
        source.add_(1.0)
        enqueue("cuMemcpyDtoHAsync_v2", host, ctypes.c_uint64(source.data_ptr()))

    with pytest.raises(CaptureRefused, match=r"copies 4000 bytes to 0x\w+: pageable memory of the host"):
        runner(pool, fn, source).capture()


def test_a_copy_from_pinned_memory_reads_its_current_contents_at_replay(pool):
    target, source = torch.zeros(1000, device="cuda"), torch.ones(1000, pin_memory=True)
    captured = runner(pool, lambda: target.copy_(source, non_blocking=True), target)
    captured.capture()
    source.fill_(5.0)
    captured.replay()
    assert target.sum() == 5000


def test_segments_of_preserves_the_refcounts_of_the_pool_id(pool):
    while pool.memory.id[1] <= 300:  # Python never frees smaller integers
        pool.memory.renew()
    x = torch.zeros(10, device="cuda")
    captured = runner(pool, lambda: x.add_(torch.ones_like(x)), x)
    captured.capture()
    references = sys.getrefcount(pool.memory.id[1])
    for _ in range(20):
        assert segments_of(pool.memory.id)
    after = sys.getrefcount(pool.memory.id[1])  # outside the assert, which would add a reference
    assert after == references
    captured.replay()
    assert x.sum() == 10
