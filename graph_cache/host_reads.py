"""Python state that a run reads: a replay stays as the capture found it, so a change needs another graph."""

from __future__ import annotations

import builtins
import copyreg
import dis
import functools
import itertools
import os
import sys
import types
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getattr_static
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_hooks
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from graph_cache.audit import storage_of
from graph_cache.garbage import no_garbage_collections
from graph_cache.host_state import LIBRARIES, REGISTRIES, global_names
from graph_cache.keys import IdentityKey
from graph_cache.namespaces import (
    MISSING,
    PLAIN,
    Attributes,
    Cell,
    ClassAttributes,
    Contents,
    FunctionParts,
    Globals,
    Hidden,
    Items,
    Namespace,
    Opaque,
    TensorAttributes,
    Values,
    position_of,
)
from graph_cache.profiling import profiled

MAX_SINGLE_ITEMS = 64  # items of larger containers are watched together
MAX_WATCHED_BYTES = 1 << 20  # of all buffers together; comparing these takes 200 µs
MAX_VERSIONS = 64  # values of one Watch that are told apart
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # watched elsewhere, or registries
COUNTED = (Items, Attributes, ClassAttributes, TensorAttributes)  # containers of which the length may be watched
UNWATCHED = MODULE_ATTRIBUTES - set(REGISTRIES)
TENSORS = ("_parameters", "_buffers")  # registries
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = [
    torch_hooks._global_forward_hooks,
    torch_hooks._global_forward_pre_hooks,
    torch_hooks._global_backward_hooks,
    torch_hooks._global_backward_pre_hooks,
]
_STANDARD = os.path.dirname(os.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARIES = (_TORCH, _STANDARD)
_ROUTING = "megatron.core.transformer.moe."
_DYNAMO = f"{_TORCH}_dynamo{os.sep}"
COMPUTES_NAMES = frozenset(("getattr", "hasattr", "__dict__", "vars", "globals", "attrgetter"))
# Code that names one of these may read all attributes of an object.
READS_ALL_ATTRIBUTES = frozenset(("vars", "__dict__", "asdict", "astuple", "fields"))
READS_ALL_NAMES = COMPUTES_NAMES | {
    "asdict",
    "astuple",
    "fields",
    "replace",
    "copy",
    "deepcopy",
    "eval",
    "exec",
    "locals",
}
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
# Attributes and methods of tensors that tell where the memory or the history of an argument comes from: a capture runs
# on other tensors than its caller's.
TENSOR_FACTS = frozenset(
    ("is_leaf", "grad_fn", "_base", "_version", "storage_offset", "retains_grad", "is_inference", "_backward_hooks")
)
PACKING = frozenset(("_push_saved_tensors_default_hooks", "register_hooks"))
GENERATOR_STATE = frozenset(("getstate", "get_rng_state", "initial_seed", "bit_generator"))
SEEDING = frozenset(("seed", "manual_seed", "manual_seed_all"))
# Looks operators up at their first use under a dispatch mode: its names depend on what the process ran before.
_OPERATORS = (f"{_TORCH}_ops.py", f"{_TORCH}_library{os.sep}", f"{_TORCH}library.py")
# This core observes and captures, and computes nothing itself: only the parts that its adapters put into models do.
_CORE = os.path.dirname(__file__) + os.sep
_ADAPTERS = f"{_CORE}adapters{os.sep}"
INCIDENTAL = ("<frozen importlib", "logging", "warnings", "linecache", "traceback", "inspect", "tokenize")


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
                if code in reads or code.co_filename.startswith(_LIBRARIES) or _is_of_the_core(code.co_filename):
                    continue
                reads._codes[id(code)] = code
                if _is_own(code.co_filename):
                    reads._globals[id(code)] = one.__globals__
                for name in global_names(code):
                    todo.append((owner, getattr_static(owner, name, None)))
                    todo.append((owner, one.__globals__.get(name)))
                todo += [(owner, _content(cell)) for cell in one.__closure__ or ()]
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
    def names_to_follow(self) -> set[str] | None:
        """The names that the code may read; None if it may read all attributes of an object."""
        if any(not READS_ALL_NAMES.isdisjoint(code.co_names) for code in self._own_codes()):
            return None
        return self.names

    @property
    def reads_environment(self) -> bool:
        """Whether code outside of PyTorch and the standard library names the environment."""
        return any(
            not {"environ", "getenv"}.isdisjoint(code.co_names) and not code.co_filename.startswith(_LIBRARIES)
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

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if self._import is not None:  # a module that is imported now: no later run repeats this
            if event == "return" and frame is self._import:
                self._import = None
            return
        if event == "c_call":
            name = f"{argument.__module__}.{argument.__name__}" if argument.__module__ else argument.__qualname__
            self.packs_saved_tensors |= argument.__name__ in PACKING
            if name in OUTSIDE and _is_called_by_own_code(frame):
                self.outside.add(OUTSIDE[name])
            return
        if event == "return" and argument is not None and _is_compile_wrapper(frame.f_code):
            self._observe_results(argument)
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_back is not None and _is_of_importlib(frame.f_back.f_code):
            self._import = frame
            return
        if code.co_filename.startswith(_OPERATORS):
            return
        if code.co_name in THREADS.get(code.co_filename.removeprefix(_STANDARD), ()) and _is_called_by_own_code(frame):
            self.outside.add(_THREADS)
        if id(code) not in self._codes and not _is_of_the_core(path := _path_of(frame)):
            self._codes[id(code)] = code
            if _is_own(path) and not _is_of_a_library(frame):
                self._globals[id(code)] = frame.f_globals
        if _is_compile_wrapper(code) and not _forces_eager():
            self.compiled.add(str(getattr(frame.f_locals.get("fn"), "__module__", "")))
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module):
                self.modules[id(first)] = first

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
            if type(value) is str:
                found.update(part for part in value.split(".") if part.isidentifier())
    return found


def _is_of_the_core(path: str) -> bool:
    return path.startswith(_CORE) and not path.startswith(_ADAPTERS)


def _is_compile_wrapper(code: types.CodeType) -> bool:
    return code.co_name == "compile_wrapper" and code.co_filename.startswith(_DYNAMO)


def _forces_eager() -> bool:
    """Whether compiled functions run uncompiled now, by `torch.compiler.set_stance`."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", "") == "force_eager"


def _is_of_importlib(code: types.CodeType) -> bool:
    return code.co_filename.startswith("<frozen importlib")


def _path_of(frame: types.FrameType) -> str:
    """Return the file of the code that runs in this frame; empty for text that has no file.

    Code of eval and exec, which also make dataclasses, is that of the module in which it runs.
    """
    path = frame.f_code.co_filename
    if path != "<string>":
        return path
    return frame.f_globals.get("__file__") or ("" if frame.f_globals.get("__name__") == "__main__" else "<frozen")


def _is_own(path: str) -> bool:
    """Whether a file is outside of installed packages, the standard library and this core."""
    return not path.startswith((*_LIBRARIES, _CORE, "<frozen")) and "-packages" not in path


def is_own_class(kind: type) -> bool:
    """Whether a class was defined outside of installed packages and the standard library."""
    module = sys.modules.get(kind.__module__)
    is_library = kind.__module__.partition(".")[0] in LIBRARIES
    return not is_library and _is_own(str(getattr(module, "__file__", None) or ""))


def _is_of_a_library(frame: types.FrameType) -> bool:
    """Whether this is Megatron's or Transformer Engine's code, which may run from a checkout."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES


def _is_called_by_own_code(frame: types.FrameType | None) -> bool:
    """Whether code outside of installed packages calls this, directly or through the standard library."""
    while frame is not None and frame.f_code.co_filename.startswith((_STANDARD, "<frozen")):
        if os.path.basename(frame.f_code.co_filename).startswith(INCIDENTAL):
            return False
        frame = frame.f_back
    return frame is not None and _is_own(_path_of(frame)) and not _is_of_a_library(frame)


def outside_reads(ran: Reads | None) -> list[str]:
    """Return why a run that read the world outside can't be replayed, as a list of at most one reason."""
    if ran is None or not ran.outside:
        return []
    return [f"reads {', '.join(sorted(ran.outside))}, which a replay would not read again: pass values as arguments"]


def tensor_facts_read(ran: Reads | None, device: torch.device) -> list[str]:
    """Return why a run can't be replayed that reads how its tensors came about, as a list of at most one reason.

    On a CPU also why one can't that reads addresses: what other code computes there does not pass the dispatcher.
    """
    facts = TENSOR_FACTS if device.type != "cpu" else TENSOR_FACTS | {"data_ptr"}
    if ran is None or not (found := facts & ran.own_names):
        return []
    return [f"reads {', '.join(sorted(found))} of a tensor, which may be another in a capture: pass the value"]


def generator_state_read(ran: Reads | None) -> list[str]:
    """Return why a run can't be replayed that reads the state of a generator, as a list of at most one reason."""
    if ran is None or not (found := GENERATOR_STATE & ran.own_names):
        return []
    return [f"reads the state of a random generator ({', '.join(sorted(found))}): pass the value"]


def seeds_given(ran: Reads | None) -> list[str]:
    """Return why a run that seeds a random generator can't be replayed, as a list of at most one reason."""
    if ran is None or ran.called.isdisjoint(SEEDING):
        return []
    return ["calls seed or manual_seed, which a replay would not repeat: seed before the call"]


def refused_reads(ran: Reads | None, device: torch.device) -> list[str]:
    """Return why a run can't be captured on `device`, by what it reads and calls."""
    found = outside_reads(ran) + seeds_given(ran) + generator_state_read(ran) + tensor_facts_read(ran, device)
    return found + refused_compiled_code(ran, device)


def refused_compiled_code(ran: Reads | None, device: torch.device) -> list[str]:
    """Return why a run that called compiled functions can't be captured on `device`, as a list of at most one reason.

    On a CPU their kernels bypass the dispatcher, so a capture would hold the uncompiled operations, which round
    differently. Captured nevertheless: compiled modules that the caller knows of (see `training/compiled.py`), and
    Megatron's helpers for routing, which round nothing.
    """
    if ran is None or device.type != "cpu" or all(name.startswith(_ROUTING) for name in ran.compiled):
        return []
    return ["calls a function compiled by torch.compile, which a CPU can't record: call the uncompiled function"]


def iterators_read(namespaces: Sequence[Namespace], names: set[str]) -> list[str]:
    """Return the names of iterators that code may read and that do not tell their position."""
    return [
        namespace.name_of(key)
        for namespace in namespaces
        if isinstance(namespace, (Cell, Items)) or namespace.named
        for key, value in namespace.read().items()
        if isinstance(value, Iterator)
        and (key in names or type(key) is not str)  # an index, or the variable of a closure
        and position_of(value) is MISSING
    ]


def unwatched_reads(namespaces: Sequence[Namespace]) -> list[str]:
    """Return why code that may read these can't be replayed, as a list of at most one reason.

    They are too large to be compared at every call, or can't be compared.
    """
    found: dict[int, str] = {}
    nbytes, largest = 0, ""
    for namespace in namespaces:
        if namespace.is_library or namespace.path.rpartition(".")[2] in (*TENSORS, *UNWATCHED):
            continue
        if not namespace.is_comparable:
            size, unit = namespace.size()
            found[id(namespace.container)] = f"{namespace.path} ({type(namespace.container).__name__}, {size:,} {unit})"
        elif isinstance(namespace, Contents) and namespace.size()[1] == "bytes":
            nbytes += namespace.size()[0]
            largest = namespace.path
    if nbytes > MAX_WATCHED_BYTES:
        found[0] = f"{largest} and other arrays (together {nbytes:,} bytes)"
    if not found:
        return []
    names = list(found.values())
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [
        f"may read {', '.join(names[:3])}{others}, which is not compared at every call, so that a change would go "
        "unnoticed: pass what it reads as an argument, or keep it in a tensor"
    ]


class Watch:
    """The current values of Python state that a run may read. Checked at every call, so it loops in C.

    Tensors are not watched: an AddressBook compares their addresses. `modules` are those whose modes, hooks and
    children are watched elsewhere.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.leave_out(modules)
        self.hooks: list[dict[int, Any]] = []  # of all other modules
        self.owners: list[Any] = []
        self.keys: list[Any] = []
        self.cells: list[types.CellType] = []
        self.functions: list[types.FunctionType] = []
        self.sized: dict[int, Any] = {}  # by id of the container, as are the next two
        self.ordered: dict[int, Any] = {}  # dictionaries of which the keys are watched
        self.large: dict[int, Any] = {}  # lists, sets and dictionaries of which all items are watched
        self.contents: list[Namespace] = []
        self.absent: list[tuple[Container[str], str]] = []  # globals and slots without a value
        self.containers: list[int] = []  # id of the container of each owner
        self._known: set[tuple[int, Any]] = set()
        self._excluded: set[tuple[int, Any]] = set()
        self.reads_environment = False
        self._seen: list[Any] = []
        self._sizes: list[Any] = []  # and contents
        self._variables: dict[Any, Any] = {}
        self._signature: tuple[Any, ...] = ()

    @classmethod
    def union(cls, watches: Iterable[Watch]) -> Watch:
        """Return a Watch of all values that these watch now, each once."""
        result = cls()
        owned: dict[tuple[int, Any], Any] = {}
        functions: dict[int, types.FunctionType] = {}
        for one in watches:
            values = zip(one.containers, one.keys, one.owners, strict=True)
            owned |= {(where, key): owner for where, key, owner in values}
            functions |= {id(function): function for function in one.functions}
            result.cells += one.cells
            result.hooks += one.hooks
            result.contents += one.contents
            result.absent += one.absent
            result.sized |= one.sized
            result.ordered |= one.ordered
            result.large |= one.large
            result.reads_environment |= one.reads_environment
        result.owners, result.functions = list(owned.values()), list(functions.values())
        result.containers, result.keys = [where for where, _ in owned], [key for _, key in owned]
        return result

    def leave_out(self, modules: Iterable[nn.Module]) -> None:
        """Add no mode, hook or child of these modules from now on, and of no others: they are watched elsewhere."""
        self._modules = {id(one) for module in modules for one in _modes_and_registries(module)}

    def exclude(self, values: set[tuple[int, Any]]) -> None:
        """Stop watching these values, each (id of the container, key): the run itself changes them."""
        self._excluded |= values
        kept = [
            index
            for index, (container, key) in enumerate(zip(self.containers, self.keys, strict=True))
            if (container, key) not in self._excluded
        ]
        self.owners = [self.owners[index] for index in kept]
        self.keys = [self.keys[index] for index in kept]
        self.containers = [self.containers[index] for index in kept]
        self.cells = [cell for cell in self.cells if (id(cell), 0) not in self._excluded]
        changing = {container for container, _ in self._excluded}
        for containers in (self.sized, self.ordered, self.large):
            for where in containers.keys() & changing:
                del containers[where]
        self.functions = [function for function in self.functions if id(function) not in changing]
        self.contents = [one for one in self.contents if id(one.container) not in changing]
        self._seen, self._sizes = [], []

    def add(self, namespaces: Sequence[Namespace], reads: Reads) -> None:
        """Watch what a run may have read: values by the names in its code, and items of containers."""
        names, parts = reads.names | _indirect_names(namespaces, reads), reads.parts_of_names
        reads_all = not READS_ALL_ATTRIBUTES.isdisjoint(reads.own_names)
        self.reads_environment |= reads.reads_environment
        for namespace in namespaces:
            container, where = namespace.container, id(namespace.container)
            if isinstance(namespace, Cell):
                if self._is_new(where, 0):
                    self.cells.append(container)
                continue
            if isinstance(namespace, FunctionParts):
                if self._is_new(where, "__code__"):
                    self.functions.append(container)
                continue
            if not self._is_watched(namespace):
                continue
            if isinstance(namespace, Contents):
                if self._is_new(where, "contents"):
                    if isinstance(container, set):
                        self.sized[where] = self.large[where] = container
                    else:
                        self.contents.append(namespace)
                continue
            if isinstance(namespace, COUNTED) and (where, MISSING) not in self._known:
                self._known.add((where, MISSING))
                if not any(changed == where for changed, _ in self._excluded):
                    self._add_container(namespace, reads.computes_names)
            if isinstance(namespace, Attributes) and HOOKS[0] in container and where not in self._modules:
                if self._is_new(where, HOOKS):
                    self.hooks += [container[name] for name in HOOKS]
            if isinstance(namespace, Items) and (
                self._has_watched_items(namespace) or len(namespace.keys()) > MAX_SINGLE_ITEMS
            ):
                continue
            if isinstance(namespace, Globals) and namespace.code is not None:
                self._add_absent(where, container, _absent_names(namespace.code, container))
            owner = namespace.values_by_key()
            if isinstance(namespace, Values):
                self._add_absent(where, owner, [name for name in namespace.names if name not in owner])
            for key, value in namespace.read().items():
                is_read = self._reads(namespace, key, value, names, parts) or (
                    reads_all and isinstance(namespace, (Attributes, Values)) and key not in MODULE_ATTRIBUTES
                )
                if is_read and self._is_new(where, key):
                    self.owners.append(owner)
                    self.keys.append(key)
                    self.containers.append(where)
        self._seen, self._sizes = [], []

    def _is_new(self, where: int, key: Any) -> bool:
        """Whether a value is neither watched nor excluded; it is from now on."""
        if (where, key) in self._known or (where, key) in self._excluded:
            return False
        self._known.add((where, key))
        return True

    def _add_absent(self, where: int, owner: Container[str], names: Sequence[str]) -> None:
        """Watch that no values have these names."""
        self.absent += [(owner, name) for name in names if self._is_new(where, name)]

    def _add_container(self, namespace: Namespace, computes_names: bool) -> None:
        """Watch the length of a container; of a small one also the keys, or all items if there are many.

        Of a tensor's attributes only if code may ask for some that are absent: libraries add others.
        """
        container, where = namespace.container, id(namespace.container)
        if isinstance(namespace, ClassAttributes):
            if namespace.only is None or container is Tensor:
                # Python adds these at their first use: by pickle and copy, and by code that reads annotations.
                copyreg._slotnames(container)  # type: ignore[attr-defined]  # noqa: SLF001
                getattr(container, "__annotations__", None)
                self.sized[where] = vars(container)
            return
        if isinstance(namespace, TensorAttributes):
            if computes_names:
                self.sized[where] = container
            return
        if not isinstance(namespace, Items):
            self.sized[where] = container
            return
        keys = self.sized[where] = namespace.keys()
        if not self._has_watched_items(namespace) and namespace.is_comparable:
            if isinstance(container, dict):
                self.ordered[where] = keys
            if len(keys) > MAX_SINGLE_ITEMS:
                self.large[where] = dict.values(container) if isinstance(container, dict) else container

    def _has_watched_items(self, namespace: Namespace) -> bool:
        """Whether an AddressBook watches the items: tensors, and the children of modules given at first."""
        return namespace.path.endswith(TENSORS) or id(namespace.container) in self._modules

    def _is_watched(self, namespace: Namespace) -> bool:
        """Whether the values of this namespace are watched: all but state that runs advance, and what is refused."""
        container = namespace.container
        if namespace.path.rpartition(".")[2] in UNWATCHED:
            return id(container) not in self._modules and bool(container)
        if isinstance(namespace, (Contents, Opaque)):
            return namespace.is_comparable  # see `unwatched_reads`
        if isinstance(namespace, Hidden):
            return "value" in namespace.read()  # a context variable
        return True

    def _reads(self, namespace: Namespace, key: Any, value: Any, names: set[str], parts: tuple[str, ...]) -> bool:
        if namespace.is_library:
            return type(value) is float
        if not namespace.named:
            return True
        if key in MODULE_ATTRIBUTES:
            return key == "training" and id(namespace.container) not in self._modules
        if isinstance(namespace, ClassAttributes) and key[:2] == "__":
            return True  # Python itself looks special methods up
        return key in names or bool(parts) and (key.startswith(parts) or key.endswith(parts))

    def signature(self) -> tuple[Any, ...]:
        """Return the current values in a form that compares plain values by value and others by identity."""
        try:
            now = list(map(getitem, self.owners, self.keys))
        except (KeyError, IndexError):  # removed
            now = [_item(owner, key) for owner, key in zip(self.owners, self.keys, strict=True)]
        now += [_content(cell) for cell in self.cells]
        now += itertools.chain.from_iterable(map(_function_parts, self.functions))
        now += itertools.chain.from_iterable(self.ordered.values())
        now += itertools.chain.from_iterable(self.large.values())
        sizes: list[Any] = list(map(len, self.sized.values()))
        if self.contents:
            sizes += [namespace.read()["contents"] for namespace in self.contents]
        if self.absent:
            sizes += [name in container for container, name in self.absent]
        if self.hooks:
            sizes += map(tuple, self.hooks)
        if (
            len(now) != len(self._seen)
            or not all(map(is_, now, self._seen))
            or sizes != self._sizes
            or (self.reads_environment and os.environ != self._variables)
        ):
            self._seen, self._sizes = now, sizes
            self._variables = dict(os.environ) if self.reads_environment else {}
            self._signature = (
                *map(_comparable, now),
                tuple(sizes),
                tuple(self._variables.items()),
            )
        return self._signature


class _TensorKey:
    """A tensor by identity. It is not kept alive; another one at its address is not equal."""

    __slots__ = ("_id", "_reference")

    def __init__(self, tensor: Tensor):
        self._id, self._reference = id(tensor), weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorKey):
            return NotImplemented
        found = self._reference()
        return found is not None and found is other._reference()

    def __hash__(self) -> int:
        return self._id


def _item_of_immutable(value: Any) -> Any:
    """Return an item of a tuple or frozenset for comparison: no other code replaces it, and no address is watched."""
    return _TensorKey(value) if isinstance(value, Tensor) else _comparable(value)


_function_parts = attrgetter(*FunctionParts.PARTS)


def _modes_and_registries(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of a module and its dictionaries of hooks, parameters, buffers and children."""
    yield vars(module)
    for name in MODULE_ATTRIBUTES & vars(module).keys():
        yield vars(module)[name]


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


def _absent_names(code: types.CodeType, namespace: dict[str, Any]) -> list[str]:
    """Return the global names that code may read and that do not exist."""
    return [name for name in _loaded_globals(code) if name not in namespace and not hasattr(builtins, name)]


def _indirect_names(namespaces: Sequence[Namespace], reads: Reads) -> set[str]:
    """Return the strings under names that code reads, which may be names themselves, as in `getattr(self, self.name)`.

    If the code computes names, also return strings in containers (`getattr(self, self.names[index])`).
    """
    names, computes = reads.names, reads.computes_names
    found = {
        item
        for namespace in namespaces
        if namespace.named or (computes and isinstance(namespace, Items) and namespace.is_comparable)
        for key, value in namespace.read().items()
        if not namespace.named or key in names
        for item in (value if computes and isinstance(value, tuple) else (value,))
        if type(item) is str
    }
    return {part for name in found for part in (name.split(".") if computes else [name]) if part.isidentifier()}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # unbound name
        return MISSING


def _item(owner: Any, key: Any) -> Any:
    try:
        return owner[key]
    except (KeyError, IndexError):
        return MISSING


def _comparable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_item_of_immutable, value))
    if isinstance(value, Tensor):
        return Tensor  # watched by address
    if isinstance(value, frozenset):
        return frozenset(map(_item_of_immutable, value))
    return (type(value), value, repr(value)) if type(value) in PLAIN else IdentityKey(value)


class ReadTensors(Mapping[str, Tensor]):
    """Tensors in Python state that a run used, by name, looked up on each access.

    `used` are the addresses of the storages. Parameters and buffers are included with `registries`, and places in
    `without` are not. `places` are those that are, each once: (id of the container, key). Several namespaces may share
    a container, as functions of one file share its globals.
    """

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        used: Container[int],
        registries: bool = False,
        without: Container[tuple[int, Any]] = (),
    ):
        self.places: set[tuple[int, Any]] = set()
        self._items: dict[str, tuple[Any, Any]] = {}
        for namespace in namespaces:
            if not registries and namespace.path.endswith(REGISTRIES):
                continue
            for key, value in namespace.read().items():
                place = id(namespace.container), key
                storage = storage_of(value) if isinstance(value, Tensor) and not is_lazy(value) else None
                if storage is not None and storage._cdata in used and place not in without and place not in self.places:
                    self.places.add(place)
                    self._items[f"{namespace.name_of(key)} ({len(self._items)})"] = namespace.values_by_key(), key

    def __getitem__(self, name: str) -> Tensor:
        values, key = self._items[name]
        try:
            value = values.cell_contents if isinstance(values, types.CellType) else values[key]
        except (IndexError, ValueError):
            raise KeyError(name) from None
        if not isinstance(value, Tensor):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def hooks_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the hooks of these modules and of all modules, by the ids of their handles. Loops in C."""
    registries = itertools.chain(itertools.chain.from_iterable(map(_registries, modules)), GLOBAL_HOOKS)
    return tuple([(id(registry), *registry) for registry in filter(None, registries)])


def gradient_hooks_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the hooks on the gradients of these tensors, by the ids of their handles. Loops in C."""
    before, after = list(map(_gradient_hooks, tensors)), list(map(_accumulation_hooks, tensors))
    if not any(before) and not any(after):
        return ()
    both = enumerate(zip(before, after, strict=True))
    return tuple([(index, *(first or ()), *(second or ())) for index, (first, second) in both if first or second])


_registries = attrgetter(*HOOKS)
_gradient_hooks, _accumulation_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class Versions:
    """A number for the current values of a Watch, which stays the same when more values are watched.

    `modules` are those whose modes, hooks and children are watched elsewhere.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.watch = Watch(modules)
        self._numbers: dict[Any, int] = {self.watch.signature(): 0}
        self._next = 0
        self._last: tuple[Any, int] = (None, 0)
        self.extensions = 0  # observed runs so far, each of which may change what is watched

    def current(self) -> int:
        """Return the number of the current values: an earlier one, if they are as they were then."""
        signature = self.watch.signature()
        if signature is self._last[0]:  # unchanged: no need to hash it
            return self._last[1]
        found = self._numbers.get(signature)
        if found is None:
            if len(self._numbers) >= MAX_VERSIONS:
                self._numbers.clear()
            self._next += 1
            found = self._numbers[signature] = self._next
        self._last = signature, found
        return found

    @contextmanager
    def extended(self) -> Iterator[Extension]:
        """Watch more values or fewer at the end of the block, which is an observed run.

        The number before the run stands for the values after it too, unless the run made some of them.
        """
        number, extension = self.current(), Extension(self.watch)
        yield extension
        if extension.made:
            self._next += 1
            number = self._next
        self._numbers, self._last = {self.watch.signature(): number}, (None, 0)
        self.extensions += 1

    def equate(self) -> None:
        """Give the current values the number of those after the last observed run, whose changes were undone."""
        (number,) = self._numbers.values()
        self._numbers[self.watch.signature()], self._last = number, (None, 0)


class AllVersions:
    """The numbers of several Versions. A value that many of them watch is read once."""

    def __init__(self, versions: Sequence[Versions]):
        self._versions = versions
        self._union = Watch()
        self._extensions: list[int] = []
        self._signature: tuple[Any, ...] | None = None
        self._numbers: list[int] = []

    def current(self) -> list[int]:
        """Return the number of each; see `Versions.current`."""
        extensions = list(map(_extensions, self._versions))
        if extensions != self._extensions:
            self._extensions, self._signature = extensions, None
            self._union = Watch.union(one.watch for one in self._versions)
        signature = self._union.signature()
        if signature is not self._signature:
            self._signature, self._numbers = signature, [one.current() for one in self._versions]
        return self._numbers


_extensions = attrgetter("extensions")


class Extension:
    """What an observed run adds to a Watch."""

    def __init__(self, watch: Watch):
        self._watch, self.made = watch, False

    def exclude(self, values: set[tuple[int, Any]], made: bool) -> None:
        """Stop watching these values. `made`: the run made others that did not exist."""
        self.made = made
        if values:
            self._watch.exclude(values)

    def add(self, namespaces: Sequence[Namespace], reads: Reads) -> None:
        """Watch what the run may have read."""
        self._watch.add(namespaces, reads)
