"""Weights into a model: from safetensors shards, from a random seed, or from a trainer while the engine serves.

Owns reading, checking and the all-or-nothing rule of updates. Where a tensor goes is the model's table
(`weight_slots`). Reads shard by shard from memory-mapped files: there is never a second copy of the model in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError, WeightUpdateError
from engine.models.config import ModelConfig
from engine.models.dense import DenseModel
from engine.models.registry import build_model, config_from_folder, read_json_object
from graph_cache.validation import did_you_mean

READABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LISTED_PROBLEMS = 20


class Slot(Protocol):
    """What the model's table gives for a name; WeightSlot is the plain one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def write(self, tensor: Tensor) -> None: ...


def load_hf_folder(
    folder: str | Path, dtype: torch.dtype, device: torch.device | str, max_len: int | None = None
) -> tuple[ModelConfig, DenseModel]:
    """Read a folder in Hugging Face layout into a new model on `device`.

    max_len bounds positions (default: the model's context). Raises ModelError for whatever is wrong with the folder,
    naming the file; on return every parameter was read from it exactly once.
    """
    config = config_from_folder(folder)
    shards = safetensors_files(folder)
    model = build_model(config, dtype, device, max_len)
    load_weights(model, iterate_shards(shards), str(folder))
    return config, model


def safetensors_files(folder: str | Path) -> list[Path]:
    """The folder's weight files, in order: those of its index, or model.safetensors, or every *.safetensors."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index}: 'weight_map' should map tensor names to file names; fetch the model again")
        files = [folder / name for name in sorted(set(names.values()))]
        # an index that came with the weights must not reach out of their folder
        if outside := [str(path) for path in files if path.parent != folder]:
            raise ModelError(f"{index} names files outside its folder: {', '.join(outside)}")
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
        advice = f"convert {others} to safetensors" if others else "was the download complete?"
        raise ModelError(f"{folder} holds no *.safetensors; {advice}")
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names; fetch the model again")
    return files


def iterate_safetensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, CPU tensor) of every tensor in the folder's weight files; tensors alias the mapped file. ModelError."""
    return iterate_shards(safetensors_files(folder))


def iterate_shards(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, CPU tensor) of every tensor in these files, one file mapped at a time. Raises ModelError naming a file."""
    for path in files:
        try:
            shard = safe_open(path, framework="pt", device="cpu")
            names = list(shard.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is no readable safetensors file ({error}); fetch it again") from error
        with shard:
            for name in names:
                try:
                    tensor = shard.get_tensor(name)
                except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as error:
                    raise ModelError(f"{path}: tensor {name!r} can't be read ({error}); fetch it again") from error
                yield name, tensor


def load_weights(model: DenseModel, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Write every tensor to its place as it comes, and demand that each place is filled exactly once.

    A tied model's own lm_head (if equal to the embedding) and rotary inv_freq buffers are passed over. Raises one
    ModelError that lists missing, unexpected, repeated and misshapen tensors; the model is then unusable.
    """
    slots: dict[str, Slot] = dict(model.weight_slots())
    unfilled = dict.fromkeys(slots)
    problems: list[str] = []
    head: Tensor | None = None
    for name, tensor in tensors:
        if _is_rotary_buffer(name):
            continue
        if name == TIED_HEAD and name not in slots:
            head = tensor
            continue
        problem = _tensor_problem(slots, name, tensor)
        if problem is None and name not in unfilled:
            problem = f"{name} comes twice"
        if problem is None:
            slots[name].write(tensor)
        else:
            problems.append(problem)
        unfilled.pop(name, None)
    if head is not None and EMBEDDING not in unfilled:
        problems += _tied_problem(head, slots[EMBEDDING].read())
    problems += [f"{name} is missing" for name in unfilled]
    if problems:
        raise ModelError(f"{source} does not fit {model.config.architecture}: {_join_problems(problems)}")


def load_dummy(model: DenseModel, seed: int = 0) -> None:
    """Fill the model with random weights (norms 1, all else normal with deviation 0.02), the same for equal seeds.

    Random numbers are drawn on the model's device: a CPU's and a GPU's differ.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, tensor in model.named_weights():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)


def stage_update(
    slots: Mapping[str, Slot],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    complete: bool = False,
    check_finite: bool = False,
) -> int:
    """Replace weights in place, all or none; returns the count of tensors. Addresses stay as they were.

    `slots`: a model's `weight_slots()`. Takes (Hugging Face name, tensor) pairs of any floating dtype on any device; a
    part of the weights is allowed unless `complete`. All pairs are drawn and checked before the first write, so the
    tensors must stay as they are until this returns. Raises one WeightUpdateError that lists every problem. Call it
    between steps, on the loop's thread.
    """
    staged: dict[str, Tensor] = {}
    problems: list[str] = []
    head: Tensor | None = None
    for index, item in enumerate(tensors):
        if not _is_pair(item):
            problems.append(f"item {index} is {type(item).__name__}, a (name, tensor) pair is needed")
            continue
        name, tensor = item
        if _is_rotary_buffer(name):
            continue
        if name == TIED_HEAD and name not in slots:
            head = tensor
            continue
        problem = _tensor_problem(slots, name, tensor)
        if problem is None and name in staged:
            problem = f"{name} comes twice"
        if problem is None and check_finite and not bool(torch.isfinite(tensor).all()):
            problem = f"{name} holds NaN or infinity"
        if problem is None:
            staged[name] = tensor
        else:
            problems.append(problem)
    if head is not None:
        slot = slots[EMBEDDING]  # which may hold a part of it
        if EMBEDDING in staged or head.shape != slot.shape:
            problems += _tied_problem(head, staged.get(EMBEDDING, slot.read()))
        else:
            problems += _tied_problem(slot.part_of(head), slot.read())
    if complete:
        problems += [f"{name} is missing" for name in slots if name not in staged]
    if not staged and not problems:
        problems.append("it holds no tensors; was the iterable used up?")
    if problems:
        raise WeightUpdateError(f"weight update refused, the old weights still serve: {_join_problems(problems)}")
    for name, tensor in staged.items():
        slots[name].write(tensor)
    return len(staged)


def _is_rotary_buffer(name: str) -> bool:
    """Old checkpoints carry rotary frequencies, which the config determines."""
    return name.endswith("rotary_emb.inv_freq")


def _is_pair(item: Any) -> bool:
    """Whether item is (str, Tensor)."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _tensor_problem(slots: dict[str, Slot], name: str, tensor: Tensor) -> str | None:
    """Why `tensor` can't be written as `name`, or None."""
    slot = slots.get(name)
    if slot is None:
        return f"{name} is unexpected{did_you_mean(name, slots)}"
    if tensor.dtype not in READABLE_DTYPES:
        return f"{name} has dtype {tensor.dtype}, one of {', '.join(map(str, READABLE_DTYPES))} is needed"
    if tuple(tensor.shape) != slot.shape:
        return f"{name} has shape {list(tensor.shape)}, {list(slot.shape)} is needed"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return f"{name} holds no dense data (device {tensor.device}, layout {tensor.layout})"
    return None


def _tied_problem(head: Tensor, embedding: Tensor) -> list[str]:
    """A tied model has one matrix: another head than the embedding can't be honoured and must not be dropped."""
    if head.shape == embedding.shape and torch.equal(head.to(embedding), embedding):
        return []
    return [f"{TIED_HEAD} differs from {EMBEDDING}, but the config ties them (tie_word_embeddings)"]


def _join_problems(problems: list[str]) -> str:
    """Problems in one line; beyond LISTED_PROBLEMS only their count."""
    unlisted = len(problems) - LISTED_PROBLEMS
    return "; ".join(problems[:LISTED_PROBLEMS]) + (f"; and {unlisted} more" if unlisted > 0 else "")
