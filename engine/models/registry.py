"""Registry of supported architectures; builds configs and models.

To add an architecture that its options describe, add a row to FAMILIES in dense.py. Any other needs an entry in
ENTRIES, with the config's reader or the model's class. Another package adds a family with an entry point in the group
`encore.models`, which names an Entry; see docs/adding-a-model.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.checkpoint.json_files import read_json_object
from engine.checkpoint.pooling_config import is_embedding_folder
from engine.checkpoint.quantization import quantization_values
from engine.checkpoint.safetensors_names import tensor_names
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.layers.weight_method import WeightMethods, plain_weights
from engine.models.cohere import COHERE, COHERE2, read_cohere2_config
from engine.models.config import Family, Fields, ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.models.dense import FAMILIES
from engine.models.exaone4 import EXAONE4, read_exaone4_config
from engine.models.gemma import GEMMA, GEMMA2, GEMMA3, read_gemma_config
from engine.models.glm4_moe import GLM4_MOE, read_glm4_moe_config
from engine.models.gpt_neox import GPT_NEOX, read_gpt_neox_config
from engine.models.gpt_oss import GPT_OSS, read_gpt_oss_config
from engine.models.granite import GRANITE, read_granite_config
from engine.models.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED, read_granite_moe_config
from engine.models.interface import Model
from engine.models.mixtral import MIXTRAL, read_mixtral_config
from engine.models.olmoe import OLMOE, read_olmoe_config
from engine.models.qwen_moe import QWEN2_MOE, QWEN3_MOE, read_qwen2_moe_config, read_qwen3_moe_config
from engine.models.smollm3 import SMOLLM3, read_smollm3_config
from graph_cache.utils.validation import is_whole_number

ENTRY_POINT_GROUP = "encore.models"
CLASSIFIER = "ForSequenceClassification"
HEADLESS = ("Model", CLASSIFIER)
"""Ends of the names of architectures that are a decoder of a `…ForCausalLM` without its LM head, the second with a
classification head, `score.weight`."""


class Entry(NamedTuple):
    """A supported architecture: its options, the reader of its config.json, and the model's class.

    `read_config` takes the arguments of `read_model_config`, `model` the arguments of Decoder.
    """

    family: Family
    read_config: Callable[[Mapping[str, Any], Family, str], ModelConfig] = read_model_config
    model: Callable[..., Model] = Decoder


ENTRIES = (
    *map(Entry, FAMILIES),
    Entry(QWEN3_MOE, read_qwen3_moe_config),
    Entry(QWEN2_MOE, read_qwen2_moe_config),
    Entry(MIXTRAL, read_mixtral_config),
    Entry(GPT_OSS, read_gpt_oss_config),
    Entry(GLM4_MOE, read_glm4_moe_config),
    Entry(OLMOE, read_olmoe_config),
    Entry(GRANITE_MOE, read_granite_moe_config),
    Entry(GRANITE_MOE_SHARED, read_granite_moe_config),
    Entry(GEMMA, read_gemma_config),
    Entry(GEMMA2, read_gemma_config),
    Entry(GEMMA3, read_gemma_config),
    Entry(GRANITE, read_granite_config),
    Entry(SMOLLM3, read_smollm3_config),
    Entry(COHERE),
    Entry(COHERE2, read_cohere2_config),
    Entry(EXAONE4, read_exaone4_config),
    Entry(GPT_NEOX, read_gpt_neox_config),
)


def installed_entries() -> tuple[Entry, ...]:
    """Return the entries of other installed packages, in the order of their names.

    Read from the installed packages at each call, so that every process of an engine finds the same ones. Raises
    ModelError for an entry point that can't be imported or is no Entry, and for an architecture or model type that
    another entry has.
    """
    found: list[Entry] = []
    owner = {name: "the engine" for entry in ENTRIES for name in (entry.family.architecture, entry.family.model_type)}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)):
        entry = _load(point)
        for name in (entry.family.architecture, entry.family.model_type):
            if name in owner:
                raise ModelError(f"{_where(point)} registers {name!r}, which {owner[name]} has already: rename one")
            owner[name] = _where(point)
        found.append(entry)
    return tuple(found)


def _load(point: EntryPoint) -> Entry:
    try:
        entry = point.load()
    except Exception as error:  # any error of another package's module
        raise ModelError(f"{_where(point)} can't be imported ({type(error).__name__}: {error})") from error
    if not isinstance(entry, Entry):
        raise ModelError(f"{_where(point)} is a {type(entry).__name__}: name an engine.models.registry.Entry")
    return entry


def _where(point: EntryPoint) -> str:
    package = f" of {point.dist.name}" if point.dist is not None else ""
    return f"entry point {point.name} = {point.value!r}{package} in group {ENTRY_POINT_GROUP!r}"


def supported_architectures() -> tuple[str, ...]:
    """Return the supported architecture names, as in `architectures` of a config.json."""
    return tuple(entry.family.architecture for entry in (*ENTRIES, *installed_entries()))


def find_entry(values: Mapping[str, Any], where: str) -> Entry:
    """Return the entry for a config.json's content, by `architectures` or, if absent, by `model_type`.

    The engine's own entries come first; other packages are looked up only for what those lack. Raises ModelError if it
    is not supported.
    """
    names = _names(values)
    model_type = values.get("model_type")
    entry = _match(ENTRIES, names, model_type) or _match(installed_entries(), names, model_type)
    if entry is not None:
        return entry
    requested = ", ".join(names) or model_type or "(none named)"
    raise ModelError(
        f"{where}: architecture {requested} is not supported; supported are {', '.join(supported_architectures())}"
    )


def _names(values: Mapping[str, Any]) -> list[str]:
    named = values.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _match(entries: Sequence[Entry], names: Sequence[str], model_type: Any) -> Entry | None:
    for entry in entries:
        if entry.family.architecture in names or (not names and model_type == entry.family.model_type):
            return entry
    for entry in entries:
        if any(not _headless(entry, end).isdisjoint(names) for end in HEADLESS):
            return entry
    return None


def config_from_dict(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Build a ModelConfig from a config.json's content; `where` names the file in errors. Raises ModelError."""
    entry = find_entry(values, where)
    for key, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        if values.get(key) not in (None, causal):
            raise Fields(values, where).error(key, f"{str(causal).lower()}: attention to later tokens is not supported")
    config = entry.read_config(values, entry.family, where)
    variant = _variant(values, entry)
    if variant is None:
        return config
    # Tied, the head takes no memory; its logits are never used.
    labels = _num_labels(values, where) if variant == CLASSIFIER else 0
    return replace(config, has_lm_head=False, tie_word_embeddings=True, head_bias=False, num_labels=labels)


def _variant(values: Mapping[str, Any], entry: Entry) -> str | None:
    """Return the end of an architecture's name that stands for a decoder without LM head; None for one with it."""
    named = _names(values)
    if entry.family.architecture in named:
        return None
    return next((end for end in HEADLESS if not _headless(entry, end).isdisjoint(named)), None)


def _headless(entry: Entry, end: str) -> frozenset[str]:
    """Return the names in transformers of a decoder without LM head: Qwen3Model, Gemma3TextModel."""
    stem = entry.family.architecture.removesuffix("ForCausalLM")
    return frozenset({f"{stem}{end}", f"{stem}Text{end}"})


def _num_labels(values: Mapping[str, Any], where: str) -> int:
    names = values.get("id2label")
    count = len(names) if isinstance(names, Mapping) and names else values.get("num_labels", 2)  # 2 as in transformers
    if not is_whole_number(count, 1, 2**16):
        raise ModelError(f"{where}: 'num_labels' must be a whole number of at least 1, found {count!r}")
    return count


def config_from_folder(folder: str | Path) -> ModelConfig:
    """Read `folder`/config.json, and more end-of-text ids from generation_config.json. Raises ModelError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; use a folder in Hugging Face layout (config.json, *.safetensors)")
    path = folder / "config.json"
    config = config_from_dict(quantization_values(folder, read_json_object(path)), str(path))
    generation = folder / "generation_config.json"
    if generation.exists():
        # chat models list their end-of-turn token only here
        extra_eos_ids = Fields(read_json_object(generation), str(generation)).token_ids("eos_token_id")
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra_eos_ids))))
    if not config.tie_word_embeddings and is_embedding_folder(folder) and not _has_tensor(folder, config.names.head):
        config = replace(config, has_lm_head=False, tie_word_embeddings=True, head_bias=False)
    return config


def _has_tensor(folder: Path, module: str) -> bool:
    """Whether the folder's weights have the weight of a module; True if there are no weights yet to tell."""
    name = f"{module}.weight"
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return name in (read_json_object(index).get("weight_map") or {})
    files = sorted(folder.glob("*.safetensors"))
    return not files or any(name in tensor_names(path) for path in files)


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    parallel: TensorParallel = SINGLE_RANK,
    methods: WeightMethods = plain_weights,
) -> Model:
    """Create the uninitialised model of `config`, or this rank's shard of one.

    `methods` chooses the weight method of each linear layer. Raises ModelError if the model can't be allocated or
    split, and if it is no Decoder and would need other methods than the plain one.
    """
    entry = find_entry({"architectures": [config.architecture]}, "the model's config")
    model = entry.model
    arguments: tuple[Any, ...] = (config, dtype, device, max_len, parallel)
    if methods is not plain_weights:
        if not (isinstance(model, type) and issubclass(model, Decoder)):
            raise ModelError(f"{config.architecture} can't be quantised: its class stores plain weights only")
        arguments += (methods,)
    try:
        return model(*arguments)
    except (RuntimeError, MemoryError) as error:
        raise ModelError(
            f"{config.architecture} with {config.num_layers} layers of width {config.hidden_size} in {dtype} can't be "
            f"created on {device} ({error}); use a smaller model or dtype"
        ) from error
