"""MXFP4 tensors: values against a plain-Python decoder of the format, pairs in any order, and refusals by name."""

from __future__ import annotations

import random

import pytest
import torch

from engine.checkpoint.mxfp4 import dequantise, dequantised
from engine.errors import ModelError

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def e2m1(bits: int) -> float:
    """Decode a 4-bit float: one sign bit, two exponent bits with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = (-1) ** (bits >> 3), (bits >> 1) & 3, bits & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def tensors(experts: int = 2, rows: int = 3, groups: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(100, 140, (experts, rows, groups), generator=generator, dtype=torch.uint8)


def test_every_value_is_that_of_the_format() -> None:
    blocks, scales = tensors()
    blocks[0, 0, 0] = torch.arange(16) * 17  # each pair of equal halves
    scales[1, 2] = torch.tensor([1, 252])
    found = dequantise(blocks, scales)
    assert found.shape == (2, 3, 64) and found.dtype == torch.bfloat16
    for expert in range(2):
        for row in range(3):
            for column in range(64):
                byte = int(blocks[expert, row, column // 32, column % 32 // 2])
                value = e2m1(byte >> 4 if column % 2 else byte & 15) * 2.0 ** (
                    int(scales[expert, row, column // 32]) - 127
                )
                assert float(found[expert, row, column]) == value


def test_pairs_become_one_transposed_matrix_in_any_order() -> None:
    blocks, scales = tensors()
    other = ("model.norm.weight", torch.ones(3))
    items = [(f"{NAME}_scales", scales), other, 3, (f"{NAME}_blocks", blocks), (f"{NAME}_bias", torch.ones(2, 3))]
    random.Random(1).shuffle(items)
    found = dict(item for item in dequantised(items, CPU) if item != 3)
    assert found.keys() == {NAME, f"{NAME}_bias", "model.norm.weight"}
    assert torch.equal(found[NAME], dequantise(blocks, scales).mT)


def test_a_tensor_without_its_partner_passes_under_its_own_name() -> None:
    blocks, _ = tensors()
    assert [name for name, _ in dequantised([(f"{NAME}_blocks", blocks)], CPU)] == [f"{NAME}_blocks"]
    twice = [(f"{NAME}_blocks", blocks), (f"{NAME}_blocks", blocks)]
    assert [name for name, _ in dequantised(twice, CPU)] == [f"{NAME}_blocks"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda blocks, scales: (blocks, scales[:, :2]),
            r"gate_up_proj_scales has shape \[2, 2, 2\], which doesn't fit",
        ),
        (lambda blocks, scales: (blocks[..., :8], scales), r"gate_up_proj_blocks of shape \[2, 3, 2, 8\]"),
        (lambda blocks, scales: (blocks, scales.fill_(255)), "gate_up_proj_scales contains NaN"),
    ],
)
def test_broken_pairs_are_refused_by_name(change, message) -> None:
    blocks, scales = change(*tensors())
    with pytest.raises(ModelError, match=message):
        list(dequantised([(f"{NAME}_blocks", blocks), (f"{NAME}_scales", scales)], CPU))
