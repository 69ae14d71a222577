"""What a start says about the choices that it makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.checkpoint.source import resolve_model
from engine.config import EngineConfig
from engine.worker.startup import plan_workers


@pytest.mark.parametrize(
    ("stored", "settings", "is_said"),
    [
        ("float32", {}, True),
        ("float16", {}, True),
        ("bfloat16", {}, False),
        ("float32", {"dtype": "float32"}, False),
        ("float32", {"dtype": "bfloat16"}, False),
        ("float32", {"cpu_weight_format": "bf16"}, False),
    ],
)
def test_lowering_a_checkpoint_is_said_unless_it_was_asked_for(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    stored: str, settings: dict[str, str], is_said: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("engine.loader.cpu_formats.has_fast_bf16", lambda: True)
    folder = tmp_path / "policy"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": stored}
    (folder / "config.json").write_text(json.dumps(config))
    plan_workers(EngineConfig(model=str(folder), device="cpu", **settings), resolve_model(str(folder)))
    assert (f"policy is stored in {stored} and runs in bfloat16" in caplog.text) is is_said
