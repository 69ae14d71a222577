"""A hundred updates, each followed by rollouts: memory, graphs and tokens stay what they should be."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import Engine
from tests.engine.lively import PROMPTS

CYCLES, WARM = 100, 20
SAMPLING = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "n": 2, "logprobs": 0, "ignore_eos": True}


def resident_bytes() -> int:
    """Return the process's memory that is neither shared nor of files."""
    gc.collect()
    fields = dict(line.split(":") for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])


def tokens(engine: Engine) -> list[list[int]]:
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=SAMPLING)
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True], ids=["copied", "shared"])
def test_updates_leave_no_trace(make_engine: Any, lively_model: Path, tmp_path: Path, is_shared: bool) -> None:
    engine = make_engine(warmup="full")
    trainer = AutoModelForCausalLM.from_pretrained(lively_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(lively_model)
    if is_shared:
        engine.share_weights(trainer, version="shared")
    captures = engine.stats().graphs["captures"]
    seen, memory = set(), 0
    saved: dict[Path, list[list[int]]] = {}
    for cycle in range(1, CYCLES + 1):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter += 0.02 * torch.randn_like(parameter) * parameter.std()
        if is_shared:
            engine.weights_changed(f"step-{cycle}")
        else:
            engine.update_weights(trainer.state_dict(), version=f"step-{cycle}")
        found = tokens(engine)
        seen.add(tuple(found[0]))
        if cycle % 10 == 0:
            folder = tmp_path / str(cycle)
            trainer.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            saved[folder] = found
        if cycle == WARM:
            memory = resident_bytes()
    assert resident_bytes() < 1.01 * memory
    graphs = engine.stats().graphs
    assert graphs["captures"] == captures and graphs["invalidations"] == []
    for folder, expected in saved.items():  # after the memory was compared: an engine needs some of its own
        assert tokens(make_engine(model=str(folder))) == expected, f"cycle {folder.name}"
    assert len(seen) > CYCLES // 2, "the updates changed the tokens"
