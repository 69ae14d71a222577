"""Python state that a run reads: a replay stays as the capture found it, so a change needs another graph."""

from __future__ import annotations

import itertools
import os
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks
from torch.nn.parameter import is_lazy

from graph_cache.audit import storage_of
from graph_cache.host_state import REGISTRIES
from graph_cache.keys import IdentityKey
from graph_cache.namespaces import (
    MISSING,
    PLAIN,
    Attributes,
    Cell,
    Contents,
    Hidden,
    Items,
    Namespace,
    position_of,
)

MAX_WATCHED_ITEMS = 64  # of larger containers, a change between two calls is not noticed
MAX_WATCHED_BYTES = 4096  # of larger buffers likewise
MAX_VERSIONS = 64  # values of one Watch that are told apart
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # watched elsewhere, or registries
UNWATCHED = MODULE_ATTRIBUTES - set(REGISTRIES)
GLOBAL_HOOKS = [
    torch_hooks._global_forward_hooks,
    torch_hooks._global_forward_pre_hooks,
    torch_hooks._global_backward_hooks,
    torch_hooks._global_backward_pre_hooks,
]
_ENTER_AUTOCAST = torch.autocast.__enter__.__code__
_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__))


class Reads:
    """Names that code may read and modules whose methods ran, found by profiling a run."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.enters_autocast = False
        self._codes: dict[int, types.CodeType] = {}

    def __contains__(self, code: object) -> bool:
        return id(code) in self._codes

    def merged(self, other: Reads) -> Reads:
        """Return the code of either run."""
        both = Reads()  # without the modules, which it would keep alive
        both._codes = self._codes | other._codes
        return both

    @property
    def names(self) -> set[str]:
        """Names of globals, attributes and closure variables in the code that ran, and strings that may be names."""
        found: set[str] = set()
        for code in self._codes.values():
            found.update(code.co_names, code.co_freevars)
            found.update(value for value in code.co_consts if type(value) is str and value.isidentifier())
        return found

    @property
    def reads_environment(self) -> bool:
        """Whether code outside of PyTorch and the standard library names the environment."""
        return any(
            not {"environ", "getenv"}.isdisjoint(code.co_names) and not code.co_filename.startswith(_LIBRARIES)
            for code in self._codes.values()
        )

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
            elif code is _ENTER_AUTOCAST and isinstance(first, torch.autocast):
                self.enters_autocast |= bool(vars(first).get("_enabled"))


def iterators_read(namespaces: Sequence[Namespace], names: set[str]) -> list[str]:
    """Return the names of iterators that code may read and that do not tell their position."""
    return [
        namespace.name_of(key)
        for namespace in namespaces
        if isinstance(namespace, Cell) or namespace.named
        for key, value in namespace.read().items()
        if (key in names or isinstance(namespace, Cell))
        and isinstance(value, Iterator)
        and position_of(value) is MISSING
    ]


class Watch:
    """The current values of Python state that a run may read. Checked at every call, so it loops in C.

    Tensors are not watched: an AddressBook compares their addresses.
    """

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._cells: list[types.CellType] = []
        self._sized: list[Any] = []
        self._contents: list[Namespace] = []
        self._containers: list[int] = []  # id of the container of each owner
        self._known: set[tuple[int, Any]] = set()
        self._excluded: set[tuple[int, Any]] = set()
        self._environment = False
        self._seen: list[Any] = []
        self._sizes: list[Any] = []  # and contents
        self._variables: dict[Any, Any] = {}
        self._signature: tuple[Any, ...] = ()

    def exclude(self, values: set[tuple[int, Any]]) -> None:
        """Stop watching these values, each (id of the container, key): the run itself changes them."""
        self._excluded |= values
        kept = [
            index
            for index, (container, key) in enumerate(zip(self._containers, self._keys, strict=True))
            if (container, key) not in self._excluded
        ]
        self._owners = [self._owners[index] for index in kept]
        self._keys = [self._keys[index] for index in kept]
        self._containers = [self._containers[index] for index in kept]
        self._cells = [cell for cell in self._cells if (id(cell), 0) not in self._excluded]
        changing = {container for container, _ in self._excluded}
        self._sized = [container for container in self._sized if id(container) not in changing]
        self._contents = [one for one in self._contents if id(one.container) not in changing]
        self._seen, self._sizes = [], []

    def add(self, namespaces: Sequence[Namespace], reads: Reads) -> None:
        """Watch what a run may have read: values by the names in its code, and items of small containers."""
        names = reads.names | _indirect_names(namespaces, reads.names)
        self._environment |= reads.reads_environment
        for namespace in namespaces:
            container, where = namespace.container, id(namespace.container)
            if isinstance(namespace, Cell):
                if (where, 0) not in self._known | self._excluded:
                    self._known.add((where, 0))
                    self._cells.append(container)
                continue
            if not _is_watched(namespace):
                continue
            if isinstance(namespace, Contents):
                if (where, "contents") not in self._known | self._excluded:
                    self._known.add((where, "contents"))
                    self._contents.append(namespace)
                continue
            if isinstance(namespace, (Items, Attributes)) and (where, MISSING) not in self._known:
                self._known.add((where, MISSING))
                if not any(changed == where for changed, _ in self._excluded):
                    self._sized.append(container)
            if isinstance(namespace, Items) and namespace.path.endswith(REGISTRIES):
                continue
            owner = namespace.values_by_key()
            for key, value in namespace.read().items():
                if (
                    _reads(namespace, key, value, names)
                    and (where, key) not in self._known
                    and (where, key) not in self._excluded
                ):
                    self._known.add((where, key))
                    self._owners.append(owner)
                    self._keys.append(key)
                    self._containers.append(where)
        self._seen, self._sizes = [], []

    def signature(self) -> tuple[Any, ...]:
        """Return the current values in a form that compares plain values by value and others by identity."""
        try:
            now = list(map(getitem, self._owners, self._keys))
        except (KeyError, IndexError):  # removed
            now = [_item(owner, key) for owner, key in zip(self._owners, self._keys, strict=True)]
        now += [_content(cell) for cell in self._cells]
        sizes: list[Any] = list(map(len, self._sized))
        if self._contents:
            sizes += [namespace.read()["contents"] for namespace in self._contents]
        if (
            len(now) != len(self._seen)
            or not all(map(is_, now, self._seen))
            or sizes != self._sizes
            or (self._environment and os.environ != self._variables)
        ):
            self._seen, self._sizes = now, sizes
            self._variables = dict(os.environ) if self._environment else {}
            self._signature = (
                *map(_comparable, now),
                tuple(sizes),
                tuple(self._variables.items()),
            )
        return self._signature


def _indirect_names(namespaces: Sequence[Namespace], names: set[str]) -> set[str]:
    """Return the strings under these names that may be names themselves, as in `getattr(self, self.name)`."""
    return {
        value
        for namespace in namespaces
        if namespace.named
        for key, value in namespace.read().items()
        if key in names and type(value) is str and value.isidentifier()
    }


def _is_watched(namespace: Namespace) -> bool:
    """Whether the values of this namespace are watched: small buffers, and all but state that runs advance."""
    if namespace.path.rpartition(".")[2] in UNWATCHED:
        return False
    if isinstance(namespace, Contents):
        container = namespace.container
        return len(container) <= (MAX_WATCHED_ITEMS if isinstance(container, set) else MAX_WATCHED_BYTES)
    if isinstance(namespace, Hidden):
        return "value" in namespace.read()  # a context variable
    return True


def _reads(namespace: Namespace, key: Any, value: Any, names: set[str]) -> bool:
    if namespace.is_library:
        return type(value) is float
    if namespace.named:
        return key in names and key not in MODULE_ATTRIBUTES
    return not isinstance(namespace, Items) or len(namespace.container) <= MAX_WATCHED_ITEMS


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
        return tuple(map(_comparable, value))
    if isinstance(value, Tensor):
        return Tensor  # watched by address
    if isinstance(value, frozenset):
        return frozenset(map(_comparable, value))
    return (type(value), value, repr(value)) if type(value) in PLAIN else IdentityKey(value)


class ReadTensors(Mapping[str, Tensor]):
    """Tensors in Python state that a run used, by name, looked up on each access.

    `used` are the addresses of the storages. Parameters and buffers are included with `registries`, and places in
    `without` are not. `places` are those that are: (id of the container, key).
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
                if storage is not None and storage._cdata in used and place not in without:
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


def gradient_hooks_of(parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the hooks on the gradients of these parameters, by the ids of their handles. Loops in C."""
    before, after = list(map(_gradient_hooks, parameters)), list(map(_accumulation_hooks, parameters))
    if not any(before) and not any(after):
        return ()
    both = enumerate(zip(before, after, strict=True))
    return tuple([(index, *(first or ()), *(second or ())) for index, (first, second) in both if first or second])


_registries = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_gradient_hooks, _accumulation_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class Versions:
    """A number for the current values of a Watch, which stays the same when more values are watched."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._numbers: dict[Any, int] = {self._watch.signature(): 0}
        self._next = 0
        self._last: tuple[Any, int] = (None, 0)

    def current(self) -> int:
        """Return the number of the current values: an earlier one, if they are as they were then."""
        signature = self._watch.signature()
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
        number, extension = self.current(), Extension(self._watch)
        yield extension
        if extension.made:
            self._next += 1
            number = self._next
        self._numbers, self._last = {self._watch.signature(): number}, (None, 0)


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
