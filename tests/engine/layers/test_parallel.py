"""Tensor-parallel layers over two gloo processes compute what the whole layers compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.layers import (
    ColumnParallelLinear,
    Embedding,
    Linear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from tests.support.gloo_ranks import CPU, run_ranks

STORAGE: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
QKV = {"q_proj": 24, "k_proj": 8, "v_proj": 8}
VOCAB, HIDDEN, INPUTS = 7, 12, 16


def whole_weights() -> dict[str, Tensor]:
    """Checkpoint tensors of every layer below."""
    generator = torch.Generator().manual_seed(4)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "head.lm_head.weight": (VOCAB, HIDDEN)}
    for name, rows in QKV.items():
        shapes |= {f"qkv.{name}.weight": (rows, INPUTS), f"qkv.{name}.bias": (rows,)}
    shapes |= {"o.o_proj.weight": (HIDDEN, INPUTS), "o.o_proj.bias": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_layers(parallel: TensorParallel) -> dict[str, Any]:
    layers: dict[str, Any] = {
        "qkv": ColumnParallelLinear(QKV, INPUTS, bias=True, **STORAGE, parallel=parallel),
        "o": RowParallelLinear({"o_proj": HIDDEN}, INPUTS, bias=True, **STORAGE, parallel=parallel),
        "embed": VocabParallelEmbedding(VOCAB, HIDDEN, **STORAGE, parallel=parallel),
        "head": VocabParallelHead(VOCAB, HIDDEN, **STORAGE, parallel=parallel),
    }
    for name, tensor in whole_weights().items():
        slots_of(layers)[name].write(tensor)
    return layers


def slots_of(layers: dict[str, Any]) -> dict[str, Any]:
    return {name: slot for prefix, layer in layers.items() for name, slot in layer.slots(prefix).items()}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(5, INPUTS, generator=generator),
        torch.tensor([6, 0, 3, 4, 6, 5]),
        torch.randn(5, HIDDEN, generator=generator),
    )


def compute(parallel: TensorParallel) -> dict[str, Tensor]:
    """Run every layer on the same values; each rank has its columns of the row-parallel layer's input."""
    layers, (x, ids, hidden) = make_layers(parallel), inputs()
    columns = x.chunk(parallel.size, dim=1)[parallel.rank].contiguous()
    with torch.no_grad():
        return {
            "qkv": layers["qkv"](x),
            "o": layers["o"](columns),
            "embed": layers["embed"](ids),
            "head": layers["head"](hidden),
        }


def test_two_ranks_compute_what_the_whole_layers_compute(tmp_path: Path) -> None:
    first, second = run_ranks(compute, tmp_path)
    whole = compute(SINGLE_RANK)
    for name in ("o", "embed", "head"):
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], whole[name])
    assert torch.equal(first["embed"], whole["embed"]) and first["head"].shape == (5, VOCAB)
    # each part is split by itself: q0 k0 v0 on the first rank, q1 k1 v1 on the second
    parts = [part for q_k_v in whole["qkv"].split([24, 8, 8], dim=1) for part in q_k_v.chunk(2, dim=1)]
    torch.testing.assert_close(first["qkv"], torch.cat(parts[0::2], dim=1))
    torch.testing.assert_close(second["qkv"], torch.cat(parts[1::2], dim=1))


def plain_layers() -> dict[str, nn.Module]:
    layers: dict[str, Any] = {
        "qkv": Linear(QKV, INPUTS, bias=True, **STORAGE),
        "o": Linear({"o_proj": HIDDEN}, INPUTS, bias=True, **STORAGE),
        "embed": Embedding(VOCAB, HIDDEN, **STORAGE),
        "head": Linear({"lm_head": VOCAB}, HIDDEN, bias=False, **STORAGE),
    }
    for name, tensor in whole_weights().items():
        slots_of(layers)[name].write(tensor)
    return layers


def test_one_rank_computes_the_plain_layers_bit_for_bit() -> None:
    plain, (x, ids, hidden) = plain_layers(), inputs()
    found = compute(SINGLE_RANK)
    with torch.no_grad():
        for name, value in (("qkv", x), ("o", x), ("embed", ids), ("head", hidden)):
            assert torch.equal(found[name], plain[name](value)), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_all_ranks_make_the_whole_tensor(ranks: int) -> None:
    ranks_slots = [slots_of(make_layers(TensorParallel(rank, ranks))) for rank in range(ranks)]
    for name, whole in whole_weights().items():
        slots = [slots[name] for slots in ranks_slots]
        assert {slot.shape for slot in slots} == {tuple(whole.shape)}
        if name == "o.o_proj.bias":  # every rank stores it, the first adds it
            assert all(torch.equal(slot.read(), whole) for slot in slots)
            continue
        joined = torch.cat([slot.read() for slot in slots], dim=1 if name == "o.o_proj.weight" else 0)
        assert torch.equal(joined, whole), name
        assert all(torch.equal(slot.part_of(whole), slot.read()) for slot in slots)


def test_padding_rows_of_the_vocabulary_are_zero() -> None:
    layers = make_layers(TensorParallel(3, 4))  # 2 rows for each of 4 ranks, and 7 tokens
    for layer in (layers["embed"], layers["head"]):
        assert layer.weight.shape == (2, HIDDEN)
        assert layer.weight[0].abs().min() > 0 and not layer.weight[1].any()
    empty = VocabParallelEmbedding(5, HIDDEN, **STORAGE, parallel=TensorParallel(3, 4))
    assert empty.slots("e")["e.weight"].read().shape == (0, HIDDEN) and not empty.weight.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda own: ColumnParallelLinear(QKV, 8, bias=False, **STORAGE, parallel=own), "q_proj with 24 outputs"),
        (
            lambda own: RowParallelLinear({"o_proj": 8}, 16, bias=False, **STORAGE, parallel=own),
            "o_proj with 16 inputs",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_rejected(make: Callable[[TensorParallel], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=f"{message} can't be split over 5 tensor-parallel ranks"):
        make(TensorParallel(0, 5))


def test_a_rank_without_a_group_does_not_compute_a_partial_result() -> None:
    layers = make_layers(TensorParallel(0, 2))
    for name, x in (("o", torch.ones(1, INPUTS // 2)), ("head", torch.ones(1, HIDDEN)), ("embed", torch.tensor([1]))):
        with pytest.raises(RuntimeError, match="rank 0 of 2 has no process group"):
            layers[name](x)
