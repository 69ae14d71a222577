"""Load the tokenizer of a folder with a tokenizer.json, whose pipeline runs exactly as it is in that file.

transformers builds the pipeline of many classes (GPT2Tokenizer, Qwen2Tokenizer, …) from the class's name instead, so
the class that tokenizer_config.json names isn't used. The other files add what tokenizer.json can't hold: names of
special tokens, chat templates, and added tokens that it lacks.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.checkpoint.regular_files import read_limited_text, require_limited_file
from engine.errors import ModelError
from engine.text.added_tokens import FLAGS, Declared, add_missing, read_token, require_counts, require_limits
from engine.text.load_warnings import warn

logger = logging.getLogger(__name__)

PIPELINE = "tokenizer.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TEMPLATES = 100
# A Unigram model takes about 340 bytes for each character of its entries. The largest known vocabulary, XLM-V's, has
# 901,629 entries; the largest part of a pipeline, SentencePiece's table of characters, has 0.4 MB.
MAX_ENTRIES = 2_000_000
MAX_ENTRY_CHARS = 16 * 2**20
MAX_PART_BYTES = 4 * 2**20
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_READ_BY_A_LIBRARY = (".json", ".jinja", ".txt", ".model", ".tiktoken")
# Keys of tokenizer_config.json that name files, code or objects, or that tokenizer.json decides.
_NO_SETTINGS = frozenset(
    "tokenizer_class auto_map init_inputs tokenizer_file vocab_file merges_file vocab merges gguf_file name_or_path "
    "special_tokens_map_file tokenizer_object post_processor tokenizer_padding tokenizer_truncation backend "
    "added_tokens_decoder add_bos_token add_eos_token fix_mistral_regex chat_template additional_special_tokens "
    "extra_special_tokens model_specific_special_tokens _json_truncation _json_padding "
    "_spm_precompiled_charsmap".split()
)


@dataclass(frozen=True)
class FolderTokenizer:
    """A tokenizer as its folder describes it.

    - special_tokens: texts by name, such as `eos_token`.
    - chat_template: one template, or several by name; None: no template.
    - settings: other keys of tokenizer_config.json, as PreTrainedTokenizerFast takes them.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None
    settings: dict[str, Any]


def load_folder(folder: str) -> FolderTokenizer:
    """Load the tokenizer of a folder that has a tokenizer.json.

    Raises ModelError for a file beyond the limits or a part of the pipeline that differs from the file's; another
    exception if a file is damaged.
    """
    config = read_config(folder)
    text = read_limited_text(os.path.join(folder, PIPELINE))
    file = json.loads(text)
    if not isinstance(file, dict):
        raise ValueError(f"{PIPELINE} has no object")
    _require_limits(file, os.path.join(folder, PIPELINE))
    backend = tokenizers.Tokenizer.from_str(text)
    del text
    add_missing(backend, config.declared, set(config.special_tokens.values()), folder)
    backend.no_truncation()  # a length stored in the file would cut prompts silently
    backend.no_padding()
    backend.encode_special_tokens = bool(config.values.get("split_special_tokens"))
    require_same_pipeline(backend, file, folder)
    special = config.special_tokens | _class_defaults(folder, config.values, backend)
    _log_contradictions(folder, config.values, backend, special)
    settings = {key: value for key, value in config.values.items() if key not in _NO_SETTINGS | special.keys()}
    if config.extra_tokens:
        settings["extra_special_tokens"] = config.extra_tokens
    return FolderTokenizer(backend, special, _chat_template(folder, config.values), settings)


def _require_limits(file: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for a tokenizer.json whose reading would take gigabytes or seconds."""
    require_limits([str(token["content"]) for token in file.get("added_tokens") or []], where)
    vocabulary = file["model"]["vocab"]
    entries = vocabulary if isinstance(vocabulary, dict) else (str(entry[0]) for entry in vocabulary)
    require_counts(entries, where, "vocabulary entries", MAX_ENTRIES, MAX_ENTRY_CHARS)
    for part in _PARTS:
        size = len(json.dumps(file.get(part)))
        if size > MAX_PART_BYTES:
            raise ModelError(f"{where}: {part} has {size} bytes, and at most {MAX_PART_BYTES} are read")


def require_same_pipeline(backend: tokenizers.Tokenizer, file: Mapping[str, Any], folder: str) -> None:
    """Raise ModelError naming the part if a tokenizer runs another pipeline than the content of a tokenizer.json."""
    # A model without entries: only the other parts are compared, and reading a vocabulary takes long.
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "model": empty} | {part: file.get(part) for part in _PARTS}
    wanted = tokenizers.Tokenizer.from_str(json.dumps(content))
    differing = [part for part in _PARTS if _state(getattr(backend, part)) != _state(getattr(wanted, part))]
    model = file["model"].get("type")
    if model is not None and type(backend.model).__name__ != model:
        differing.append("model")
    added = backend.get_added_tokens_decoder()
    for token in file.get("added_tokens") or []:
        found = added.get(token["id"])
        if found is None or any(getattr(found, key) != token[key] for key in ("content", *FLAGS) if key in token):
            differing.append(f"added token {token['content']!r}")
            break
    if differing:
        raise ModelError(
            f"{folder}: the tokenizer's {', '.join(differing)} would differ from {PIPELINE}, so ids would too: load "
            f"and save {PIPELINE} with tokenizers {tokenizers.__version__}"
        )


def _state(part: Any) -> bytes | None:
    return None if part is None else part.__getstate__()


@dataclass(frozen=True)
class Configuration:
    """tokenizer_config.json, with the files that older versions of transformers wrote beside it.

    - declared: added tokens, in the order in which transformers adds them.
    - special_tokens: texts by name, such as `eos_token`; extra_tokens: the texts of special tokens without a name.
    """

    values: dict[str, Any]
    declared: list[Declared]
    special_tokens: dict[str, str]
    extra_tokens: list[str]


def read_config(folder: str) -> Configuration:
    """Read what the files beside tokenizer.json say. Raises ModelError beyond a limit, ValueError for a wrong form."""
    values = json_object(folder, "tokenizer_config.json")
    by_index = values.get("added_tokens_decoder")
    declared: list[Declared] = []
    if by_index is not None:
        indices = sorted(by_index, key=int)
        declared = [Declared(read_token(by_index[index]), int(index), with_flags=True) for index in indices]
    else:
        values |= json_object(folder, "special_tokens_map.json")
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    named = {key: value for key, value in values.items() if key.endswith("_token") and _is_token(value)}
    named |= values.get("model_specific_special_tokens") or {}
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: read_token(value).content for name, value in named.items()}
    extra = [] if isinstance(extra, dict) else [read_token(value, special=True) for value in extra]
    if by_index is None:
        special = {*texts.values(), *(token.content for token in extra)}
        for text, index in sorted(json_object(folder, "added_tokens.json").items(), key=lambda item: item[1]):
            is_special = text in special
            declared.append(Declared(AddedToken(text, normalized=not is_special, special=is_special), index))
    require_limits([one.token.content for one in declared], os.path.join(folder, "tokenizer_config.json"))
    declared += [Declared(read_token(value, special=True)) for value in named.values()]
    declared += map(Declared, extra)
    return Configuration(values, declared, texts, [token.content for token in extra])


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or isinstance(value, dict) and "content" in value


def _class_defaults(folder: str, values: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Return the special tokens that no file names, but the class of the tokenizer does, if tokenizer.json has them."""
    if "eos_token" in values:
        return {}
    # Importing transformers takes a second; a folder that names its tokens is loaded without.
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    model_type = json_object(folder, "config.json").get("model_type")
    name = values.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(str(model_type))
    found = tokenizer_class_from_name(name) if isinstance(name, str) else None
    if found is None:
        return {}
    parameters = inspect.signature(found.__init__).parameters
    defaults = {key: parameters[key].default for key in NAMED_TOKENS if key in parameters and key not in values}
    return {
        key: str(text)
        for key, text in defaults.items()
        if isinstance(text, str | AddedToken) and backend.token_to_id(str(text)) is not None
    }


def _log_contradictions(
    folder: str, values: Mapping[str, Any], backend: tokenizers.Tokenizer, special: Mapping[str, str]
) -> None:
    """Log the settings of tokenizer_config.json that tokenizer.json contradicts."""
    runs = {"add_prefix_space": _adds_prefix_space(backend), "fix_mistral_regex": False}
    bos, eos = special.get("bos_token"), special.get("eos_token")
    if bos != eos:  # of one token for both ends it can't be said which end it marks
        added = backend.encode("").tokens
        runs |= {"add_bos_token": bos in added, "add_eos_token": eos in added}
    differing = [f"{key}={values[key]}" for key, does in runs.items() if values.get(key) not in (None, does)]
    if differing:
        found = ", ".join(differing)
        warn(logger, "%s: %s decides, against %s in tokenizer_config.json", folder, PIPELINE, found)
    if "auto_map" in values:
        warn(logger, "%s: the code that auto_map names is never run; %s is used", folder, PIPELINE)


def _adds_prefix_space(backend: tokenizers.Tokenizer) -> bool:
    text = "a" if backend.normalizer is None else backend.normalizer.normalize_str("a")
    pieces = [] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return (pieces[0][0] if pieces else text)[:1] in (" ", "Ġ", "▁")


def _chat_template(folder: str, values: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name. Files take precedence over tokenizer_config.json."""
    files: dict[str, str] = {}
    for name, path in chat_template_files(folder):
        if len(files) == MAX_TEMPLATES:
            raise ModelError(f"{folder} has more than {MAX_TEMPLATES} chat templates: give the model's own files")
        files[name] = read_limited_text(path)
    if files:
        return files["default"] if files.keys() == {"default"} else files
    found = values.get("chat_template")
    if found is None:
        found = json_object(folder, "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}
    texts = found.values() if isinstance(found, dict) else [found]
    if found is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError("chat_template must be text, or a list of objects with 'name' and 'template'")
    return found or None


def chat_template_files(folder: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of a folder's files with chat templates."""
    if (path := Path(folder, "chat_template.jinja")).exists():
        yield "default", path
    templates = Path(folder, "chat_templates")
    if templates.is_dir():
        yield from ((path.stem, path) for path in sorted(templates.glob("*.jinja")))


def json_object(folder: str, name: str) -> dict[str, Any]:
    """Return the object in a JSON file, {} if there is no such file or it holds something else.

    Raises ModelError beyond the file's limit, ValueError if it isn't JSON.
    """
    try:
        found = json.loads(read_limited_text(os.path.join(folder, name)))
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}


def require_readable_folder(folder: str) -> None:
    """Check the kinds and sizes of the files that a library may read, before it gets the folder. Raises ModelError."""
    for entry in sorted(os.listdir(folder)):
        if entry.endswith(_READ_BY_A_LIBRARY):
            require_limited_file(os.path.join(folder, entry))
    for _, path in chat_template_files(folder):
        require_limited_file(path)
