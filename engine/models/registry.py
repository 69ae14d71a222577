"""Registry of supported architectures; builds configs and models.

To add a dense architecture, add a row to FAMILIES. Any other needs an entry in ENTRIES, with the config's reader and
the model's class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.models.config import Family, Fields, ModelConfig, read_model_config
from engine.models.dense import DenseModel
from engine.models.gemma3 import GEMMA3, Gemma3Model, read_gemma3_config
from engine.models.qwen3_moe import QWEN3_MOE, Qwen3MoeModel, read_qwen3_moe_config

FAMILIES = (
    Family(architecture="LlamaForCausalLM", model_type="llama", mlp_bias_key=True),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        qkv_bias=False,
        output_bias=False,
        window="always",
        default_window=4096,
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        qkv_bias=True,
        output_bias=False,
        window="flagged",
        default_window=4096,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        qk_norm=True,
        window="flagged",
        default_window=4096,
        default_head_dim=128,
    ),
)


class Entry(NamedTuple):
    """A supported architecture: what its config.json doesn't state, the reader of that file, and the model's class.

    `read_config` takes the arguments of `read_model_config`, `model` those of DenseModel.
    """

    family: Family
    read_config: Callable[[Mapping[str, Any], Family, str], ModelConfig] = read_model_config
    model: Callable[..., DenseModel] = DenseModel


ENTRIES = (
    *map(Entry, FAMILIES),
    Entry(QWEN3_MOE, read_qwen3_moe_config, Qwen3MoeModel),
    Entry(GEMMA3, read_gemma3_config, Gemma3Model),
)


def supported_architectures() -> tuple[str, ...]:
    """Return the supported architecture names, as in `architectures` of a config.json."""
    return tuple(entry.family.architecture for entry in ENTRIES)


def find_entry(values: Mapping[str, Any], where: str) -> Entry:
    """Return the entry for a config.json's content, by `architectures` or, if absent, by `model_type`.

    Raises ModelError if it is not supported.
    """
    named = values.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for entry in ENTRIES:
        family = entry.family
        if family.architecture in names or (not names and values.get("model_type") == family.model_type):
            return entry
    requested = ", ".join(names) or values.get("model_type") or "(none named)"
    raise ModelError(
        f"{where}: architecture {requested} is not supported; supported are {', '.join(supported_architectures())}"
    )


def config_from_dict(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Build a ModelConfig from a config.json's content; `where` names the file in errors. Raises ModelError."""
    entry = find_entry(values, where)
    return entry.read_config(values, entry.family, where)


def config_from_folder(folder: str | Path) -> ModelConfig:
    """Read `folder`/config.json, and more end-of-text ids from generation_config.json. Raises ModelError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; use a folder in Hugging Face layout (config.json, *.safetensors)")
    path = folder / "config.json"
    config = config_from_dict(read_json_object(path), str(path))
    generation = folder / "generation_config.json"
    if generation.exists():
        # chat models list their end-of-turn token only here
        extra_eos_ids = Fields(read_json_object(generation), str(generation)).token_ids("eos_token_id")
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra_eos_ids))))
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from `path`. Raises ModelError if it can't be read or is not an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model folder needs it (was the download complete?)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download the model again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} has a JSON {type(values).__name__}, expected an object; download the model again")
    return values


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    parallel: TensorParallel = SINGLE_RANK,
) -> DenseModel:
    """Create the uninitialised model of `config`, or this rank's shard of one.

    Raises ModelError if it can't be allocated or split.
    """
    model = next((entry.model for entry in ENTRIES if entry.family.architecture == config.architecture), DenseModel)
    try:
        return model(config, dtype, device, max_len, parallel)
    except (RuntimeError, MemoryError) as error:
        raise ModelError(
            f"{config.architecture} with {config.num_layers} layers of width {config.hidden_size} in {dtype} can't be "
            f"created on {device} ({error}); use a smaller model or dtype"
        ) from error
