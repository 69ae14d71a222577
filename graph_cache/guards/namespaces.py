"""Containers of Python values with one interface: read, restore, watch and name what they hold.

Attributes, globals, closures, lists, dictionaries, slots, class attributes, arrays, generators and iterators.
"""

from __future__ import annotations

import array
import ctypes
import functools
import io
import itertools
import pickle
import queue
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graph_cache.guards.ownership import is_compilers
from graph_cache.guards.values import PLAIN

MAX_ITEMS = 4096  # items of larger containers are neither compared at every call nor searched for other containers
MAX_BYTES = 65_536  # larger buffers are not compared at every call; comparing these takes 10 µs
MAX_COPIED_ITEMS = 100_000  # of larger containers, a copy has only the length
NUMPY_GENERATORS = ("random.Generator", "random.RandomState", "random.BitGenerator")
# What Python itself stores in a class.
METADATA = frozenset(
    f"__{name}__"
    for name in (
        *("module", "qualname", "doc", "dict", "weakref", "annotations", "annotate", "slots", "abstractmethods"),
        *("parameters", "type_params", "orig_bases", "dataclass_fields", "dataclass_params"),
        *("firstlineno", "static_attributes", "annotate_func", "annotations_cache"),
    )
)
PLAIN_DICTIONARIES = frozenset((dict, OrderedDict))
PLAIN_CONTAINERS = PLAIN_DICTIONARIES | {list, deque}
Getter = Callable[[Any, Any], Any]  # from a container and a key to a value; in C, as far as it goes
Read = tuple[Getter, Any, Any]  # with the container and the key


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


@dataclass(eq=False)
class Namespace:
    """A container of values by key.

    `is_library`: attributes of a module whose library counts and caches in them, and whose adapter recreates what a
    forward reads.
    """

    path: str
    container: Any
    is_library: bool = False
    named: ClassVar[bool] = False  # code reads the values by their keys, as names
    is_limited: ClassVar[bool] = False  # too many values are not compared

    def read(self) -> dict[Any, Any]:
        """Return a copy of the values by key."""
        raise NotImplementedError

    def write(self, values: Mapping[Any, Any]) -> None:
        """Restore values returned by `read`."""
        raise NotImplementedError

    def set(self, key: Any, value: Any) -> None:
        """Set one value."""
        self.container[key] = value

    def watched(self, key: Any) -> Read:
        """Return a function, container and key that give the current value. Raises one of ABSENT if there is none."""
        return getitem, self.container, key

    def watched_absence(self, key: Any) -> Read:
        """Return a function, container and key that give MISSING as long as there is no such value."""
        return _item_or_missing, self.container, key

    def value(self, key: Any) -> Any:
        """Return the current value; MISSING if there is none."""
        return read_or_missing(*self.watched(key))

    def name_of(self, key: Any) -> str:
        """Return a value's name for messages."""
        if self.named:
            return f"{self.path}.{key}" if self.path else str(key)
        return f"{self.path}[{key!r}]" if type(key) in PLAIN else f"{self.path}[…]"

    def size(self) -> tuple[int, str]:
        """Return the number of values, and their unit."""
        return len(self.read()), "items"

    @property
    def is_whole(self) -> bool:
        """Whether `read` copies a dictionary, the container."""
        return False

    @property
    def is_restorable(self) -> bool:
        """Whether `write` restores the values."""
        return True

    @property
    def is_comparable(self) -> bool:
        """Whether the values can be compared at every call: there are few enough."""
        if not self.is_limited:
            return True
        size, unit = self.size()
        return size <= (MAX_BYTES if unit == "bytes" else MAX_ITEMS)


ABSENT = (KeyError, IndexError, AttributeError, ValueError)


def read_or_missing(function: Getter, container: Any, key: Any) -> Any:
    """Return a value; MISSING if there is none."""
    try:
        return function(container, key)
    except ABSENT:
        return MISSING


def _item_or_missing(container: Any, key: Any) -> Any:
    return container.get(key, MISSING)


_attribute = object.__getattribute__  # runs no code of a class: no `__getattr__`


def _attribute_or_missing(container: Any, name: str) -> Any:
    return read_or_missing(_attribute, container, name)


def _context_value(variable: ContextVar[Any], key: Any) -> Any:
    """Return the value of a context variable, or its default; MISSING if it has neither."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


class Items(Namespace):
    """Items of a list, a deque or a dictionary."""

    is_limited = True

    def read(self) -> dict[Any, Any]:
        container = self.container
        if not container and type(container) in PLAIN_CONTAINERS:
            return {}
        if len(self.keys()) > MAX_COPIED_ITEMS:
            return {"length": len(self.keys())}
        if _computes_items(container):
            return dict(dict.items(container))
        return dict(container if isinstance(container, dict) else enumerate(container))

    @property
    def is_comparable(self) -> bool:
        return len(self.keys()) <= MAX_ITEMS

    @property
    def is_whole(self) -> bool:
        return type(self.container) in PLAIN_DICTIONARIES and len(self.container) <= MAX_COPIED_ITEMS

    def write(self, values: Mapping[Any, Any]) -> None:
        container = self.container
        if set(values) == {"length"}:
            return
        if _computes_items(container):
            dict.clear(container)
            dict.update(container, values)
            return
        container.clear()
        container.update(values) if isinstance(container, dict) else container.extend(values.values())

    def size(self) -> tuple[int, str]:
        return len(self.keys()), "items"

    def keys(self) -> Any:
        """Return an object that iterates over the stored keys of a dictionary, or the container; it has a length."""
        return dict.keys(self.container) if _computes_items(self.container) else self.container

    def watched(self, key: Any) -> Read:
        return dict.__getitem__ if _computes_items(self.container) else getitem, self.container, key


def _computes_items(container: Any) -> bool:
    """Whether reading runs code of a subclass of dict, which may return new objects, or other keys than are stored."""
    kind = type(container)
    return (
        kind not in PLAIN_CONTAINERS
        and isinstance(container, dict)
        and not (
            kind.__getitem__ is dict.__getitem__
            and kind.__iter__ in (dict.__iter__, OrderedDict.__iter__)
            and kind.__len__ is dict.__len__
        )
    )


class Attributes(Namespace):
    """Values in a dictionary by name: attributes of an object, or only those in `names`."""

    named = True

    def __init__(
        self, path: str, container: dict[str, Any], names: Container[str] | None = None, is_library: bool = False
    ):
        super().__init__(path, container, is_library)
        self.names = names

    @property
    def is_whole(self) -> bool:
        return self.names is None and type(self.container) in PLAIN_DICTIONARIES

    def read(self) -> dict[Any, Any]:
        if self.names is None:
            return dict(self.container)
        return {name: value for name, value in self.container.items() if name in self.names}

    def write(self, values: Mapping[Any, Any]) -> None:
        for name in self.read().keys() - values.keys():
            del self.container[name]
        self.container.update(values)
        if self.names is None and list(self.container) != list(values):
            for name in values:  # in their order
                self.container[name] = self.container.pop(name)


class TensorAttributes(Attributes):
    """Attributes of a tensor that code names; libraries keep counters and flags there too."""


class Globals(Attributes):
    """Globals of a module that code names. `code` belongs to the function that does."""

    def __init__(
        self, path: str, container: dict[str, Any], names: tuple[str, ...], code: types.CodeType | None = None
    ):
        super().__init__(path, container, names)
        self.code = code

    def read(self) -> dict[Any, Any]:
        return {name: self.container[name] for name in self.names if name in self.container}  # type: ignore[union-attr]


class Slots(Namespace):
    """Attributes of an object that has no dictionary."""

    named = True

    def __init__(self, path: str, container: Any, names: tuple[str, ...]):
        super().__init__(path, container)
        self.names = names

    def read(self) -> dict[Any, Any]:
        found = ((name, self.value(name)) for name in self.names)
        return {name: value for name, value in found if value is not MISSING}

    def write(self, values: Mapping[Any, Any]) -> None:
        for name in self.names:
            if name in values:
                setattr(self.container, name, values[name])
            elif self.value(name) is not MISSING:
                delattr(self.container, name)

    def set(self, key: Any, value: Any) -> None:
        setattr(self.container, key, value)

    def watched(self, key: Any) -> Read:
        return _attribute, self.container, key

    def watched_absence(self, key: Any) -> Read:
        return _attribute_or_missing, self.container, key


class Kind(Slots):
    """The class of an object, which code may replace."""

    named = False

    def __init__(self, path: str, container: Any):
        super().__init__(path, container, ("__class__",))

    def name_of(self, key: Any) -> str:
        return f"the class of {self.path}"


class FunctionParts(Slots):
    """Code and default arguments of a function."""

    named = False

    def __init__(self, path: str, container: types.FunctionType):
        super().__init__(path, container, ("__code__", "__defaults__", "__kwdefaults__"))

    def name_of(self, key: Any) -> str:
        return f"{self.path}.{key}"


class Cell(Slots):
    """A variable of a closure."""

    named = False

    def __init__(self, path: str, container: types.CellType):
        super().__init__(path, container, ("cell_contents",))

    def name_of(self, key: Any) -> str:
        return self.path


class ClassAttributes(Slots):
    """Attributes of a class, its methods included; only those in `names`, if given."""

    def __init__(self, path: str, container: type, only: tuple[str, ...] | None = None):
        super().__init__(path, container, only or ())
        self.has_all = only is None

    def read(self) -> dict[Any, Any]:
        return {
            name: value
            for name, value in vars(self.container).items()
            if (name not in METADATA if self.has_all else name in self.names)
            and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
        }

    def write(self, values: Mapping[Any, Any]) -> None:
        now = self.read()
        for name in now.keys() - values.keys():
            delattr(self.container, name)
        for name, value in values.items():
            if now.get(name, MISSING) is not value:
                setattr(self.container, name, value)

    def watched(self, key: Any) -> Read:
        return getitem, vars(self.container), key


class Contents(Namespace):
    """A set, or a buffer of numbers (bytearray, array, NumPy array, ctypes, mmap), copied as a whole."""

    is_limited = True

    def size(self) -> tuple[int, str]:
        if isinstance(self.container, set):
            return len(self.container), "items"
        return _nbytes(self.container), "bytes"

    def read(self) -> dict[Any, Any]:
        container = self.container
        if isinstance(container, set):
            many = len(container) > MAX_COPIED_ITEMS
            return {"length": len(container)} if many else {"contents": frozenset(container)}
        shape = {"shape": container.shape} if isinstance(container, _numpy_type("ndarray")) else {}
        return {"contents": bytes_of(container)} | shape

    def write(self, values: Mapping[Any, Any]) -> None:
        container, contents = self.container, values.get("contents")
        if isinstance(container, set):
            if contents is not None:
                container.clear()
                container.update(contents)
        elif isinstance(container, bytearray):
            container[:] = contents or b""
        elif isinstance(container, array.array):
            del container[:]
            container.frombytes(contents or b"")
        elif isinstance(container, _numpy_type("ndarray")):
            if container.shape != values["shape"]:
                container.shape = values["shape"]
            container[...] = sys.modules["numpy"].frombuffer(contents, container.dtype).reshape(container.shape)
        elif contents:
            memoryview(container).cast("B")[:] = contents

    def name_of(self, key: Any) -> str:
        return self.path


def bytes_of(buffer: Any) -> bytes:
    """Return a copy of a buffer; empty if it is closed."""
    if isinstance(buffer, _numpy_type("ndarray")):
        return sys.modules["numpy"].ndarray.tobytes(buffer)  # a masked array fills its own copies
    try:
        return bytes(memoryview(buffer))
    except ValueError:
        return b""


def _nbytes(buffer: Any) -> int:
    """Return the bytes of a buffer; 0 if it is closed."""
    if isinstance(buffer, _numpy_type("ndarray")):
        return int(buffer.nbytes)
    try:
        return memoryview(buffer).nbytes
    except ValueError:
        return 0


class Opaque(Namespace):
    """An object that keeps values where nothing compares them, or reads others' attributes by names that it keeps in C.

    An array of Python objects, a pointer, a queue in C; `operator.attrgetter`.
    """

    @property
    def is_comparable(self) -> bool:
        return False

    def read(self) -> dict[Any, Any]:
        return {}

    def write(self, values: Mapping[Any, Any]) -> None:
        """Do nothing."""

    def size(self) -> tuple[int, str]:
        return getattr(self.container, "size", 1), "values"


class Hidden(Namespace):
    """State that an object keeps in C: a random generator, a context variable, an iterator."""

    @property
    def is_restorable(self) -> bool:
        return not isinstance(self.container, Iterator)

    def read(self) -> dict[Any, Any]:
        one = self.container
        if isinstance(one, torch.Generator):
            return {"state": state_of(one)}
        if isinstance(one, random.Random):
            return {"state": one.getstate()}
        if isinstance(one, ContextVar):
            return {"value": _context_value(one, "value")}
        if isinstance(one, Iterator):
            return {"position": position_of(one)}
        return {"state": pickle.dumps(_numpy_state(one)[0])}

    def write(self, values: Mapping[Any, Any]) -> None:
        one = self.container
        if isinstance(one, torch.Generator):
            set_state(one, values["state"])
        elif isinstance(one, random.Random):
            one.setstate(values["state"])
        elif isinstance(one, ContextVar):
            if _context_value(one, "value") is not values["value"] is not MISSING:
                one.set(values["value"])
        elif not isinstance(one, Iterator):
            _numpy_state(one)[1](pickle.loads(values["state"]))

    def watched(self, key: Any) -> Read:
        return _context_value, self.container, key

    def name_of(self, key: Any) -> str:
        return self.path


def contents_of(path: str, value: Any) -> Namespace | None:
    """Return the contents of a container or of an object that keeps its state in C; None for any other object."""
    kind: Any = type(value)
    found = _contents_kind(kind)
    if found is None or (isinstance(value, ContextVar) and is_compilers(value)):
        return None
    if found is Contents and isinstance(value, _numpy_type("ndarray")) and value.dtype.hasobject:
        return Opaque(path, value)
    return found(path, value)


@functools.cache
def _contents_kind(kind: Any) -> type[Namespace] | None:
    """Return the class of `contents_of` for objects of this type."""
    if issubclass(kind, (dict, list, deque)):
        return Items
    if issubclass(kind, (set, bytearray, array.array, *_numpy_types("ndarray"))):
        return Contents
    if issubclass(kind, (queue.SimpleQueue, attrgetter)) or _is_pointer(kind):
        return Opaque
    if _is_memory(kind):
        return Contents
    if issubclass(kind, (torch.Generator, random.Random, ContextVar, *_numpy_types(*NUMPY_GENERATORS))):
        return Hidden
    return Hidden if issubclass(kind, Iterator) and not issubclass(kind, io.IOBase) else None


def _is_memory(kind: Any) -> bool:
    """Whether objects of this type are memory of ctypes, or a mapped file."""
    return any(base.__name__ == "_CData" or base.__module__ == "mmap" for base in kind.__mro__)


def _is_pointer(kind: Any) -> bool:
    """Whether objects of this type refer to memory that they do not hold."""
    is_pointer = any(base.__name__ == "_Pointer" for base in kind.__mro__)
    return is_pointer or issubclass(kind, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p))


def _numpy_state(generator: Any) -> tuple[Any, Callable[[Any], None]]:
    """Return the state of one of NumPy's generators, and the function that sets it."""
    if isinstance(generator, _numpy_type("random.RandomState")):
        return generator.get_state(legacy=False), generator.set_state
    bits = getattr(generator, "bit_generator", generator)
    return bits.state, functools.partial(setattr, bits, "state")


def _numpy_type(name: str) -> Any:
    """Return a type of NumPy, or no type if it was never imported."""
    module = sys.modules.get("numpy")
    for part in name.split("."):
        module = getattr(module, part, None)
    return () if module is None else module


def _numpy_types(*names: str) -> list[Any]:
    """Return types of NumPy; none if it was never imported."""
    return [found for name in names if (found := _numpy_type(name))]


def state_of(generator: torch.Generator) -> bytes:
    """Return a generator's state, also inside a capture, which sees no read of the host."""
    with _disable_current_modes():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Set a generator's state, also inside a capture."""
    with _disable_current_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def position_of(iterator: Iterator[Any]) -> Any:
    """Return how far an iterator has been read, as a plain value; MISSING if it does not tell."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return "ended"
        return frame.f_lasti, *[
            position_of(value) if isinstance(value, Iterator) else value
            for value in frame.f_locals.values()
            if type(value) in PLAIN or isinstance(value, Iterator)
        ]
    if isinstance(iterator, (itertools.count, itertools.repeat)):
        return repr(iterator)
    remaining = getattr(iterator, "__length_hint__", None)
    return MISSING if remaining is None else remaining()


def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names in the `__slots__` of a class and its bases."""
    if kind.__module__ == "builtins":
        return ()
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [_mangled(name, base) for name in ([slots] if isinstance(slots, str) else slots)]
    # A subclass may put a property over a slot.
    return tuple([name for name in found if isinstance(getattr(kind, name, None), types.MemberDescriptorType)])


def _mangled(name: str, owner: type) -> str:
    """Return the name under which a class stores an attribute: the class is part of a private name."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private and owner.__name__.strip("_") else name
