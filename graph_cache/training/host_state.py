"""Python state that a callable changes or reads: attributes, closures, globals, lists and dictionaries.

A replay runs no Python. State that a run changes would stay as the capture left it, and state that it reads would stay
as the capture found it.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

from torch import Tensor, nn

from graph_cache.training.call import IdentityKey

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
DEPTH = 8  # references from a callable to its state: closure, trainer, wrapper, model, registry
MAX_WATCHED_ITEMS = 64  # of larger containers, a change between two calls is not noticed
MAX_ITEMS = 4096  # of larger containers, only the length is compared
# Packages whose objects are not followed: their state is caches and counters that no result depends on.
RECORDS = frozenset(("types", "argparse", "collections", "dataclasses"))  # whose objects hold a user's values
SKIPPED = frozenset((*sys.stdlib_module_names, "numpy", "graph_cache", "engine", "_pytest")) - RECORDS
NOT_FOLLOWED = (Tensor, type, tuple, types.ModuleType, types.BuiltinFunctionType, types.MethodType, functools.partial)
# Attributes of every module, which are watched elsewhere or are its registries.
_REGISTRY = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")
REGISTRIES = ("_parameters", "_buffers", "_modules")
LIBRARIES = frozenset(("transformer_engine", "megatron"))
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
SKIPPED_PREFIXES = ("torch.distributed", "torch.utils.data", "torch.cuda", "torch._", "torch.profiler")


@dataclass
class Namespace:
    """A container of named values: an object's attributes, a dictionary, a list, or a closure's cell.

    `names` restricts a dictionary, such as a function's globals; None includes every name. `is_library`: attributes of
    a module whose library counts and caches in them, and whose adapter recreates what a forward reads.
    """

    path: str
    container: Any
    names: tuple[str, ...] | None = None
    is_attributes: bool = False
    is_library: bool = False

    def read(self) -> dict[Any, Any]:
        """Return a copy of the values by name."""
        container = self.container
        if isinstance(container, types.CellType):
            return dict(enumerate(_contents(container)))
        if isinstance(container, (list, deque)):
            return dict(enumerate(container)) if len(container) <= MAX_ITEMS else {"length": len(container)}
        if isinstance(container, set):
            return {"contents": frozenset(container)} if len(container) <= MAX_ITEMS else {"length": len(container)}
        if self.names is not None:
            return {name: container[name] for name in self.names if name in container}
        return dict(container) if len(container) <= MAX_ITEMS else {"length": len(container)}

    def write(self, values: Mapping[Any, Any]) -> None:
        """Restore values returned by `read`."""
        container = self.container
        if set(values) == {"length"}:
            return
        if isinstance(container, types.CellType):
            if 0 in values:
                container.cell_contents = values[0]
        elif isinstance(container, (list, deque)):
            container.clear()
            container.extend(values.values())
        elif isinstance(container, set):
            container.clear()
            container.update(values["contents"])
        else:
            for name in [name for name in container if name not in values and self.names is None]:
                del container[name]
            container.update(values)

    def name_of(self, key: Any) -> str:
        if isinstance(self.container, types.CellType):
            return self.path
        if self.is_attributes or self.names is not None:
            return f"{self.path}.{key}" if self.path else str(key)
        return f"{self.path}[{key!r}]" if type(key) in PLAIN else f"{self.path}[…]"


class HostState:
    """Values of all Python state reachable from some roots, to find and undo what a run changes.

    Without `libraries`, attributes of Megatron's and Transformer Engine's modules don't count; otherwise numbers and
    tensors with history do.

    Attributes:
        namespaces: The reachable namespaces.
        changed: (id of the container, key) of the values that `changes` found changed.
        allowed: Those among them that replays update.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], libraries: bool = True, ignored: Sequence[Any] = ()):
        self.namespaces = [one for one in reachable(roots, ignored=ignored) if libraries or not one.is_library]
        self.changed: set[tuple[int, Any]] = set()
        self.allowed: set[tuple[int, Any]] = set()
        self._before = [namespace.read() for namespace in self.namespaces]
        self._addresses = [
            (namespace.name_of(key), value, value.data_ptr(), value.data)
            for namespace, values in zip(self.namespaces, self._before, strict=True)
            for key, value in values.items()
            if isinstance(value, Tensor) and _has_address(value)
        ]

    def changes(self, was_read: Callable[[Tensor], bool]) -> list[str]:
        """Return descriptions of what changed.

        A tensor attribute may be replaced by a result without history if `was_read` is false for the former: every
        replay then updates the memory of the new one.
        """
        found = []
        for namespace, before in zip(self.namespaces, self._before, strict=True):
            now = namespace.read()
            for key in [*before, *[key for key in now if key not in before]]:
                old, new = before.get(key, _MISSING), now.get(key, _MISSING)
                if same(old, new) or (namespace.is_library and not _is_state_of_a_library(old, new)):
                    continue
                self.changed.add((id(namespace.container), key))
                if _updated_by_replays(old, new, was_read):
                    self.allowed.add((id(namespace.container), key))
                else:
                    found.append(namespace.name_of(key))
        found += [
            f"the memory of {name}" for name, tensor, address, _ in self._addresses if tensor.data_ptr() != address
        ]
        return [_REGISTRY.sub(r".\1", name) for name in found]

    def restore(self) -> None:
        """Restore all values, and the memory of tensors that was replaced."""
        for namespace, before in zip(self.namespaces, self._before, strict=True):
            now = namespace.read()
            if list(now) != list(before) or any(now[key] is not value for key, value in before.items()):
                namespace.write(before)
        for _, tensor, address, memory in self._addresses:
            if tensor.data_ptr() != address:
                tensor.data = memory

    def restore_changed(self) -> None:
        """Restore all values but those that replays update: results without history in place of unread tensors."""
        allowed = [
            (namespace, key, namespace.read()[key])
            for namespace in self.namespaces
            for key in list(namespace.read())
            if (id(namespace.container), key) in self.allowed
        ]
        self.restore()
        for namespace, key, value in allowed:
            namespace.container[key] = value


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


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


def _updated_by_replays(old: Any, new: Any, was_read: Callable[[Tensor], bool]) -> bool:
    """Whether the new value is a tensor without history, in place of one that the run did not read."""
    if not isinstance(new, Tensor) or new.requires_grad:
        return False
    return not (isinstance(old, Tensor) and was_read(old))


def _has_address(tensor: Tensor) -> bool:
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:
        return False


def reachable(
    roots: Sequence[tuple[str, Any]], without: tuple[type, ...] = (), ignored: Sequence[Any] = ()
) -> list[Namespace]:
    """Return the namespaces reachable from these named values, up to DEPTH references, each once.

    Objects of the types in `without` and those in `ignored` are not followed.
    """
    found: list[Namespace] = []
    seen = set(map(id, ignored))
    frontier = list(roots)
    for _ in range(DEPTH):
        following: list[tuple[str, Any]] = []
        for path, value in frontier:
            if id(value) in seen or type(value) in PLAIN or isinstance(value, without):
                continue
            seen.add(id(value))
            for namespace in _namespaces_of(path, value):
                found.append(namespace)
                if not isinstance(namespace.container, set) and not namespace.is_library:
                    following += [(namespace.name_of(key), item) for key, item in namespace.read().items()]
            following += _constants_of(path, value)
        frontier = following
    return found


def _namespaces_of(path: str, value: Any) -> Iterator[Namespace]:
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield Namespace(name, cell)
        yield Namespace("", value.__globals__, tuple(_global_names(value.__code__)))
    elif isinstance(value, (dict, list, deque, set)):
        yield Namespace(path, value)
    elif not isinstance(value, NOT_FOLLOWED) and not _is_skipped(value):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and _is_library_module(value):
            yield Namespace(path, attributes, is_attributes=True, is_library=True)
            for name, item in attributes.items():
                if name in REGISTRIES:
                    yield Namespace(f"{path}.{name}", item)
                elif isinstance(item, (dict, list)):
                    yield Namespace(f"{path}.{name}", item, is_library=True)
        elif isinstance(attributes, dict):
            yield Namespace(path, attributes, is_attributes=True)


def _constants_of(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values that an immutable object refers to."""
    if isinstance(value, types.FunctionType):
        return [(f"a default of {path}", item) for item in value.__defaults__ or ()]
    if isinstance(value, types.MethodType):
        return [(f"{path}.__self__", value.__self__), (path, value.__func__)]
    if isinstance(value, functools.partial):
        return [(path, value.func), *[(path, item) for item in (*value.args, *value.keywords.values())]]
    if isinstance(value, tuple):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return []


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a nested function or comprehension
            yield from _global_names(constant)


def _is_library_module(value: Any) -> bool:
    """Whether this is a module of a library whose adapter recreates its Python state: only its tensors count."""
    return isinstance(value, nn.Module) and type(value).__module__.partition(".")[0] in LIBRARIES


def _is_state_of_a_library(old: Any, new: Any) -> bool:
    return type(old) in (int, float) or (isinstance(new, Tensor) and new.grad_fn is not None)


def _is_skipped(value: Any) -> bool:
    module = type(value).__module__
    return module.partition(".")[0] in SKIPPED or module.startswith(SKIPPED_PREFIXES)


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # unbound name
        return []


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


class Reads:
    """Names that code may read and modules whose methods ran, found by profiling a run."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._codes: dict[int, types.CodeType] = {}

    @property
    def names(self) -> set[str]:
        """Names of globals, attributes and closure variables in the code that ran."""
        return {name for code in self._codes.values() for name in (*code.co_names, *code.co_freevars)}

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Profile the calling thread within the block."""
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        self._codes[id(code)] = code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module):
                self.modules[id(first)] = first


class Watch:
    """The current values of Python state that a run may read. Checked at every call, so it loops in C."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._cells: list[types.CellType] = []
        self._known: set[tuple[int, Any]] = set()
        self._excluded: set[tuple[int, Any]] = set()
        self._seen: list[Any] = []
        self._signature: tuple[Any, ...] = ()

    def exclude(self, values: set[tuple[int, Any]]) -> None:
        """Stop watching these values, each (id of the container, key): the run itself changes them."""
        self._excluded |= values
        kept = [
            (owner, key)
            for owner, key in zip(self._owners, self._keys, strict=True)
            if (id(owner), key) not in self._excluded
        ]
        self._owners, self._keys = [owner for owner, _ in kept], [key for _, key in kept]
        self._cells = [cell for cell in self._cells if (id(cell), 0) not in self._excluded]
        self._seen = []

    def add(self, namespaces: Sequence[Namespace], names: set[str]) -> None:
        """Watch closures, attributes and globals that are in `names`, and items of lists and dictionaries."""
        for namespace in namespaces:
            container = namespace.container
            if isinstance(container, types.CellType):
                if (id(container), 0) not in self._known | self._excluded:
                    self._known.add((id(container), 0))
                    self._cells.append(container)
            elif isinstance(container, (dict, list)) and not namespace.path.endswith(REGISTRIES):
                named = namespace.is_attributes or namespace.names is not None
                for key, value in namespace.read().items():
                    if namespace.is_library:
                        wanted = type(value) is float
                    elif named:
                        wanted = key in names and key not in MODULE_ATTRIBUTES
                    else:
                        wanted = not isinstance(value, Tensor) and len(container) <= MAX_WATCHED_ITEMS
                    if (
                        wanted
                        and key in _keys_of(container)
                        and (id(container), key) not in self._known | self._excluded
                    ):
                        self._known.add((id(container), key))
                        self._owners.append(container)
                        self._keys.append(key)
        self._seen = []

    def signature(self) -> tuple[Any, ...]:
        """Return the current values in a form that compares plain values by value and others by identity."""
        try:
            now = list(map(getitem, self._owners, self._keys))
        except (KeyError, IndexError):  # removed
            now = [_item(owner, key) for owner, key in zip(self._owners, self._keys, strict=True)]
        now += [content for cell in self._cells for content in _contents(cell) or [_MISSING]]
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            self._seen, self._signature = now, tuple(map(_comparable, now))
        return self._signature


def _keys_of(container: Any) -> Any:
    return range(len(container)) if isinstance(container, list) else container


def _item(owner: Any, key: Any) -> Any:
    try:
        return owner[key]
    except (KeyError, IndexError):
        return _MISSING


def _comparable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return (type(value), value, repr(value)) if type(value) in PLAIN else IdentityKey(value)
