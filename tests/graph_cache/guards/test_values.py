"""The equality of captures: by type and bits."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import pytest
import torch

from graph_cache.guards.values import key_of, same, same_bits

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


class Pair(NamedTuple):
    first: int
    second: int


class Object:
    def __eq__(self, other):
        return True

    __hash__ = object.__hash__

    def method(self):
        pass


OBJECT = Object()


@pytest.mark.parametrize(
    "make",
    [
        lambda: math.nan * 1,
        lambda: complex(-0.0, math.nan),
        lambda: -0.0,
        lambda: "".join(["ab", "c"]),
        lambda: (1, ("a", 2.0), frozenset([1.0])),
        lambda: Pair(1, 2),
        lambda: torch.device("cpu"),
        lambda: torch.float32,
        lambda: OBJECT.method,
    ],
)
def test_values_of_the_same_type_and_bits_are_equal(make):
    one, other = make(), make()
    assert same(one, other)
    assert key_of(one) == key_of(other) and hash(key_of(one)) == hash(key_of(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (0, None),
        ("1", b"1"),
        (math.nan, OTHER_NAN),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ((1, 0.0), (1, -0.0)),
        ((1, 2), Pair(1, 2)),
        (frozenset([1]), frozenset([1.0])),
        (frozenset([0.0]), frozenset([-0.0])),
        (Object(), Object()),
        ([1], [1]),
        (([1],), ([1],)),
        ({"a": 1}, {"a": 1}),
        (torch.ones(1), torch.ones(1)),
    ],
)
def test_other_types_bits_and_objects_differ(one, other):
    assert not same(one, other) and key_of(one) != key_of(other)


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ([1, [2.0]], [1, [2.0]], True),
        ([1, [2.0]], [1, [2]], False),
        ([0.0], [-0.0], False),
        ([1], (1,), False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": [1]}, {"a": [True]}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),  # code may iterate
    ],
)
def test_containers_compare_by_their_contents_where_these_are_read_anew(one, other, is_equal):
    assert (key_of(one, contents=True) == key_of(other, contents=True)) is is_equal


def test_a_key_does_not_keep_a_tensor_alive_and_an_address_used_again_differs():
    tensor = torch.ones(1)
    key = key_of((tensor,))
    del tensor
    assert all(key_of((torch.ones(1),)) != key for _ in range(10))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x80000000, 0])
def test_tensors_compare_by_their_bits(bits):
    one = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert same_bits(one, one.clone())
    assert not same_bits(one, (one.view(torch.int32) + 1).view(torch.float32))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
