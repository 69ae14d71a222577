"""Graphs of a Megatron-Core GPTModel's parts equal eager bit for bit, and detach restores the model."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import random as rng
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.utils import _pytree

from engine import Engine, EngineConfig
from engine.errors import ConfigError
from graph_cache.adapters.megatron.attachment import attachment, check_config, register_packed_sequences
from graph_cache.adapters.megatron.config import MegatronGraphConfig as GraphConfig
from graph_cache.adapters.megatron.parts import parts_of
from graph_cache.errors import GraphConfigError
from tests.support.megatron_models import config, gpt, loss_of, tokens

PARTS = {
    "layers": ([], ["decoder.layers.0", "decoder.layers.1"]),
    "attn": (["attn"], ["decoder.layers.0.attn", "decoder.layers.1.attn"]),
    "mlp": (["mlp"], ["decoder.layers.0.mlp", "decoder.layers.1.mlp"]),
    "both": (
        ["attn", "mlp"],
        ["decoder.layers.0.attn", "decoder.layers.0.mlp", "decoder.layers.1.attn", "decoder.layers.1.mlp"],
    ),
}


def training(modules=(), **options):
    return Engine(
        EngineConfig(
            **{"mode": "training", "cuda_graph_modules": list(modules), "cuda_graph_warmup_steps": 2} | options
        )
    )


def train(model, steps=10, outstanding=True):
    """Return losses and all gradients of each step of two microbatches."""
    torch.manual_seed(1)
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for micro in range(2):
            losses.append(loss_of(model, *tokens(2 * step + micro)))
            if not outstanding:
                losses[-1].backward()
        for loss in losses if outstanding else ():
            loss.backward()
        log.append([*[loss.detach().clone() for loss in losses], *[p.grad.clone() for p in model.parameters()]])
        optimizer.step()
    return log


def assert_same(ours, theirs):
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(one, other), f"step {step}, value {index}"


@pytest.mark.parametrize("outstanding", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_losses_and_gradients_match_eager_over_ten_steps(name, outstanding):
    modules, names = PARTS[name]
    model = gpt(hidden_dropout=0.1)
    eager = train(gpt(hidden_dropout=0.1), outstanding=outstanding)
    engine = training(modules)
    assert engine.attach(model) == names
    assert_same(train(model, outstanding=outstanding), eager)
    rows = {row["module"]: row for row in engine.graphs()}
    assert set(rows) == set(names)
    for row in rows.values():
        assert row["failed"] == 0 and set(row["eager"]) == {"warming_up"}
        assert row["graphs"] == (2 if outstanding else 1) and row["replays"] > 10
    engine.detach()


def snapshot(model):
    """Return the attributes and hooks of each module."""
    return [
        {name: (list(value) if isinstance(value, dict) else id(value)) for name, value in vars(module).items()}
        for module in model.modules()
    ]


@pytest.mark.parametrize("name", PARTS)
def test_detach_leaves_the_model_as_it_was(name):
    model = gpt()
    before, keys = snapshot(model), list(model.state_dict())
    engine = training(PARTS[name][0])
    engine.attach(model)
    assert list(model.state_dict()) == keys
    for step in range(4):  # past the capture
        loss_of(model, *tokens(step)).backward()
    assert all(row["replays"] > 0 for row in engine.graphs())
    engine.detach()
    model.zero_grad()
    assert snapshot(model) == before and list(model.state_dict()) == keys
    assert "forward" not in vars(model.decoder.layers[0])


def test_wrapper_prefixes_are_stripped_from_names():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    with training() as engine:
        assert engine.attach(Wrapper(Wrapper(gpt()))) == ["decoder.layers.0", "decoder.layers.1"]


def test_a_transformer_block_alone_is_attached():
    with training() as engine:
        assert engine.attach(gpt().decoder) == ["layers.0", "layers.1"]


def test_model_chunks_get_numbered_names():
    with training(["attn"]) as engine:
        assert engine.attach([gpt(), gpt(1)]) == [
            f"chunks.{chunk}.decoder.layers.{layer}.attn" for chunk in range(2) for layer in range(2)
        ]


def test_packed_sequences_and_none_are_graph_inputs():
    from megatron.core.packed_seq_params import PackedSeqParams

    class Core(nn.Module):
        """Attention that reads the lengths of packed sequences."""

        def forward(
            self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
        ):
            scale = 1.0 if packed_seq_params is None else packed_seq_params.cu_seqlens_q.float().mean()
            return (query * scale).flatten(-2)

    model, eager = gpt(), gpt()
    for layer in (*model.decoder.layers, *eager.decoder.layers):
        layer.self_attention.core_attention = Core()
    engine = training()
    engine.attach(model)
    log = {model: [], eager: []}
    for step in range(6):
        for one in (model, eager):
            for packed in (None, PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=torch.tensor([0, step, 12]))):
                one.zero_grad()
                ids, positions = tokens(step)
                hidden = one.embedding(ids, positions)
                for layer in one.decoder.layers:
                    hidden, context = layer(hidden_states=hidden, attention_mask=None, packed_seq_params=packed)
                    assert context is None
                hidden.pow(2).mean().backward()
                log[one].append(
                    [hidden.detach().clone(), *[p.grad.clone() for p in one.decoder.parameters() if p.grad is not None]]
                )
    assert_same(log[model], log[eager])
    assert all(row["graphs"] == 2 and row["failed"] == 0 for row in engine.graphs())
    engine.detach()


def test_a_model_that_megatron_captures_itself_is_refused():
    model = gpt()
    object.__setattr__(model.config, "cuda_graph_impl", "local")
    with pytest.raises(GraphConfigError, match="cuda_graph_impl='local'"), training() as engine:
        engine.attach(model)


def test_hooks_inside_are_refused_by_name_and_no_layer_is_intercepted():
    model = gpt()
    model.decoder.layers[1].mlp.register_forward_hook(print)
    with training() as engine:
        with pytest.raises(GraphConfigError, match=r"decoder.layers.1 .*print"):
            engine.attach(model)
        assert "forward" not in vars(model.decoder.layers[0])
        assert engine.graphs() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute_granularity": "full"}, "recompute"),
        ({"cpu_offloading": True}, "offloading"),
        ({"fp4": "e2m1"}, "fp4"),
    ],
)
def test_uncapturable_settings_are_refused(changes, message):
    model = gpt()
    for name, value in changes.items():
        object.__setattr__(model.config, name, value)
    with pytest.raises(GraphConfigError, match=message), training() as engine:
        engine.attach(model)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["moe_preprocess", "moe_router"], "num_moe_experts"),
        (["mamba"], "none of the 2 layers"),
    ],
)
def test_parts_missing_from_the_model_are_refused(modules, message):
    with pytest.raises(Exception, match=message), training(modules) as engine:
        engine.attach(gpt())


@pytest.fixture
def tracker():
    """Megatron's RNG tracker, initialized for states set by the test. Needs no GPU."""
    before = rng._CUDA_RNG_STATE_TRACKER, rng._CUDA_RNG_STATE_TRACKER_INITIALIZED
    rng.initialize_rng_tracker(force_reset=True)
    yield rng.get_cuda_rng_tracker()
    rng._CUDA_RNG_STATE_TRACKER, rng._CUDA_RNG_STATE_TRACKER_INITIALIZED = before


def test_random_states_on_the_host_are_refused_and_generators_are_registered(tracker):
    tracker.set_states({"model-parallel-rng": torch.get_rng_state()})
    with pytest.raises(GraphConfigError, match="te_rng_tracker"), training() as engine:
        engine.attach(gpt())
    generator = torch.Generator().manual_seed(3)
    tracker.set_states({"model-parallel-rng": generator})
    with training() as engine:
        engine.attach(gpt())
        assert generator in engine._networks[0].graphs[0].context.generators  # noqa: SLF001


def test_dropout_is_checked_at_attach_not_from_settings():
    """A model's settings don't say which RNG tracker it uses."""
    source = config(cuda_graph_impl="local", hidden_dropout=0.1)
    assert EngineConfig.from_megatron(source, mode="training").cuda_graph_impl == "local"


def test_a_stage_without_layers_has_nothing_to_capture(monkeypatch):
    stage = MegatronModule(config())
    stage.embedding = nn.Embedding(4, 4)
    with pytest.raises(GraphConfigError, match="no TransformerLayer"):
        parts_of([stage], ())
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    assert parts_of([stage], ()) == []
    assert parts_of([gpt()], ["moe"]) == []
    with training() as engine:
        assert engine.attach(stage) == [] and engine.graphs() == []


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]},
        {"enable_cuda_graph": True, "cuda_graph_scope": "attn"},
    ],
)
def test_settings_come_from_a_transformer_config_deprecated_names_included(given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine_config = EngineConfig.from_megatron(config(**given), mode="training", cuda_graph_warmup_steps=2)
    assert engine_config.cuda_graph_impl == "local" and engine_config.cuda_graph_modules == ("attn",)
    assert engine_config.mode == "training" and engine_config.cuda_graph_warmup_steps == 2


def test_full_iteration_scope_of_older_versions_becomes_the_impl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine_config = EngineConfig.from_megatron(
            config(cuda_graph_impl="local", cuda_graph_scope=["full_iteration"]), mode="training"
        )
    assert engine_config.cuda_graph_impl == "full_iteration" and engine_config.cuda_graph_modules == ()


def test_the_engine_captures_a_forward_backward_function_and_refuses_what_it_cannot():
    def forward_backward(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
        return [forward_step_func(data_iterator, model) for _ in range(num_microbatches)]

    def forward_step(iterator, model):
        loss = loss_of(model, *next(iterator))
        loss.backward()
        return {"loss": loss.detach()}

    log = {}
    for graphed in (False, True):
        model = gpt()
        with training(cuda_graph_impl="full_iteration") if graphed else nullcontext() as engine:
            run = engine.capture_forward_backward(forward_backward) if graphed else forward_backward
            log[graphed] = []
            for step in range(6):
                found = run(
                    forward_step_func=forward_step,
                    data_iterator=iter([tokens(step), tokens(step + 9)]),
                    model=model,
                    num_microbatches=2,
                    forward_only=False,
                )
                log[graphed].append([*[one["loss"] for one in found], *[p.grad.clone() for p in model.parameters()]])
                model.zero_grad()
            if graphed:
                (row,) = engine.graphs()
                assert row["replays"] == 3 and row["graphs"] == 1 and row["eager"] == {"warming_up": 2}
    assert_same(log[True], log[False])
    with training(cuda_graph_impl="full_iteration") as engine:
        with pytest.raises(GraphConfigError, match="isfinite"):
            engine.capture_forward_backward(forward_backward, settings=[{"check_for_nan_in_loss_and_grad": True}])
        with pytest.raises(ConfigError, match="attach"):
            engine.attach(gpt())


def test_transformer_engine_impl_without_the_package_is_refused_at_attach():
    model = gpt()
    with pytest.raises(GraphConfigError, match="cuda_graph_impl='local'"):
        training(cuda_graph_impl="transformer_engine").attach(model)
    assert all("forward" not in vars(layer) for layer in model.decoder.layers)


class FakeBucketGroup:
    """Replaces a bucket group of Megatron's DDP, which needs a GPU. Counts waits for its parameters."""

    def __init__(self):
        self.waits = 0

    def finish_param_sync(self, skip_next_bucket_dispatch):
        self.waits += 1


def test_hooks_of_megatrons_data_parallelism_run_before_each_replay():
    model = gpt()
    ddp = object.__new__(DistributedDataParallel)  # with DDP's hooks, without its buffers
    nn.Module.__init__(ddp)
    ddp.use_forward_hook, ddp.overlap_param_gather_with_optimizer_step = True, False
    ddp.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    ddp.module, ddp.remove_forward_pre_hook_handles = model, {}
    group = FakeBucketGroup()
    ddp.param_to_bucket_group = dict.fromkeys(model.parameters(), group)
    ddp.enable_forward_pre_hook()
    expected = train(gpt(), steps=2, outstanding=False)
    with training() as engine:
        assert engine.attach(ddp) == ["decoder.layers.0", "decoder.layers.1"]
        found, waits = [], []
        for _ in range(3):
            before = group.waits
            found += [train(model, steps=1, outstanding=False)]
            waits.append(group.waits - before)
        assert all(row["failed"] == 0 and row["replays"] == 4 for row in engine.graphs())
    assert_same(found[0], expected[:1])
    each = len(list(model.parameters()))
    # Two microbatches per step. The capture waits once more for the layers' parameters.
    assert waits == [2 * each, 2 * each + len(list(model.decoder.layers.parameters())), 2 * each]


def test_submodules_by_name_get_the_same_checks(tracker):
    tracker.set_states({"model-parallel-rng": torch.get_rng_state()})
    with pytest.raises(GraphConfigError, match="te_rng_tracker"), training() as engine:
        engine.attach(gpt(), modules=["decoder.layers.0"])
    tracker.set_states({"model-parallel-rng": torch.Generator()})
    expected, model = train(gpt(), steps=4), gpt()
    with training() as engine:
        assert engine.attach(model, modules=["decoder.layers.0"]) == ["decoder.layers.0"]
        assert_same(train(model, steps=4), expected)


def test_a_refused_model_does_not_block_another():
    refused, model = gpt(), gpt()
    object.__setattr__(refused.config, "cuda_graph_impl", "local")
    with training() as engine:
        with pytest.raises(GraphConfigError):
            engine.attach(refused)
        with pytest.raises(GraphConfigError, match="same module"):
            engine.attach([model, model])
        assert engine.attach(model) == ["decoder.layers.0", "decoder.layers.1"]


def test_expert_settings_are_checked_against_the_model_at_attach():
    with training(["attn", "moe_router"]) as engine, pytest.raises(GraphConfigError, match="num_moe_experts"):
        engine.attach(gpt())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = config(num_moe_experts=4, moe_router_topk=2, cuda_graph_impl="local", cuda_graph_scope=["moe_router"])
        # Megatron 0.16 adds moe_preprocess by itself.
        assert EngineConfig.from_megatron(source, mode="training").cuda_graph_modules == (
            "moe_router",
            "moe_preprocess",
        )


def test_selective_recompute_is_off_during_capture_and_restored():
    model = gpt(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    layer = model.decoder.layers[0]
    found = attachment([model], GraphConfig(cuda_graph_impl="local", inference_cuda_graph_scope="none"))
    with pytest.raises(ValueError, match="broken"), found.ambient.recreate(list(layer.modules()), None):
        assert not layer.recompute_mlp and not layer.self_attention.checkpoint_core_attention
        raise ValueError("broken")
    assert layer.recompute_mlp and layer.self_attention.checkpoint_core_attention
    assert attachment([gpt()], GraphConfig(cuda_graph_impl="local", inference_cuda_graph_scope="none")).ambient is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("delay_wgrad_compute", "use full_iteration"),
        ("fine_grained_activation_offloading", "moves storage"),
        ("overlap_moe_expert_parallel_comm", "name parts in cuda_graph_modules"),
    ],
)
def test_settings_unsupported_by_layer_graphs_are_refused(name, message):
    model = gpt()
    object.__setattr__(model.config, name, True)
    with pytest.raises(GraphConfigError, match=f"{name}=True .*{message}"):
        Engine(EngineConfig(mode="training")).attach(model)


@pytest.mark.parametrize(
    ("modules", "shared", "is_allowed"),
    [
        (["moe_router"], None, True),
        (["moe_router"], 64, False),
        (["attn", "moe_router"], None, False),
        (["moe"], None, False),
    ],
)
def test_delayed_weight_gradients_are_allowed_only_for_parts_without_them(modules, shared, is_allowed):
    source = config()
    object.__setattr__(source, "delay_wgrad_compute", True)
    object.__setattr__(source, "num_moe_experts", 2)
    object.__setattr__(source, "moe_pad_expert_input_to_capacity", True)
    object.__setattr__(source, "moe_shared_expert_intermediate_size", shared)
    graphs = GraphConfig(
        cuda_graph_impl="local",
        inference_cuda_graph_scope="none",
        cuda_graph_modules=modules,
        num_moe_experts=2,
        moe_pad_expert_input_to_capacity=True,
    )
    with nullcontext() if is_allowed else pytest.raises(GraphConfigError, match="delay_wgrad_compute"):
        check_config(source, graphs)


def test_inference_ignores_megatrons_training_rules():
    source = {"cuda_graph_impl": "local", "hidden_dropout": 0.1, "recompute_granularity": "full"}
    assert EngineConfig.from_megatron(source).cuda_graph_impl == "local"
    with pytest.raises(GraphConfigError, match="recompute_granularity"):
        EngineConfig.from_megatron(source, mode="training")


def test_packed_sequences_round_trip_through_pytree():
    """The constructor of 0.19 computes further tensors from `total_tokens`, so a capture must not call it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    register_packed_sequences()
    packed = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=torch.tensor([0, 5, 12]), max_seqlen_q=7)
    packed.made_later = None
    values, spec = _pytree.tree_flatten(packed)
    again = _pytree.tree_unflatten(values, spec)
    assert type(again) is PackedSeqParams and again.cu_seqlens_q is packed.cu_seqlens_q
    assert (again.qkv_format, again.max_seqlen_q, again.made_later) == ("sbhd", 7, None)
