"""Dropless experts with token counts on the device: whole MoE layers in graphs, against eager and Megatron's own."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from engine import Engine, EngineConfig
from engine.errors import ConfigError
from graph_cache.adapters.megatron.dropless import DroplessExperts, Stacked, eager_reason, make_adjacent
from graph_cache.errors import GraphConfigError
from tests.graph_cache.adapters.megatron import loops
from tests.graph_cache.adapters.megatron.test_attach import assert_same, train
from tests.support.megatron_models import EXPERTS, FIXED, gpt, loss_of, loss_sums, sums_of, tokens

pytestmark = pytest.mark.usefixtures("experts_on_cpu")
DROPLESS = EXPERTS | {"normalization": "LayerNorm"}
ON_HOST = {"moe_token_dispatcher_type": "allgather"}  # the alltoall dispatcher copies counts on a CUDA stream
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
EXPERT_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def training(modules=(), **options):
    return Engine(
        EngineConfig(
            mode="training",
            cuda_graph_modules=list(modules),
            cuda_graph_warmup_steps=2,
            cuda_graph_moe_dropless=True,
            **options,
        )
    )


def layers_of(model):
    return [one for one in model.modules() if isinstance(one, MoELayer)]


def train_with_counts(model, outstanding=True):
    """Train, and return losses, gradients, the routers' token counts and the sums of auxiliary losses."""
    loss_sums().clear()
    log = train(model, outstanding=outstanding)
    counts = [layer.router.local_tokens_per_expert for layer in layers_of(model)]
    counted = [one.clone() for one in counts if one is not None]
    return [*log, counted, [one.clone() for one in sums_of(loss_sums())]]


def replaced(model):
    """Train eager with the replacement."""
    experts = DroplessExperts([model])
    experts.begin()
    return model


@pytest.mark.parametrize("outstanding", [False, True])
@pytest.mark.parametrize("modules", [(), ("attn", "moe")], ids=["layers", "moe"])
@pytest.mark.parametrize("options", [{}, AUX_LOSS, EXPERT_BIAS], ids=["plain", "aux_loss", "expert_bias"])
def test_whole_layers_equal_eager_over_ten_steps(options, modules, outstanding):
    build = DROPLESS | options
    expected, model = train_with_counts(replaced(gpt(**build)), outstanding), gpt(**build)
    with training(modules) as engine:
        engine.attach(model)
        assert_same(train_with_counts(model, outstanding), expected)
        for row in engine.graphs():
            assert row["failed"] == 0 and row["replays"] > 10 and set(row["eager"]) == {"warming_up"}, row


@pytest.mark.parametrize("options", [{}, {"moe_router_topk": 3}, {"gated_linear_unit": False}, AUX_LOSS])
def test_the_replacement_computes_what_megatron_computes(options):
    build = DROPLESS | ON_HOST | options
    theirs, ours = train_with_counts(gpt(**build)), train_with_counts(replaced(gpt(**build)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_one_token_reaches_its_experts():
    """It has fewer rows than there are experts."""
    build = DROPLESS | ON_HOST
    ours, theirs = replaced(gpt(**build)), gpt(**build)
    torch.testing.assert_close(loss_of(ours, *tokens(0, 1, 1)), loss_of(theirs, *tokens(0, 1, 1)), rtol=1e-5, atol=1e-6)


def test_without_the_setting_such_layers_run_eager_with_the_reason():
    expected, model = train(gpt(**DROPLESS | ON_HOST), steps=4), gpt(**DROPLESS | ON_HOST)
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=1)) as engine:
        engine.attach(model)
        assert_same(train(model, steps=4), expected)
        for row in engine.graphs():
            assert row["eager"] == {"warming_up": 2, "capture_failed": 6} and row["failure"], row


def test_a_whole_iteration_with_dropless_experts_equals_eager(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)  # the schedule sets its shape
    build = DROPLESS | AUX_LOSS
    expected = loops.train(loops.no_pipelining, replaced(gpt(**build)))
    model = gpt(**build)
    with training(cuda_graph_impl="full_iteration") as engine:
        run = engine.capture_forward_backward(loops.no_pipelining)
        loops.assert_same(loops.train(run, model), expected)
        (row,) = engine.graphs()
        assert (row["replays"], row["failed"], row["eager"]) == (7, 0, {"warming_up": 2}), row
    assert all("forward" not in vars(one) for one in model.modules())


def test_every_expert_may_get_all_tokens_or_none():
    """Replayed ids send all tokens to two experts, then to others, in one graph."""
    RouterReplay.clear_global_router_replay_instances()
    model, twin = (gpt(**DROPLESS, moe_enable_routing_replay=True) for _ in range(2))
    steps = [(0, 1), (2, 3), (1, 3), (0, 0), (3, 2), (1, 1)]  # (0, 0) is one expert twice

    def losses(one):
        found = []
        for ids in steps:
            for layer in layers_of(one):
                layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
                layer.router.router_replay.set_target_indices(torch.tensor(ids).expand(24, 2).contiguous())
            loss = loss_of(one, *tokens(0))
            loss.backward()
            grads = [p.grad.clone() if p.grad is not None else None for p in one.parameters()]
            one.zero_grad()
            found.append([loss.detach().clone(), *[grad for grad in grads if grad is not None]])
        return found

    expected = losses(replaced(twin))
    with training() as engine:
        engine.attach(model)
        assert_same(losses(model), expected)
        assert all(row["replays"] == 4 and row["failed"] == 0 for row in engine.graphs())
    assert all(torch.isfinite(one).all() for step in expected for one in step)


def test_detach_restores_layers_and_keeps_state_dict():
    model = gpt(**DROPLESS)
    before = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    dispatchers = [layer.token_dispatcher for layer in layers_of(model)]
    with training() as engine:
        engine.attach(model)
        for step in range(4):
            loss_of(model, *tokens(step)).backward()
        assert all(row["replays"] for row in engine.graphs())
    assert [layer.token_dispatcher for layer in layers_of(model)] == dispatchers
    assert all("forward" not in vars(one) for one in model.modules())
    after = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_weights_are_stacked_without_a_copy_where_they_have_memory_of_their_own():
    own = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    values = [one.detach().clone() for one in own]
    make_adjacent(own)
    assert all(map(torch.equal, own, values))
    assert Stacked.apply(*own).data_ptr() == own[0].data_ptr()
    buffer = torch.randn(40)
    shared = [torch.nn.Parameter(buffer[index * 13 : index * 13 + 12].view(3, 4)) for index in range(3)]
    make_adjacent(shared)
    assert [one.data_ptr() - buffer.data_ptr() for one in shared] == [0, 52, 104]
    for weights in (own, shared):
        stacked = Stacked.apply(*weights)
        assert torch.equal(stacked, torch.stack(tuple(weights)))
        grad = torch.randn(3, 3, 4)
        assert all(map(torch.equal, torch.autograd.grad(stacked, weights, grad), grad))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_expert_capacity_factor": 2.0}, "it drops tokens: set moe_pad"),
        ({"add_bias_linear": True}, "adds no bias"),
        (
            {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
            "after the activation",
        ),
    ],
)
def test_layers_that_need_counts_on_the_host_are_refused(changes, message):
    model = gpt(**DROPLESS | changes)
    assert message in eager_reason(layers_of(model)[0])
    with pytest.raises(GraphConfigError, match=f"cuda_graph_moe_dropless=True: no MoE layer .*{message}"):
        training().attach(model)
    assert all("forward" not in vars(one) for one in model.modules())


def test_experts_whose_parameters_hooks_wait_for_are_refused():
    """As DDP's do with overlap_param_gather: they would not run, since only the first expert's modules are called."""
    model = gpt(**DROPLESS)
    for layer in layers_of(model):
        layer.experts.local_experts[1].linear_fc1.register_forward_pre_hook(lambda module, args: None)
    assert "overlap_param_gather" in eager_reason(layers_of(model)[0])


def test_dispatchers_that_megatron_switches_at_every_call_are_refused():
    model = gpt(**DROPLESS)
    for layer in layers_of(model):
        vars(layer)["_inference_token_dispatcher"] = None  # transformer_impl='inference_optimized', from 0.19
    with pytest.raises(GraphConfigError, match="transformer_impl='inference_optimized' switches"):
        training().attach(model)


def test_experts_of_fixed_capacity_and_dense_models_are_left_alone():
    for options in (FIXED, {}):
        expected, model = train(gpt(**options), steps=4), gpt(**options)
        with training() as engine:
            engine.attach(model)
            assert_same(train(model, steps=4), expected)
            assert all(row["replays"] for row in engine.graphs())


@pytest.mark.parametrize(
    "options",
    [{"cuda_graph_impl": "transformer_engine"}, {"cuda_graph_modules": ["attn"]}],
)
def test_the_setting_is_refused_without_whole_moe_layers(options):
    with pytest.raises(ConfigError, match="cuda_graph_moe_dropless=True captures whole MoE layers"):
        EngineConfig(**{"mode": "training", "cuda_graph_moe_dropless": True} | options)


def test_the_setting_is_refused_for_other_models():
    with pytest.raises(ConfigError, match="is for Megatron-Core models"):
        training().attach(torch.nn.Linear(2, 2))
