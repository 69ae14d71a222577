"""Reference: restoring state after a run, and bitwise comparison."""

from __future__ import annotations

import pytest
import torch

from graph_cache import BATCH, BufferSpec, GraphCache
from graph_cache.guards.reference import Reference
from graph_cache.guards.values import same_bits


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), True),
        (torch.tensor([1 + 2j], dtype=torch.complex128), torch.tensor([1 - 2j], dtype=torch.complex128), False),
        (torch.tensor(3), torch.tensor(3), True),
        (torch.zeros(0, 2), torch.zeros(0, 2), True),
        (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous(), True),
        (torch.ones(4, 3)[:1, 0], torch.ones(1), True),
        (torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8), False),
    ],
)
def test_tensors_are_the_same_down_to_the_bits(one, other, same):
    assert same_bits(one, other) is same


def test_rewind_restores_statics_and_generators_but_not_later_additions():
    generator, statics = torch.Generator().manual_seed(5), [torch.zeros(2)]
    reference = Reference(lambda: statics, [generator])
    first = torch.rand(2, generator=generator)
    statics[0].add_(1)
    statics.append(torch.full((2,), 7.0))
    reference.rewind()
    assert statics[0].tolist() == [0, 0] and statics[1].tolist() == [7, 7]
    assert torch.equal(torch.rand(2, generator=generator), first)


def test_differences_count_every_static_that_is_not_as_remembered():
    statics = [torch.zeros(2), torch.tensor(float("nan")), torch.zeros(1)]
    reference = Reference(lambda: statics, [])
    reference.remember()
    assert reference.differences() == 0
    statics[0][1] = -0.0
    statics[2].add_(1)
    assert reference.differences() == 2


def test_noise_goes_into_floating_point_only_and_is_always_the_same():
    statics = [torch.zeros(4), torch.arange(3), torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)]
    reference = Reference(lambda: statics, [])
    noisy = reference.with_noise()
    taken = [tensor.detach().clone() for tensor in statics]
    assert taken[0].unique().numel() == 4 and taken[2].any()
    assert taken[1].tolist() == [0, 1, 2]
    with torch.no_grad():
        reference.rewind()
        assert not statics[0].any()
        noisy.rewind()
        assert torch.equal(statics[0], taken[0])
        reference.with_noise()
        assert torch.equal(statics[0], taken[0])


def test_a_callable_that_makes_nan_of_padding_is_captured():
    cache = GraphCache()
    run = cache.graphed("nan", lambda x: x / x, {"x": BufferSpec((BATCH, 2), torch.float32)}, buckets=(2,))
    assert run(x=torch.full((2, 2), 3.0)).eq(1).all()
    assert cache.table()[0]["state"] == "captured"
