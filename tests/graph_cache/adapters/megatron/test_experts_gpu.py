"""Experts and Mamba layers with Transformer Engine on a GPU: graphs against eager, bit for bit, over ten steps.

Needs megatron-core 0.19 and Transformer Engine. Run this file in a process of its own: Megatron keeps one parallel
state per process.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.megatron_gpu_models import (  # isort: skip  (before what imports megatron)
    MOE,
    VOCAB,
    assert_same,
    build,
    compare,
    equal_to_eager,
    one_process,
    train,
    training,
)

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from graph_cache.adapters.megatron.dropless import DroplessExperts
from tests.support.megatron_models import loss_sums, sums_of

__all__ = ["one_process"]  # a fixture
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
FIXED = MOE | {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
GROUPED = MOE | {"moe_grouped_gemm": True}
EXPERT_BIAS = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 64, "mamba_num_groups": 2, "mamba_state_dim": 64}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("modules", [(), ("attn", "moe"), ("attn", "moe_router", "moe_preprocess")])
def test_drop_and_pad_layers_equal_eager(modules):
    compare(modules, **FIXED)


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_router_equals_eager(fused):
    compare(("moe_router",), moe_router_fusion=fused, **FIXED)


@pytest.mark.parametrize("options", [{}, EXPERT_BIAS, {"moe_router_fusion": True}], ids=["aux_loss", "bias", "fused"])
@pytest.mark.parametrize("modules", [(), ("attn", "moe")])
def test_dropless_grouped_experts_equal_eager(options, modules):
    twin = build(**GROUPED | options)
    DroplessExperts([twin]).begin()
    expected, model = train(twin), build(**GROUPED | options)
    with training(modules, cuda_graph_moe_dropless=True) as engine:
        engine.attach(model)
        assert_same(train(model), expected)
        assert all(row["failed"] == 0 and row["replays"] for row in engine.graphs()), engine.graphs()
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):  # the tokens per expert
        assert torch.equal(ours, theirs)


def test_dropless_experts_compute_what_transformer_engines_do():
    twin = build(**GROUPED)
    DroplessExperts([twin]).begin()
    ours, theirs = train(twin, steps=1), train(build(**GROUPED), steps=1)
    torch.testing.assert_close(ours[0][:2], theirs[0][:2], rtol=2e-2, atol=2e-2)
    for one, other in zip(ours[0][2:], theirs[0][2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-1, atol=1e-2)


def test_dropless_experts_without_the_setting_run_eager():
    rows = equal_to_eager(steps=4, **GROUPED)
    assert all(row["replays"] == 0 for row in rows), rows


def test_sums_of_auxiliary_losses_equal_eager():
    sums = []
    for graphed in (False, True):
        loss_sums().clear()
        model = build(**FIXED)
        with training() as engine:
            if graphed:
                engine.attach(model)
            train(model, steps=6)
            assert not graphed or all(row["replays"] for row in engine.graphs())
        sums.append([one.clone() for one in sums_of(loss_sums())])
    assert sums[0]
    assert_same([sums[1]], [sums[0]])


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_replayed_expert_ids_equal_eager(host):
    def ids_of(step):
        generator = torch.Generator().manual_seed(step)
        ids = [torch.rand(256, 4, generator=generator).argsort(1)[:, :2] for _ in range(3)]
        return ids if host else [one.cuda() for one in ids]

    def replayed(graphed):
        RouterReplay.clear_global_router_replay_instances()
        model, log = build(**FIXED, moe_enable_routing_replay=True), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        with training() as engine:
            if graphed:
                engine.attach(model)
            for step in range(10):
                optimizer.zero_grad()
                RouterReplay.set_replay_data(ids_of(step))
                ids = torch.randint(VOCAB, (2, 129), generator=torch.Generator().manual_seed(step)).cuda()
                positions = torch.arange(128, device="cuda").expand(2, -1)
                loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).float().mean()
                loss.backward()
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                log.append([loss.detach().clone(), *grads])
                optimizer.step()
            assert not graphed or all(row["replays"] == 8 and row["failed"] == 0 for row in engine.graphs())
        return log

    assert_same(replayed(True), replayed(False))


@pytest.fixture
def mamba_kernels():
    pytest.importorskip("mamba_ssm", reason="needs mamba-ssm: docs/mamba.md has the recipe")
    pytest.importorskip("causal_conv1d", reason="needs causal-conv1d: docs/mamba.md has the recipe")


@pytest.mark.usefixtures("mamba_kernels")
@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("M*-M", ()),
        ("M*-M", ("mamba",)),
        ("M*-M", ("mamba", "attn", "mlp")),
        ("M*-ME", ()),
        ("M*-ME", ("mamba", "moe")),
    ],
)
def test_hybrid_models_equal_eager(pattern, modules):
    compare(modules, pattern=pattern, **MAMBA, **(FIXED if "E" in pattern else {}))


@pytest.mark.usefixtures("mamba_kernels")
def test_a_mixer_of_default_sizes_equals_eager():
    compare(pattern="M-M", hidden_size=1024, mamba_num_groups=8)


@pytest.mark.usefixtures("mamba_kernels")
def test_packed_batches_of_a_hybrid_model_replay():
    def losses(model):
        log = []
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            cuts = torch.randperm(255, generator=generator)[: step % 8].sort().values + 1
            ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([256])]).to("cuda", torch.int32)
            ids = torch.randint(VOCAB, (1, 257), generator=generator).cuda()
            packed = PackedSeqParams(
                "thd", ends, ends, max_seqlen_q=256, max_seqlen_kv=256, total_tokens=256
            )  # total_tokens: the mixers' seq_idx is computed from it
            positions = torch.arange(256, device="cuda")[None]
            loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:], packed_seq_params=packed).float().mean()
            loss.backward()
            model.zero_grad()
            log.append(loss.detach().clone())
        return torch.stack(log)

    options = MAMBA | {"apply_rope_fusion": True, "pattern": "M*-M"}
    expected, model = losses(build(**options)), build(**options)
    with training(cuda_graph_max_packed_seqs=8) as engine:
        engine.attach(model)
        torch.testing.assert_close(losses(model), expected, rtol=2e-2, atol=2e-2)
        assert all(row["failed"] == 0 and row["replays"] == 8 for row in engine.graphs()), engine.graphs()


def test_layers_are_megatrons_own_after_detach():
    model = build(**GROUPED)
    with training(cuda_graph_moe_dropless=True) as engine:
        engine.attach(model)
        train(model, steps=3)
    assert all("forward" not in vars(one) for one in model.modules())
    assert all(
        type(one.token_dispatcher).__name__.startswith("MoE") for one in model.modules() if isinstance(one, MoELayer)
    )
