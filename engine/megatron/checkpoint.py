"""Load Hugging Face checkpoints into a Megatron-Core GPTModel and save them back, bit for bit.

weight_layout.py maps tensors to parameters; engine/loader/weights.py reads and checks the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.errors import ModelError, WeightUpdateError
from engine.loader.weights import EMBEDDING, TIED_HEAD, iterate_shards, safetensors_files, stage_update
from engine.megatron.config import differences
from engine.megatron.weight_layout import Slot, gather, listed, unwrapped, vocabulary_parameters, weight_slots
from engine.models.config import ModelConfig
from engine.models.registry import build_model, config_from_dict, config_from_folder

SHARD_BYTES = 4 << 30


def load_checkpoint(model: nn.Module, folder: str | Path, tp_rank: int = 0, tp_size: int = 1) -> ModelConfig:
    """Load a folder in Hugging Face layout into a GPTModel, a pipeline stage or a tensor-parallel rank of one.

    All or nothing: before the first write, raises one ModelError that lists every difference in configuration, or every
    tensor that is missing, unexpected, repeated or of another shape. Padding rows of the vocabulary are set to zero.
    """
    config = config_from_folder(folder)
    files = safetensors_files(folder)
    if problems := differences(unwrapped(model), config):
        raise ModelError(f"the model differs from that of {folder}: {listed(problems)}")
    slots = weight_slots(model, config.vocab_size, tp_rank, tp_size)
    elsewhere = whole_shapes(config).keys() - slots.keys()
    if EMBEDDING not in slots and TIED_HEAD not in slots:
        elsewhere.add(TIED_HEAD)  # a tied head copies the embedding, and this stage has neither
    tensors = ((name, tensor) for name, tensor in iterate_shards(files) if name not in elsewhere)
    try:
        stage_update(slots, tensors, complete=True)
    except WeightUpdateError as error:
        raise ModelError(f"{folder} can't be loaded: {error}") from error
    parameters = dict(unwrapped(model).named_parameters())
    for name, parameter in vocabulary_parameters(unwrapped(model)).items():
        parameters[parameter].data[slots[name].read().shape[0] :].zero_()
    return config


def save_checkpoint(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    hf_config: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    pipeline_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a GPTModel (or all its chunks) as a folder in Hugging Face layout: config.json and safetensors.

    `hf_config`: the content of config.json; its dtype is replaced by that of the weights. `group`, `pipeline_group`:
    the tensor and pipeline parallel groups, if any. All their ranks must call this function with the same shared
    folder. The first rank of each stage writes that stage's files; on return the folder is complete. Before anything is
    written, raises ModelError with every problem if the chunks don't make up the model of `hf_config` or the folder
    holds a model already.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    stage = 0 if pipeline_group is None else pipeline_group.rank()
    config = config_from_dict(hf_config, "hf_config")
    folder = Path(folder)
    slots: dict[str, Slot] = {}
    problems: list[str] = []
    for chunk in chunks:
        problems += [text for text in differences(unwrapped(chunk), config) if text not in problems]
        slots |= weight_slots(chunk, config.vocab_size, rank, ranks)
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        problems.append(f"{folder} holds a model already; give a new folder")
    own = {name: _Entry(slot.shape, slot.dtype) for name, slot in slots.items()}
    stages = _gather_from_stages((own, problems), pipeline_group)
    tables = _without_duplicates([table for table, _ in stages])
    entries = {name: entry for table in tables for name, entry in table.items()}
    problems = list(dict.fromkeys(text for _, texts in stages for text in texts))
    problems += _mismatches({name: entry.shape for name, entry in entries.items()}, whole_shapes(config))
    if problems:
        raise ModelError(f"the model can't be saved as {config.architecture}: {listed(problems)}")
    files = _planned_files(tables)
    for file, names in files.items():
        if names[0] not in tables[stage]:
            continue  # another stage writes this file
        tensors = {name: _gather_tensor(slots[name], group) for name in names}
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / file, metadata={"format": "pt"})
    _barrier(group, pipeline_group)
    if rank == stage == 0:
        for file, text in _json_files(hf_config, entries, files).items():
            (folder / file).write_text(text, encoding="utf-8")
    _barrier(pipeline_group, group)


class _Entry(NamedTuple):
    """Shape and dtype of a checkpoint tensor, on any stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _gather_from_stages(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    found = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _without_duplicates(tables: Sequence[dict[str, _Entry]]) -> list[dict[str, _Entry]]:
    """Keep each tensor only on the first stage that has it: a tied last stage holds a copy of the embedding."""
    seen: set[str] = set()
    found = []
    for table in tables:
        found.append({name: entry for name, entry in table.items() if name not in seen})
        seen |= table.keys()
    return found


def _barrier(*groups: dist.ProcessGroup | None) -> None:
    """Run a barrier in each group, in order."""
    for group in groups:
        if group is not None:
            dist.barrier(group)


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and whole shape of every tensor in a checkpoint of `config`."""
    return {name: slot.shape for name, slot in build_model(config, torch.float32, "meta", 1).weight_slots().items()}


def _mismatches(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {list(shape)}, {list(wanted[name])} is needed"
        for name, shape in found.items()
        if shape != wanted.get(name, shape)
    ]
    return problems


def _gather_tensor(slot: Slot, group: dist.ProcessGroup | None) -> Tensor:
    """Gather a slot's whole tensor on the CPU of the group's first rank; other ranks return their part."""
    part = slot.read().cpu().contiguous()
    if group is None:
        return part
    parts = [part] * group.size() if group.rank() == 0 else None
    # clone: pickling a view would send the whole parameter
    dist.gather_object(part.clone(), parts, group=group, group_dst=0)
    return part if parts is None else gather(parts, slot.shape)


def _planned_files(tables: Sequence[Mapping[str, _Entry]]) -> dict[str, list[str]]:
    """Map file names to tensor names. Each file holds tensors of one stage and at most SHARD_BYTES, unless a single
    tensor is larger: the tensors of a file are in memory twice while it is written.
    """
    shards: list[list[str]] = []
    for table in tables:
        shard_bytes = SHARD_BYTES
        for name, entry in table.items():
            size = _bytes(entry)
            if shard_bytes + size > SHARD_BYTES:
                shards.append([])
                shard_bytes = 0
            shards[-1].append(name)
            shard_bytes += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{index:05d}-of-{len(shards):05d}.safetensors": names for index, names in enumerate(shards, 1)}


def _bytes(entry: _Entry) -> int:
    """Return the size of the whole tensor in bytes."""
    return prod(entry.shape) * entry.dtype.itemsize


def _json_files(
    hf_config: Mapping[str, Any], entries: Mapping[str, _Entry], files: Mapping[str, list[str]]
) -> dict[str, str]:
    """Return the texts of config.json and, with several weight files, of their index."""
    # with the original dtype, transformers would round the weights to it
    dtype = reduce(torch.promote_types, (entry.dtype for entry in entries.values()))
    config = {key: value for key, value in hf_config.items() if key != "torch_dtype"}
    found = {"config.json": config | {"dtype": str(dtype).removeprefix("torch.")}}
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        size = sum(map(_bytes, entries.values()))
        found["model.safetensors.index.json"] = {"metadata": {"total_size": size}, "weight_map": weight_map}
    return {file: json.dumps(values, indent=2) + "\n" for file, values in found.items()}
