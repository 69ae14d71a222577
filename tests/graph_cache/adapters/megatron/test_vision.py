"""Megatron-Core's vision encoders: padded microbatches replay and equal eager, beside the language model's graphs."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.attachment import attachment
from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.adapters.megatron.schedule import stage_plan
from graph_cache.adapters.megatron.vision_padding import padded_encoders
from graph_cache.adapters.transformer_engine import TransformerEngineGraphs
from graph_cache.errors import GraphConfigError
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker
from tests.graph_cache.adapters.transformer_engine.te_stack import capture_context
from tests.support.megatron_models import gpt
from tests.support.megatron_vision import MERGE, PATCHES, llava, llava_batch, packed_encoder, packed_images

IMAGES = [1, 3, 2, 2, 1, 3, 2, 1, 3, 1]  # per microbatch, for ten steps
BUDGETS = (2 * PATCHES, 3 * PATCHES)
SIZES = [[8, 16], [4], [12, 4, 8], [32], [4, 4, 4], [24, 16], [8], [16, 16, 16], [48], [4, 28]]  # patches per image
PACKED_BUDGETS, MAX_IMAGES = (32, 64), 3
ENCODER = ["vision_model.decoder.layers.0", "vision_model.decoder.layers.1"]
LANGUAGE = ["language_model.decoder.layers.0", "language_model.decoder.layers.1"]


def settings_of(**options):
    values = {
        "cuda_graph_warmup_steps": 1,
        "vision_cuda_graph_impl": "local",
        "vision_token_budgets": BUDGETS,
        "vision_max_images": MAX_IMAGES,
    }
    return EngineConfig(mode="training", **values | options)


def step_llava(model, step):
    return model(**llava_batch(step, IMAGES[step % len(IMAGES)]))[0].mean()


def step_packed(model, step):
    sizes = SIZES[step % len(SIZES)]
    rotary = torch.randn(sum(sizes), 1, 1, 8, generator=torch.Generator().manual_seed(step))
    return model(*packed_images(step, sizes), rotary)


def train(model, step_of, steps=10):
    """Return the loss and all gradients of each step."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer, log = torch.optim.SGD(trained, lr=0.05), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = step_of(model, step)
        loss.backward()
        log.append([loss.detach().clone(), *[one.grad.clone() for one in trained if one.grad is not None]])
        optimizer.step()
    return log


def eager(model, step_of, settings):
    """Train without graphs on padded batches. Returns the log and the reasons of batches that were not padded."""
    found = []
    paddings = padded_encoders([model], settings.vision_settings(), lambda *reason: found.append(reason))
    for padding in paddings:
        padding.begin()
    log = train(model, step_of)
    for padding in paddings:
        padding.end()
    return log, found


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def rows_of(engine):
    return {row["module"]: row for row in engine.graphs()}


@pytest.mark.parametrize("scope", [[], ["attn", "mlp"]], ids=["layers", "parts"])
def test_llava_replays_both_parts_and_equals_eager_on_the_padded_batch(scope):
    settings = settings_of(vision_cuda_graph_scope=scope, cuda_graph_modules=["attn"])
    expected, unpadded = eager(llava(), step_llava, settings)
    model = llava()
    with Engine(settings) as engine:
        names = engine.attach(model)
        assert [name for name in names if name.startswith("language")] == [f"{name}.attn" for name in LANGUAGE]
        assert_same(train(model, step_llava), expected)
        rows = rows_of(engine)
    encoder = [f"{name}.{part}" for name in ENCODER for part in scope] or ENCODER
    assert sorted(rows) == sorted(names) and set(encoder) < set(names) and not unpadded
    for name, row in rows.items():
        assert row["failed"] == 0 and set(row["eager"]) <= {"warming_up", "unseen_signature"}
        assert row["replays"] == (8 if name in encoder else 9)  # the encoder warms up for each of two budgets


def test_padded_images_change_results_no_more_than_another_budget_does():
    plain = train(llava(), step_llava)
    padded, _ = eager(llava(), step_llava, settings_of())
    wider, _ = eager(llava(), step_llava, settings_of(vision_token_budgets=(5 * PATCHES,)))

    def largest(ours, theirs):
        return max(
            float((a - b).abs().max()) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
        )

    assert largest(plain, padded) <= max(2 * largest(padded, wider), 1e-6)


@pytest.mark.parametrize("scope", [[], ["attn", "mlp"]], ids=["layers", "parts"])
def test_packed_images_replay_and_equal_eager_on_the_padded_batch(scope):
    settings = settings_of(vision_cuda_graph_scope=scope, vision_token_budgets=PACKED_BUDGETS, cuda_graph_impl="none")
    expected, unpadded = eager(packed_encoder(), step_packed, settings)
    model = packed_encoder()
    with Engine(settings) as engine:
        engine.attach(model)
        assert_same(train(model, step_packed), expected)
        for row in engine.graphs():
            assert (row["replays"], row["failed"]) == (8, 0) and set(row["eager"]) <= {"warming_up", "unseen_signature"}
    assert not unpadded
    plain = train(packed_encoder(), step_packed)
    for ours, theirs in zip(expected, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_packed_images_beyond_the_settings_run_eager_and_are_counted():
    model = packed_encoder()
    with Engine(settings_of(vision_token_budgets=PACKED_BUDGETS, cuda_graph_impl="none")) as engine:
        engine.attach(model)
        for sizes in ([68], [4] * (MAX_IMAGES + 1)):
            expected = packed_encoder()(*packed_images(0, sizes))
            assert_same(model(*packed_images(0, sizes)), expected)
        assert rows_of(engine)["decoder"]["eager"] == {"above_largest_budget": 1, "too_many_images": 1}


def test_a_table_of_positions_within_an_image_is_not_padded():
    model, table = packed_encoder(), torch.randn(16, 1, 1, 8)
    expected = packed_encoder()(*packed_images(0, [8, 16]), table)
    with Engine(settings_of(vision_token_budgets=PACKED_BUDGETS, cuda_graph_impl="none")) as engine:
        engine.attach(model)
        assert_same(model(*packed_images(0, [8, 16]), table), expected)
        assert rows_of(engine)["decoder"]["eager"] == {"position_table": 1}


def test_images_of_one_size_beyond_the_largest_budget_run_eager_and_are_counted():
    model, expected = llava(), llava()(**llava_batch(0, 3))[0]
    with Engine(settings_of(vision_token_budgets=(2 * PATCHES,))) as engine:
        engine.attach(model)
        assert_same(model(**llava_batch(0, 3))[0], expected)
        assert rows_of(engine)["vision_model.decoder"]["eager"] == {"above_largest_budget": 1}


def shapes_seen(block):
    """Return a list that gets the shape of the hidden states of each call of the block's first layer."""
    shapes = []
    block.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["hidden_states"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("options", [{"vision_token_budgets": None}, {"vision_cuda_graph_impl": "none"}])
def test_images_of_one_size_are_padded_only_on_request(options):
    """An earlier implementation forced a fixed length on every configuration."""
    options = {"vision_token_budgets": None, "vision_max_images": 64} | options
    model = llava()
    with Engine(settings_of(**options)) as engine:
        engine.attach(model)
        shapes = shapes_seen(model.vision_model.decoder)
        for images in (1, 3):
            model(**llava_batch(0, images))
        assert [images for _, images, _ in shapes] == [1, 3]


def test_a_derived_length_pads_packed_images(caplog):
    model = packed_encoder()
    with Engine(settings_of(vision_token_budgets=None, cuda_graph_impl="none")) as engine:
        engine.attach(model)
        assert f"derived {64 // MERGE**2} patches per microbatch" in caplog.text
        shapes = shapes_seen(model.decoder)
        model(*packed_images(0, [4, 8]))
        assert shapes == [(64 // MERGE**2, 1, 32)]


@pytest.mark.parametrize("frozen", ["vision_model", "vision_projection", "language_model"])
def test_freezing_one_part_works(frozen):
    def make():
        model = llava()
        model.freeze(frozen == "language_model", frozen == "vision_model", frozen == "vision_projection")
        return model

    settings = settings_of(vision_token_budgets=(3 * PATCHES,))
    expected, model = eager(make(), step_llava, settings)[0], make()
    with Engine(settings) as engine:
        engine.attach(model)
        assert_same(train(model, step_llava), expected)
        rows = rows_of(engine)
    for name in ENCODER:
        if frozen == "vision_model":
            assert rows[name]["eager"] == {"no_gradient": 10} and not rows[name]["graphs"]
        else:
            assert rows[name]["replays"] == 9
    assert all(rows[name]["replays"] == 9 for name in LANGUAGE)


class Wrapper(nn.Module):
    """A wrapper as Float16Module and DistributedDataParallel are."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llava, [*LANGUAGE, *ENCODER]),
        (lambda: Wrapper(Wrapper(llava())), [*LANGUAGE, *ENCODER]),
        (lambda: [llava()], [*LANGUAGE, *ENCODER]),
        (packed_encoder, ["decoder.layers.0", "decoder.layers.1"]),
        (lambda: Wrapper(packed_encoder()), ["decoder.layers.0", "decoder.layers.1"]),
    ],
    ids=["model", "wrapped", "chunks", "encoder", "wrapped encoder"],
)
def test_the_encoder_is_found_once_however_the_model_is_wrapped(make, expected):
    """In an earlier implementation the encoder was looked up inside the encoder, so its graphs were never created."""
    with Engine(settings_of()) as engine:
        assert engine.attach(make()) == expected


@pytest.fixture
def two_stages():
    parallel_state.set_pipeline_model_parallel_world_size(2)
    yield
    parallel_state.set_pipeline_model_parallel_world_size(None)


@pytest.mark.parametrize("has_encoder", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_each_stage_captures_the_layers_that_it_has(two_stages, has_encoder, is_first, is_last):
    """An earlier implementation took the flags of a pipeline stage as constants."""
    model = llava(add_encoder=has_encoder, pre_process=is_first, post_process=is_last)
    with Engine(settings_of()) as engine:
        assert engine.attach(model) == LANGUAGE + (ENCODER if has_encoder else [])
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_stage_with_the_encoder_alone(two_stages):
    model = llava(add_decoder=False)
    with Engine(settings_of()) as engine:
        assert engine.attach(model) == ENCODER


def test_a_stage_without_an_encoder_captures_nothing_and_deletes_nothing(two_stages):
    settings = settings_of(vision_token_budgets=(3 * PATCHES,))
    first, second = llava(), gpt()
    with Engine(settings) as engine, Engine(settings_of(cuda_graph_impl="none")) as other:
        engine.attach(first)
        train(first, step_llava, steps=3)
        bytes_before = {name: row["bytes"] for name, row in rows_of(engine).items()}
        assert other.attach(second) == [] and other.graphs() == []
        other.clear()
        other.detach()
        assert {name: row["bytes"] for name, row in rows_of(engine).items()} == bytes_before
        assert all(bytes_before[name] for name in ENCODER)


def test_a_model_without_an_encoder_is_refused_outside_a_pipeline():
    with Engine(settings_of()) as engine, pytest.raises(GraphConfigError, match="GPTModel has no vision encoder"):
        engine.attach(gpt())


def test_sequence_parallelism_in_the_encoder_is_refused():
    model = packed_encoder()
    model.decoder.config.sequence_parallel = True
    with Engine(settings_of(cuda_graph_impl="none")) as engine:
        with pytest.raises(GraphConfigError, match="PackedEncoder has sequence_parallel=True"):
            engine.attach(model)
        assert not any("forward" in vars(module) for module in model.modules())


def test_detach_restores_the_encoder():
    model = packed_encoder()
    before = [(list(one._forward_pre_hooks), list(one._forward_hooks)) for one in model.modules()]  # noqa: SLF001
    state = list(model.state_dict())
    with Engine(settings_of(vision_token_budgets=PACKED_BUDGETS, cuda_graph_impl="none")) as engine:
        engine.attach(model)
        train(model, step_packed, steps=3)
    after = [(list(one._forward_pre_hooks), list(one._forward_hooks)) for one in model.modules()]  # noqa: SLF001
    assert before == after and list(model.state_dict()) == state
    assert not any("forward" in vars(module) for module in model.modules())


# ---- packed_seq_params -----------------------------------------------------------------------------------------------


def call_layers(model, seed, packed):
    hidden = torch.randn(8, 1, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    ends = torch.tensor([0, 3, 8]).int()
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=5, max_seqlen_kv=5) if packed else None
    out = hidden
    for layer in model.decoder.layers:
        out, context = layer(hidden_states=out, attention_mask=None, packed_seq_params=params)
        assert context is None  # layers return (out, None)
    out.square().mean().backward()
    return [out.detach().clone(), hidden.grad.clone()]


def with_local_graphs(model):
    engine = Engine(settings_of(cuda_graph_impl="none", vision_token_budgets=None))
    engine.attach(model)
    return engine.stats, engine.detach


def with_transformer_engine_graphs(model):
    config = MegatronGraphConfig(cuda_graph_impl="transformer_engine", inference_cuda_graph_scope="none")
    found = attachment([model], config, encoder=True)
    plan = stage_plan(found.parts, [model], model.config, config.cuda_graph_modules, 4, "2.20.2")
    graphs = TransformerEngineGraphs(
        plan.parts, plan.order, capture_context(), holders=plan.holders, warmup_rounds=1, maker=StaticMaker()
    )
    return graphs.context.stats, graphs.detach


@pytest.mark.parametrize("attach", [with_local_graphs, with_transformer_engine_graphs])
@pytest.mark.parametrize("captured_packed", [True, False])
def test_packed_seq_params_never_reach_a_replay_captured_without_them(attach, captured_packed):
    """Nor does a call without them reach a replay that was captured with them."""
    model, reference = packed_encoder(), packed_encoder()
    stats, detach = attach(model)
    for seed in range(3):
        assert_same(call_layers(model, seed, captured_packed), call_layers(reference, seed, captured_packed))
    before = stats.replays.total()
    assert before > 0
    assert_same(call_layers(model, 9, not captured_packed), call_layers(reference, 9, not captured_packed))
    assert stats.replays.total() == before
    assert_same(call_layers(model, 10, captured_packed), call_layers(reference, 10, captured_packed))
    assert stats.replays.total() == before + 2
    detach()
