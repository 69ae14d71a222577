"""The MoE layer: routing, padding, row independence, weight slots, and capture on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.layers.moe import Experts, MoE, Router, run_experts_grouped
from graph_cache import BufferSpec, GraphCache
from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool
from tests.support.moe_reference import experts_reference, random_experts, random_routing

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 32, 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_layer(device: str, dtype: torch.dtype = torch.float32, normalize: bool = True, experts: int = EXPERTS) -> MoE:
    torch.manual_seed(0)
    place = {"dtype": dtype, "device": torch.device(device)}
    router = Router(experts, TOP_K, HIDDEN, normalize=normalize, **place)
    layer = MoE(router, Experts(experts, HIDDEN, WIDTH, **place))
    with torch.no_grad():
        layer.router.weight.normal_(0.0, 1.0)
        layer.experts.gate_up.weight.normal_(0.0, 2 / HIDDEN**0.5)
        layer.experts.down.weight.normal_(0.0, 2 / WIDTH**0.5)
    return layer


@pytest.mark.parametrize("normalize", [True, False])
def test_router_takes_the_softmax_over_all_experts_in_float32(normalize: bool) -> None:
    router = Router(4, 2, 4, normalize=normalize, dtype=torch.bfloat16, device=torch.device("cpu"))
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    weights, experts = router(torch.tensor([[1.0, 3.0, 2.0, 0.0]], dtype=torch.bfloat16))
    exact = torch.tensor([3.0, 2.0]).double().exp()
    exact /= exact.sum() if normalize else torch.tensor([0.0, 1.0, 2.0, 3.0]).double().exp().sum()
    assert experts.tolist() == [[1, 2]]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[0].double(), exact, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_grouped_formulation_equals_a_loop_over_tokens(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(tokens)
    gate_up, down = random_experts(EXPERTS, HIDDEN, WIDTH, dtype, "cpu")
    x, (weights, experts) = torch.randn(tokens, HIDDEN).to(dtype), random_routing(tokens, EXPERTS, TOP_K, "cpu")
    experts[tokens // 2] = -1
    expected = experts_reference(x, weights, experts, gate_up, down)
    found = run_experts_grouped(x, weights, experts, gate_up, down)
    assert found.dtype == dtype
    assert float((found.double() - expected).norm()) <= tolerance * max(float(expected.norm()), 1.0)
    assert not found[tokens // 2].any()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_biases_and_the_clamped_activation_equal_a_loop_over_tokens(biased: bool, limit: float | None) -> None:
    torch.manual_seed(3)
    gate_up, down = random_experts(EXPERTS, HIDDEN, WIDTH, torch.float32, "cpu")
    options: dict[str, Any] = {"limit": limit, "alpha": 1.0 if limit is None else 1.7}
    if biased:
        options |= {"gate_up_bias": torch.randn(EXPERTS, 2 * WIDTH), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    x, (weights, experts) = torch.randn(9, HIDDEN), random_routing(9, EXPERTS, TOP_K, "cpu")
    experts[4] = -1
    found = run_experts_grouped(x, weights, experts, gate_up, down, **options)
    torch.testing.assert_close(
        found.double(), experts_reference(x, weights, experts, gate_up, down, **options), atol=1e-4, rtol=0
    )


def test_a_router_with_a_bias_chooses_and_weighs_by_it() -> None:
    router = Router(4, 2, 4, normalize=True, dtype=torch.float32, device=torch.device("cpu"), bias=True)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        assert router.bias is not None
        router.bias.copy_(torch.tensor([0.0, -9.0, 0.0, 5.0]))
    weights, experts = router(torch.tensor([[1.0, 3.0, 2.0, 0.0]]))
    assert experts.tolist() == [[3, 2]]
    torch.testing.assert_close(weights[0], torch.tensor([5.0, 2.0]).softmax(0))


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_padding_rows_get_0_and_change_no_other_row(device: str) -> None:
    layer = make_layer(device)
    x = torch.randn(3, HIDDEN, device=device)
    padded = torch.cat((x, torch.full((5, HIDDEN), float("nan"), device=device)))
    valid = torch.arange(8, device=device) < 3
    found = layer(padded, valid)
    assert torch.equal(found[:3], layer(x, None))
    assert not found[3:].any()
    assert not layer(padded, torch.zeros_like(valid)).any()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_row_does_not_depend_on_the_other_rows(device: str) -> None:
    layer = make_layer(device)
    x = torch.randn(16, HIDDEN, device=device)
    before = layer(x, None)
    x[1:] = torch.randn(15, HIDDEN, device=device)
    torch.testing.assert_close(layer(x, None)[0], before[0], atol=1e-5, rtol=0)
    x[1:] = float("nan")
    torch.testing.assert_close(layer(x, None)[0], before[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_replay_follows_rows_padding_and_weights(device: str) -> None:
    layer = make_layer(device)
    cache = GraphCache(pool=GraphPool(backend_for(torch.device(device))))
    inputs = {"x": BufferSpec(("batch", HIDDEN), torch.float32), "valid": BufferSpec(("batch",), torch.bool)}
    run = cache.graphed(
        "moe", lambda x, valid: layer(x, valid), inputs, independent_rows=True, buckets=(4, 16), watch=layer
    )
    cache.warm()
    for rows in (16, 3, 1, 4, 9, 2):
        x, valid = torch.randn(rows, HIDDEN, device=device), torch.rand(rows, device=device) > 0.2
        bucket = cache.plan("moe", rows).bucket
        pad = bucket - rows
        whole = torch.cat((x, torch.zeros(pad, HIDDEN, device=device)))
        with torch.inference_mode():
            expected = layer(whole, torch.cat((valid, torch.zeros(pad, dtype=torch.bool, device=device))))[:rows]
        assert torch.equal(run(x=x, valid=valid), expected)
        assert torch.equal(expected.any(dim=1), valid)
        with torch.no_grad():
            layer.experts.down.weight.mul_(-1.25)
    if device == "cuda":  # a CPU's grouped product rounds by the rows of each expert, so its replays are refused
        assert sum(cache.stats.replays.values()) == 6
        assert not cache.stats.fallbacks


def test_slots_write_each_experts_rows_of_the_stacked_storage() -> None:
    layer = make_layer("cpu")
    slots = layer.slots("layers.0")
    assert len(slots) == 1 + 3 * EXPERTS
    for number, (name, slot) in enumerate(slots.items()):
        slot.write(torch.full(slot.shape, float(number)))
        assert torch.equal(slot.read(), torch.full(slot.shape, float(number))), name
    names = list(slots)
    for index in range(EXPERTS):
        parts = [names.index(f"layers.0.mlp.experts.{index}.{part}_proj.weight") for part in ("gate", "up", "down")]
        assert layer.experts.gate_up.weight[index, :, 0].tolist() == [parts[0]] * WIDTH + [parts[1]] * WIDTH
        assert set(layer.experts.down.weight[index].flatten().tolist()) == {parts[2]}
    assert set(layer.router.weight.flatten().tolist()) == {names.index("layers.0.mlp.gate.weight")}


def test_unaligned_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="width=20 must be multiples of 8"):
        Experts(4, 32, 20, dtype=torch.float32, device=torch.device("cpu"))
