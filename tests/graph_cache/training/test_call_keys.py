"""Call keys: equality and hashes, and cheap lookup among many keys."""

from __future__ import annotations

import enum

import pytest
import torch

from graph_cache.training.call import CallKey, Expected, flatten_call

X = torch.zeros(2, 3)


class Color(enum.Enum):
    RED, BLUE = 1, 2


class LooseEnum(enum.Enum):
    """Enum with its own equality, and so without a hash."""

    ONE, TWO = 1, 2

    def __eq__(self, other):
        return True


class Unhashable:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


class LooseString(str):
    """Subclass of a plain type with its own equality and no hash."""

    __hash__ = None

    def __eq__(self, other):
        return True


def key_of(**values) -> CallKey:
    return flatten_call((X,), values, True)[0]


@pytest.mark.parametrize(
    "values",
    [
        range(100),
        [0.5 * index for index in range(100)],
        [complex(0, index) for index in range(100)],
        [str(index) for index in range(100)],
        [b"%d" % index for index in range(100)],
        [None, True, torch.float16, torch.bfloat16, torch.device("cpu"), torch.device("meta"), *Color],
    ],
    ids=["int", "float", "complex", "str", "bytes", "others"],
)
def test_signatures_that_differ_in_a_plain_value_have_different_hashes(values):
    """Otherwise, each new key (a new `max_seqlen` at each step) would be compared with all earlier ones."""
    assert len({hash(key_of(value=value)) for value in values}) == len(list(values))


@pytest.mark.parametrize(("one", "other"), [(2, 2.0), (1, True), (0, False), (1, Color.RED)])
def test_equal_values_of_different_types_are_distinguished(one, other):
    assert key_of(value=one) != key_of(value=other) and hash(key_of(value=one)) != hash(key_of(value=other))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Unhashable(3),
        lambda: LooseEnum.ONE,
        lambda: LooseString("x"),
        lambda: [1, {"a": Unhashable(2)}],
        lambda: Color.BLUE,
        lambda: "mask",
    ],
)
def test_equal_keys_have_equal_hashes_for_all_value_types(make):
    assert key_of(value=make()) == key_of(value=make()) and hash(key_of(value=make())) == hash(key_of(value=make()))


def test_values_that_differ_and_compare_equal_are_told_apart():
    for one, other in ((LooseEnum.ONE, LooseEnum.TWO), (LooseString("x"), LooseString("y"))):
        assert one == other and key_of(value=one) != key_of(value=other)
        assert key_of(value=one) == key_of(value=one) and hash(key_of(value=one)) == hash(key_of(value=one))


def test_zero_and_negative_zero_are_different_values():
    keys = [flatten_call((X, value), {}, True)[0] for value in (0.0, -0.0)]
    assert keys[0] != keys[1] and keys[1] == flatten_call((X, -0.0), {}, True)[0]
    assert Expected(keys[0], (X, 0.0), {}).tensors((X, -0.0), {}, True) is None
    assert Expected(keys[0], (X, 0.0), {}).tensors((X, 0.0), {}, True) is not None
