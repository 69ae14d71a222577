"""Support for torch.compile inside captures: detect compiled code, and prevent compilation during a capture.

Compilation happens during warm-up, in the eager calls before a capture. A capture runs the code compiled there.
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

COMPILED_CALL = "_compiled_call_impl"  # attribute in which module.compile() stores the compiled call
_SEARCH_DEPTH = 6  # reference depth from a step function to its models: closure, trainer, wrapper, list


def is_compiled(value: Any) -> bool:
    """Whether `value` is a compiled function, a wrapper from torch.compile(module), or compiled in place."""
    if isinstance(value, nn.Module):
        return getattr(value, COMPILED_CALL, None) is not None or "_orig_mod" in value._modules
    try:
        return hasattr(value, "_torchdynamo_orig_callable")
    except Exception:  # of any kind: it runs code of a user's `__getattr__`
        return False


def at_compile_time(count: Callable[[], None]) -> Callable[[], bool]:
    """Return a function that torch.compile calls once, while it compiles the caller.

    As `torch._dynamo.assume_constant_result`, which would import the compiler.
    """

    def counted() -> bool:
        count()
        return True

    counted._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return counted


def keeping_history() -> AbstractContextManager:
    """Return a context in which compiled backwards don't overwrite their saved tensors (no donated buffers).

    Donated buffers make a backward with retain_graph=True fail. Needed when code to be captured is compiled, and when
    its backward is.
    """
    return aot_config.patch(donated_buffer=False)


@contextmanager
def without_compiling(backend: Backend) -> Iterator[None]:
    """Context for a capture: use matching compiled code, and never compile, which a graph can't record.

    On a CPU, compiled code runs uncompiled: its kernels bypass the dispatcher, so the backend can't record them.
    """
    if "torch._dynamo" not in sys.modules:
        yield  # nothing was compiled in this process
        return
    with keeping_history(), torch.compiler.set_stance("force_eager" if backend.name == "cpu" else "eager_on_recompile"):
        yield


def reached_from(step: Callable[..., Any]) -> list[Any]:
    """Return the modules and compiled functions reachable from a step function.

    Follows its closure, the globals it names, its `self`, and the contents of these, up to _SEARCH_DEPTH references.
    """
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
        return iter(())  # the caller walks a module's submodules itself
    if isinstance(value, types.FunctionType):
        cells = [content for cell in value.__closure__ or () for content in _cell_contents(cell)]
        names = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        compiled: Any = value
        wrapped = [compiled._torchdynamo_orig_callable] if is_compiled(value) else []
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
    except ValueError:  # unbound name
        return []
