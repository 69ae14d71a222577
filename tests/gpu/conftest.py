"""Tests of this folder need a CUDA device: without one each is skipped, and the reason says so.

Those marked `interpretable` also run on the CPU under TRITON_INTERPRET=1 (Triton's interpreter; slow, no bfloat16).
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "interpretable: also runs on the CPU under TRITON_INTERPRET=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords and not (INTERPRETED and "interpretable" in item.keywords):
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    """The CUDA device; the CPU where the kernels are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
