"""Python state that a run changes: attributes, closures, globals, containers, and state of the process.

A replay runs no Python, so state that a run changes would stay as the capture left it. `watch.py` handles state that a
run only reads.
"""

from __future__ import annotations

import bisect
import contextvars
import itertools
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_, methodcaller
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from graph_cache.guards.namespaces import MISSING, Contents, Hidden, Namespace
from graph_cache.guards.ownership import is_own_variable, own_environment
from graph_cache.guards.search import MAX_NAMESPACES, RunCode, reachable
from graph_cache.guards.torch_settings import SETTINGS, Setting, autocast_state
from graph_cache.guards.values import same, same_items

_REGISTRY = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")


class HostState:
    """Values of all Python state reachable from some roots, to find and undo what a run changes.

    Args:
        roots: Named objects from which the state is searched.
        libraries: Whether all attributes of Megatron's and Transformer Engine's modules count; otherwise numbers and
            tensors with history do.
        ignored: Objects that are not followed.
        gradients: Whether `.grad` counts.
        ran: The code that an earlier run executed. Without it, methods and their globals are not searched.
        process: Whether state of the process counts: random generators except the ones in `ignored`, the environment,
            context variables, and PyTorch's modes and settings.

    Attributes:
        namespaces: The reachable namespaces.
        changed: (id of the container, key) of the values that `changes` found changed.
        created: Those among them that were missing or None before, such as a cache that the first run makes.
        results: Namespace, key and value of those among them that are results of the run, which replays update.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, Any]] = (),
        libraries: bool = True,
        ignored: Sequence[Any] = (),
        gradients: bool = False,
        ran: RunCode | None = None,
        process: bool = False,
    ):
        found = reachable(roots, ignored=ignored, ran=ran)
        self._is_complete = found.is_complete
        self.namespaces = [one for one in found if libraries or not one.is_library]
        self._all = [*self.namespaces, *(_of_the_process(ignored) if process else ())]
        self.changed: set[tuple[int, Any]] = set()
        self.created: set[tuple[int, Any]] = set()
        self.results: list[tuple[Namespace, Any, Tensor]] = []
        self._dictionaries = _Dictionaries([one for one in self._all if one.is_whole])
        self._others = [(one, one.read()) for one in self._all if not one.is_whole]
        self._tensors: dict[int, _TensorState] = {}
        others = [
            (namespace, key, value)
            for namespace, values in self._others
            for key, value in values.items()
            if isinstance(value, Tensor)
        ]
        for namespace, key, tensor in (*self._dictionaries.tensors(), *others):
            if id(tensor) not in self._tensors:
                self._tensors[id(tensor)] = _TensorState(namespace, key, tensor, gradients)

    def changes(self, was_read: Callable[[Tensor], bool] = lambda tensor: True) -> list[str]:
        """Return descriptions of what changed.

        A tensor may be replaced by a result without history if `was_read` is false for the former; see `results`.
        """
        found = [] if self._is_complete else [f"unknown state: it can reach more than {MAX_NAMESPACES:,} objects"]
        for namespace, before in self._changed_or_unknown():
            now = namespace.read()
            if _are_identical(before, now):
                continue
            for key in [*before, *[key for key in now if key not in before]]:
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                if same(old, new) or (namespace.is_library and not _is_state_of_a_library(old, new)):
                    continue
                self.changed.add((id(namespace.container), key))
                if old is MISSING or old is None:
                    self.created.add((id(namespace.container), key))
                if not isinstance(namespace, _Process) and _is_result(old, new, was_read):
                    self.results.append((namespace, key, new))
                else:
                    found.append(namespace.name_of(key))
        found += [change for tensor in self._tensors.values() for change in tensor.changes()]
        return [_REGISTRY.sub(r".\1", name) for name in dict.fromkeys(found)]

    def _changed_or_unknown(self) -> list[tuple[Namespace, dict[Any, Any]]]:
        """Return the namespaces with the values that they held, without dictionaries if none has changed."""
        return [*(() if self._dictionaries.are_unchanged() else self._dictionaries.before()), *self._others]

    def knows(self, value: Any) -> bool:
        """Whether an object was in this state at construction."""
        others = (one for _, before in self._others for one in before.values())
        return any(value is one for one in (*self._dictionaries.values, *others))

    def irreversible(self) -> list[str]:
        """Return the names of changed objects that `restore` can't restore, such as iterators."""
        return [
            namespace.path
            for namespace, before in self._others
            if not namespace.is_restorable and not same_items(before, namespace.read())
        ]

    def restore(self) -> None:
        """Restore all values, and the memory of tensors that was replaced."""
        for namespace, before in self._changed_or_unknown():
            now = namespace.read()
            if _are_identical(before, now):
                continue
            is_copy = isinstance(namespace, (Contents, Hidden, _Process))  # read anew each time
            if list(now) == list(before) and is_copy and same_items(before, now):
                continue
            if list(now) != list(before) or any(now[key] is not value for key, value in before.items()):
                namespace.write(before)
        for tensor in self._tensors.values():
            tensor.restore()


class _Dictionaries:
    """The values of many dictionaries, in flat lists that C compares. `namespaces` copy them whole."""

    def __init__(self, namespaces: Sequence[Namespace]):
        self._namespaces = namespaces
        self._containers = [one.container for one in namespaces]
        self._lengths, self._keys, self.values = self._now()

    def _now(self) -> tuple[list[int], list[Any], list[Any]]:
        values = itertools.chain.from_iterable(map(_values_of, self._containers))
        return list(map(len, self._containers)), list(itertools.chain.from_iterable(self._containers)), list(values)

    def are_unchanged(self) -> bool:
        """Whether all dictionaries hold the same objects under the same keys, in the same order."""
        lengths, keys, values = self._now()
        return lengths == self._lengths and all(map(is_, values, self.values)) and keys == self._keys

    def before(self) -> Iterator[tuple[Namespace, dict[Any, Any]]]:
        """Yield each namespace with the values that it held."""
        keys, values = iter(self._keys), iter(self.values)
        for namespace, length in zip(self._namespaces, self._lengths, strict=True):
            yield namespace, dict(zip(itertools.islice(keys, length), itertools.islice(values, length), strict=True))

    def tensors(self) -> Iterator[tuple[Namespace, Any, Tensor]]:
        """Yield the tensors among the values, with their namespaces and keys."""
        kinds = list(map(type, self.values))
        of_tensors = {kind for kind in set(kinds) if issubclass(kind, Tensor)}
        ends = list(itertools.accumulate(self._lengths))
        for index, kind in enumerate(kinds) if of_tensors else ():
            if kind in of_tensors:
                namespace = self._namespaces[bisect.bisect_right(ends, index)]
                yield namespace, self._keys[index], self.values[index]


_values_of = methodcaller("values")


def _are_identical(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dictionaries hold the same objects, in the same order. Loops in C."""
    if len(one) != len(other):
        return False
    return not one or (all(map(is_, one.values(), other.values())) and list(one) == list(other))


class ProcessState(HostState):
    """State of the process alone. `generators` are those that a graph registers: its replays advance them."""

    def __init__(self, generators: Sequence[torch.Generator] = ()):
        super().__init__(ignored=generators, process=True)


def _is_state_of_a_library(old: Any, new: Any) -> bool:
    return type(old) in (int, float) or (isinstance(new, Tensor) and new.grad_fn is not None)


def _is_result(old: Any, new: Any, was_read: Callable[[Tensor], bool]) -> bool:
    """Whether the new value is a tensor without history, in place of one that the run did not read."""
    if not isinstance(new, Tensor) or isinstance(new, nn.Parameter) or new.requires_grad:
        return False
    return isinstance(old, Tensor) and not was_read(old)


class _TensorState:
    """What a run may change of a tensor besides its contents: its memory, whether it is trained, its gradient."""

    def __init__(self, namespace: Namespace, key: Any, tensor: Tensor, gradients: bool):
        self._place, self.tensor = (namespace, key), tensor
        self.address = _address(tensor)
        self.memory = tensor.data if self.address else None
        self.requires_grad = tensor.requires_grad
        self.gradients = gradients and tensor.is_leaf
        self.grad = tensor.grad if self.gradients else None

    @property
    def name(self) -> str:
        namespace, key = self._place
        return namespace.name_of(key)

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


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; 0 if it has none."""
    if is_lazy(tensor):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


# ---- state of the process --------------------------------------------------------------------------------------------


def _of_the_process(ignored: Sequence[Any]) -> list[Namespace]:
    found: list[Namespace] = [Hidden("the state of random", cast(Any, random.getstate).__self__)]
    if all(one is not torch.default_generator for one in ignored):
        found.append(Hidden("the state of PyTorch's generator of the host", torch.default_generator))
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append(Hidden("the state of numpy.random", numpy.random.get_state.__self__))
    return [*found, _Environment("the environment", os.environ), _Variables("", None), _Modes("", None)]


class _Process(Namespace):
    """State of the process, read anew each time."""


class _Environment(_Process):
    def read(self) -> dict[Any, Any]:
        return dict(own_environment())

    def write(self, values: Mapping[Any, Any]) -> None:
        for name in self.read().keys() - values.keys():
            del os.environ[name]
        os.environ.update(values)

    def name_of(self, key: Any) -> str:
        return self.path


class _Variables(_Process):
    """Context variables. One that had no value keeps its new one."""

    def read(self) -> dict[Any, Any]:
        return {one: value for one, value in contextvars.copy_context().items() if is_own_variable(one)}

    def write(self, values: Mapping[Any, Any]) -> None:
        for variable, value in values.items():
            if variable.get(None) is not value:
                variable.set(value)

    def name_of(self, key: Any) -> str:
        return f"the context variable {key.name}"


class _Modes(_Process):
    """Modes and settings of PyTorch, by name."""

    SETTINGS = (
        Setting("the gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("autocast", autocast_state, lambda value: None),
        *[setting for setting in SETTINGS if setting.set is not None],
    )

    def read(self) -> dict[Any, Any]:
        values = {setting.name: setting.get() for setting in self.SETTINGS}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    def write(self, values: Mapping[Any, Any]) -> None:
        now = self.read()
        for setting in self.SETTINGS:
            value = values[setting.name]
            if now[setting.name] != value and setting.set is not None:
                setting.set(list(value) if type(value) is tuple else value)

    def name_of(self, key: Any) -> str:
        return str(key)
