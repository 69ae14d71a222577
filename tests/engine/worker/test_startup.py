"""What a start says about the choices that it makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.checkpoint.source import resolve_model
from engine.config import EngineConfig
from engine.worker.startup import plan_workers
from tests.engine.lively import PROMPTS, greedy


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


def test_threads_are_tuned_only_where_nothing_sets_their_number(make_engine, reference, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    try:
        torch.set_num_threads(2)
        tuned, fixed = make_engine(num_threads=None, warmup="full"), make_engine(num_threads=2)
        assert fixed.loop.executor.capabilities.threads is None and fixed.stats().num_threads == 2
        tuner = tuned.loop.executor.capabilities.threads
        tuner.count = 1  # as after a trial beside a busy process
        assert tuned.stats().num_threads == 1
        captures = tuned.stats().graphs["captures"]
        for prompt in PROMPTS:
            (output,) = tuned.generate(prompt_token_ids=[prompt], sampling_params=greedy(12))
            assert output.token_ids == reference.greedy(prompt, 12)
        assert tuned.stats().graphs["captures"] == captures  # no other capture
        assert torch.get_num_threads() == 2  # outside of steps it is the caller's
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert make_engine(num_threads=None).loop.executor.capabilities.threads is None
    finally:
        torch.set_num_threads(before)
