"""Whose code and objects these are, in one table: a user's, a library's, PyTorch's or this core's.

State is searched in the code and objects of users. A row for another package says what else is searched there; an
adapter adds its package here.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import types
from contextvars import ContextVar
from typing import Any

import torch

STANDARD = os.path.dirname(os.__file__) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
CORE = os.path.dirname(os.path.dirname(__file__)) + os.sep
ADAPTERS = f"{CORE}adapters{os.sep}"


class Searched(enum.Enum):
    """What is searched for state in a package: its code and objects, only objects, or nothing."""

    ALL = "all"
    OBJECTS = "objects"
    NOTHING = "nothing"


# Package, or a part of one -> what is searched. The longest name that fits counts; all of other packages is searched.
# The state of packages with NOTHING is caches and counters that no result depends on.
SEARCHED = {
    **dict.fromkeys(sys.stdlib_module_names, Searched.NOTHING),
    # Modules of the standard library whose objects hold a user's values.
    **dict.fromkeys(
        (
            *("types", "argparse", "collections", "configparser", "contextlib", "dataclasses", "multiprocessing"),
            *("optparse", "queue", "string", "threading", "weakref", "_thread", "_weakrefset"),
        ),
        Searched.OBJECTS,
    ),
    **dict.fromkeys(("numpy.random", "graph_cache", "engine", "_pytest", "triton"), Searched.NOTHING),
    **dict.fromkeys(("numpy", "torch"), Searched.OBJECTS),
    **dict.fromkeys(
        ("torch.distributed", "torch.utils.data", "torch.cuda", "torch.profiler"),
        Searched.NOTHING,
    ),
    "megatron": Searched.OBJECTS,
    "transformer_engine": Searched.OBJECTS,
}
# Packages that count and cache in their modules' attributes; their adapters recreate what a forward reads.
ADAPTED = frozenset(("megatron", "transformer_engine"))
# Compiled functions here are helpers for routing, which round nothing: they may run uncompiled.
COMPILED_HELPERS = "megatron.core.transformer.moe."
# Modules of PyTorch whose functions other code may replace.
PATCHED = frozenset(("torch", "torch.nn", "torch.nn.functional"))
# Looks operators up at their first use under a dispatch mode: its names depend on what the process ran before.
_LOOKS_OPERATORS_UP = (f"{TORCH}_ops.py", f"{TORCH}_library{os.sep}", f"{TORCH}library.py")
# Files of functions that get no module as first argument, or one whose methods they run.
_TAKES_NO_MODULES = tuple(
    os.path.join(TORCH, *path.split("/"))
    for path in (
        *("_tensor.py", "_ops.py", "functional.py", "overrides.py", "_jit_internal.py", "_utils.py", "_library/"),
        *("nn/functional.py", "nn/init.py", "optim/optimizer.py", "autograd/", "_prims_common/"),
        *("utils/_pytree.py", "utils/_python_dispatch.py"),
    )
)
# Files of the standard library that read clocks and files for their own purposes.
_INCIDENTAL = ("<frozen importlib", "logging", "warnings", "linecache", "traceback", "inspect", "tokenize")
# Compilers and launchers of kernels keep their settings in context variables and in the environment.
_COMPILERS = ("triton.", "torch._dynamo.", "torch._functorch.", "torch._inductor.", "torch.fx.")
_COMPILERS_VARIABLES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
_MADE_BY_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_DECIMAL_CONTEXT = "decimal_context"  # of the standard library, which makes it when it is first read


# ---- modules, classes and objects ------------------------------------------------------------------------------------


@functools.cache
def searched(module: str | None) -> Searched:
    """Return what is searched in a module, given by its name; nothing if it has none."""
    if not isinstance(module, str) or module.startswith("torch._"):
        return Searched.NOTHING
    name = module
    while name not in SEARCHED and "." in name:
        name = name.rpartition(".")[0]
    if name in sys.stdlib_module_names and _is_shadowed(name):
        return Searched.ALL
    return SEARCHED.get(name, Searched.ALL)


def _is_shadowed(name: str) -> bool:
    """Return whether a user's file has the name of a module of the standard library, and was imported as that."""
    path = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(path, str) and is_own_file(path)


def searched_class(kind: type) -> Searched:
    """Return what is searched in the module of a class. A class of text that `exec` runs may be in no module."""
    if kind.__module__ == "builtins" and kind.__flags__ & _MADE_BY_CODE:
        return Searched.ALL
    return searched(kind.__module__)


def searched_function(function: types.FunctionType) -> Searched:
    """Return what is searched in the module that holds a function's code, or in that which it names as its own.

    They differ for wrappers, to which `functools.wraps` gives the `__module__` of another function. Text that `exec`
    runs may be in no module.
    """
    module = function.__globals__.get("__name__", "builtins")
    return Searched.ALL if module == "builtins" or searched(module) is Searched.ALL else searched(function.__module__)


def is_adapted(module: str) -> bool:
    """Return whether a module belongs to a package with an adapter."""
    return module.partition(".")[0] in ADAPTED


def is_own_class(kind: type) -> bool:
    """Return whether a class was defined outside of installed packages and the standard library."""
    module = sys.modules.get(kind.__module__)
    return not is_adapted(kind.__module__) and is_own_file(str(getattr(module, "__file__", None) or ""))


# ---- code ------------------------------------------------------------------------------------------------------------


@functools.cache
def is_own_file(path: str) -> bool:
    """Return whether a file is outside of installed packages, the standard library and this core."""
    return not path.startswith((TORCH, STANDARD, CORE, "<frozen")) and "-packages" not in path


@functools.cache
def is_core_file(path: str) -> bool:
    """Return whether a file belongs to this core, without the parts that its adapters put into models.

    The core observes and captures, and computes nothing itself.
    """
    return path.startswith(CORE) and not path.startswith(ADAPTERS)


def is_torch_or_standard(path: str) -> bool:
    """Return whether a file belongs to PyTorch or the standard library."""
    return path.startswith((TORCH, STANDARD))


def looks_operators_up(code: types.CodeType) -> bool:
    """Return whether this is code of PyTorch that looks operators up."""
    return code.co_filename.startswith(_LOOKS_OPERATORS_UP)


def may_take_modules(code: types.CodeType) -> bool:
    """Return whether the first argument of code may be a module: the functions that PyTorch calls most take tensors."""
    return not code.co_filename.startswith(_TAKES_NO_MODULES)


def is_import(frame: types.FrameType) -> bool:
    """Return whether this frame runs a module that is imported."""
    caller = frame.f_back
    return (
        frame.f_code.co_name == "<module>"
        and caller is not None
        and caller.f_code.co_filename.startswith("<frozen importlib")
    )


def file_of(frame: types.FrameType) -> str:
    """Return the file of the code that runs in this frame; empty for text that has no file.

    Code of eval and exec, which also make dataclasses, belongs to the module in which it runs.
    """
    path = frame.f_code.co_filename
    if path != "<string>":
        return path
    module = frame.f_globals.get("__name__", "")
    return frame.f_globals.get("__file__") or ("<frozen" if str(module).startswith("namedtuple_") else "")


def is_own_frame(frame: types.FrameType) -> bool:
    """Return whether this frame runs code outside of installed packages.

    A package with an adapter may run from a checkout.
    """
    return is_own_file(file_of(frame)) and not is_adapted(str(frame.f_globals.get("__name__")))


def is_called_by_own_code(frame: types.FrameType | None) -> bool:
    """Return whether code outside of installed packages calls this, directly or through the standard library."""
    while frame is not None and frame.f_code.co_filename.startswith((STANDARD, "<frozen")):
        if os.path.basename(frame.f_code.co_filename).startswith(_INCIDENTAL):
            return False
        frame = frame.f_back
    return frame is not None and is_own_frame(frame)


# ---- context variables and the environment ---------------------------------------------------------------------------


@functools.cache
def is_own_variable(variable: ContextVar[Any]) -> bool:
    """Return whether a context variable may hold a user's values. PyTorch's are settings, which are watched as such."""
    return variable.name != _DECIMAL_CONTEXT and not variable.name.startswith("torch.") and not is_compilers(variable)


@functools.cache
def is_compilers(variable: ContextVar[Any]) -> bool:
    """Return whether this is a global or a setting of a compiler, which no result depends on."""
    return any(
        value is variable
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(_COMPILERS)
        for value in _values_of(module)
    )


def _values_of(module: types.ModuleType) -> list[Any]:
    """Return the globals of a module, and the variables that PyTorch keeps the settings of its compilers in."""
    settings = vars(module).get("_config")
    entries = settings.values() if isinstance(settings, dict) else ()
    return [*vars(module).values(), *[getattr(entry, "user_override", None) for entry in entries]]


def own_environment() -> dict[str, str]:
    """Return the environment without the variables of compilers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_COMPILERS_VARIABLES)}
