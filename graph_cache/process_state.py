"""State of the process that a run may change: random generators, context variables, the environment, PyTorch's modes.

A replay changes none of it, and does not read it either.
"""

from __future__ import annotations

import contextvars
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from graph_cache.host_state import same
from graph_cache.namespaces import is_of_a_compiler, set_state, state_of
from graph_cache.torch_settings import SETTINGS, autocast_state, settings

IGNORED_VARIABLES = frozenset(("decimal_context",))  # made when first read
# Compilers and launchers of kernels keep their own settings in the environment, and in context variables.
COMPILERS_ENVIRONMENT = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")


class ProcessState:
    """State of the process at construction, to find and undo what a run changes.

    `generators` are those that a graph registers: its replays advance them.
    """

    def __init__(self, generators: Sequence[torch.Generator] = ()):
        self._host_generator = torch.default_generator
        self._watches_generator = all(one is not self._host_generator for one in generators)
        self._before = self._read()
        self._variables = _context_variables()

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "the state of random": random.getstate(),
            "the environment": _environment(),
            "the gradient mode": torch.is_grad_enabled(),
            "autocast": autocast_state(),
        }
        found |= {
            setting.name: value for setting, value in zip(SETTINGS, settings(), strict=False) if setting.set is not None
        }
        if self._watches_generator:
            found["the state of PyTorch's generator of the host"] = state_of(self._host_generator)
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = numpy.random.get_state()
            found["the state of numpy.random"] = (name, keys.tobytes(), *rest)
        return found

    def changes(self) -> list[str]:
        """Return descriptions of what changed."""
        now = self._read()
        found = [name for name, value in self._before.items() if now[name] != value]
        variables = _context_variables()
        for variable in {**self._variables, **variables}:
            if not same(self._variables.get(variable), variables.get(variable)):
                found.append(f"the context variable {variable.name}")
        return found

    def restore(self) -> None:
        """Restore what changed, except context variables that had no value."""
        before, now = self._before, self._read()
        for name, value in before.items():
            if now[name] == value:
                continue
            if name == "the state of random":
                random.setstate(value)
            elif name == "the state of numpy.random":
                keys = sys.modules["numpy"].frombuffer(value[1], dtype="uint32")
                sys.modules["numpy"].random.set_state((value[0], keys, *value[2:]))
            elif name == "the environment":
                for variable in now[name].keys() - value.keys():
                    del os.environ[variable]
                os.environ.update(value)
            elif name == "the gradient mode":
                torch.set_grad_enabled(value)
            elif name == "the state of PyTorch's generator of the host":
                set_state(self._host_generator, value)
        for setting in SETTINGS:
            if setting.set is not None and now[setting.name] != before[setting.name]:
                value = before[setting.name]
                setting.set(list(value) if isinstance(value, tuple) else value)
        for variable, value in self._variables.items():
            if variable.get(None) is not value:
                variable.set(value)


def _context_variables() -> dict[contextvars.ContextVar[Any], Any]:
    return {
        variable: value
        for variable, value in contextvars.copy_context().items()
        if variable.name not in IGNORED_VARIABLES
        and not variable.name.startswith("torch.")  # settings of PyTorch; what code reads by name is watched elsewhere
        and not is_of_a_compiler(variable)
    }


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(COMPILERS_ENVIRONMENT)}
