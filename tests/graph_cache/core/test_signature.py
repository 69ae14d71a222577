"""Signatures: all differences are reported, and nothing else."""

from __future__ import annotations

import pytest
import torch

from graph_cache.core.signature import Signature
from graph_cache.errors import SignatureMismatch

TENSORS = {"x": torch.zeros(2, 3), "ids": torch.zeros(2, dtype=torch.int64)}


def test_matching_tensors_have_no_differences():
    signature = Signature.of(TENSORS)
    assert signature.differences({"x": torch.ones(2, 3), "ids": torch.ones(2, dtype=torch.int64)}) == []
    signature.check(TENSORS, "inputs")


def test_strides_and_gradients_are_no_difference_since_inputs_are_copied():
    x = torch.ones(3, 2, requires_grad=True).t()
    assert Signature.of(TENSORS).differences(TENSORS | {"x": x}) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4)}, "x: shape (2, 4) where (2, 3) was captured"),
        ({"x": torch.zeros(2, 3, dtype=torch.float16)}, "x: dtype torch.float16 where torch.float32 was captured"),
        ({"x": torch.zeros(2, 3, device="meta")}, "x: device meta where cpu was captured"),
        ({"x": [1.0]}, "x: a tensor is needed, found list"),
        ({"x": None}, "x: a tensor is needed, found NoneType"),
        ({"y": torch.zeros(1)}, "y: not an input of this graph"),
    ],
)
def test_a_difference_says_what_was_found_and_what_was_captured(change, message):
    assert Signature.of(TENSORS).differences(TENSORS | change) == [message]


def test_all_differences_are_in_one_error():
    with pytest.raises(SignatureMismatch, match="inputs do not fit the graph: .*;.*;.*") as caught:
        Signature.of(TENSORS).check({"x": torch.zeros(1, dtype=torch.int8), "z": 1}, "inputs")
    assert caught.value.differences == [
        "ids: missing",
        "z: not an input of this graph",
        "x: shape (1,) where (2, 3) was captured",
        "x: dtype torch.int8 where torch.float32 was captured",
    ]
    assert isinstance(caught.value, ValueError)
