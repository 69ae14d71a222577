"""Settings from a YAML file (`--config FILE`) and from environment variables (`ENCORE_*`), named as the flags.

Parses values and refuses unknown names. The configuration classes validate the values; the caller applies the
precedence: flag, environment, file, default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from graph_cache.utils.validation import did_you_mean
from server.config import ServerConfig

PREFIX = "ENCORE_"
# Variables that are not settings: used elsewhere, or too secret for a flag.
NOT_SETTINGS = frozenset(
    {
        "ENCORE_CACHE",
        "ENCORE_CONFIG",
        "ENCORE_CPU_KERNELS",
        "ENCORE_API_KEYS",
        "ENCORE_API_KEY",
        "ENCORE_ADMIN_KEYS",
    }
)
# Kubernetes sets these variables in every container if a Service is named encore, ENCORE_PORT among them.
_KUBERNETES_NAME = re.compile(r"ENCORE_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


# Fields without a flag: the nested engine configuration, and the engine's mode, which is always inference.
NOT_OFFERED = frozenset({"engine", "mode"})


def setting_types() -> dict[str, str]:
    """Return setting name -> type annotation, as written in the configuration classes."""
    classes = (ServerConfig, EngineConfig)
    fields = [field for config_class in classes for field in dataclasses.fields(config_class)]
    return {field.name: str(field.type) for field in fields if field.name not in NOT_OFFERED}


def read_file(path: str) -> dict[str, Any]:
    """Read the settings of a YAML file. Names may be flags (`max-num-seqs`) or fields (`max_num_seqs`).

    A null value counts as not given. Raises ConfigError for an unreadable file, one that isn't a mapping, an unknown
    name, or an invalid value.
    """
    types, values = setting_types(), {}
    for key, value in _mapping(path).items():
        name = _field(key)
        if name not in types:
            near = did_you_mean(name, types, str if "_" in str(key) else lambda found: found.replace("_", "-"))
            raise ConfigError(f"{path}: unknown setting {str(key)!r}{near}")
        if name in values:
            raise ConfigError(f"{path}: {name} is given twice, in both spellings")
        if value is not None:
            values[name] = _from_yaml(f"{path}: {key}", types[name], value)
    return values


def written_keys(path: str) -> dict[str, str]:
    """Return field -> key as the YAML file spells it."""
    return {_field(key): str(key) for key in _mapping(path)}


def _field(key: object) -> str:
    return str(key).removeprefix("--").replace("-", "_")


def _mapping(path: str) -> dict[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"the configuration file {path} can't be read: {exc.strerror or exc}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the configuration file {path} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"the configuration file {path} must be a mapping of settings, such as `port: 8000`")
    return found


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the settings of `ENCORE_*` variables. An empty one counts as not given. Raises ConfigError if unknown."""
    types, values = setting_types(), {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or _is_kubernetes(variable, text):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in types:
            near = did_you_mean(name, types, lambda found: PREFIX + found.upper())
            raise ConfigError(f"unknown environment variable {variable}{near}")
        if text:
            values[name] = parse(variable, types[name], text)
    return values


def parse(where: str, annotation: str, text: str) -> Any:
    """Parse a setting's value by its annotation. Raises ConfigError that names `where`."""
    if annotation.startswith("bool"):
        if text.strip().lower() not in _BOOLEANS:
            raise ConfigError(f"{where}={text!r}: must be true or false")
        return _BOOLEANS[text.strip().lower()]
    try:
        return PARSERS[annotation](text)
    except ValueError as exc:
        raise ConfigError(f"{where}={text!r}: must be {NEEDED[annotation]}") from exc


def split(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of comma-separated items."""

    def parse_list(text: str) -> tuple[Any, ...]:
        return tuple(item(part.strip()) for part in text.split(",") if part.strip())

    return parse_list


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "str": str,
    "str | None": str,
    "KVEventsConfig | None": str,
    "tuple[int, ...] | None": split(int),
    "tuple[str, ...]": split(str),
}
METAVARS: Mapping[str, str] = {
    "int": "N",
    "int | None": "N",
    "float": "X",
    "float | None": "X",
    "str": "TEXT",
    "str | None": "TEXT",
    "KVEventsConfig | None": "JSON",
    "tuple[int, ...] | None": "N,N",
    "tuple[str, ...]": "TEXT,TEXT",
}


def _from_yaml(where: str, annotation: str, value: Any) -> Any:
    if isinstance(value, str):
        return parse(where, annotation, value)
    if isinstance(value, dict) and annotation.startswith("KVEventsConfig"):
        return value
    if annotation.startswith("tuple"):
        items = value if isinstance(value, list) else [value]
        item = int if "int" in annotation else str
        if not all(type(one) is item for one in items):
            raise ConfigError(f"{where}: must be a list of {'integers' if item is int else 'strings'}")
        return tuple(items)
    if (
        annotation.startswith("str")
        or isinstance(value, (list, dict))
        or annotation.startswith("bool") != isinstance(value, bool)
    ):
        shown = f"{type(value).__name__} {value!r}"[:80]
        raise ConfigError(f"{where}: must be {NEEDED[annotation]}; found {shown}")
    return value


NEEDED = {
    "bool": "true or false",
    "bool | None": "true or false",
    "str": "a string",
    "str | None": "a string",
    "KVEventsConfig | None": "a mapping, or a JSON object",
    "int": "an integer",
    "int | None": "an integer",
    "float": "a number",
    "float | None": "a number",
    "tuple[int, ...] | None": "integers separated by commas",
    "tuple[str, ...]": "words separated by commas",
}


def _is_kubernetes(variable: str, text: str) -> bool:
    by_value = variable.endswith("PORT") and _KUBERNETES_VALUE.match(text) is not None
    return by_value or _KUBERNETES_NAME.fullmatch(variable) is not None
