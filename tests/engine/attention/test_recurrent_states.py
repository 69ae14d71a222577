"""Recurrent states: their entries, and the recurrence over packed chunks."""

from __future__ import annotations

import pytest
import torch

from engine.attention.cache_spec import FullAttentionSpec, RecurrentStateSpec
from engine.attention.recurrent_states import RecurrentStates, StepStates
from engine.errors import ModelError
from engine.layers.recurrence import linear_recurrence
from engine.models.interface import ForwardContext

FULL = FullAttentionSpec(kv_heads=2, head_dim=8)
SPECS = [
    RecurrentStateSpec(shapes=((3,), (2, 4))),
    FULL,
    RecurrentStateSpec(shapes=((3,),), dtype=torch.float64),
    RecurrentStateSpec(shapes=((3,), (3,))),
]


def test_every_recurrent_layer_has_tensors_of_its_own() -> None:
    states = RecurrentStates(SPECS, 5, torch.float32, "cpu")
    assert list(states.of_layer) == [0, 2, 3]
    found = [[(tuple(one.shape), one.dtype) for one in tensors] for tensors in states.of_layer.values()]
    assert found == [
        [((6, 3), torch.float32), ((6, 2, 4), torch.float32)],
        [((6, 3), torch.float64)],
        [((6, 3), torch.float32), ((6, 3), torch.float32)],
    ]
    each = [one for tensors in states.of_layer.values() for one in tensors]
    for number, one in enumerate(each, 1):
        one.fill_(number)
    assert [one.unique().tolist() for one in each] == [[1], [2], [3], [4], [5]]
    assert sum(whole.numel() for whole in states.storage) == sum(one.numel() for one in each)


def test_zero_clears_entries_in_all_layers_even_of_nan() -> None:
    states = RecurrentStates(SPECS, 5, torch.float32, "cpu")
    for whole in states.storage:
        whole.fill_(float("nan"))
    states.zero(torch.tensor([2, 5]))
    for tensors in states.of_layer.values():
        for one in tensors:
            kept = one.flatten(1).isnan().all(1).tolist()
            assert kept == [True, True, False, True, True, False] and not one[[2, 5]].any()


def test_a_step_reads_and_writes_the_entries_of_its_chunks() -> None:
    states = RecurrentStates(SPECS, 5, torch.float32, "cpu")
    step = StepStates(states, torch.tensor([4, 2, 0, 0]))
    new = torch.arange(1.0, 5.0).view(4, 1)
    step.write(0, new.expand(4, 3), new.unsqueeze(2).expand(4, 2, 4))
    step.write(2, new.expand(4, 3))
    [small, large], [other] = step.read(0), step.read(2)
    assert small.tolist() == [[1] * 3, [2] * 3, [0] * 3, [0] * 3]
    assert large[:, 1, 2].tolist() == [1, 2, 0, 0] and other.dtype == torch.float64
    assert states.of_layer[0][0][:, 0].tolist() == [0, 0, 2, 0, 1, 0]
    assert not states.of_layer[3][0].any()


def test_a_model_without_recurrent_layers_has_no_states() -> None:
    with pytest.raises(ModelError, match="a layer reads recurrent state, but cache_specs.. has no RecurrentStateSpec"):
        ForwardContext((), lambda layer, q, k, v: q).states  # noqa: B018


@pytest.mark.parametrize("lengths", [[1], [7], [1, 5, 1, 12, 3], [1, 1, 1]])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_recurrence_over_packed_chunks_equals_a_loop(lengths: list[int], padding: int) -> None:
    torch.manual_seed(0)
    count, n = sum(lengths) + padding, 4
    decay, inputs = torch.rand(count, n, dtype=torch.float64), torch.randn(count, n, dtype=torch.float64)
    before = torch.randn(len(lengths), n, dtype=torch.float64)
    chunk_of = torch.tensor([chunk for chunk, length in enumerate(lengths) for _ in range(length)] + [-1] * padding)
    found = linear_recurrence(decay, inputs, before, chunk_of)
    token = 0
    for h, length in zip(before, lengths, strict=True):
        for _ in range(length):
            h = decay[token] * h + inputs[token]
            torch.testing.assert_close(found[token], h)
            token += 1


def test_a_decode_step_is_one_step_of_the_recurrence() -> None:
    decay, inputs, before = torch.rand(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    found = linear_recurrence(decay, inputs, before, None)
    torch.testing.assert_close(found, decay * before + inputs)
