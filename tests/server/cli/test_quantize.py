"""`encore quantize` writes a folder that the engine serves, and refuses one that exists."""

from __future__ import annotations

from pathlib import Path

from engine import Engine, EngineConfig
from server.cli.main import main
from tests.engine.lively import PROMPTS, SETTINGS
from tests.support.engines import greedy_tokens


def test_the_command_writes_what_the_engine_serves(tiny_model: Path, tmp_path: Path, capsys):
    assert main(["quantize", str(tiny_model), "--to", "fp8", "--out", str(tmp_path / "out")]) == 0
    assert "14 matrices in fp8" in capsys.readouterr().out
    with Engine(EngineConfig(model=str(tmp_path / "out"), **SETTINGS)) as engine:
        assert all(len(tokens) == 4 for tokens in greedy_tokens(engine, PROMPTS, 4))
    assert main(["quantize", str(tiny_model), "--to", "fp8", "--out", str(tmp_path / "out")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
