"""Settings from a file and from the environment, in the flags' names: `--config FILE` and `ENCORE_*`.

Owns how text and YAML become values, and the refusal of names that don't exist. What a value may be is the
configuration classes' to say. Precedence is the caller's: flag, then environment, then file, then default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from graph_cache.validation import did_you_mean
from server.config import ServerConfig

PREFIX = "ENCORE_"
# Variables that are no settings of the server: read by others, or too secret for a flag.
NOT_SETTINGS = frozenset({"ENCORE_CACHE", "ENCORE_CONFIG", "ENCORE_API_KEYS", "ENCORE_ADMIN_KEYS"})
# Kubernetes sets such variables in every container for a Service named encore, ENCORE_PORT among them.
_KUBERNETES_NAME = re.compile(r"ENCORE_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


# Fields that are no settings of a server: the engine's own settings, and its mode, which is inference here.
NOT_OFFERED = frozenset({"engine", "mode"})


def setting_types() -> dict[str, str]:
    """Every setting's name and its annotation, as the configuration classes spell it."""
    classes = (ServerConfig, EngineConfig)
    fields = [field for config_class in classes for field in dataclasses.fields(config_class)]
    return {field.name: str(field.type) for field in fields if field.name not in NOT_OFFERED}


def read_file(path: str) -> dict[str, Any]:
    """The settings of a YAML file; names may be spelled as flags (`max-num-seqs`) or as fields (`max_num_seqs`).

    A value of null counts as not given. Raises ConfigError for what can't be read, isn't a mapping, or isn't known.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"the configuration file {path} can't be read: {exc.strerror or exc}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the configuration file {path} is no valid YAML: {' '.join(str(exc).split())}") from exc
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"the configuration file {path} must be a mapping of settings, such as `port: 8000`")
    types, values = setting_types(), {}
    for key, value in found.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in types:
            raise ConfigError(f"{path}: unknown setting {str(key)!r}{did_you_mean(name, types)}")
        if name in values:
            raise ConfigError(f"{path}: {name} is given twice, in both spellings")
        if value is not None:
            values[name] = _from_yaml(f"{path}: {name}", types[name], value)
    return values


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of `ENCORE_*` variables; an empty one counts as not given. ConfigError for an unknown one."""
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
    """A setting's value from text, by its annotation. ConfigError that names `where`."""
    if annotation.startswith("bool"):
        if text.strip().lower() not in _BOOLEANS:
            raise ConfigError(f"{where}={text!r}: true or false is needed")
        return _BOOLEANS[text.strip().lower()]
    try:
        return PARSERS[annotation](text)
    except ValueError as exc:
        raise ConfigError(f"{where}={text!r}: {METAVARS[annotation]} is needed") from exc


def split(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of comma-separated items."""

    def parse_list(text: str) -> tuple[Any, ...]:
        return tuple(item(part.strip()) for part in text.split(",") if part.strip())

    parse_list.__name__ = f"comma-separated {item.__name__}"  # argparse names it in its message
    return parse_list


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": int,
    "float": float,
    "str": str,
    "str | None": str,
    "tuple[int, ...] | None": split(int),
    "tuple[str, ...]": split(str),
}
METAVARS: Mapping[str, str] = {
    "int": "N",
    "int | None": "N",
    "float": "X",
    "str": "TEXT",
    "str | None": "TEXT",
    "tuple[int, ...] | None": "N,N",
    "tuple[str, ...]": "TEXT,TEXT",
}


def _from_yaml(where: str, annotation: str, value: Any) -> Any:
    if isinstance(value, str):
        return parse(where, annotation, value)
    if annotation.startswith("tuple"):
        items = value if isinstance(value, list) else [value]
        item = int if "int" in annotation else str
        if not all(type(one) is item for one in items):
            raise ConfigError(f"{where}: a list of {'whole numbers' if item is int else 'texts'} is needed")
        return tuple(items)
    if (
        annotation.startswith("str")
        or isinstance(value, (list, dict))
        or annotation.startswith("bool") != isinstance(value, bool)
    ):
        shown = f"{type(value).__name__} {value!r}"[:80]
        raise ConfigError(f"{where}: {_NEEDED.get(annotation, 'a number')} is needed; found {shown}")
    return value


_NEEDED = {
    "bool": "true or false",
    "bool | None": "true or false",
    "str": "text",
    "str | None": "text",
    "int": "a whole number",
}


def _is_kubernetes(variable: str, text: str) -> bool:
    by_value = variable.endswith("PORT") and _KUBERNETES_VALUE.match(text) is not None
    return by_value or _KUBERNETES_NAME.fullmatch(variable) is not None
