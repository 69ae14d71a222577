"""Every family that the engine serves, beside transformers on the same tiny folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.loader.weights import load_hf_folder
from engine.models.registry import ENTRIES
from tests.support.families import FAMILIES, VARIANTS, load_reference, tiny_folder
from tests.support.parity import check_against

MAX_LEN = 128  # below the trained context of phi3-short, above the one of phi3-long-partial
DENSE = [name for name in FAMILIES if name != "qwen3_moe"]


def test_every_family_has_a_tiny_folder() -> None:
    assert set(FAMILIES) == {entry.family.model_type for entry in ENTRIES}


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
@torch.no_grad()
def test_logits_and_tensor_names_equal_transformers(family: str, tmp_path: Path) -> None:
    tiny_folder(family, tmp_path)
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu", MAX_LEN)
    stored = load_file(tmp_path / "model.safetensors")
    check_against(load_reference(tmp_path), model)
    if family in DENSE:
        exported = dict(model.named_weights())
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
