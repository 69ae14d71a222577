"""The equality of captures: by type and bits.

-0.0 is not 0.0, 1 is neither 1.0 nor True, and a NaN equals the same NaN. Tuples and frozen sets are compared element
by element, lists and dictionaries too where their contents are read anew each time, any other object by identity.
"""

from __future__ import annotations

import io
import pickle
import struct
import types
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

# Of one of these types, values with the same bits are equal, and no others.
EXACT = frozenset((type(None), bool, int, str, bytes, torch.dtype, torch.device))
PLAIN = EXACT | {float, complex}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per element -> dtype to compare as
_bits_of_float, _bits_of_complex = struct.Struct("=d").pack, struct.Struct("=dd").pack


def key_of(value: Any, contents: bool = False) -> Hashable:
    """Return a key that equals another one if the values are equal.

    Objects that code may change count by identity. With `contents`, lists and dictionaries count by their contents,
    so take the key anew for each comparison.
    """
    kind = type(value)
    if kind in EXACT:
        return kind, value
    if kind is float:
        return kind, _bits_of_float(value)
    if kind is complex:
        return kind, _bits_of_complex(value.real, value.imag)
    if kind is tuple and EXACT.issuperset(map(type, value)):
        return kind, tuple(map(type, value)), value
    if isinstance(value, tuple) or (contents and kind is list):
        return kind, *[key_of(item, contents) for item in value]
    if isinstance(value, frozenset):
        return kind, frozenset([key_of(item, contents) for item in value])
    if contents and kind is dict:
        return kind, *[(key_of(key), key_of(item, contents)) for key, item in value.items()]
    return TensorKey(value) if isinstance(value, Tensor) else IdentityKey(value)


def same(old: Any, new: Any) -> bool:
    """Return whether two values are the same object, or equal values that no code can change."""
    if old is new or type(old) is not type(new):
        return old is new
    if type(old) is tuple and EXACT.issuperset(map(type, old)):  # a long one is the state of a generator
        return list(map(type, old)) == list(map(type, new)) and old == new
    return key_of(old) == key_of(new)


def same_items(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Return whether two mappings hold the same values under the same keys."""
    return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())


@dataclass(frozen=True, eq=False)
class IdentityKey:
    """Key that compares by identity. Bound methods match if their owner and function match.

    It keeps its object alive, so the address is never reused by another object.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IdentityKey):
            return NotImplemented
        bound = isinstance(self.value, types.MethodType)
        return self.value is other.value or bound and self.value == other.value

    def __hash__(self) -> int:
        if isinstance(self.value, types.MethodType):
            return hash((id(self.value.__self__), id(self.value.__func__)))
        return id(self.value)  # not of its type, which may change


class TensorKey:
    """A tensor by identity. It is not kept alive; another one at its address is not equal."""

    __slots__ = ("_id", "_reference")

    def __init__(self, tensor: Tensor):
        self._id, self._reference = id(tensor), ref(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorKey):
            return NotImplemented
        found = self._reference()
        return found is not None and found is other._reference()

    def __hash__(self) -> int:
        return self._id


# ---- arguments -------------------------------------------------------------------------------------------------------


class SameValue:
    """A value that equals itself, and another of the same type and state: `==` may leave differences out.

    The state is what pickle stores; objects in it that compare by identity count by identity. A dataclass may exclude
    fields from its comparison, and frozenset([1]) equals frozenset([1.0]).
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameValue):
            return NotImplemented
        one, another = self.value, other.value
        if one is another:
            return True
        if type(one) is not type(another) or _compares_by_identity(one):
            return False
        try:
            return _state(one) == _state(another)
        except Exception:  # of any kind: it runs code of the value
            return False

    def __hash__(self) -> int:
        return hash(type(self.value))


def _compares_by_identity(value: Any) -> bool:
    return isinstance(value, (Tensor, type)) or type(value).__eq__ is object.__eq__


class _StatePickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return id(value) if _compares_by_identity(value) else None


def _state(value: Any) -> bytes:
    stream = io.BytesIO()
    _StatePickler(stream).dump(value)
    return stream.getvalue()


def kind_of(value: Any) -> Any:
    """Return what tells a value apart from others that equal it by `==`."""
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value)) if not value.real or (kind is complex and not value.imag) else kind  # -0.0
    if kind in PLAIN or kind is types.MethodType or _compares_by_identity(value):
        return kind
    return SameValue(value)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same bytes, including NaN payloads and signs of zero."""
    return torch.equal(raw_bits(one), raw_bits(other))


def raw_bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers of the same bytes, one-dimensional: a view if the elements are in order."""
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    flat = tensor.reshape(-1)
    # A tensor of one element may have any stride; a view as another dtype needs stride 1.
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(INTEGERS.get(flat.itemsize, torch.uint8))
