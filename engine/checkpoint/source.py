"""Resolve a model name to local files: the default model, a local folder, a .gguf file or a hub name.

Only checks that the required files exist; reads neither config nor weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint.default_model import SMOLLM2, default_gguf
from engine.checkpoint.hub import Check, download
from engine.checkpoint.regular_files import require_regular_file
from engine.config import DEFAULT_MODEL
from engine.errors import ModelError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ACCEPTED_NAMES = (
    f"use {DEFAULT_MODEL!r}, a folder in Hugging Face layout (config.json, safetensors, tokenizer), a .gguf "
    "file, or a hub name (owner/name)"
)


@dataclass(frozen=True)
class ModelSource:
    """The location of a model's files: a file for "gguf", a folder for "hf".

    `name` is the hub name, the folder's own name, or a .gguf file's name without folder and suffix.
    `generation_config`: what a generation_config.json would say, for a model that comes without one.
    """

    path: str
    kind: Literal["gguf", "hf"]
    name: str
    generation_config: Mapping[str, Any] = field(default_factory=dict, hash=False)


def resolve_model(name: str, check: Check | None = None, progress: bool = True) -> ModelSource:
    """Find the files of model `name`, downloading the default model or a hub model if necessary.

    An existing path takes precedence over a hub name. `check` refuses a hub model before its weights are downloaded; it
    is called with a folder that has config.json. `progress`: show how far the download of the default model is. Raises
    ModelError that says what is missing and what to do.
    """
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ModelError(f"{name!r} is not a model name; {_ACCEPTED_NAMES}")
    if name.lower() == DEFAULT_MODEL:
        return ModelSource(default_gguf(progress=progress), "gguf", DEFAULT_MODEL, SMOLLM2.generation_config)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return ModelSource(_require_config(path), "hf", os.path.basename(os.path.abspath(path)) or name)
    if os.path.isfile(path):
        if path.lower().endswith(".gguf"):
            return ModelSource(path, "gguf", Path(path).stem)
        raise ModelError(f"{name} is a file, but not a .gguf file; {_ACCEPTED_NAMES}")
    if os.path.exists(path):
        require_regular_file(path)  # neither a folder nor a file: says what it is
    if os.path.isabs(path) or name.startswith((".", "~")) or name.lower().endswith(".gguf"):
        raise ModelError(f"no such file or folder: {name}; {_ACCEPTED_NAMES}")
    if not is_hub_name(name):
        raise ModelError(f"{name!r} is neither a local file or folder nor a hub name; {_ACCEPTED_NAMES}")
    return ModelSource(_require_config(download(name, check)), "hf", name)


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form of a hub name, owner/name."""
    return _HUB_NAME.fullmatch(name) is not None


def _require_config(path: str) -> str:
    config = os.path.join(path, "config.json")
    require_regular_file(config)
    if not os.path.exists(config):
        ggufs = sorted(entry for entry in os.listdir(path) if entry.lower().endswith(".gguf"))
        hint = f"; for a GGUF file, give its path: {os.path.join(path, ggufs[0])}" if ggufs else f"; {_ACCEPTED_NAMES}"
        raise ModelError(f"{path} has no config.json{hint}")
    return path
