"""Code that runs: its names, the modules whose methods ran, and what it reads outside of the process."""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from graph_cache.guards.audit import storage_of
from graph_cache.guards.namespaces import Cell
from graph_cache.guards.ownership import (
    STANDARD,
    TORCH,
    file_of,
    is_called_by_own_code,
    is_core_file,
    is_import,
    is_own_file,
    is_own_frame,
    is_torch_or_standard,
    looks_operators_up,
    may_take_modules,
)
from graph_cache.guards.search import global_names
from graph_cache.utils.garbage import no_garbage_collections
from graph_cache.utils.profiling import profiled, uncompiled

_DYNAMO = f"{TORCH}_dynamo{os.sep}"
PACKING = frozenset(("_push_saved_tensors_default_hooks", "register_hooks"))
COMPUTES_NAMES = frozenset(("getattr", "hasattr", "__getattribute__", "__dict__", "vars", "globals", "attrgetter"))
# Code that names one of these may read all attributes of an object.
READS_ALL_ATTRIBUTES = frozenset(
    (
        *("vars", "__dict__", "asdict", "astuple", "fields", "dir", "getmembers", "get_type_hints", "to_dict"),
        *("model_dump", "__annotations__", "__slots__", "__getstate__"),
    )
)
READS_ALL_NAMES = COMPUTES_NAMES | READS_ALL_ATTRIBUTES | {"replace", "copy", "deepcopy", "eval", "exec", "locals"}
# Functions in C that read the world outside of the process, or what changes while it runs, as `module.name`; methods of
# types as `type.name`.
OUTSIDE = {
    **{
        f"time.{name}{suffix}": "the clock"
        for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
        for suffix in ("", "_ns")
    },
    **{f"{kind}.{name}": "the clock" for kind in ("datetime", "date") for name in ("now", "utcnow", "today")},
    **{f"time.{name}": "the clock" for name in ("strftime", "gmtime", "localtime", "ctime", "asctime")},
    "posix.times": "the clock",
    "torch.get_num_threads": "the number of threads",
    "posix.urandom": "random numbers of the system",
    **{
        f"posix.{name}": "the file system"
        for name in ("stat", "fstat", "lstat", "listdir", "scandir", "access", "getcwd")
    },
    **{f"{module}.open": "a file" for module in ("_io", "io", "posix")},
}
# Functions of the standard library, by file, that wait for another thread or give it work.
_THREADS = "the results of another thread"
THREADS = {
    "threading.py": ("start", "wait"),
    "queue.py": ("get",),
    os.path.join("concurrent", "futures", "thread.py"): ("submit",),
    os.path.join("concurrent", "futures", "process.py"): ("submit",),
    os.path.join("multiprocessing", "pool.py"): ("apply_async", "_map_async", "imap", "imap_unordered"),
}


_FIELDS, _NAMES = re.compile(r"{([^{}]*)"), re.compile(r"[^\W\d]\w*")  # of a format: `{config.scale:.3f}`
# Last parts of the names of functions in C whose calls are observed.
_OBSERVED_IN_C = frozenset(name.rpartition(".")[2] for name in OUTSIDE) | PACKING


class _Kind(NamedTuple):
    """What each call of some code is asked: does it wait for a thread, is it compiled, is its argument a module."""

    waits: bool
    is_compile_wrapper: bool
    first: str  # the name of the first argument; empty if it is no module


_NOTHING_MORE = _Kind(False, False, "")


class Reads:
    """Names that code may read and modules whose methods ran, found by profiling a run.

    Attributes:
        modules: The modules, by id.
        outside: What code outside of installed packages read of the world outside of the process: clocks and files.
        compiled: Modules of the functions that torch.compile has compiled and the code called.
        made: Addresses of the storages of these functions' results.
        packs_saved_tensors: Whether hooks pack what autograd saves, as a checkpoint's hooks do to compute it again.

    Args:
        names: Names that the caller itself reads, such as that of the method that it calls.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._given = frozenset(names)
        self.modules: dict[int, nn.Module] = {}
        self.outside: set[str] = set()
        self.compiled: set[str] = set()
        self.packs_saved_tensors = False
        self.made: dict[int, StorageWeakRef] = {}  # weak references keep the addresses from being reused
        self._codes: dict[int, types.CodeType] = {}
        self._kinds: dict[int, _Kind] = {}  # by id of the code
        self._kept: list[types.CodeType] = []
        self._import: types.FrameType | None = None  # of the module that is imported now
        self._names: tuple[int, set[str]] = 0, set(self._given)  # as of that number of codes, as is the next
        self._own_names: tuple[int, set[str]] = 0, set()
        self._globals: dict[int, dict[str, Any]] = {}  # that code outside of installed packages ran with

    @classmethod
    def of_calls(cls, modules: Iterable[nn.Module], function: Any = None) -> Reads:
        """Return the code that calls of these modules and of a function may run, without running it.

        For compiled code, which can't be observed: the forwards, and the functions and methods that they name.
        """
        reads = cls()
        todo: list[tuple[Any, Any]] = [(None, function)]
        todo += [(type(module), vars(module).get("forward", type(module).forward)) for module in modules]
        while todo:
            owner, value = todo.pop()
            for one in _functions_in(value):
                code = one.__code__
                if code in reads or is_torch_or_standard(code.co_filename) or is_core_file(code.co_filename):
                    continue
                reads._codes[id(code)] = code
                if is_own_file(code.co_filename):
                    reads._globals[id(code)] = one.__globals__
                for name in global_names(code):
                    todo.append((owner, getattr_static(owner, name, None)))
                    todo.append((owner, one.__globals__.get(name)))
                todo += [(owner, Cell("", cell).value("cell_contents")) for cell in one.__closure__ or ()]
        return reads

    def __contains__(self, code: object) -> bool:
        return id(code) in self._codes

    def merged(self, other: Reads) -> Reads:
        """Return the code of either run."""
        both = Reads(self._given | other._given)  # without the modules, which it would keep alive
        both._codes = self._codes | other._codes
        both._globals = self._globals | other._globals
        both.outside = self.outside | other.outside
        both.compiled = self.compiled | other.compiled
        both.packs_saved_tensors = self.packs_saved_tensors or other.packs_saved_tensors
        return both

    @property
    def names(self) -> set[str]:
        """Names of globals, attributes and closure variables in the code that ran, and strings that may be names."""
        count, names = self._names
        if count != len(self._codes):
            names = _names_in(self._codes.values()) | self._given
            self._names = len(self._codes), names
        return names

    @property
    def own_names(self) -> set[str]:
        """Those among `names` in code outside of installed packages."""
        count, names = self._own_names
        if count != len(self._codes):
            names = _names_in(self._own_codes())
            self._own_names = len(self._codes), names
        return names

    @property
    def called(self) -> set[str]:
        """Names of the functions and methods that code outside of installed packages calls."""
        return {name for code in self._own_codes() for name in _called_names(code)}

    @property
    def own(self) -> list[tuple[types.CodeType, dict[str, Any]]]:
        """The code outside of installed packages, each with the globals that it ran with."""
        return [(self._codes[where], variables) for where, variables in self._globals.items()]

    @property
    def computes_names(self) -> bool:
        """Whether code outside of installed packages reads attributes that may be absent, or computes their names."""
        return any(map(_computes_names, self._own_codes()))

    @property
    def parts_of_names(self) -> tuple[str, ...]:
        """Strings in code that computes names (`getattr(self, f"layer{index}")`): names may begin or end with them."""
        return tuple(
            {
                value
                for code in self._own_codes()
                if _computes_names(code)
                for value in code.co_consts
                if type(value) is str and value.replace("_", "a").isalnum()
            }
        )

    @property
    def reads_all_attributes(self) -> bool:
        """Whether code outside of installed packages may read all attributes of an object."""
        codes = self._own_codes()
        return not READS_ALL_ATTRIBUTES.isdisjoint(self.own_names) or any(map(_matches_by_position, codes))

    @property
    def names_to_follow(self) -> set[str] | None:
        """The names that the code may read; None if it may read all attributes of an object."""
        if any(not READS_ALL_NAMES.isdisjoint(code.co_names) for code in self._own_codes()):
            return None
        if any(map(_matches_by_position, self._own_codes())):
            return None
        return self.names

    @property
    def reads_environment(self) -> bool:
        """Whether code outside of PyTorch and the standard library names the environment."""
        return any(
            not {"environ", "getenv"}.isdisjoint(code.co_names) and not is_torch_or_standard(code.co_filename)
            for code in self._codes.values()
        )

    def _own_codes(self) -> list[types.CodeType]:
        """Return the code outside of installed packages and the standard library."""
        return [self._codes[where] for where in self._globals]

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Profile the calling thread within the block. Collects no garbage: that would run code of other objects."""
        with no_garbage_collections(), profiled(self._called):
            yield

    @uncompiled
    def _called(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if self._import is not None:  # a module that is imported now: no later run repeats this
            if event == "return" and frame is self._import:
                self._import = None
        elif event == "call":
            self._entered(frame)
        elif event == "c_call":
            if argument.__name__ in _OBSERVED_IN_C:
                self._entered_in_c(frame, argument)
        elif event == "return" and argument is not None and _is_compile_wrapper(frame.f_code):
            self._observe_results(argument)

    def _entered(self, frame: types.FrameType) -> None:
        code = frame.f_code
        kind = self._kinds.get(id(code))
        if kind is None:
            if is_import(frame):
                self._import = frame
                return
            kind = self._kinds[id(code)] = self._kind_of(frame)
        if kind is _NOTHING_MORE:
            return
        if kind.waits and is_called_by_own_code(frame):
            self.outside.add(_THREADS)
        if kind.is_compile_wrapper and not _forces_eager():
            self.compiled.add(str(getattr(frame.f_locals.get("fn"), "__module__", "")))
        if kind.first:
            first = frame.f_locals.get(kind.first)
            if isinstance(first, nn.Module):
                self.modules[id(first)] = first

    def _kind_of(self, frame: types.FrameType) -> _Kind:
        """Record the code of this frame, and return what each call of it is asked."""
        code = frame.f_code
        self._kept.append(code)  # so that no other code gets its id
        if looks_operators_up(code):
            return _NOTHING_MORE
        if not is_core_file(file_of(frame)):
            self._codes[id(code)] = code
            if is_own_frame(frame):
                self._globals[id(code)] = frame.f_globals
        kind = _Kind(
            code.co_name in THREADS.get(code.co_filename.removeprefix(STANDARD), ()),
            _is_compile_wrapper(code),
            code.co_varnames[0] if code.co_argcount and may_take_modules(code) else "",
        )
        return kind if any(kind) else _NOTHING_MORE

    def _entered_in_c(self, frame: types.FrameType, function: Any) -> None:
        name = f"{function.__module__}.{function.__name__}" if function.__module__ else function.__qualname__
        self.packs_saved_tensors |= function.__name__ in PACKING
        if name in OUTSIDE and is_called_by_own_code(frame):
            self.outside.add(OUTSIDE[name])

    def _observe_results(self, results: Any) -> None:
        for leaf in tree_leaves(results):
            storage = storage_of(leaf) if isinstance(leaf, Tensor) else None
            if storage is not None:
                self.made[storage._cdata] = StorageWeakRef(storage)


def _functions_in(value: Any) -> list[types.FunctionType]:
    """Return the function behind a method, a property, a compiled function or a wrapper, as a list of at most one."""
    if isinstance(value, (types.FunctionType, types.MethodType)):
        value = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, (functools.partial, functools.cached_property)):
        value = value.func
    return [value] if isinstance(value, types.FunctionType) else []


def _computes_names(code: types.CodeType) -> bool:
    return not COMPUTES_NAMES.isdisjoint(code.co_names)


def _names_in(codes: Iterable[types.CodeType]) -> set[str]:
    """Return the names of globals, attributes and closure variables in code, and strings that may be names."""
    found: set[str] = set()
    for code in codes:
        found.update(code.co_names, code.co_freevars)
        for value in code.co_consts:
            for text in value if type(value) is tuple else (value,):  # a tuple of names, as of `case Point(x=0)`
                if type(text) is str:
                    found.update(names_in(text))
    return found


def names_in(text: str) -> set[str]:
    """Return the parts of a text that may be names: between points, as for `attrgetter`, and of a format's fields."""
    found = {part for part in text.split(".") if part.isidentifier()}
    if "{" in text:
        found.update(name for field in _FIELDS.findall(text) for name in _NAMES.findall(field))
    return found


@functools.lru_cache(maxsize=8192)
def _matches_by_position(code: types.CodeType) -> bool:
    """Return whether code has patterns as `case Point(0, 1)`, which read attributes without their names."""
    return any(one.opname == "MATCH_CLASS" and one.arg for one in dis.get_instructions(code))


def _is_compile_wrapper(code: types.CodeType) -> bool:
    return code.co_name == "compile_wrapper" and code.co_filename.startswith(_DYNAMO)


def _forces_eager() -> bool:
    """Whether compiled functions run uncompiled now, by `torch.compiler.set_stance`."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", "") == "force_eager"


@functools.lru_cache(maxsize=8192)
def _loaded_globals(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code loads as globals, or may look up in `globals()`."""
    loaded = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    if "globals" in code.co_names:
        loaded.update(value for value in code.co_consts if type(value) is str and value.isidentifier())
    return tuple(loaded)


@functools.lru_cache(maxsize=8192)
def _called_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code loads in order to call them."""
    found: set[str] = set()
    is_callee = False  # of an expression such as torch.manual_seed, which begins with a mark on the stack for its call
    for instruction in dis.get_instructions(code):
        is_attribute = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if not is_attribute and instruction.opname != "CACHE":
            is_callee = "NULL" in instruction.argrepr or instruction.opname == "PUSH_NULL"
        is_named = is_attribute or instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
        if is_named and (is_callee or instruction.opname == "LOAD_METHOD" or "NULL" in instruction.argrepr):
            found.add(instruction.argval)
    return frozenset(found)


def absent_names(code: types.CodeType, namespace: dict[str, Any]) -> list[str]:
    """Return the global names that code may read and that do not exist, or belong to builtins."""
    return [name for name in _loaded_globals(code) if name not in namespace]
