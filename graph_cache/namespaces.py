"""Containers of Python values with one interface: read, restore, and name what they hold.

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
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
NUMPY_GENERATORS = ("random.Generator", "random.RandomState", "random.BitGenerator")
MAX_ITEMS = 4096  # items of larger containers are neither compared at every call nor searched for other containers
MAX_BYTES = 65_536  # larger buffers are not compared at every call; comparing these takes 10 µs
MAX_COPIED_ITEMS = 100_000  # of larger containers, a copy has only the length
# What Python itself stores in a class.
METADATA = frozenset(
    f"__{name}__"
    for name in (
        *("module", "qualname", "doc", "dict", "weakref", "annotations", "annotate", "slots", "abstractmethods"),
        *("parameters", "type_params", "orig_bases", "match_args", "dataclass_fields", "dataclass_params"),
        *("firstlineno", "static_attributes", "annotate_func", "annotations_cache"),
    )
)
# Compilers and launchers of kernels keep their own settings in context variables.
COMPILERS = ("triton.", "torch._dynamo.", "torch._functorch.", "torch._inductor.", "torch.fx.")


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


@dataclass(eq=False)
class Namespace:
    """A container of named values.

    `is_library`: attributes of a module whose library counts and caches in them, and whose adapter recreates what a
    forward reads.
    """

    path: str
    container: Any
    is_library: bool = False

    named = False
    """Whether code reads the values by their keys, as names."""

    def read(self) -> dict[Any, Any]:
        """Return a copy of the values by key."""
        raise NotImplementedError

    def write(self, values: Mapping[Any, Any]) -> None:
        """Restore values returned by `read`."""
        raise NotImplementedError

    def set(self, key: Any, value: Any) -> None:
        """Set one value."""
        self.container[key] = value

    def values_by_key(self) -> Any:
        """Return an object whose items are the current values."""
        return self.container

    def name_of(self, key: Any) -> str:
        """Return a value's name for messages."""
        if self.named:
            return f"{self.path}.{key}" if self.path else str(key)
        return f"{self.path}[{key!r}]" if type(key) in PLAIN else f"{self.path}[…]"

    def size(self) -> tuple[int, str]:
        """Return the number of values, and their unit."""
        return len(self.read()), "items"

    @property
    def is_comparable(self) -> bool:
        """Whether the values can be compared at every call: there are few enough."""
        return True


class Items(Namespace):
    """Items of a list, a deque or a dictionary."""

    def read(self) -> dict[Any, Any]:
        if len(self.keys()) > MAX_COPIED_ITEMS:
            return {"length": len(self.keys())}
        if _computes_items(self.container):
            return dict(dict.items(self.container))
        return dict(self.container if isinstance(self.container, dict) else enumerate(self.container))

    def write(self, values: Mapping[Any, Any]) -> None:
        if set(values) == {"length"}:
            return
        if _computes_items(self.container):
            dict.clear(self.container)
            dict.update(self.container, values)
            return
        self.container.clear()
        self.container.update(values) if isinstance(self.container, dict) else self.container.extend(values.values())

    def size(self) -> tuple[int, str]:
        return len(self.keys()), "items"

    @property
    def is_comparable(self) -> bool:
        return len(self.keys()) <= MAX_ITEMS

    def keys(self) -> Any:
        """Return an object that iterates over the stored keys of a dictionary, or the container; it has a length."""
        return dict.keys(self.container) if _computes_items(self.container) else self.container

    def values_by_key(self) -> Any:
        return _StoredItems(self.container) if _computes_items(self.container) else self.container


def _computes_items(container: Any) -> bool:
    """Whether reading runs code of a subclass of dict, which may return new objects, or other keys than are stored."""
    kind = type(container)
    return isinstance(container, dict) and not (
        kind.__getitem__ is dict.__getitem__
        and kind.__iter__ in (dict.__iter__, OrderedDict.__iter__)
        and kind.__len__ is dict.__len__
    )


class _StoredItems:
    """The items of a dictionary as they are stored."""

    __slots__ = ("_container",)

    def __init__(self, container: dict[Any, Any]):
        self._container = container

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self._container, key)


class Attributes(Namespace):
    """Attributes of an object."""

    named = True

    def read(self) -> dict[Any, Any]:
        return dict(self.container)

    def write(self, values: Mapping[Any, Any]) -> None:
        for name in [name for name in self.container if name not in values]:
            del self.container[name]
        self.container.update(values)


class Globals(Namespace):
    """Some globals of a module."""

    named = True

    def __init__(
        self, path: str, container: dict[str, Any], names: tuple[str, ...], code: types.CodeType | None = None
    ):
        super().__init__(path, container)
        self.names = names
        self.code = code  # of the function that names them

    def read(self) -> dict[Any, Any]:
        return {name: self.container[name] for name in self.names if name in self.container}

    def write(self, values: Mapping[Any, Any]) -> None:
        for name in self.names:
            if name not in values:
                self.container.pop(name, None)
        self.container.update(values)


class TensorAttributes(Namespace):
    """Those attributes of a tensor that code names; libraries keep counters and flags there too."""

    named = True

    def __init__(self, path: str, container: dict[str, Any], names: Container[str]):
        super().__init__(path, container)
        self.names = names

    def read(self) -> dict[Any, Any]:
        return {name: value for name, value in self.container.items() if name in self.names}

    def write(self, values: Mapping[Any, Any]) -> None:
        for name in self.read():
            if name not in values:
                del self.container[name]
        self.container.update(values)


class FunctionParts(Namespace):
    """Code and default arguments of a function."""

    PARTS = ("__code__", "__defaults__", "__kwdefaults__")

    def read(self) -> dict[Any, Any]:
        return {name: getattr(self.container, name) for name in self.PARTS}

    def write(self, values: Mapping[Any, Any]) -> None:
        for name, value in values.items():
            self.set(name, value)

    def set(self, key: Any, value: Any) -> None:
        setattr(self.container, key, value)

    def values_by_key(self) -> Any:
        return _Attribute(self.container)

    def name_of(self, key: Any) -> str:
        return f"{self.path}.{key}"


class Cell(Namespace):
    """A variable of a closure."""

    def read(self) -> dict[Any, Any]:
        try:
            return {0: self.container.cell_contents}
        except ValueError:  # unbound name
            return {}

    def write(self, values: Mapping[Any, Any]) -> None:
        if 0 in values:
            self.container.cell_contents = values[0]

    def set(self, key: Any, value: Any) -> None:
        self.container.cell_contents = value

    def name_of(self, key: Any) -> str:
        return self.path


class _Attribute:
    """Attributes of an object as items."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any):
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: str) -> bool:
        return hasattr(self._owner, name)


class Values(Namespace):
    """Slots of an object."""

    named = True

    def __init__(self, path: str, container: Any, names: tuple[str, ...]):
        super().__init__(path, container)
        self.names = names

    def read(self) -> dict[Any, Any]:
        return {name: getattr(self.container, name) for name in self.names if hasattr(self.container, name)}

    def write(self, values: Mapping[Any, Any]) -> None:
        for name in self.names:
            if name in values:
                setattr(self.container, name, values[name])
            elif hasattr(self.container, name):
                delattr(self.container, name)

    def set(self, key: Any, value: Any) -> None:
        setattr(self.container, key, value)

    def values_by_key(self) -> Any:
        return _Attribute(self.container)


class ClassAttributes(Namespace):
    """Attributes of a class, its methods included; only those in `only`, if given."""

    named = True

    def __init__(self, path: str, container: type, only: tuple[str, ...] | None = None):
        super().__init__(path, container)
        self.only = only

    def read(self) -> dict[Any, Any]:
        return {
            name: value
            for name, value in vars(self.container).items()
            if (name not in METADATA if self.only is None else name in self.only)
            and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
        }

    def write(self, values: Mapping[Any, Any]) -> None:
        now = self.read()
        for name in now:
            if name not in values:
                delattr(self.container, name)
        for name, value in values.items():
            if now.get(name, MISSING) is not value:
                setattr(self.container, name, value)

    def set(self, key: Any, value: Any) -> None:
        setattr(self.container, key, value)

    def values_by_key(self) -> Any:
        return vars(self.container)


class _Whole:
    """The contents of a container as one item."""

    __slots__ = ("_namespace",)

    def __init__(self, namespace: Namespace):
        self._namespace = namespace

    def __getitem__(self, key: str) -> Any:
        return self._namespace.read()[key]


class Contents(Namespace):
    """A set, or a buffer of numbers (bytearray, array, NumPy array, ctypes, mmap), copied as a whole."""

    def size(self) -> tuple[int, str]:
        if isinstance(self.container, set):
            return len(self.container), "items"
        return _nbytes(self.container), "bytes"

    @property
    def is_comparable(self) -> bool:
        size, unit = self.size()
        return size <= (MAX_BYTES if unit == "bytes" else MAX_ITEMS)

    def read(self) -> dict[Any, Any]:
        container = self.container
        if isinstance(container, set):
            many = len(container) > MAX_COPIED_ITEMS
            return {"length": len(container)} if many else {"contents": frozenset(container)}
        if isinstance(container, _numpy_type("ndarray")):
            return {"contents": _numpy().ndarray.tobytes(container)}  # a masked array fills its own copies
        try:
            return {"contents": bytes(memoryview(container))}
        except ValueError:  # closed
            return {"contents": b""}

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
            container[...] = _numpy().frombuffer(contents, container.dtype).reshape(container.shape)
        elif contents:
            memoryview(container).cast("B")[:] = contents

    def values_by_key(self) -> Any:
        return _Whole(self)

    def name_of(self, key: Any) -> str:
        return self.path


def _nbytes(buffer: Any) -> int:
    """Return the bytes of a buffer; 0 if it is closed."""
    if isinstance(buffer, _numpy_type("ndarray")):
        return int(buffer.nbytes)
    try:
        return memoryview(buffer).nbytes
    except ValueError:
        return 0


class Opaque(Namespace):
    """An object that keeps values where nothing compares them: an array of Python objects, a pointer, a queue in C."""

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
            return {"value": one.get(MISSING)}
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
            if values["value"] is not MISSING:
                one.set(values["value"])
        elif not isinstance(one, Iterator):
            _numpy_state(one)[1](pickle.loads(values["state"]))

    def values_by_key(self) -> Any:
        return _Whole(self)

    def name_of(self, key: Any) -> str:
        return self.path


def _numpy_state(generator: Any) -> tuple[Any, Callable[[Any], None]]:
    """Return the state of one of NumPy's generators, and the function that sets it."""
    if isinstance(generator, _numpy_type("random.RandomState")):
        return generator.get_state(legacy=False), generator.set_state
    bits = getattr(generator, "bit_generator", generator)
    return bits.state, functools.partial(setattr, bits, "state")


def state_of(generator: torch.Generator) -> bytes:
    """Return a generator's state, also inside a capture, which sees no read of the host."""
    with _disable_current_modes():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Set a generator's state, also inside a capture."""
    with _disable_current_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def is_buffer(value: Any) -> bool:
    """Return whether this is a set, or a mutable buffer of numbers."""
    if isinstance(value, (set, bytearray, array.array)):
        return True
    if isinstance(value, _numpy_type("ndarray")):
        return not value.dtype.hasobject
    kind: Any = type(value)
    return _is_memory(kind) and not _is_pointer(kind)


def is_opaque(value: Any) -> bool:
    """Return whether this object keeps values that nothing compares."""
    kind: Any = type(value)
    return isinstance(value, (_numpy_type("ndarray"), queue.SimpleQueue)) or _is_pointer(kind)


@functools.cache
def _is_memory(kind: Any) -> bool:
    """Whether objects of this type are memory of ctypes, or a mapped file."""
    return any(base.__name__ == "_CData" or base.__module__ == "mmap" for base in kind.__mro__)


@functools.cache
def _is_pointer(kind: Any) -> bool:
    """Whether objects of this type refer to memory that they do not hold."""
    is_pointer = any(base.__name__ == "_Pointer" for base in kind.__mro__)
    return is_pointer or issubclass(kind, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p))


def is_hidden(value: Any) -> bool:
    """Return whether this object keeps state in C that `Hidden` reads."""
    numpy = tuple(kind for name in NUMPY_GENERATORS if (kind := _numpy_type(name)))
    if isinstance(value, ContextVar):
        return not is_of_a_compiler(value)
    return isinstance(value, (torch.Generator, random.Random, *numpy)) or (
        isinstance(value, Iterator) and not isinstance(value, io.IOBase)
    )


@functools.cache
def is_of_a_compiler(variable: ContextVar[Any]) -> bool:
    """Return whether this is a global or a setting of a compiler, which no result depends on."""
    return any(
        value is variable
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(COMPILERS)
        for value in _variables_of(module)
    )


def _variables_of(module: types.ModuleType) -> list[Any]:
    """Return the globals of a module, and the variables that PyTorch keeps the settings of its compilers in."""
    settings = vars(module).get("_config")
    entries = settings.values() if isinstance(settings, dict) else ()
    return [*vars(module).values(), *[getattr(entry, "user_override", None) for entry in entries]]


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
    """Return the name under which a class stores an attribute: that of its private ones has its own name in it."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private and owner.__name__.strip("_") else name


def _numpy() -> Any:
    return sys.modules["numpy"]


def _numpy_type(name: str) -> Any:
    """Return a type of NumPy, or no type if it was never imported."""
    module = sys.modules.get("numpy")
    for part in name.split("."):
        module = getattr(module, part, None)
    return () if module is None else module
