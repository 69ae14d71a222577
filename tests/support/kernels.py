"""Helpers for tests of Triton kernels. Importing this module skips the importing test module if no kernel can run.

Import it before anything that imports triton. Under TRITON_INTERPRET=1 kernels run on the CPU, without bfloat16.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which is not installed", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return norm(found - wanted) / norm(wanted), computed in float64."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
