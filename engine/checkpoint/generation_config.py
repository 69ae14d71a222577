"""The sampling parameters that a model's authors recommend: a server's defaults for fields that requests leave out.

They come from a generation_config.json, as in vLLM, or from the `general.sampling.*` keys of a GGUF file, as in
llama.cpp.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.gguf_file import open_gguf
from engine.checkpoint.json_files import read_json_object
from engine.checkpoint.source import ModelSource
from engine.errors import ConfigError, ModelError, RequestError
from engine.protocol.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

AUTO, ENGINE = "auto", "engine"
FILE_NAME = "generation_config.json"
# Keys of the file -> names in SamplingParams.
_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
    "skip_special_tokens": "skip_special_tokens",
}
_GGUF_PREFIX = "general.sampling."
_GGUF_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Keys that change what transformers or llama.cpp sample and that have no counterpart here -> their neutral values.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "num_beams": (1,),
    "num_beam_groups": (1,), "diversity_penalty": (0,), "penalty_alpha": (0,), "guidance_scale": (1,),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "bad_words_ids": ([],), "sequence_bias": ({}, []),
    "min_length": (0,), "min_new_tokens": (0,), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (), "stop_strings": ([],), "xtc_probability": (0,), "mirostat": (0,),
}  # fmt: skip


def sampling_defaults(setting: str, source: ModelSource) -> dict[str, Any]:
    """Return the sampling parameters that `setting` (EngineConfig.generation_config) and the model recommend.

    Keys and values follow SamplingParams; `do_sample: false` is temperature 0. Logs them, and the ones that can't
    be applied. Raises ConfigError for a folder without the file, ModelError for an invalid value.
    """
    if setting == ENGINE:
        return {}
    found, keys, where = _read(setting, source)
    defaults: dict[str, Any] = {}
    try:
        for key, ours in keys.items():
            if found.get(key) is not None:
                defaults[ours] = _checked(key, ours, found[key])
        if not _samples(found.get("do_sample")):
            defaults["temperature"] = 0.0
    except RequestError as error:
        raise ModelError(
            f"{where}: {error}; correct it, or start with generation_config={ENGINE!r} (--generation-config {ENGINE}), "
            "which leaves the file's sampling parameters out"
        ) from error
    if defaults:
        shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("requests sample with %s unless they say otherwise, from %s", shown, where)
    skipped = [key for key, neutral in _NOT_APPLIED.items() if found.get(key) not in (None, *neutral)]
    if skipped:
        logger.warning("%s also sets %s, which have no effect here", where, ", ".join(skipped))
    return defaults


def _read(setting: str, source: ModelSource) -> tuple[Mapping[str, Any], Mapping[str, str], str]:
    """Return the values, the name of each key in SamplingParams, and where they were found."""
    if setting != AUTO:
        path = Path(os.path.expanduser(setting)) / FILE_NAME
        if not path.is_file():
            raise ConfigError(
                f"generation_config={setting!r}: there is no file {path}; use {AUTO}, {ENGINE}, or a folder with a "
                f"{FILE_NAME}"
            )
        return read_json_object(path), _KEYS, str(path)
    if source.generation_config:
        return source.generation_config, _KEYS, f"the model card of {source.name}"
    if source.kind == "gguf":
        metadata = open_gguf(source.path).metadata
        found = {
            key.removeprefix(_GGUF_PREFIX): _single(value)
            for key, value in metadata.items()
            if key.startswith(_GGUF_PREFIX)
        }
        return found, _GGUF_KEYS, source.path
    path = Path(source.path) / FILE_NAME
    return (read_json_object(path) if path.exists() else {}), _KEYS, str(path)


def _single(value: Any) -> Any:
    """Return a float of single precision, as GGUF files have them, as the shortest decimal: 0.6, not 0.60000002."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _checked(key: str, name: str, value: Any) -> Any:
    """Return a value as SamplingParams keeps it. Raises RequestError that names the file's key."""
    if name == "max_tokens" and value == 0:
        raise RequestError(f"{key} must be at least 1; found 0")
    try:
        return getattr(SamplingParams.from_dict({name: value}), name)
    except RequestError as error:
        raise RequestError(f"{key}{str(error).removeprefix(name)}") from error


def _samples(do_sample: Any) -> bool:
    if not isinstance(do_sample, bool | None):
        raise RequestError(f"do_sample must be true or false; found {do_sample!r}")
    return do_sample is not False
