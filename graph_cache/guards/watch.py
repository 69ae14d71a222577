"""Python state that runs read: a replay stays as the capture found it, so a change needs another graph."""

from __future__ import annotations

import copyreg
import itertools
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks
from torch.nn.parameter import is_lazy

from graph_cache.guards.audit import storage_of
from graph_cache.guards.code import Reads, absent_names, names_in
from graph_cache.guards.namespaces import (
    ABSENT,
    MISSING,
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
    Read,
    Slots,
    TensorAttributes,
    bytes_of,
    read_or_missing,
)
from graph_cache.guards.search import REGISTRIES
from graph_cache.guards.values import PLAIN, key_of

MAX_SINGLE_ITEMS = 64  # items of larger containers are watched together
MAX_VERSIONS = 64  # values of one Watch that are told apart
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # watched elsewhere, or registries
UNWATCHED = MODULE_ATTRIBUTES - set(REGISTRIES)
TENSORS = ("_parameters", "_buffers")  # registries
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = [
    torch_hooks._global_forward_hooks,
    torch_hooks._global_forward_pre_hooks,
    torch_hooks._global_backward_hooks,
    torch_hooks._global_backward_pre_hooks,
]

Place = tuple[int, Any]  # (id of a container, key)
Summary = tuple[Callable[[Any], Any], Any]  # a function in C, and the container that it reads


class Watch:
    """The current values of Python state that a run may read, in flat lists of containers and keys.

    Checked at every call, so it loops in C. Values and items count as unchanged while they are the same objects; else
    their keys are compared (see `values.py`).

    - values: A value by its key in a container.
    - items: All items of a container that has many, or the keys of a dictionary.
    - facts: Numbers of items, contents of buffers, ids of hooks, the environment.

    Of tensors, only what code reads without an operation is watched: an AddressBook compares their addresses. `modules`
    are those whose modes, hooks and children are watched elsewhere.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.leave_out(modules)
        self.values: dict[Place, Read] = {}
        self.items: dict[Place, Summary] = {}
        self.facts: dict[Place, Summary] = {}
        self._known: set[Place] = set()
        self._excluded: set[Place] = set()
        self.reads_gradients = False
        self.changing: set[int] = set()  # containers of which some values are excluded
        self._changed()

    def _changed(self) -> None:
        """Arrange what is watched for `signature`."""
        self._values = _by_function(self.values.values())
        self._items = _by_function(self.items.values())
        self._facts = _by_function(self.facts.values())
        self._seen: list[Any] = []
        self._seen_facts: list[Any] = []
        self._lists: list[list[Any]] = []  # small ones among the values, which count by their contents
        self._tensors: list[Tensor] = []  # among the values
        self._signature: tuple[Any, ...] = ()

    @classmethod
    def union(cls, watches: Iterable[Watch]) -> Watch:
        """Return a Watch of all values that these watch now, each once."""
        result = cls()
        for one in watches:
            result.values |= one.values
            result.items |= one.items
            result.facts |= one.facts
            result.changing |= one.changing
            result.reads_gradients |= one.reads_gradients
        result._changed()
        return result

    def leave_out(self, modules: Iterable[nn.Module]) -> None:
        """Add no mode, hook or child of these modules from now on, and of no others: they are watched elsewhere."""
        self._modules = {id(one) for module in modules for one in _modes_and_registries(module)}

    def exclude(self, values: set[Place]) -> None:
        """Stop watching these values: the run itself changes them. Nor are their containers watched as a whole."""
        self._excluded |= values
        self.changing |= {where for where, _ in values}
        self.values = {place: one for place, one in self.values.items() if place not in self._excluded}
        self.items = {place: one for place, one in self.items.items() if place[0] not in self.changing}
        self.facts = {place: one for place, one in self.facts.items() if place[0] not in self.changing}
        self._changed()

    def add(self, namespaces: Sequence[Namespace], reads: Reads) -> None:
        """Watch what a run may have read: values by the names in its code, and items of containers."""
        names, parts = reads.names | _indirect_names(namespaces, reads), reads.parts_of_names
        reads_all = reads.reads_all_attributes
        self.reads_gradients |= "grad" in reads.own_names
        if reads.reads_environment:
            self.facts[id(os.environ), "environment"] = dict, os.environ
        for namespace in filter(self._is_watched, namespaces):
            container, where = namespace.container, id(namespace.container)
            if (where, MISSING) not in self._known and where not in self.changing:
                self._known.add((where, MISSING))
                self._add_container(namespace, reads.computes_names)
            if isinstance(namespace, Attributes) and HOOKS[0] in container and where not in self._modules:
                for hooks in map(container.get, HOOKS):
                    self.facts[id(hooks), "hooks"] = tuple, hooks
            if self._has_watched_items(namespace) and namespace.path.endswith(TENSORS):
                for key in [
                    key for key, value in namespace.read().items() if value is None and self._is_new(where, key)
                ]:
                    self.values[where, key] = namespace.watched(key)  # no tensor so far
            if isinstance(namespace, Contents) or (
                isinstance(namespace, Items)
                and (self._has_watched_items(namespace) or len(namespace.keys()) > MAX_SINGLE_ITEMS)
            ):
                continue
            for name in _absent_names(namespace):
                if self._is_new(where, name):
                    self.values[where, name] = namespace.watched_absence(name)
            for key, value in namespace.read().items():
                is_read = self._reads(namespace, key, value, names, parts) or (
                    reads_all and type(namespace) in (Attributes, Slots) and key not in MODULE_ATTRIBUTES
                )
                if is_read and self._is_new(where, key):
                    self.values[where, key] = namespace.watched(key)
                    if value is os.environ:  # under another name
                        self.facts[id(os.environ), "environment"] = dict, os.environ
        self._changed()

    def _is_new(self, where: int, key: Any) -> bool:
        """Whether a value is neither watched nor excluded; it is from now on."""
        if (where, key) in self._known or (where, key) in self._excluded:
            return False
        self._known.add((where, key))
        return True

    def _add_container(self, namespace: Namespace, computes_names: bool) -> None:
        """Watch the length of a container; of a small one also the keys, or all items if there are many.

        Of a tensor's attributes only if code may ask for some that are absent: libraries add others.
        """
        container, where = namespace.container, id(namespace.container)
        if isinstance(namespace, Contents):
            if isinstance(container, set):
                self.facts[where, len], self.items[where, iter] = (len, container), (iter, container)
            else:
                self.facts[where, bytes] = bytes_of, container
                if hasattr(type(container), "dtype"):  # an array, of which code may set these
                    self.facts[where, "layout"] = _layout, container
        elif isinstance(namespace, ClassAttributes):
            if namespace.has_all or container is Tensor:
                # Python adds these at their first use: by pickle and copy, and by code that reads annotations.
                copyreg._slotnames(container)  # type: ignore[attr-defined]  # noqa: SLF001
                getattr(container, "__annotations__", None)
                self.facts[where, len] = len, vars(container)
        elif isinstance(namespace, Items):
            keys = namespace.keys()
            self.facts[where, len] = len, keys
            if not self._has_watched_items(namespace) and namespace.is_comparable:
                if isinstance(container, dict):
                    self.items[where, iter] = iter, keys
                if len(keys) > MAX_SINGLE_ITEMS:
                    self.items[where, dict] = (dict.values if isinstance(container, dict) else iter), container
        elif isinstance(namespace, TensorAttributes):
            if computes_names:
                self.facts[where, len] = len, container
        elif type(namespace) is Attributes:
            self.facts[where, len] = len, container

    def _has_watched_items(self, namespace: Namespace) -> bool:
        """Whether an AddressBook watches the items: tensors and children of modules given at first."""
        return id(namespace.container) in self._modules

    def _is_watched(self, namespace: Namespace) -> bool:
        """Whether the values of this namespace are watched: all but state that runs advance, and what is refused."""
        container = namespace.container
        if isinstance(namespace, (Cell, FunctionParts)):
            return True
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
        """Return the current values in a form that compares them; the same object as long as none has changed."""
        now: list[Any] = []
        facts: list[Any] = []
        try:
            for function, containers, keys in self._values:
                now += map(function, containers, keys)
        except ABSENT:  # removed
            now = [
                read_or_missing(function, container, key)
                for function, containers, keys in self._values
                for container, key in zip(containers, keys, strict=True)
            ]
        count = len(now)
        for function, containers in self._items:
            now += itertools.chain.from_iterable(map(function, containers))
        for function, containers in self._facts:
            facts += map(function, containers)
        end, counted, lists = len(now), len(facts), self._lists
        if lists:
            now += itertools.chain.from_iterable(lists)
            facts += map(len, lists)
        facts += self._facts_of_tensors()
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)) and facts == self._seen_facts:
            return self._signature
        values, items = now[:count], now[count:end]
        facts = facts[:counted]
        self._lists = list(filter(self._counts_by_contents, values))
        self._tensors = [value for value in values if isinstance(value, Tensor) and not is_lazy(value)]
        self._seen = [*values, *items, *itertools.chain.from_iterable(self._lists)]
        of_tensors = self._facts_of_tensors()
        self._seen_facts = [*facts, *map(len, self._lists), *of_tensors]
        self._signature = (*map(self._key, values), *map(key_of, items), tuple(map(_fact_key, [*facts, *of_tensors])))
        return self._signature

    def _facts_of_tensors(self) -> list[Any]:
        """Return what code may read of the tensors among the values without an operation."""
        gradients = [one.grad is None for one in self._tensors if one.is_leaf] if self.reads_gradients else []
        return [*map(_tensor_facts, self._tensors), *gradients]

    def _counts_by_contents(self, value: Any) -> bool:
        """Whether this is a small list of plain values: an equal one may be in its place."""
        return (
            type(value) is list
            and len(value) <= MAX_SINGLE_ITEMS
            and PLAIN.issuperset(map(type, value))
            and id(value) not in self.changing
        )

    def _key(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Tensor  # watched by address, and by `_facts_of_tensors`
        return key_of(value, contents=self._counts_by_contents(value))


def _by_function(reads: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return each function once, with the lists of its arguments."""
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for function, *arguments in reads:
        groups.setdefault(function, []).append(tuple(arguments))
    return [(function, *map(list, zip(*arguments, strict=True))) for function, arguments in groups.items()]


_tensor_facts = attrgetter("__class__", "shape", "dtype", "requires_grad")  # what code may read without an operation
_layout = attrgetter("shape", "dtype")


def _fact_key(fact: Any) -> Any:
    return tuple(fact.items()) if isinstance(fact, dict) else fact


def _modes_and_registries(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of a module and its dictionaries of hooks, parameters, buffers and children."""
    yield vars(module)
    for name in MODULE_ATTRIBUTES & vars(module).keys():
        yield vars(module)[name]


def _absent_names(namespace: Namespace) -> Sequence[str]:
    """Return the names that code may read here and that have no value."""
    if isinstance(namespace, Globals) and namespace.code is not None:
        return absent_names(namespace.code, namespace.container)
    if type(namespace) is Slots:
        return [name for name in namespace.names if namespace.value(name) is MISSING]
    return ()


def _indirect_names(namespaces: Sequence[Namespace], reads: Reads) -> set[str]:
    """Return the strings under names that code reads, which may be names themselves, as in `getattr(self, self.name)`.

    If the code computes names, also return strings in containers (`getattr(self, self.names[index])`).
    """
    names, computes = reads.names, reads.computes_names
    found: list[Any] = []
    for namespace in namespaces:
        is_container = isinstance(namespace, Items) or isinstance(namespace.container, set)
        if is_container and not (computes and namespace.is_comparable):
            continue
        if namespace.named or is_container or isinstance(namespace, (Cell, FunctionParts)):
            values = namespace.read()
            found += [value for key, value in values.items() if not namespace.named or key in names]
            found += values if is_container else ()  # the keys of a dictionary
    texts = [
        item
        for value in found
        for item in (value if computes and isinstance(value, (tuple, frozenset)) else (value,))
        if type(item) is str
    ]
    return {
        part
        for text in texts
        for part in (names_in(text) if computes or "{" in text else [text])
        if part.isidentifier()
    }


# ---- versions --------------------------------------------------------------------------------------------------------


class ValueVersions:
    """A number for the current values of a Watch, which stays the same when more values are watched.

    `modules` are those whose modes, hooks and children are watched elsewhere.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.watch = Watch(modules)
        self._numbers: dict[Any, int] = {self.watch.signature(): 0}
        self._next = 0
        self._last: tuple[Any, int] = (None, 0)
        self._made = False  # the last observed run made values that did not exist
        self.observed_runs = 0  # each may change what is watched

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
    def extended(self) -> Iterator[Self]:
        """Watch more values or fewer at the end of the block, which is an observed run: call `exclude` and `add` there.

        The number before the run stands for the values after it too, unless the run made some of them.
        """
        number, self._made = self.current(), False
        yield self
        if self._made:
            self._next += 1
            number = self._next
        self._numbers, self._last = {self.watch.signature(): number}, (None, 0)
        self.observed_runs += 1

    def exclude(self, values: set[Place], made: bool) -> None:
        """Stop watching these values. `made`: the run made others that did not exist."""
        self._made = made
        if values:
            self.watch.exclude(values)

    def add(self, namespaces: Sequence[Namespace], reads: Reads) -> None:
        """Watch what the run may have read."""
        self.watch.add(namespaces, reads)

    def equate(self) -> None:
        """Give the current values the number of those after the last observed run, whose changes were undone."""
        (number,) = self._numbers.values()
        self._numbers[self.watch.signature()], self._last = number, (None, 0)


class CombinedVersions:
    """The numbers of several ValueVersions. A value that many of them watch is read once."""

    def __init__(self, versions: Sequence[ValueVersions]):
        self._versions = versions
        self._union = Watch()
        self._observed_runs: list[int] = []
        self._signature: tuple[Any, ...] | None = None
        self._numbers: list[int] = []

    def current(self) -> list[int]:
        """Return the number of each; see `ValueVersions.current`."""
        observed_runs = list(map(_observed_runs, self._versions))
        if observed_runs != self._observed_runs:
            self._observed_runs, self._signature = observed_runs, None
            self._union = Watch.union(one.watch for one in self._versions)
        signature = self._union.signature()
        if signature is not self._signature:
            self._signature, self._numbers = signature, [one.current() for one in self._versions]
        return self._numbers


_observed_runs = attrgetter("observed_runs")


# ---- tensors and hooks -----------------------------------------------------------------------------------------------


class ReadTensors(Mapping[str, Tensor]):
    """Tensors in Python state that a run used, by name, looked up on each access.

    `used` are the addresses of the storages. Parameters and buffers are included with `registries`, and places in
    `without` are not. `places` are those that are, each once. Several namespaces may share a container, as functions of
    one file share its globals.
    """

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        used: Container[int],
        registries: bool = False,
        without: Container[Place] = (),
    ):
        self.places: set[Place] = set()
        self._items: dict[str, tuple[Namespace, Any]] = {}
        for namespace in namespaces:
            if not registries and namespace.path.endswith(REGISTRIES):
                continue
            for key, value in namespace.read().items():
                place = id(namespace.container), key
                storage = storage_of(value) if isinstance(value, Tensor) and not is_lazy(value) else None
                if storage is not None and storage._cdata in used and place not in without and place not in self.places:
                    self.places.add(place)
                    self._items[f"{namespace.name_of(key)} ({len(self._items)})"] = namespace, key

    def __getitem__(self, name: str) -> Tensor:
        namespace, key = self._items[name]
        value = namespace.value(key)
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


def gradient_hook_functions(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the hooks on the gradients of these tensors, which only C refers to."""
    registries = [read(tensor) for tensor in tensors for read in (_gradient_hooks, _accumulation_hooks)]
    return [hook for registry in registries if registry for hook in registry.values()]


_registries = attrgetter(*HOOKS)
_gradient_hooks, _accumulation_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
