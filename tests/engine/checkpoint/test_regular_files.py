"""Files of a model folder: only regular ones are opened, and only up to a size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.checkpoint.regular_files import require_regular_file, size_limit
from engine.checkpoint.source import resolve_model
from engine.errors import ModelError
from engine.loader.weights import safetensors_files
from engine.models.registry import config_from_folder

MIB = 2**20


@pytest.mark.parametrize(("name", "limit"), [
    ("tokenizer.json", 128), ("vocab.json", 128), ("merges.txt", 128), ("tokenizer.model", 128), ("config.json", 32),
    ("tokenizer_config.json", 32), ("generation_config.json", 32), ("model.safetensors.index.json", 128),
    ("chat_template.jinja", 1), ("model.safetensors", None), ("model.gguf", None),
])  # fmt: skip
def test_a_files_name_gives_its_limit(name: str, limit: int | None) -> None:
    assert size_limit(name) == (None if limit is None else limit * MIB)


def read(folder: Path, name: str) -> None:
    resolve_model(str(folder))
    if name.endswith("index.json"):
        safetensors_files(folder)
    else:
        config_from_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_fifo_or_a_large_file_is_refused_unread(tiny_model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    path, limit = tmp_path / name, size_limit(name)
    assert limit is not None
    with open(path, "wb") as file:
        file.truncate(limit + 1)  # takes no disk
    with pytest.raises(ModelError, match=f"{name} has {limit + 1} bytes, and at most {limit} are read"):
        read(tmp_path, name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match=f"{name} is a FIFO"):
        read(tmp_path, name)


def test_a_link_is_followed_and_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "file")
    (tmp_path / "null.json").symlink_to("/dev/null")
    require_regular_file(tmp_path / "link.json")
    with pytest.raises(ModelError, match=r"null\.json is a character device"):
        require_regular_file(tmp_path / "null.json")
