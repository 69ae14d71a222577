"""Map Hugging Face tensor names to views of a Megatron-Core GPTModel's parameters.

Covers q, k and v interleaved by query group, gate rows before up rows, tensor-parallel shards, pipeline stages, both
names of the norms (local spec and Transformer Engine), and a padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.layers.weight_slot import PartSlot, Slot, WeightSlot
from engine.loader.weights import EMBEDDING, LISTED_PROBLEMS, TIED_HEAD

EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
HEAD_PARAMETER = "output_layer.weight"


def weight_slots(
    model: nn.Module, vocab_size: int | None = None, tp_rank: int = 0, tp_size: int = 1
) -> dict[str, Slot]:
    """Map Hugging Face tensor names to slots in a GPTModel or one of its pipeline stages.

    `model` may be wrapped (DDP, Float16Module). `vocab_size`: the checkpoint's, if the model's is padded; the padding
    rows belong to no slot. A tied head has no entry. Raises one ModelError that lists every parameter that is missing,
    of another shape, or without a counterpart. After a write, call `reload_model_params` on an optimizer that keeps its
    own copy of the weights.
    """
    if not 0 <= tp_rank < tp_size:
        raise ModelError(f"tp_rank {tp_rank} is not between 0 and tp_size - 1 ({tp_size - 1})")
    model = unwrapped(model)
    table = _Table(model, tp_rank, tp_size)
    for name, parameter in vocabulary_parameters(model).items():
        table.vocabulary(name, parameter, vocab_size)
    for index, layer in enumerate(model.decoder.layers):
        table.layer(f"decoder.layers.{index}", f"model.layers.{layer.layer_number - 1}")
    if "decoder.final_layernorm.weight" in table.parameters:
        table.split("model.norm.weight", "decoder.final_layernorm.weight", (table.hidden,), None)
    table.problems += [f"{name} has no counterpart in a Hugging Face Llama or Qwen" for name in table.parameters]
    if table.problems:
        raise ModelError(
            f"this {type(model).__name__} can't hold a Hugging Face checkpoint as rank {tp_rank} of "
            f"{tp_size}: {listed(table.problems)}"
        )
    return table.slots


def named_weights(
    model: nn.Module, vocab_size: int | None = None, tp_rank: int = 0, tp_size: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) for every weight; with tp_size > 1, this rank's part (see `gather`).

    Arguments and errors as for `weight_slots`. Tensors alias the model's storage, except q, k and v, which are copies.
    """
    for name, slot in weight_slots(model, vocab_size, tp_rank, tp_size).items():
        yield name, slot.read()


def gather(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the whole tensor, of `shape`, from the parts of all tensor-parallel ranks in order of rank.

    Raises ModelError if the parts don't add up to `shape`, or if ranks differ in a tensor that is not split.
    """
    if all(tuple(part.shape) == shape for part in parts):
        if any(not torch.equal(part, parts[0]) for part in parts[1:]):
            raise ModelError(f"a weight of shape {list(shape)} that is not split differs between ranks; synchronise it")
        return parts[0]
    dim = next(dim for part in parts for dim, size in enumerate(part.shape) if size != shape[dim])
    whole = torch.cat(tuple(parts), dim)
    if tuple(whole.shape) != shape:
        raise ModelError(
            f"the parts of {len(parts)} ranks make {list(whole.shape)}, {list(shape)} is needed; pass "
            "the parts of every rank"
        )
    return whole


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the GPTModel inside wrappers that keep it as `module`. Raises ModelError if there is none."""
    inner: Any = model
    while not hasattr(inner, "decoder") and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if not hasattr(getattr(inner, "decoder", None), "layers") or not hasattr(inner, "config"):
        raise ModelError(f"{type(model).__name__} is not a Megatron-Core GPTModel: it has no config and decoder.layers")
    return inner


def vocabulary_parameters(model: nn.Module) -> dict[str, str]:
    """Map Hugging Face names to parameter names for the embedding and the head of this pipeline stage.

    With a tied head, the last stage holds a copy of the embedding as its output layer's weight.
    """
    present = {name for name, _ in model.named_parameters()}
    head = EMBEDDING if model.share_embeddings_and_output_weights else TIED_HEAD
    pairs = ((head, HEAD_PARAMETER), (EMBEDDING, EMBEDDING_PARAMETER))
    return {name: parameter for name, parameter in pairs if parameter in present}


def listed(problems: list[str]) -> str:
    """Join problems in one line; those beyond LISTED_PROBLEMS are only counted."""
    rest = len(problems) - LISTED_PROBLEMS
    return "; ".join(problems[:LISTED_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")


class _Table:
    """Slots and problems found so far. `parameters` holds the parameters that are not mapped yet."""

    def __init__(self, model: Any, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.parameters = dict(model.named_parameters())
        self.slots: dict[str, Slot] = {}
        self.problems: list[str] = []
        config = model.config
        self.hidden, self.ffn, self.head_dim = config.hidden_size, config.ffn_hidden_size, config.kv_channels
        self.heads = config.num_attention_heads
        self.groups = config.num_query_groups or self.heads

    def layer(self, path: str, name: str) -> None:
        """Add a decoder layer: `path` in the model, `name` in the checkpoint."""
        attention, mlp = f"{path}.self_attention", f"{path}.mlp"
        self.norm(
            f"{name}.input_layernorm.weight",
            f"{path}.input_layernorm.weight",
            f"{attention}.linear_qkv.layer_norm_weight",
        )
        q, kv = self.heads // self.groups * self.head_dim, self.head_dim
        self.merged(
            f"{name}.self_attn", f"{attention}.linear_qkv", {"q_proj": q, "k_proj": kv, "v_proj": kv}, self.groups
        )
        for which in "qk":
            if (parameter := f"{attention}.{which}_layernorm.weight") in self.parameters:
                self.split(f"{name}.self_attn.{which}_norm.weight", parameter, (self.head_dim,), None)
        self.output(f"{name}.self_attn.o_proj", f"{attention}.linear_proj", self.heads * self.head_dim)
        self.norm(
            f"{name}.post_attention_layernorm.weight",
            f"{path}.pre_mlp_layernorm.weight",
            f"{mlp}.linear_fc1.layer_norm_weight",
        )
        # each rank has its gate rows, then its up rows: as many groups as ranks
        self.merged(
            f"{name}.mlp",
            f"{mlp}.linear_fc1",
            dict.fromkeys(("gate_proj", "up_proj"), self.ffn // self.ranks),
            self.ranks,
        )
        self.output(f"{name}.mlp.down_proj", f"{mlp}.linear_fc2", self.ffn)

    def norm(self, name: str, *candidates: str) -> None:
        """Add a norm of the hidden state: a separate module (local spec) or part of the next linear layer (TE)."""
        present = [parameter for parameter in candidates if parameter in self.parameters]
        self.split(name, present[0] if present else " or ".join(candidates), (self.hidden,), None)

    def output(self, name: str, path: str, inputs: int) -> None:
        """Add a row-parallel linear [hidden, inputs]: its columns are split, its bias is replicated."""
        self.split(f"{name}.weight", f"{path}.weight", (self.hidden, inputs), 1)
        if f"{path}.bias" in self.parameters:
            self.split(f"{name}.bias", f"{path}.bias", (self.hidden,), None)

    def split(self, name: str, parameter: str, shape: tuple[int, ...], dim: int | None) -> None:
        """Add a tensor that equals the parameter, or the concatenation of all ranks' parameters along `dim`."""
        local_shape = list(shape)
        if dim is not None:
            local_shape[dim] = self.share(shape[dim], parameter)
        storage = self.take(parameter, tuple(local_shape))
        if storage is not None:
            self.put(name, storage, shape, dim or 0, 0 if dim is None else self.rank * local_shape[dim])

    def merged(self, name: str, path: str, parts: dict[str, int], groups: int) -> None:
        """Add a column-parallel linear that merges several tensors: each group holds some rows of each part.

        `parts`: rows of each part in a group. Ranks hold consecutive rows. A rank holds whole groups, or, with more
        ranks than query groups, a range of one group's rows in which some parts may have no rows.
        """
        rows = sum(parts.values())
        local_size = self.share(rows * groups, path)
        if groups % self.ranks and self.ranks % groups:
            self.problems.append(f"{path}: {groups} query groups can't be split over {self.ranks} ranks")
            return
        for kind, trailing in (("weight", (self.hidden,)), ("bias", ())):
            if kind == "bias" and f"{path}.bias" not in self.parameters:
                continue
            storage = self.take(f"{path}.{kind}", (local_size, *trailing))
            if storage is None:
                continue
            group, offset = divmod(self.rank * local_size, rows)
            local_rows = storage.view(max(local_size // rows, 1), min(local_size, rows), *trailing)
            part_start = 0
            for part, size in parts.items():
                # this part's rows within each group of this rank: low to high of the group's rows
                low, high = max(part_start, offset), min(part_start + size, offset + local_rows.shape[1])
                target = local_rows[:, low - offset : high - offset] if low < high else local_rows[:, :0]
                start = group * size + max(low - part_start, 0)
                self.put(f"{name}.{part}.{kind}", target, (groups * size, *trailing), 0, min(start, groups * size))
                part_start += size

    def vocabulary(self, name: str, parameter: str, vocab_size: int | None) -> None:
        """Add a tensor with a row per token. Rows beyond `vocab_size` are padding and belong to no slot."""
        rows = self.parameters[parameter].shape[0]
        storage = self.take(parameter, (rows, self.hidden))
        wanted = rows * self.ranks if vocab_size is None else vocab_size
        if wanted > rows * self.ranks:
            self.problems.append(
                f"{parameter} has {rows} rows on each of {self.ranks} ranks, too few for a vocabulary of {wanted}"
            )
        elif storage is not None:
            start = min(self.rank * rows, wanted)
            self.put(name, storage[: min(rows, wanted - start)], (wanted, self.hidden), 0, start)

    def share(self, size: int, what: str) -> int:
        """Return a rank's share of `size`; add a problem if it is not divisible."""
        if size % self.ranks:
            self.problems.append(f"{what}: {size} can't be split over {self.ranks} ranks")
        return size // self.ranks

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the storage of a parameter; add a problem and return None if it is missing or has another shape."""
        parameter = self.parameters.pop(name, None)
        if parameter is None:
            self.problems.append(f"{name} is missing")
        elif type(parameter.data) is not Tensor:
            # a view of a tensor subclass is a dequantised or gathered copy: writes would be lost
            self.problems.append(f"{name} is a {type(parameter.data).__name__}, a plain tensor is needed")
        elif tuple(parameter.shape) != shape:
            self.problems.append(f"{name} has shape {list(parameter.shape)}, {list(shape)} is needed")
        else:
            return parameter.data
        return None

    def put(self, name: str, target: Tensor, shape: tuple[int, ...], dim: int, start: int) -> None:
        plain = tuple(target.shape) == shape
        self.slots[name] = WeightSlot(target) if plain else PartSlot(target, shape, dim, start)
