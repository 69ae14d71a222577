"""Devices of the contract suite: always the CPU, and the GPU if there is one."""

from __future__ import annotations

import pytest
import torch

from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
]


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    torch.manual_seed(0)
    return torch.device(request.param)


@pytest.fixture
def pool(device) -> GraphPool:
    return GraphPool(backend_for(device))
