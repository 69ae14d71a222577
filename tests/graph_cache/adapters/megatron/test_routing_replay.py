"""Recorded and replayed expert ids (`moe_enable_routing_replay`) with the router inside a graph."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.attachment import check_config
from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.errors import GraphConfigError
from tests.graph_cache.adapters.megatron.test_attach import assert_same, training
from tests.support.megatron_models import FIXED, gpt, loss_of, tokens

pytestmark = pytest.mark.usefixtures("experts_on_cpu")
RECORD, REPLAY = RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD
MODULES = {"layers": [], "moe": ["attn", "moe"], "router": ["moe_router", "moe_preprocess"]}
TOKENS = 24  # 2 rows of 12


@pytest.fixture(autouse=True)
def own_routers():
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


def build():
    """Return a model whose routers are the only ones that RouterReplay knows."""
    RouterReplay.clear_global_router_replay_instances()
    return gpt(**FIXED, moe_enable_routing_replay=True)


def ids_of(step, layers=2):
    """Return expert ids [tokens, top-k] per layer that no router would choose by itself."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.rand(TOKENS, 4, generator=generator).argsort(1)[:, :2] for _ in range(layers)]


def train(model, each, steps=10, micro=2, outstanding=True):
    """Train with `each(step)` before every forward; return losses, gradients and recorded ids of each step."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        losses, recorded = [], []
        for index in range(micro):
            each(micro * step + index)
            losses.append(loss_of(model, *tokens(micro * step + index)))
            recorded.append(RouterReplay.get_recorded_data())
            if not outstanding:
                losses[-1].backward()
        for loss in losses if outstanding else ():
            loss.backward()
        ids = [one for each_micro in recorded for one in each_micro if one is not None]
        log.append([*[loss.detach().clone() for loss in losses], *ids, *[p.grad.clone() for p in model.parameters()]])
        optimizer.step()
    return log


def replay(step):
    RouterReplay.set_global_router_replay_action(REPLAY)
    RouterReplay.set_replay_data(ids_of(step))


def record(step):
    RouterReplay.set_global_router_replay_action(RECORD)


@pytest.mark.parametrize("outstanding", [False, True])
@pytest.mark.parametrize("each", [replay, record])
@pytest.mark.parametrize("name", MODULES)
def test_recorded_and_replayed_ids_equal_eager_over_ten_steps(name, each, outstanding):
    expected, model = train(build(), each, outstanding=outstanding), build()
    with training(MODULES[name]) as engine:
        engine.attach(model)
        assert_same(train(model, each, outstanding=outstanding), expected)
        for row in engine.graphs():
            assert row["failed"] == 0 and row["replays"] > 10 and set(row["eager"]) == {"warming_up"}, row


def test_each_action_has_graphs_of_its_own():
    def each(step):
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()
        (lambda _: None, record, replay)[step % 3](step)

    expected, model = train(build(), each, steps=18, micro=1), build()
    with training() as engine:
        engine.attach(model)
        assert_same(train(model, each, steps=18, micro=1), expected)
        for row in engine.graphs():
            assert (row["graphs"], row["replays"], row["failed"]) == (3, 18 - 3 * 2, 0), row


def test_a_rollout_and_training_route_alike():
    """Record ids of a forward without gradients, then train on them with other weights, which would route otherwise."""

    def steps(model):
        optimizer, log = torch.optim.SGD(model.parameters(), lr=1.0), []
        for step in range(6):
            RouterReplay.clear_global_indices()
            RouterReplay.set_global_router_replay_action(RECORD)
            with torch.no_grad():
                loss_of(model, *tokens(step))
            rollout = RouterReplay.get_recorded_data()
            for _ in range(2):  # two updates on one rollout
                RouterReplay.set_global_router_replay_action(REPLAY)
                RouterReplay.set_replay_data(rollout)
                optimizer.zero_grad()
                loss = loss_of(model, *tokens(step))
                loss.backward()
                optimizer.step()
                log.append([loss.detach().clone(), *rollout, *[p.grad.clone() for p in model.parameters()]])
        return log

    expected, model = steps(build()), build()
    assert any(not torch.equal(one[1], two[1]) for one, two in zip(expected, expected[2:], strict=False))
    with training() as engine:
        engine.attach(model)
        assert_same(steps(model), expected)
        for row in engine.graphs():
            assert row["replays"] == 10 and row["eager"] == {"warming_up": 2, "no_gradient": 6}, row


def test_recorded_ids_survive_later_replays():
    model = build()
    RouterReplay.set_global_router_replay_action(RECORD)
    with training() as engine:
        engine.attach(model)
        for step in range(4):
            loss_of(model, *tokens(step)).backward()
        kept = RouterReplay.get_recorded_data()
        values = [one.clone() for one in kept]
        loss_of(model, *tokens(9)).backward()
        assert all(map(torch.equal, kept, values))
        assert not all(map(torch.equal, RouterReplay.get_recorded_data(), values))


@pytest.mark.skipif(not hasattr(RouterReplay, "set_static_buffer"), reason="needs megatron-core 0.19")
def test_recorded_ids_fill_megatrons_static_buffers():
    def each(step):
        if step == 0:
            RouterReplay.set_global_static_buffers(torch.full((32, 2, 2), -1))
        record(step)

    expected, model = train(build(), each), build()
    with training() as engine:
        engine.attach(model)
        assert_same(train(model, each), expected)
        assert all(row["replays"] == 16 and row["failed"] == 0 for row in engine.graphs())
    for router in RouterReplay.global_router_replay_instances:
        assert router.recorded_topk_idx.data_ptr() == router.static_buffer.data_ptr()
        assert router.static_buffer[24:].eq(-1).all() and router.static_buffer[:24].ge(0).all()


def test_ids_of_a_recomputation_come_from_the_routers_list():
    def each(step):
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data(ids_of(step))
        RouterReplay.set_replay_data(ids_of(step + 100))  # the latest target, which the list precedes
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    expected, model = train(build(), each), build()
    with training() as engine:
        engine.attach(model)
        assert_same(train(model, each), expected)
        assert all(row["replays"] == 16 for row in engine.graphs())
    assert [len(one.replay_backward_list) for one in RouterReplay.global_router_replay_instances] == [1, 1]


def test_replay_without_ids_is_refused():
    model = build()
    RouterReplay.set_global_router_replay_action(REPLAY)
    with training() as engine:
        engine.attach(model)
        with pytest.raises(GraphConfigError, match=r"decoder.layers.0: its router .* has no expert ids: call"):
            loss_of(model, *tokens(0))


def test_detach_restores_routers():
    model = build()
    replay(0)
    before = [dict(vars(one)) for one in RouterReplay.global_router_replay_instances]
    with training() as engine:
        engine.attach(model)
        for step in range(4):
            loss_of(model, *tokens(step)).backward()
        assert all(row["replays"] for row in engine.graphs())
    assert [dict(vars(one)) for one in RouterReplay.global_router_replay_instances] == before
    assert all("forward" not in vars(one) for one in model.modules())


@pytest.mark.parametrize("impl", ["transformer_engine", "full_iteration"])
def test_other_captures_refuse_replayed_routers(impl):
    config = MegatronGraphConfig(cuda_graph_impl=impl, inference_cuda_graph_scope="none", model_facts_known=False)
    with pytest.raises(GraphConfigError, match="moe_enable_routing_replay=True .*cuda_graph_impl='local'"):
        check_config(build().config, config)


def test_named_routers_are_captured_with_their_ids():
    expected, model = train(build(), replay), build()
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
        engine.attach(model, modules=[f"decoder.layers.{layer}.mlp.router" for layer in range(2)])
        assert_same(train(model, replay), expected)
        assert all(row["replays"] == 16 and row["failed"] == 0 for row in engine.graphs())
