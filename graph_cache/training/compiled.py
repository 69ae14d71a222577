"""Modules and functions that torch.compile made, inside captures. Knows how to tell them, and keeps compilers out.

Compilation happens in warm-up, by the eager calls before a capture; a capture runs what is compiled already.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._functorch.config as aot_config
from torch import Tensor, nn

from graph_cache.backends.base import Backend

COMPILED_CALL = "_compiled_call_impl"  # where module.compile() keeps the compiled call
_SEARCH_DEPTH = 6  # how far from a step function its models are looked for: closure, trainer, wrapper, list


def is_compiled(value: Any) -> bool:
    """Whether torch.compile made it: a function, a module around another, or a module that was compiled in place."""
    if isinstance(value, nn.Module):
        return getattr(value, COMPILED_CALL, None) is not None or "_orig_mod" in value._modules
    return hasattr(value, "_torchdynamo_orig_callable")


def keeping_history() -> AbstractContextManager:
    """Context in which compiled backwards leave what was saved for them as it is, and don't refuse to have it retained.

    Needed when something is compiled that will be captured, and again when its backward is.
    """
    return aot_config.patch(donated_buffer=False)


@contextmanager
def without_compiling(backend: Backend) -> Iterator[None]:
    """Context for a capture: compiled code is used where it fits, and nothing is compiled, which no graph can hold.

    On a CPU what was compiled runs uncompiled: its kernels pass by the dispatcher, where they can't be recorded.
    """
    if "torch._dynamo" not in sys.modules:
        yield  # nothing was compiled in this process
        return
    with keeping_history(), torch.compiler.set_stance("force_eager" if backend.name == "cpu" else "eager_on_recompile"):
        yield


def reached_from(step: Callable[..., Any]) -> list[Any]:
    """Modules and compiled functions that a step function can reach by its closure, the globals that it names, the
    object that it is a method of, and what these hold."""
    found: list[Any] = []
    seen: set[int] = set()
    frontier = [step]
    for _ in range(_SEARCH_DEPTH):
        next_frontier: list[Any] = []
        for value in frontier:
            if id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, nn.Module) or is_compiled(value):
                    found.append(value)
                next_frontier += _referenced_by(value)
        frontier = next_frontier
    return found


def _referenced_by(value: Any) -> Iterator[Any]:
    if isinstance(value, (nn.Module, Tensor, type, types.ModuleType, str, bytes)):
        return iter(())  # a module's own are asked of the module
    if isinstance(value, types.FunctionType):
        cells = [content for cell in value.__closure__ or () for content in _cell_contents(cell)]
        names = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        wrapped = [value._torchdynamo_orig_callable] if is_compiled(value) else []
        return iter([*cells, *names, *wrapped, *(value.__defaults__ or ())])
    if isinstance(value, types.MethodType):
        return iter([value.__self__, value.__func__])
    if isinstance(value, functools.partial):
        return iter([value.func, *value.args, *value.keywords.values()])
    if isinstance(value, dict):
        return iter(list(value.values()))
    if isinstance(value, (list, tuple, set)):
        return iter(list(value))
    return iter(list(getattr(value, "__dict__", {}).values()))


def _cell_contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a name that is not bound yet
        return []
