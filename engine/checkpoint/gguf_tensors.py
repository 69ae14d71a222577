"""How the tensors of a checkpoint are made of the tensors of a GGUF file: names, row order, joined experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.gguf_families import GGUFFamily
from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_rope import FACTOR_TENSORS
from engine.errors import ModelError

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class Weight(NamedTuple):
    """A tensor of a checkpoint: `arrange` makes it of the tensors `sources` of the file.

    moves_rows: `arrange` only moves whole rows of one tensor, so that it can also move the codes of a quantised one.
    """

    sources: tuple[str, ...]
    arrange: Callable[..., Tensor]
    moves_rows: bool = False


def map_tensors(file: GGUFFile, family: GGUFFamily, config: Mapping[str, Any]) -> dict[str, Weight]:
    """Map the names of the checkpoint's tensors to the tensors of a file. Raises ModelError for one without a place."""
    layers = f"{family.top['token_embd'].rpartition('.')[0]}.layers"
    found: dict[str, Weight] = {}
    for source in file.tensors:
        match = _LAYER.fullmatch(source)
        if match is None:
            if source not in FACTOR_TENSORS:  # they belong to the config
                name = _name_of(source, family.top, family, file)
                found[name] = _arranged(source, name, family, config)
        elif int(match[1]) < config["num_hidden_layers"]:
            for name, weight in _layer_weights(match, file, family, config):
                found[f"{layers}.{match[1]}.{name}"] = weight
        elif not file.metadata.get(f"{family.name}.nextn_predict_layers"):  # else it is a layer for drafts
            raise ModelError(
                f"{file.path}: tensor {source!r} is not part of a model of {config['num_hidden_layers']} layers"
            )
    return found


def _layer_weights(
    match: re.Match[str], file: GGUFFile, family: GGUFFamily, config: Mapping[str, Any]
) -> Iterator[tuple[str, Weight]]:
    """Yield the tensor of the checkpoint that a layer's tensor of the file is, or is the first part of."""
    source, name = match[0], match[2]
    prefix = source.removesuffix(name)
    pairs = [pair.split() for pair in family.whole if " " in pair]
    if any(name == second and prefix + first in file.tensors for first, second in pairs):
        return
    parts = next((pair for pair in pairs if pair[0] == name), [name])
    found = family.whole.get(" ".join(parts)) or _name_of(name, family.layer, family, file, source)
    sources = tuple(prefix + part for part in parts)
    for part in sources:
        file.info(part)  # raises if it is missing
    if "_exps." in name or len(sources) > 1:
        yield found, Weight(sources, _interleaved if family.experts_interleaved else _joined)
    else:
        yield found, _arranged(source, found, family, config)


def _name_of(name: str, names: Mapping[str, str], family: GGUFFamily, file: GGUFFile, source: str = "") -> str:
    """Return a checkpoint's name of a tensor, whose suffix stays."""
    stem, _, suffix = name.rpartition(".")
    if stem not in names:
        raise ModelError(f"{file.path}: tensor {source or name!r} is not part of a {family.name} model")
    return f"{names[stem]}.{suffix}"


def _arranged(source: str, name: str, family: GGUFFamily, config: Mapping[str, Any]) -> Weight:
    """Return how one tensor of the file, which is not of experts, becomes the checkpoint's tensor `name`."""
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    part = name.rpartition(".")[0]
    if family.rows_interleaved and part in heads:
        return Weight((source,), partial(_rotate_half_order, count=config[heads[part]]), moves_rows=True)
    if family.qkv_by_head and part == "attention.query_key_value":
        return Weight((source,), partial(_by_head, count=config["num_attention_heads"]), moves_rows=True)
    if family.norms_plus_one and name.endswith("norm.weight"):
        return Weight((source,), _minus_one)
    if part == "mlp.shared_expert_gate":
        return Weight((source,), _one_row)
    return Weight((source,), _same, moves_rows=True)


# ---- arrangements of tensors, also without data ---------------------------------------------------------------------


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _minus_one(tensor: Tensor) -> Tensor:
    return tensor - 1.0


def _one_row(tensor: Tensor) -> Tensor:
    """Return [h] as [1, h]."""
    return tensor.reshape(1, -1)


def _rotate_half_order(tensor: Tensor, count: int) -> Tensor:
    """Undo the interleaving of the two halves of the rows of each of `count` heads."""
    rows = tensor.shape[0]
    if rows % (2 * count):
        raise RuntimeError(f"{rows} rows are not a multiple of 2 x {count} heads")
    return tensor.view(count, rows // (2 * count), 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _by_head(tensor: Tensor, count: int) -> Tensor:
    """Bring the rows of q, k and v of each of `count` heads together."""
    rows = tensor.shape[0]
    if rows % (3 * count):
        raise RuntimeError(f"{rows} rows are not a multiple of 3 x {count} heads")
    return tensor.view(3, count, rows // (3 * count), *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def _joined(first: Tensor, second: Tensor | None = None) -> Tensor:
    """Join the rows of gate and up, of one MLP or of each expert."""
    return first if second is None else torch.cat((first, second), dim=-2)


def _interleaved(first: Tensor, second: Tensor | None = None) -> Tensor:
    """Let the rows, or biases, of gate and up of each expert take turns. Matrices are transposed."""
    rows = first if second is None else torch.stack((first, second), dim=2).flatten(1, 2)
    return rows.mT if rows.dim() == 3 else rows
