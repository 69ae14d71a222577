"""Load weights from safetensors shards or a random seed, and apply all-or-nothing updates while the engine serves.

The model's `weight_slots` maps tensor names to storage. Shards are memory-mapped and read one at a time, so memory
never holds a second copy of the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.json_files import read_json_object
from engine.checkpoint.regular_files import require_regular_file
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError, WeightUpdateError
from engine.layers.formats.slots import PLAIN_DTYPES, PLAIN_NAME, CheckpointSlot, plain_slots
from engine.layers.weight_slot import Slot, WeightSlot
from engine.loader.quantized import weight_methods
from engine.models.config import ModelConfig, TensorNames
from engine.models.interface import Model
from engine.models.registry import build_model, config_from_folder
from engine.utils.progress import Progress
from graph_cache.utils.validation import did_you_mean

READABLE_DTYPES = PLAIN_DTYPES
NAMES = TensorNames()
TIED_HEAD, EMBEDDING = f"{NAMES.head}.weight", f"{NAMES.embedding}.weight"
"""The usual names; a family may have others."""
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Ends of the names of scales for a quantised KV cache, which a cache in the model's dtype doesn't use."""

LISTED_PROBLEMS = 20


def load_hf_folder(
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    parallel: TensorParallel = SINGLE_RANK,
) -> tuple[ModelConfig, Model]:
    """Load a folder in Hugging Face layout into a new model on `device`, or into this rank's shard of one.

    max_len bounds positions (default: the model's context length). On return every parameter was read exactly once; a
    rank reads only the parts of the files that it stores. Raises ModelError naming the file for an invalid folder.
    """
    config = config_from_folder(folder)
    files = safetensors_files(folder)  # raises before the model is allocated
    model = build_model(config, dtype, device, max_len, parallel, weight_methods(config, parallel, files))
    load_folder_weights(model, folder)
    return config, model


def load_folder_weights(model: Model, folder: str | Path, progress: Progress | None = None) -> None:
    """Load the weights of a folder in Hugging Face layout into `model`. Raises ModelError naming the file."""
    load_weights(model, iterate_shards(safetensors_files(folder)), str(folder), progress)


def safetensors_files(folder: str | Path) -> list[Path]:
    """Return the folder's weight files in order: the index's files, else model.safetensors, else *.safetensors."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index}: 'weight_map' should map tensor names to file names; download the model again")
        files = [folder / name for name in sorted(set(names.values()))]
        # an untrusted index must not read files outside its folder
        if outside := [str(path) for path in files if path.parent != folder]:
            raise ModelError(f"{index} names files outside its folder: {', '.join(outside)}")
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
        advice = f"convert {others} to safetensors" if others else "was the download complete?"
        raise ModelError(f"{folder} has no *.safetensors; {advice}")
    if missing := [path.name for path in files if not path.exists()]:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, listed in its index; download the model again")
    return files


def iterate_safetensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) of every tensor in the folder; tensors alias the mapped file. Raises ModelError."""
    return iterate_shards(safetensors_files(folder))


def iterate_shards(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) of every tensor, mapping one file at a time. Raises ModelError naming the file."""
    for path in files:
        require_regular_file(path)
        try:
            shard = safe_open(path, framework="pt", device="cpu")
            names = list(shard.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}); download it again") from error
        with shard:
            for name in names:
                try:
                    tensor = shard.get_tensor(name)
                except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as error:
                    raise ModelError(f"{path}: tensor {name!r} can't be read ({error}); download it again") from error
                yield name, tensor


def load_weights(
    model: Model, tensors: Iterable[tuple[str, Tensor]], source: str, progress: Progress | None = None
) -> None:
    """Write every tensor to its slot as it is read, and check that each slot is filled exactly once.

    Ignores buffers that the config determines, and the head in a tied model if it equals the embedding; of a quantised
    checkpoint, scales of the KV cache. Raises one ModelError that lists missing, unexpected, repeated and misshapen
    tensors, and scales and indices with impossible values; the model is then unusable.
    """
    slots, names = model.weight_slots(), model.config.names
    tied_head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    unfilled = dict.fromkeys(slots)
    quantized = model.config.quantization is not None
    problems: list[str] = []
    head: Tensor | None = None
    for name, tensor in model.split_stacked(tensors):
        if progress is not None:
            progress(len(slots) - len(unfilled), len(slots))
        name = _slot_name(name, slots, names.root)
        if name.endswith(names.unused) or (quantized and name.endswith(KV_SCALES) and name not in slots):
            continue
        if name == tied_head and name not in slots:
            head = tensor
            continue
        problem = _tensor_problem(slots, name, tensor)
        if problem is None and name not in unfilled:
            problem = f"{name} appears twice"
        if problem is None:
            slots[name].write(tensor)
        else:
            problems.append(problem)
        unfilled.pop(name, None)
    if progress is not None:
        progress(len(slots) - len(unfilled), len(slots))
    if head is not None and embedding not in unfilled and model.config.has_lm_head:
        problems += _tied_head_problem(head, slots[embedding], names)
    filled = slots.keys() - unfilled.keys()
    problems += [f"{name} is missing" for name in unfilled if _is_missing(slots[name], name, filled)]
    if problems:
        raise ModelError(f"{source} does not fit {model.config.architecture}: {_join_problems(problems)}")


class LoadableModel(Protocol):
    """A model whose weights can be written."""

    @property
    def device(self) -> torch.device: ...

    def weight_slots(self) -> Mapping[str, Slot]: ...


def load_dummy(model: LoadableModel, seed: int = 0) -> None:
    """Fill the model with random weights: norms 1, all others normal with standard deviation 0.02.

    Each whole tensor is generated on the model's device from the seed and its name, so the values of a shard do not
    depend on the number of ranks. A CPU's and a GPU's values differ.
    """
    slots = model.weight_slots()
    plain: dict[str, Slot] = {name: slot for name, slot in slots.items() if not isinstance(slot, CheckpointSlot)}
    for name, slot in (plain | plain_slots(slots)).items():
        if type(slot) is WeightSlot:
            _fill_dummy(name, slot.target, seed)  # in place: a copy of a large embedding would take memory
        else:
            whole = torch.empty(slot.shape, dtype=slot.dtype, device=model.device)
            _fill_dummy(name, whole, seed)
            slot.write(whole)


def _fill_dummy(name: str, tensor: Tensor, seed: int) -> None:
    if name.endswith("norm.weight"):
        tensor.fill_(1.0)
    else:
        generator = torch.Generator(tensor.device).manual_seed(seed ^ zlib.crc32(name.encode()))
        tensor.normal_(0.0, 0.02, generator=generator)


def check_update(
    slots: Mapping[str, Slot],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    complete: bool = False,
    check_finite: bool = False,
    names: TensorNames = NAMES,
) -> dict[str, Tensor]:
    """Check new weights for `write_update` and return them by name.

    `slots` is a model's `weight_slots()`, `names` are its config's. `tensors` yields (Hugging Face name, tensor) pairs
    of any floating dtype on any device; a subset of the weights is accepted unless `complete`. `check_finite` also
    rejects NaN and infinity. A quantised matrix is updated by its plain tensor, `….weight`, which is then quantised, or
    by all of its checkpoint tensors. Raises one WeightUpdateError that lists every problem.
    """
    staged: dict[str, Tensor] = {}
    plain = plain_slots(slots)
    known = slots.keys() | plain.keys()
    tied_head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    problems: list[str] = []
    head: Tensor | None = None
    for index, item in enumerate(tensors):
        if not _is_pair(item):
            problems.append(f"item {index} is {type(item).__name__}, expected a (name, tensor) pair")
            continue
        name, tensor = _slot_name(item[0], known, names.root), item[1]
        if name.endswith(names.unused):
            continue
        if name == tied_head and name not in slots:
            head = tensor
            continue
        problem = _tensor_problem(plain if _is_plain(plain, name, tensor) else slots, name, tensor)
        if problem is None and name in staged:
            problem = f"{name} appears twice"
        if problem is None:
            staged[name] = tensor
        else:
            problems.append(problem)
    if head is not None:
        slot = slots[embedding]  # may hold only this rank's part of the embedding
        if embedding in staged or head.shape != slot.shape:
            problems += _tied_problem(head, staged.get(embedding, slot.read()), names)
        else:
            problems += _tied_head_problem(head, slot, names)
    if check_finite:
        stored = {name: plain[name].dtype if _is_plain(plain, name, one) else slots[name].dtype
                  for name, one in staged.items()}  # fmt: skip
        problems += _not_finite(staged, stored)
    problems += _matrix_problems(slots, plain, staged, complete)
    if complete:
        others = (name for name, slot in slots.items() if not isinstance(slot, CheckpointSlot))
        problems += [f"{name} is missing" for name in others if name not in staged]
    if not staged and not problems:
        problems.append("it has no tensors; was the iterable already consumed?")
    if problems:
        raise WeightUpdateError(f"weight update rejected, the old weights still serve: {_join_problems(problems)}")
    return staged


def _not_finite(tensors: Mapping[str, Tensor], stored: Mapping[str, torch.dtype]) -> list[str]:
    """Describe the tensors with NaN or an infinity, also one that only the conversion to the stored dtype gives.

    Reads each tensor once and allocates nothing of its size. The host waits for a device once, not for every tensor.
    """
    names: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    ends: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # PyTorch has no minimum of fp8
            dtype = stored[name] if stored[name] in PLAIN_DTYPES else wide.dtype
            kind = wide.device, dtype
            names.setdefault(kind, []).append(name)
            ends.setdefault(kind, []).extend(end.to(dtype) for end in torch.aminmax(wide))  # both are NaN if any is
    found = []
    for kind, pairs in ends.items():
        finite = torch.isfinite(torch.stack(pairs)).view(-1, 2).all(1).tolist()
        for name, is_finite in zip(names[kind], finite, strict=True):
            if not is_finite:
                converted = f" as {kind[1]}" if tensors[name].dtype != kind[1] else ""
                found.append(f"{name} contains NaN or infinity{converted}")
    return found


def write_update(slots: Mapping[str, Slot], staged: Mapping[str, Tensor]) -> None:
    """Write tensors that `check_update` returned in place; addresses don't change. Call it between steps."""
    plain = plain_slots(slots)
    for name, tensor in staged.items():
        (plain if _is_plain(plain, name, tensor) else slots)[name].write(tensor)


def stage_update(
    slots: Mapping[str, Slot],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    complete: bool = False,
    check_finite: bool = False,
    names: TensorNames = NAMES,
) -> int:
    """Replace weights in place, all or none; return the number of tensors written. See `check_update`.

    All pairs are read and checked before the first write, so the tensors must not change until this returns.
    """
    staged = check_update(slots, tensors, complete=complete, check_finite=check_finite, names=names)
    write_update(slots, staged)
    return len(staged)


def _is_plain(plain: Mapping[str, Slot], name: str, tensor: Tensor) -> bool:
    """Return whether `tensor` is the plain form of a quantised matrix."""
    return name in plain and tensor.dtype in READABLE_DTYPES


def _is_missing(slot: Slot, name: str, found: Collection[str]) -> bool:
    """Return whether a tensor that is needed is not in `found`, under another name either."""
    if name in found or not isinstance(slot, CheckpointSlot):
        return name not in found
    prefix = name.rpartition(".")[0]
    return slot.required and not any(f"{prefix}.{other}" in found for other in slot.others)


def _matrix_problems(
    slots: Mapping[str, Slot], plain: Mapping[str, Slot], staged: Mapping[str, Tensor], complete: bool
) -> list[str]:
    """Return the problems of quantised matrices of which an update has some tensors, or, if `complete`, none."""
    problems = []
    matrices: dict[Hashable, list[tuple[str, CheckpointSlot]]] = {}
    for name, slot in slots.items():
        if isinstance(slot, CheckpointSlot):
            matrices.setdefault(slot.matrix, []).append((name, slot))
    for tensors in matrices.values():
        plain_name = f"{tensors[0][0].rpartition('.')[0]}.{PLAIN_NAME}"
        has_plain = plain_name in staged and _is_plain(plain, plain_name, staged[plain_name])
        sent = [name for name, _ in tensors if name in staged and not (has_plain and name == plain_name)]
        missing = [name for name, slot in tensors if _is_missing(slot, name, staged)]
        if has_plain and sent:
            problems.append(f"{plain_name} is a plain weight, but {', '.join(sent)} of its quantised form came too")
        elif not has_plain and (sent or complete):
            problems += [f"{name} is missing, and {plain_name} is no plain weight either" for name in missing]
    return problems


def _slot_name(name: str, known: Collection[str], root: str) -> str:
    """Return the name of a tensor's slot. Checkpoints of a decoder without head leave out the prefix `root`."""
    return f"{root}.{name}" if name not in known and f"{root}.{name}" in known else name


def _is_pair(item: Any) -> bool:
    """Return whether item is a (str, Tensor) pair."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _tensor_problem(slots: Mapping[str, Slot], name: str, tensor: Tensor) -> str | None:
    """Return why `tensor` can't be written as `name`, or None if it can."""
    slot = slots.get(name)
    if slot is None:
        return f"{name} is unexpected{did_you_mean(name, slots)}"
    if isinstance(slot, CheckpointSlot):
        problem = slot.problem(tensor)
        return None if problem is None else f"{name} {problem}"
    if tensor.dtype not in READABLE_DTYPES:
        return f"{name} has dtype {tensor.dtype}, expected one of {', '.join(map(str, READABLE_DTYPES))}"
    if tuple(tensor.shape) != slot.shape:
        return f"{name} has shape {list(tensor.shape)}, expected {list(slot.shape)}"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return f"{name} has no dense data (device {tensor.device}, layout {tensor.layout})"
    return None


def _tied_problem(head: Tensor, embedding: Tensor, names: TensorNames) -> list[str]:
    """Check a tied model's head against its embedding. A different head can't be stored; don't drop it silently."""
    if head.shape == embedding.shape and torch.equal(head.to(embedding), embedding):
        return []
    return [
        f"{names.head}.weight differs from {names.embedding}.weight, but the config ties them (tie_word_embeddings)"
    ]


def _tied_head_problem(head: Tensor, slot: Slot, names: TensorNames) -> list[str]:
    """Check a tied model's whole head against the stored embedding, of which a rank may hold a part."""
    return _tied_problem(slot.part_of(head) if head.shape == slot.shape else head, slot.read(), names)


def _join_problems(problems: list[str]) -> str:
    """Join problems into one line; beyond LISTED_PROBLEMS give only their count."""
    unlisted = len(problems) - LISTED_PROBLEMS
    return "; ".join(problems[:LISTED_PROBLEMS]) + (f"; and {unlisted} more" if unlisted > 0 else "")
