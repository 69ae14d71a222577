"""Pull, list, show and remove the models of the hub's cache and the default model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import hub
from engine.checkpoint.default_model import SMOLLM2, default_gguf
from engine.checkpoint.source import ModelSource, is_hub_name, resolve_model
from engine.config import DEFAULT_MODEL, EngineConfig, cache_folder
from engine.errors import ModelError
from engine.library.memory import Fit, Machine, fit, this_machine, weight_bytes
from engine.loader.cpu_formats import choose_cpu_format, format_dtype, gguf_config
from engine.loader.weights import safetensors_files
from engine.models.config import ModelConfig
from engine.models.registry import config_from_folder, find_entry
from engine.worker.sizing import CPU_KV_BYTES
from engine.worker.startup import choose_format


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """A model: what `encore models` shows.

    - size_bytes: of its files, on this machine or, for a model that isn't here, on the hub.
    - format: "safetensors" or "gguf". family: the model_type, empty if the model is not supported.
    - state: "ready", "incomplete" (a pull was interrupted), "unsupported" (`problem` says why) or "remote".
    - fit: whether it fits this machine's memory; None if it is not supported.
    """

    name: str
    path: str
    size_bytes: int
    format: str
    family: str
    state: str
    parameters: int = 0
    weight_format: str = ""
    problem: str = ""
    fit: Fit | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, with `fits` beside the details of `fit`."""
        values = {name: value for name, value in vars(self).items() if name != "fit"}
        details = None if self.fit is None else {**vars(self.fit), "fits": self.fit.fits}
        return {**values, "fit": details}


def pull(name: str) -> ModelSummary:
    """Download a hub model, or the default model, and return its summary. Continues an interrupted download.

    Raises ModelError for an unsupported model before its weights are downloaded.
    """
    if name.lower() == DEFAULT_MODEL:
        default_gguf()
    elif is_hub_name(name) and not os.path.exists(name):
        hub.download(name, config_from_folder)
    else:
        raise ModelError(f"{name!r} is not a hub name: give one as owner/name, such as Qwen/Qwen3-0.6B")
    found = show(name)
    if found.state == "unsupported":  # downloaded by another program
        raise ModelError(found.problem)
    return found


def pulled() -> list[ModelSummary]:
    """Return the models on this machine, by name: the default model, and the models of the hub's cache."""
    machine = this_machine()
    found = [] if not _default_file().exists() else [_summary(resolve_model(DEFAULT_MODEL), machine)]
    found += [_summary(ModelSource(str(folder), "hf", name), machine) for name, folder in sorted(_cached())]
    return found


def weights_fit(parameters: int, machine: Machine) -> bool:
    """Return whether a model with this number of parameters fits, as far as that can be told without its config."""
    on_cpu = machine.device == "cpu"
    itemsize = format_dtype(choose_cpu_format()).itemsize if on_cpu else torch.bfloat16.itemsize
    return 1.1 * itemsize * parameters + CPU_KV_BYTES <= machine.memory_bytes


def show(name: str) -> ModelSummary:
    """Return the summary of a model on this machine, or of a hub model that is not here, of which it reads config.json.

    Raises ModelError if there is no such model.
    """
    machine = this_machine()
    if name.lower() == DEFAULT_MODEL:
        if _default_file().exists():
            return _summary(resolve_model(name), machine)
        return ModelSummary(
            name=DEFAULT_MODEL, path="", size_bytes=SMOLLM2.gguf_bytes, format="gguf", family="llama", state="remote"
        )
    if os.path.exists(os.path.expanduser(name)) or not is_hub_name(name):
        return _summary(resolve_model(name), machine)
    folder = dict(_cached()).get(name)
    return _remote(name, machine) if folder is None else _summary(ModelSource(str(folder), "hf", name), machine)


def remove(name: str) -> int:
    """Delete a model from the hub's cache, or the default model, and return the bytes that this freed.

    Raises ModelError if it is not there. Folders and files that are given by their path are never deleted.
    """
    if name.lower() == DEFAULT_MODEL:
        if not _default_file().exists():
            raise ModelError(f"{DEFAULT_MODEL} is not on this machine")
        freed = _default_file().stat().st_size
        shutil.rmtree(_default_file().parent)
        return freed
    from huggingface_hub import scan_cache_dir

    for cache, repository in _repositories():
        if repository.repo_id == name:
            freed = sum(file.stat().st_size for file in (repository.repo_path / "blobs").glob("*"))
            if revisions := [revision.commit_hash for revision in repository.revisions]:
                scan_cache_dir(cache).delete_revisions(*revisions).execute()
            shutil.rmtree(repository.repo_path, ignore_errors=True)
            return freed
    names = ", ".join(sorted(name for name, _ in _cached())) or "none"
    raise ModelError(f"{name!r} is not in the hub's cache; there are: {names}")


def _default_file() -> Path:
    return Path(cache_folder(), "models", SMOLLM2.name, SMOLLM2.gguf)


def _repositories() -> Iterator[tuple[Path, Any]]:
    """Yield (cache folder, repository) for each model of the hub's cache."""
    from huggingface_hub import constants, scan_cache_dir

    cache = Path(constants.HF_HUB_CACHE)
    if cache.is_dir():
        yield from ((cache, one) for one in scan_cache_dir(cache).repos if one.repo_type == "model")


def _cached() -> Iterator[tuple[str, Path]]:
    """Yield (name, folder) of the newest revision of each model in the hub's cache.

    Leaves out one with nothing but a config.json, which `show` and a refused pull leave behind.
    """
    for _, repository in _repositories():
        revisions = sorted(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
        names = os.listdir(revisions[-1].snapshot_path) if revisions else []
        if hub.CONFIG in names and len(names) > 1:
            yield repository.repo_id, revisions[-1].snapshot_path


def _summary(source: ModelSource, machine: Machine) -> ModelSummary:
    path = Path(source.path)
    values: dict[str, Any] = {
        "name": source.name,
        "path": source.path,
        "size_bytes": _size(path),
        "format": "gguf" if source.kind == "gguf" else "safetensors",
    }
    try:
        config, stored = gguf_config(source.path) if source.kind == "gguf" else (config_from_folder(path), None)
    except ModelError as error:
        return ModelSummary(**values, family="", state="unsupported", problem=str(error))
    problem = ""
    if source.kind == "hf":
        try:
            safetensors_files(path)
        except ModelError as error:
            problem = str(error)
    described = _described(config, stored, path if source.kind == "gguf" else None, machine)
    return ModelSummary(**values, **described, state="incomplete" if problem else "ready", problem=problem)


def _described(config: ModelConfig, stored: str | None, gguf: Path | None, machine: Machine) -> dict[str, Any]:
    """Return family, parameters, weight format and fit."""
    weight_format, dtype = choose_format(EngineConfig(), config, torch.device(machine.device), stored)
    parameters, weights = weight_bytes(config, dtype)
    if weight_format in ("int4", "int8") and gguf is not None:
        weights += gguf.stat().st_size  # at most: the dense copies for prefill are kept for small models only
    return {
        "family": find_entry({"architectures": [config.architecture]}, "config").family.model_type,
        "parameters": parameters,
        "weight_format": weight_format,
        "fit": fit(config, dtype, weights, machine),
    }


def _remote(name: str, machine: Machine) -> ModelSummary:
    """Describe a hub model by its config.json and the sizes of its files."""
    folder, sizes = hub.describe(name)
    config = config_from_folder(folder)
    files = (*hub.text_files(sizes), *(file for file in sizes if file.endswith(".safetensors") and "/" not in file))
    return ModelSummary(
        name=name, path="", size_bytes=sum(sizes[file] for file in files), format="safetensors", state="remote",
        **_described(config, None, None, machine),
    )  # fmt: skip


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder (of the files that its links lead to)."""
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
