"""Weights between which tests of the core switch."""

from __future__ import annotations

import pytest
import safetensors.torch


@pytest.fixture(scope="module")
def weights(lively_model, other_model):
    """The tensors of two models of the same shape, a and b; engines begin with a."""
    return {
        name: safetensors.torch.load_file(folder / "model.safetensors")
        for name, folder in (("a", lively_model), ("b", other_model))
    }
