"""The log of a start has each warning once, although several processes load the model's files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.client.async_client import make_client
from engine.config import EngineConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def without_tokenizer(folder: Path) -> list[str]:
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    return ["has no tokenizer"]


def with_contradictions(folder: Path) -> list[str]:
    file = folder / "tokenizer_config.json"
    wrong = {"auto_map": {"AutoTokenizer": ["x.X", None]}, "add_prefix_space": True, "bos_token": "<|im_start|>"}
    token = {"content": "<|im_end|>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    wrong["added_tokens_decoder"] = {"2": token | {"special": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    return ["auto_map", "add_prefix_space=True in tokenizer_config.json", "another file differs in"]


@pytest.mark.parametrize("change", [without_tokenizer, with_contradictions])
async def test_an_engine_in_a_thread_warns_once(tiny_model, tmp_path, caplog, change) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    expected = change(folder)
    client = make_client(EngineConfig(model=str(folder), warmup="lazy", graph_manifest="none"), in_process=True)
    await client.start()
    await client.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [sum(text in one for one in warnings) for text in expected] == [1] * len(expected), warnings


def test_processes_of_a_server_warn_once_together(tiny_model, tmp_path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    expected = with_contradictions(folder)
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(folder), "--port", "0", "--warmup", "lazy",
               "--graph-manifest", "none", "--http-workers", "2"]  # fmt: skip
    lines: list[str] = []
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        while not lines or "serving " not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        process.terminate()
        lines += process.stderr.readlines()
    warnings = Counter(line.partition(" WARNING ")[2] for line in lines if " WARNING " in line)
    assert set(warnings.values()) == {1}
    assert [sum(text in one for one in warnings) for text in expected] == [1] * len(expected), warnings
