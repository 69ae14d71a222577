"""Read how a folder's vectors and scores are made: the files of sentence-transformers, and keys of config.json.

modules.json lists the modules: the transformer, its pooling, and normalisation; or, for a reranker, the logits of two
tokens. A module or a value that the engine can't compute is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf_file import open_gguf
from engine.checkpoint.json_files import read_json_object
from engine.checkpoint.regular_files import read_limited_text
from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.protocol.pooling import PoolingConfig
from graph_cache.utils.validation import is_whole_number

MODULES = "modules.json"
TRANSFORMER = "sentence_bert_config.json"
REMEDY = "use another model, or remove modules.json to pool the last token and normalise"
MODES = {
    "lasttoken": "last", "pooling_mode_lasttoken": "last",
    "mean": "mean", "pooling_mode_mean_tokens": "mean",
}  # fmt: skip
ACTIVATION_KEYS = ("sbert_ce_default_activation_function", "activation_fn")
ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity"}
PROBLEM_TYPES = {
    "regression": "identity", "multi_label_classification": "sigmoid", "single_label_classification": "auto",
}  # fmt: skip
GGUF_POOLING = {0: "last", 1: "mean", 3: "last"}
"""Values of `pooling_type` in a GGUF file: none, mean, and last; 2 and 4 are the first token and a rank."""

QWEN3_RERANKER_TEMPLATE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {{ instruction or 'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ query }}\n"
    "<Document>: {{ document }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, from its model card."""


def read_pooling_config(config: EngineConfig, source: ModelSource) -> PoolingConfig:
    """Return how the model at `source` makes vectors and scores; settings of `config` override its files.

    Raises ModelError for a module or value that can't be computed, or files that can't be read.
    """
    found: dict[str, Any] = {}
    if source.kind == "hf":
        folder = Path(source.path)
        if (folder / "config.json").exists():
            found |= _from_model_config(read_json_object(folder / "config.json"), str(folder / "config.json"))
        if (folder / MODULES).exists():
            found |= _from_modules(folder)
    else:
        found |= _from_gguf(source.path)
    if config.score_tokens:
        found["score_tokens"] = config.score_tokens
    if config.score_template is not None:
        found["score_template"] = _template(Path(config.score_template))
        found["score_prompt"] = False
    is_joined = (Path(source.path) / MODULES).exists() and not config.score_tokens  # a LogitScore that takes texts
    if found.get("score_tokens") and not found.get("score_template") and not is_joined:
        found["score_template"] = QWEN3_RERANKER_TEMPLATE
    return PoolingConfig(**found)


def is_embedding_folder(folder: Path) -> bool:
    """Whether sentence-transformers pools this model's hidden states, so that the folder may have no LM head."""
    return (folder / MODULES).exists() and any(_kind(module) == "Pooling" for module in _modules(folder))


def _from_gguf(path: str) -> dict[str, Any]:
    metadata = open_gguf(path).metadata
    key = f"{metadata.get('general.architecture')}.pooling_type"
    if (kind := metadata.get(key)) is None:
        return {}
    if kind not in GGUF_POOLING:
        raise ModelError(f"{path}: {key} is {kind!r}; 1 (mean) and 3 (last token) are supported: use another model")
    return {"mode": GGUF_POOLING[kind]}


def _from_model_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (problem := values.get("problem_type")) is not None:
        if problem not in PROBLEM_TYPES:
            raise ModelError(f"{where}: problem_type is {problem!r}; {', '.join(PROBLEM_TYPES)} are supported")
        found["activation"] = PROBLEM_TYPES[problem]
    nested = values.get("sentence_transformers")
    for settings in (values, nested if isinstance(nested, Mapping) else {}):
        for key in ACTIVATION_KEYS:
            if settings.get(key) is not None:
                found["activation"] = _activation(settings[key], key, where)
    if (tokens := values.get("classifier_from_token")) is not None:
        if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(one, str) for one in tokens):
            raise ModelError(f"{where}: classifier_from_token must be two tokens, no and yes; found {tokens!r}")
        found["score_tokens"] = tuple(tokens)
    if (sizes := values.get("matryoshka_dimensions")) is not None:
        if not isinstance(sizes, list) or not all(is_whole_number(one, 1) for one in sizes):
            raise ModelError(f"{where}: matryoshka_dimensions must be a list of whole numbers; found {sizes!r}")
        found["dimensions"] = tuple(sizes)
    return found


def _activation(value: Any, key: str, where: str) -> str:
    name = value.rpartition(".")[2] if isinstance(value, str) else value
    if name not in ACTIVATIONS:
        raise ModelError(f"{where}: {key!r} is {value!r}; torch.nn.{' and torch.nn.'.join(ACTIVATIONS)} are supported")
    return ACTIVATIONS[name]


def _from_modules(folder: Path) -> dict[str, Any]:
    modules = _modules(folder)
    kinds = [_kind(module) for module in modules]
    where = str(folder / MODULES)
    settings = read_json_object(folder / TRANSFORMER) if (folder / TRANSFORMER).exists() else {}
    supported = [["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"], ["Transformer", "LogitScore"]]
    if settings.get("transformer_task") == "sequence-classification":
        supported.append(["Transformer"])
    if kinds not in supported:
        raise ModelError(
            f"{where} lists {', '.join(kinds) or 'no modules'}; Transformer, Pooling and Normalize in this order, or "
            f"Transformer and LogitScore, are supported: {REMEDY}"
        )
    found = _from_transformer(folder, settings)
    if "Pooling" not in kinds:
        scored = _logit_score(folder, modules[-1]) if kinds[-1] == "LogitScore" else {}
        return found | scored | _from_template(folder, settings)
    mode = _mode(folder / modules[1].get("path", "") / "config.json")
    return found | {"mode": mode, "normalize": len(kinds) == 3}


def _modules(folder: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_limited_text(folder / MODULES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder / MODULES} can't be read as JSON ({error}); download the model again") from error
    if isinstance(modules, dict):
        modules = modules.get("modules")
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelError(f"{folder / MODULES} must be a list of modules; download the model again")
    for module in modules:
        path = module.get("path", "")
        # an untrusted list must not read files outside its folder
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelError(f"{folder / MODULES}: path {path!r} is outside the folder; use another model")
    return sorted(modules, key=lambda module: module["idx"] if is_whole_number(module.get("idx"), 0) else 0)


def _kind(module: Mapping[str, Any]) -> str:
    """Return the class name of a module, such as Pooling for sentence_transformers.models.Pooling."""
    return str(module.get("type", "")).rpartition(".")[2]


def _mode(path: Path) -> str:
    """Return the pooling mode of a module's config.json, in its older form (a flag per mode) or the newer one."""
    values = read_json_object(path)
    chosen = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    named = values.get("pooling_mode")
    if named is not None:
        chosen = list(named) if isinstance(named, list) else [named]
    if len(chosen) != 1 or not isinstance(chosen[0], str) or chosen[0] not in MODES:
        shown = ", ".join(map(str, chosen)) or "no pooling mode"
        raise ModelError(f"{path} has {shown}; the last token or the mean is supported: {REMEDY}")
    if values.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt=false, which leaves prompts out of the mean, is not supported")
    return MODES[chosen[0]]


def _from_transformer(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompts of config_sentence_transformers.json and the length of sentence_bert_config.json."""
    found: dict[str, Any] = {}
    path = folder / "config_sentence_transformers.json"
    if path.exists():
        values = read_json_object(path)
        prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise ModelError(f"{path}: prompts must be an object of texts; found {prompts!r:.200}")
        if default is not None and default not in prompts:
            raise ModelError(f"{path}: default_prompt_name {default!r} is none of its prompts; correct it")
        found |= {"prompts": prompts, "default_prompt": default}
        if values.get("activation_fn") is not None:
            found["activation"] = _activation(values["activation_fn"], "activation_fn", str(path))
    length = settings.get("max_seq_length")
    if length is not None and not is_whole_number(length, 1):
        raise ModelError(f"{folder / TRANSFORMER}: max_seq_length must be a whole number; found {length!r}")
    if settings.get("do_lower_case"):
        raise ModelError(f"{folder / TRANSFORMER}: do_lower_case=true is not supported: use another model")
    return found | {"max_length": length}


def _logit_score(folder: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / module.get("path", "") / "config.json"
    values = read_json_object(path)
    no, yes = values.get("false_token_id"), values.get("true_token_id")
    if not is_whole_number(no, 0) or not is_whole_number(yes, 0):
        raise ModelError(f"{path} needs true_token_id and false_token_id; found {yes!r} and {no!r}")
    return {"score_tokens": (no, yes)}


def _from_template(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template of a reranker that takes a query and a document as messages; nothing if it takes texts."""
    modalities, options = settings.get("modality_config") or {}, settings.get("processing_kwargs") or {}
    if "message" not in modalities:
        return {}
    chosen = options.get("chat_template") or {} if isinstance(options, Mapping) else {}
    known = {"add_generation_prompt", "restore_suffix"}
    if not isinstance(chosen, Mapping) or (unknown := sorted(chosen.keys() - known)):
        shown = chosen if not isinstance(chosen, Mapping) else ", ".join(unknown)
        raise ModelError(f"{folder / TRANSFORMER}: processing_kwargs.chat_template has {shown}, which is not supported")
    if (folder / "chat_template.jinja").exists():
        text: Any = _template(folder / "chat_template.jinja")
    else:
        path = folder / "tokenizer_config.json"
        text = read_json_object(path).get("chat_template") if path.exists() else None
    if not isinstance(text, str):
        raise ModelError(f"{folder} has no chat template, and {TRANSFORMER} takes messages: download the model again")
    return {"score_template": text, "score_prompt": chosen.get("add_generation_prompt") is True}


def _template(path: Path) -> str:
    try:
        return read_limited_text(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"score_template {str(path)!r} can't be read ({error}); give a file with a template"
        ) from error
