"""Python state that a callable changes: attributes, closures, globals, containers, and state of the process.

A replay runs no Python, so state that a run changes would stay as the capture left it. `host_reads.py` handles state
that a run only reads.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from graph_cache.namespaces import (
    MAX_ITEMS,
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
    is_buffer,
    is_hidden,
    is_opaque,
    slots_of,
)

MAX_NAMESPACES = 200_000  # of a larger state, the rest is not searched, and no graph is captured
MAX_OF_ANY_CODE = 20_000  # before a run was observed: of all that its functions may reach, the nearest
# Modules of the standard library whose objects hold a user's values.
RECORDS = frozenset(
    (
        *("types", "argparse", "collections", "configparser", "dataclasses", "multiprocessing", "queue", "weakref"),
        "_thread",
    )
)
# Packages whose objects are not followed: their state is caches and counters that no result depends on.
SKIPPED = frozenset((*sys.stdlib_module_names, "numpy", "graph_cache", "engine", "_pytest")) - RECORDS
SKIPPED_PREFIXES = ("torch.distributed", "torch.utils.data", "torch.cuda", "torch._", "torch.profiler", "triton.")
NOT_FOLLOWED = (Tensor, types.BuiltinFunctionType, types.MethodType, functools.partial)
FLAGS = frozenset(("main_grad", "grad_added_to_main_grad"))  # of parameters, which `parameter_aliases.py` takes care of
LIBRARIES = frozenset(("transformer_engine", "megatron"))
REGISTRIES = ("_parameters", "_buffers", "_modules")
_REGISTRY = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")
_WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    type(functools.cache(len)),
)
DICTIONARY_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
PATCHED = frozenset(("torch", "torch.nn", "torch.nn.functional"))  # modules whose functions other code may replace
_WRAPPED = ("__func__", "fget", "func", "__wrapped__", "args", "keywords", "dispatcher")  # what these refer to


class Ran(Protocol):
    """The code of an observed run. `own` is that outside of installed packages, with the globals that it ran with."""

    @property
    def names(self) -> set[str]: ...

    @property
    def own(self) -> Sequence[tuple[types.CodeType, dict[str, Any]]]: ...

    @property
    def own_names(self) -> set[str]: ...

    def __contains__(self, code: object) -> bool: ...


class _AnyCode:
    """Stands for all code, before a run was observed."""

    names: set[str] = set()
    own: tuple[tuple[types.CodeType, dict[str, Any]], ...] = ()
    own_names: set[str] = set()

    def __contains__(self, code: object) -> bool:
        return True


ANY_CODE = _AnyCode()


class HostState:
    """Values of all Python state reachable from some roots, to find and undo what a run changes.

    Args:
        roots: Named objects from which the state is searched.
        libraries: Whether all attributes of Megatron's and Transformer Engine's modules count; otherwise numbers and
            tensors with history do.
        ignored: Objects that are not followed.
        gradients: Whether `.grad` counts.
        ran: The code that an earlier run executed. Without it, methods and their globals are not searched.

    Attributes:
        namespaces: The reachable namespaces.
        changed: (id of the container, key) of the values that `changes` found changed.
        created: Those among them that were missing or None before, such as a cache that the first run makes.
        results: Namespace, key and value of those among them that are results of the run, which replays update.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, Any]],
        libraries: bool = True,
        ignored: Sequence[Any] = (),
        gradients: bool = False,
        ran: Ran | None = None,
    ):
        found = reachable(roots, ignored=ignored, ran=ran)
        self._is_complete = found.is_complete
        self.namespaces = [one for one in found if libraries or not one.is_library]
        self.changed: set[tuple[int, Any]] = set()
        self.created: set[tuple[int, Any]] = set()
        self.results: list[tuple[Namespace, Any, Tensor]] = []
        self._before = [namespace.read() for namespace in self.namespaces]
        self._tensors: dict[int, _TensorState] = {}
        for namespace, values in zip(self.namespaces, self._before, strict=True):
            for key, value in values.items():
                if isinstance(value, Tensor) and id(value) not in self._tensors:
                    self._tensors[id(value)] = _TensorState(namespace.name_of(key), value, gradients)

    def changes(self, was_read: Callable[[Tensor], bool]) -> list[str]:
        """Return descriptions of what changed.

        A tensor may be replaced by a result without history if `was_read` is false for the former; see `results`.
        """
        found = [] if self._is_complete else [f"unknown state: it can reach more than {MAX_NAMESPACES:,} objects"]
        for namespace, before in zip(self.namespaces, self._before, strict=True):
            now = namespace.read()
            for key in [*before, *[key for key in now if key not in before]]:
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                if same(old, new) or (namespace.is_library and not _is_state_of_a_library(old, new)):
                    continue
                self.changed.add((id(namespace.container), key))
                if old is MISSING or old is None:
                    self.created.add((id(namespace.container), key))
                if _is_result(old, new, was_read):
                    self.results.append((namespace, key, new))
                else:
                    found.append(namespace.name_of(key))
        found += [change for tensor in self._tensors.values() for change in tensor.changes()]
        return [_REGISTRY.sub(r".\1", name) for name in dict.fromkeys(found)]

    def knows(self, value: Any) -> bool:
        """Whether an object was in this state at construction."""
        return any(value is one for before in self._before for one in before.values())

    def irreversible(self) -> list[str]:
        """Return the names of changed objects that `restore` can't restore, such as iterators."""
        return [
            namespace.path
            for namespace, before in zip(self.namespaces, self._before, strict=True)
            if isinstance(namespace, Hidden)
            and not namespace.is_restorable
            and not same_values(before, namespace.read())
        ]

    def restore(self) -> None:
        """Restore all values, and the memory of tensors that was replaced."""
        for namespace, before in zip(self.namespaces, self._before, strict=True):
            now = namespace.read()
            if isinstance(namespace, Contents) and now == before:
                continue  # read anew each time
            if list(now) != list(before) or any(now[key] is not value for key, value in before.items()):
                namespace.write(before)
        for tensor in self._tensors.values():
            tensor.restore()


class _TensorState:
    """What a run may change of a tensor besides its contents: its memory, whether it is trained, its gradient."""

    def __init__(self, name: str, tensor: Tensor, gradients: bool):
        self.name, self.tensor = name, tensor
        self.address = _address(tensor)
        self.memory = tensor.data if self.address else None
        self.requires_grad = tensor.requires_grad
        self.gradients = gradients and tensor.is_leaf
        self.grad = tensor.grad if self.gradients else None

    def changes(self) -> Iterator[str]:
        if _address(self.tensor) != self.address:
            yield f"the memory of {self.name}"
        if self.tensor.requires_grad != self.requires_grad:
            yield f"requires_grad of {self.name}"
        if self.gradients and self.tensor.grad is not self.grad:
            yield f"the gradient of {self.name}"

    def restore(self) -> None:
        if self.memory is not None and _address(self.tensor) != self.address:
            self.tensor.data = self.memory
        if self.tensor.is_leaf and self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        if self.gradients and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad


def same(old: Any, new: Any) -> bool:
    """Return whether two values are the same object, or plain values (or tuples of such) that are equal."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if type(old) in PLAIN or isinstance(old, frozenset):
        return bool(old == new) and repr(old) == repr(new)  # 0.0 is not -0.0
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(same, old, new))
    if isinstance(old, types.MethodType):
        return bool(old == new)
    return False


def same_values(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> bool:
    """Return whether two namespaces hold the same values under the same keys."""
    return before.keys() == now.keys() and all(same(value, now[key]) for key, value in before.items())


def _is_result(old: Any, new: Any, was_read: Callable[[Tensor], bool]) -> bool:
    """Whether the new value is a tensor without history, in place of one that the run did not read."""
    if not isinstance(new, Tensor) or isinstance(new, nn.Parameter) or new.requires_grad:
        return False
    return isinstance(old, Tensor) and not was_read(old)


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; 0 if it has none."""
    if is_lazy(tensor):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


# ---- search ----------------------------------------------------------------------------------------------------------


class Namespaces(list[Namespace]):
    """Namespaces that a search found. `is_complete`: there are no more than MAX_NAMESPACES."""

    is_complete = True


def reachable(
    roots: Sequence[tuple[str, Any]],
    without: tuple[type, ...] = (),
    ignored: Sequence[Any] = (),
    ran: Ran | None = None,
    names: Container[Any] | None = None,
) -> Namespaces:
    """Return the namespaces reachable from these named values, each once.

    Objects of the types in `without` and those in `ignored` are not followed. With `ran`, only functions that ran are
    followed, and methods, class attributes and names of imported modules are searched too. With `names`, only these
    names of objects are followed, and those that Python itself looks up (`__len__`).
    """
    found, limit = Namespaces(), MAX_OF_ANY_CODE if ran is ANY_CODE else MAX_NAMESPACES
    seen = set(map(id, ignored))
    frontier = list(roots)
    if ran is not None:
        # Functions that ran without a reference from the roots that leads to them.
        found += [Globals("", variables, tuple(global_names(code)), code) for code, variables in ran.own]
        found.append(ClassAttributes("Tensor", Tensor, only=_patched_methods(Tensor, ran.own_names)))
        frontier += [item for namespace in found for item in namespace.read().items()]
    while frontier:
        following: list[tuple[str, Any]] = []
        for path, value in frontier:
            if id(value) in seen or type(value) in PLAIN or isinstance(value, without):
                continue
            seen.add(id(value))
            if len(found) > limit:
                found.is_complete = ran is ANY_CODE  # a later search is
                return found
            for namespace in _namespaces_of(path, value, ran):
                found.append(namespace)
                if isinstance(namespace, (Contents, Hidden)):
                    following += [(path, item) for item in _held(namespace)]
                elif not namespace.is_library and namespace.is_comparable:
                    following += [
                        (namespace.name_of(key), item)
                        for key, item in namespace.read().items()
                        if names is None or not namespace.named or key in names or key in REGISTRIES or key[:2] == "__"
                    ]
            following += _constants_of(path, value)
            if ran is not None:
                following += [(kind.__name__, kind) for kind in type(value).__mro__]
        frontier = following
    return found


def _patched_methods(kind: type, names: Container[str]) -> tuple[str, ...]:
    """Return the names, among `names`, under which other code has put functions on a class of PyTorch."""
    return tuple(
        [
            name
            for name, value in vars(kind).items()
            if name in names and isinstance(value, types.FunctionType) and not _is_library(value.__module__)
        ]
    )


def _namespaces_of(path: str, value: Any, ran: Ran | None) -> Iterator[Namespace]:
    if isinstance(value, types.FunctionType):
        if ran is None or (value.__code__ in ran and not _is_library(value.__module__)):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield Cell(name, cell)
            yield Globals("", value.__globals__, tuple(global_names(value.__code__)), value.__code__)
            if imported := tuple(name for name in value.__code__.co_names if name in sys.modules):
                yield Globals("", sys.modules, imported)
            yield Attributes(path, value.__dict__)
            yield FunctionParts(path, value)
    elif (found := _contents_of(path, value)) is not None:
        yield found
        module = type(value).__module__
        if module not in ("builtins", "collections") and (not _is_skipped(module) or module.startswith("numpy.ma")):
            yield from _attributes_of(path, value)  # of a subclass; a masked array has its mask there
    elif isinstance(value, types.ModuleType):
        if ran is not None and (value.__name__ in PATCHED or not _is_library(value.__name__)):
            yield Globals(path, vars(value), tuple(ran.names & vars(value).keys()))
    elif isinstance(value, type):
        if ran is not None and issubclass(value, nn.Module) and value.__module__.startswith("torch.nn."):
            yield ClassAttributes(path, value, only=("forward",))
        elif ran is not None and not _is_library(value.__module__):
            yield ClassAttributes(path, value)
    elif isinstance(value, Tensor):
        if ran is ANY_CODE:
            yield Attributes(path, vars(value), is_library=True)
        elif ran is not None and ran.own_names:
            yield TensorAttributes(path, vars(value), ran.own_names - FLAGS)
    elif not isinstance(value, NOT_FOLLOWED) and not _is_skipped(type(value).__module__):
        yield from _attributes_of(path, value)
    elif isinstance(value, nn.Module):  # such as the wrapper that torch.compile returns
        yield Items(f"{path}._modules", value._modules)


def _contents_of(path: str, value: Any) -> Namespace | None:
    """Return the contents of a container or of an object that keeps its state in C; None for any other object."""
    if isinstance(value, (dict, list, deque)):
        return Items(path, value)
    if is_buffer(value):
        return Contents(path, value)
    if is_opaque(value):
        return Opaque(path, value)
    return Hidden(path, value) if is_hidden(value) else None


def _attributes_of(path: str, value: Any) -> Iterator[Namespace]:
    attributes = getattr(value, "__dict__", None)
    is_library = isinstance(value, nn.Module) and type(value).__module__.partition(".")[0] in LIBRARIES
    if isinstance(attributes, dict):
        yield Attributes(path, attributes, is_library=is_library)
        for name, item in attributes.items() if is_library else ():
            if name in REGISTRIES:
                yield Items(f"{path}.{name}", item)
            elif isinstance(item, (dict, list)):
                yield Items(f"{path}.{name}", item, is_library=True)
    if slots := slots_of(type(value)):
        yield Values(path, value, slots)


def _held(namespace: Namespace) -> list[Any]:
    """Return the objects in a set or in a context variable, or those that an array refers to."""
    if not namespace.is_comparable:
        return []
    values = [one for one in namespace.read().values() if one is not MISSING]
    if isinstance(namespace, Hidden):
        return values if isinstance(namespace.container, ContextVar) else []
    return [item for contents in values if isinstance(contents, frozenset) for item in contents]


def _constants_of(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values that an immutable object refers to, and what a dictionary holds besides its values."""
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [(f"a default of {path}", item) for item in defaults]
    if isinstance(value, types.MethodType):
        return [(f"{path}.__self__", value.__self__), (path, value.__func__)]
    if isinstance(value, functools.partial):
        return [(path, value.func), (f"{path}.keywords", value.keywords), *[(path, item) for item in value.args]]
    if isinstance(value, weakref.ref):
        return [(path, value())]
    if isinstance(value, memoryview):
        return [] if _is_released(value) else [(path, value.obj)]
    if isinstance(value, (tuple, frozenset)):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        keys = [key for key in dict.keys(value) if type(key) not in PLAIN] if len(value) <= MAX_ITEMS else []
        factory = [value.default_factory] if isinstance(value, defaultdict) else []
        return [(path, item) for item in (*keys, *factory)]
    if isinstance(value, (types.MappingProxyType, *DICTIONARY_VIEWS)):
        return [(path, one) for one in gc.get_referents(value)]
    if isinstance(value, _WRAPPERS):
        return [(path, getattr(value, name)) for name in _WRAPPED if hasattr(value, name)]
    return []


def _is_released(view: memoryview) -> bool:
    try:
        return view.nbytes < 0
    except ValueError:
        return True


def global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in functions nested in it."""
    yield from code.co_names
    uses_dictionary = "globals" in code.co_names
    for constant in code.co_consts:
        if uses_dictionary and type(constant) is str:
            yield constant
        if isinstance(constant, types.CodeType):  # a nested function or comprehension
            yield from global_names(constant)


def _is_state_of_a_library(old: Any, new: Any) -> bool:
    return type(old) in (int, float) or (isinstance(new, Tensor) and new.grad_fn is not None)


def _is_library(module: str | None) -> bool:
    """Whether functions and classes of this module are not searched: nobody keeps state there that a run reads."""
    if not isinstance(module, str):
        return True
    root = module.partition(".")[0]
    return root in LIBRARIES or root == "torch" or root in sys.stdlib_module_names or _is_skipped(module)


def _is_skipped(module: str) -> bool:
    return module.partition(".")[0] in SKIPPED or module.startswith(SKIPPED_PREFIXES)


def objects_with_tensors(values: Sequence[Any], without: tuple[type, ...] = ()) -> list[str]:
    """Return the types of these values that are no tensors but refer to some. Functions are not followed."""
    unfollowed = (types.FunctionType, types.MethodType, *without)
    objects = [value for value in values if type(value) not in PLAIN and not isinstance(value, (Tensor, *unfollowed))]
    return [
        type(value).__name__
        for value in objects
        if any(
            isinstance(item, Tensor)
            for namespace in reachable([("", value)], without=unfollowed)
            for item in _items(namespace.read().values())
        )
    ]


def _items(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, frozenset)):
            yield from value
        else:
            yield value
