"""Graphs of MoE layers' parts equal eager bit for bit, including state passed through the token dispatcher."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from graph_cache.adapters.megatron.attachment import attachment
from graph_cache.adapters.megatron.config import MegatronGraphConfig as GraphConfig
from graph_cache.adapters.megatron.moe_dispatch import DISPATCHER_ATTRIBUTES, eager_reason
from graph_cache.adapters.megatron.parts import parts_of
from tests.graph_cache.adapters.megatron import loops
from tests.graph_cache.adapters.megatron.test_attach import assert_same, train, training
from tests.support.megatron_models import EXPERTS, FIXED, gpt, loss_of, loss_sums, sums_of, tokens

BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ROUTED = ["pre_mlp_layernorm", "moe_router"]


pytestmark = pytest.mark.usefixtures("experts_on_cpu")


def dispatchers(model):
    return [module.token_dispatcher for module in model.modules() if isinstance(module, MoELayer)]


@pytest.mark.parametrize("outstanding", [False, True])
@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (["attn", "moe_router"], ["attn", *ROUTED]),
        (["moe_router", "moe_preprocess"], [*ROUTED, "moe_preprocess"]),
        (["attn", "moe"], ["attn", "moe"]),
    ],
    ids=["router", "preprocess", "whole"],
)
def test_losses_and_gradients_match_eager_over_ten_steps(modules, names, outstanding):
    expected, model = train(gpt(**FIXED), outstanding=outstanding), gpt(**FIXED)
    with training(modules) as engine:
        assert engine.attach(model) == [f"decoder.layers.{layer}.{name}" for layer in range(2) for name in names]
        assert_same(train(model, outstanding=outstanding), expected)
        for row in engine.graphs():
            assert row["failed"] == 0 and row["replays"] > 10 and set(row["eager"]) == {"warming_up"}, row


def test_calls_of_several_shapes_restore_their_own_dispatcher_state():
    def steps(model):
        log = []
        for step in range(16):
            loss = loss_of(model, *tokens(step, batch=2 if step % 3 else 1, length=12 if step % 2 else 8))
            loss.backward()
            log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
            model.zero_grad()
        return log

    expected, model = steps(gpt(**FIXED)), gpt(**FIXED)
    with training(["moe_router", "moe_preprocess"]) as engine:
        engine.attach(model)
        assert_same(steps(model), expected)
        rows = [row for row in engine.graphs() if row["module"].endswith("preprocess")]
        assert len(rows) == 2 and all(row["graphs"] == 4 and row["failed"] == 0 for row in rows), rows


def test_detach_restores_token_dispatchers():
    model = gpt(**FIXED)
    loss_of(model, *tokens(0)).backward()
    before = [dict(vars(one)) for one in dispatchers(model)]
    with training(["moe_router", "moe_preprocess"]) as engine:
        engine.attach(model)
        assert [one.cuda_dtoh_point for one in dispatchers(model)] == ["before_ep_alltoall"] * 2
        for step in range(5):
            loss_of(model, *tokens(step)).backward()
        assert all(row["replays"] > 0 for row in engine.graphs())
        assert [set(vars(one)) for one in dispatchers(model)] == [set(one) for one in before]
    passing = {*DISPATCHER_ATTRIBUTES, *dispatchers(model)[0].cudagraph_attrs}
    for one, was in zip(dispatchers(model), before, strict=True):
        kept = [name for name in was if name not in passing]
        assert [vars(one)[name] for name in kept] == [was[name] for name in kept]
    assert all("preprocess" not in vars(layer.mlp) for layer in model.decoder.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "set moe_permute_fusion, or"),
        ({"moe_expert_capacity_factor": 2.0}, "set moe_pad_expert_input_to_capacity"),
        ({"moe_token_dispatcher_type": "allgather"}, "MoEAllGatherTokenDispatcher does little"),
    ],
)
def test_uncapturable_preprocess_stays_eager_with_a_warning(changes, message, caplog):
    model = gpt(**EXPERTS | changes)
    assert [part.name for part in parts_of([model], ["moe_router", "moe_preprocess"])] == [
        f"decoder.layers.{layer}.{name}" for layer in range(2) for name in ROUTED
    ]
    assert "decoder.layers.0.moe_preprocess runs eager" in caplog.text and message in caplog.text


def test_fused_permutation_needs_no_fixed_capacity():
    model = gpt(**EXPERTS)
    object.__setattr__(model.config, "moe_permute_fusion", True)
    assert not eager_reason(model.decoder.layers[0].mlp)


def test_transformer_engine_graphs_skip_preprocess_with_a_warning(caplog):
    config = GraphConfig(
        cuda_graph_impl="transformer_engine",
        inference_cuda_graph_scope="none",
        num_moe_experts=4,
        cuda_graph_modules=["moe_router", "moe_preprocess"],
    )
    names = [part.name for part in attachment([gpt(**FIXED)], config).parts]
    assert names == [f"decoder.layers.{layer}.{name}" for layer in range(2) for name in ROUTED]
    assert "runs eager under cuda_graph_impl='transformer_engine'" in caplog.text


def test_expert_parallel_overlap_keeps_preprocess_eager():
    model = gpt(**FIXED)
    object.__setattr__(model.config, "overlap_moe_expert_parallel_comm", True)
    assert "frees the memory" in eager_reason(model.decoder.layers[0].mlp)


def test_experts_attached_alone_never_replay_captured_token_counts():
    every_token_to_any = EXPERTS | {"moe_token_dispatcher_type": "allgather"}
    model, twin = gpt(**every_token_to_any), gpt(**every_token_to_any)
    with training() as engine:
        engine.attach(model, modules=[f"decoder.layers.{layer}.mlp.experts" for layer in range(2)])
        assert_same(train(model), train(twin))
        assert all(row["graphs"] == 0 and "tolist" in row["failure"] for row in engine.graphs())


@pytest.mark.parametrize("replaced", ["sums", "scale"])
def test_full_iteration_recaptures_when_aux_loss_tensors_are_replaced(replaced):
    def before(model, step):
        if step == 0 or (step == 5 and replaced == "sums"):
            loss_sums().clear()
        if step == 0 or (step == 5 and replaced == "scale"):
            MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor([0.5 * (step + 1)])

    def steps(run):
        log = loops.train(run, gpt(**FIXED | BALANCED), steps=10, before=before)
        (sums,) = sums_of(loss_sums())
        return log, sums.clone(), MoEAuxLossAutoScaler.main_loss_backward_scale.clone()

    run, stats = loops.graphed()
    loops.assert_same(steps(run), steps(loops.no_pipelining))
    again = 2 if replaced == "sums" else 0  # eager calls recreate cleared sums
    assert loops.counts(stats) == (2, 10 - 2 - 2 - again, {"warming_up": 2 + again})
    assert stats.invalidations == {"stale_address": 1}
