"""Zeroed host memory for caches: contents, alignment, and that no page is resident before its first use."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from engine.attention.host_memory import zeros


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 16, 2, 8), (0, 16, 2, 8), (1,)])
def test_it_is_zero_and_writable(shape, dtype):
    tensor = zeros(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.any()
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert (tensor.fill_(2) == 2).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_resident_from_their_first_use_on():
    before = resident_bytes()
    tensor = zeros((64, 2**20), torch.float32)
    reserved = resident_bytes() - before
    tensor[:32].fill_(1)
    assert reserved < 2**25 < 2**27 <= resident_bytes() - before < 3 * 2**26
    assert not tensor[32:].any() and tensor[:32].all()


def test_more_than_the_system_has_is_an_error():
    with pytest.raises(OSError, match="allocate"):
        zeros((2**46,), torch.float32)
