"""Qwen's vision towers: padded images replay for every microbatch, equal eager, and give the unpadded results."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from engine import Engine, EngineConfig
from engine.errors import ConfigError
from engine.training.vision.padding import PaddedImages
from engine.training.vision.towers import is_packed_tower
from graph_cache.errors import GraphConfigError

BUDGETS, MAX_IMAGES = (64, 128, 192), 4
IMAGE, START, VOCAB = 90, 91, 96
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 24,
}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0},
    "use_cache": False,
}
SPECIAL = {"image_token_id": IMAGE, "vision_start_token_id": START, "video_token_id": 92, "vision_end_token_id": 93}


def qwen3():
    torch.manual_seed(0)
    vision = TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=TEXT, **SPECIAL))


def qwen2_5():
    torch.manual_seed(0)
    vision = TOWER | {"window_size": 32, "fullatt_block_indexes": [2]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=TEXT, **SPECIAL))


MODELS = [qwen3, qwen2_5]


def images(step, most=3):
    """Return patches [n, 96] and grid_thw [images, 3] of a microbatch: 1 to 3 images of different sizes."""
    generator = torch.Generator().manual_seed(step)
    count = int(torch.randint(1, most + 1, (1,), generator=generator))
    sides = 2 * torch.randint(1, 5, (count, 2), generator=generator)
    grid = torch.cat([torch.ones(count, 1, dtype=torch.long), sides], 1)
    return torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator), grid


def batch(step):
    """Return the inputs of one training step: text around the images, of one length for all steps."""
    patches, grid = images(step)
    ids = torch.randint(0, IMAGE, (1, 60), generator=torch.Generator().manual_seed(step))
    at = 2
    for tokens in (grid.prod(1) // 4).tolist():
        ids[0, at], ids[0, at + 1 : at + 1 + tokens] = START, IMAGE
        at += tokens + 2
    return {
        "input_ids": ids,
        "labels": ids,
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def train(model, steps=10):
    """Return the loss and all gradients of each step."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer, log = torch.optim.SGD(trained, lr=0.05), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss
        loss.backward()
        log.append([loss.detach().clone(), *[one.grad.clone() for one in trained if one.grad is not None]])
        optimizer.step()
    return log


def eager(model, budgets=BUDGETS, **options):
    """Train without graphs on padded batches."""
    padding = PaddedImages(model.model.visual, budgets, MAX_IMAGES)
    padding.begin()
    log = train(model, **options)
    padding.end()
    return log


def engine_of(**options):
    settings = {
        "cuda_graph_warmup_steps": 1,
        "vision_cuda_graph_impl": "local",
        "vision_token_budgets": BUDGETS,
        "vision_max_images": MAX_IMAGES,
    }
    return Engine(EngineConfig(mode="training", **settings | options))


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def rows_of(engine):
    rows = engine.graphs()
    encoder = [row for row in rows if ".visual." in row["module"]]
    return encoder, [row for row in rows if row not in encoder]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("scope", [[], ["attn", "mlp"]], ids=["layers", "parts"])
def test_encoder_and_language_model_replay_and_equal_eager_on_the_padded_batch(make, scope):
    expected, model = eager(make()), make()
    with engine_of(vision_cuda_graph_scope=scope) as engine:
        names = engine.attach(model)
        assert len([name for name in names if ".visual." in name]) == (6 if scope else 3)
        assert_same(train(model), expected)
        encoder, language = rows_of(engine)
        assert encoder and all(row["replays"] >= 7 and not row["failed"] for row in encoder)
        assert len(language) == 3 and all(row["replays"] == 9 and not row["failed"] for row in language)
        assert all(set(row["eager"]) <= {"warming_up", "unseen_signature"} for row in (*encoder, *language))


@pytest.mark.parametrize("make", MODELS)
def test_padding_changes_results_no_more_than_another_budget_does(make):
    plain, padded, wider = train(make()), eager(make()), eager(make(), budgets=(256,))

    def largest(ours, theirs):
        return max(
            float((a - b).abs().max()) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
        )

    assert largest(plain, padded) <= max(2 * largest(padded, wider), 1e-6)


@pytest.mark.parametrize("make", MODELS)
def test_outputs_are_cut_back_and_restored_by_detach(make):
    model = make()
    tower, implementation = model.model.visual, model.model.visual.config._attn_implementation  # noqa: SLF001
    patches, grid = images(3)
    plain = tower(patches, grid_thw=grid, output_hidden_states=True)
    with engine_of(cuda_graph_impl="none") as engine:
        engine.attach(model)
        padded = tower(patches, grid, output_hidden_states=True)
        for name, value in plain.items():
            theirs, ours = (one if isinstance(one, (tuple, list)) else [one] for one in (value, padded[name]))
            for one, other in zip(theirs, ours, strict=True):
                torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
        assert tower(patches, grid, return_dict=False)[0].shape == plain.last_hidden_state.shape
    assert tower.config._attn_implementation == implementation  # noqa: SLF001
    assert not tower._forward_pre_hooks and not tower._forward_hooks  # noqa: SLF001
    assert_same(tower(patches, grid_thw=grid).pooler_output, plain.pooler_output)


@pytest.mark.parametrize("make", MODELS)
def test_several_images_and_frames_of_any_shape_fit_a_budget(make):
    tower = make().model.visual
    shapes = []
    tower.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append([len(args[0]), len(kwargs["cu_seqlens"])]), with_kwargs=True
    )
    grids = [[[1, 2, 2]], [[1, 2, 32]], [[1, 8, 8]], [[2, 4, 4], [1, 4, 8]], [[1, 2, 2]] * 4]
    plain = [tower(_patches(grid), grid_thw=torch.tensor(grid)).pooler_output for grid in grids]
    del shapes[:]
    padding = PaddedImages(tower, (64,), MAX_IMAGES)
    padding.begin()
    for grid, one in zip(grids, plain, strict=True):
        torch.testing.assert_close(tower(_patches(grid), grid_thw=torch.tensor(grid)).pooler_output, one)
    padding.end()
    assert len({tuple(shape) for shape in shapes}) == 1


def _patches(grid):
    return torch.randn(int(torch.tensor(grid).prod(1).sum()), 96, generator=torch.Generator().manual_seed(5))


def test_larger_microbatches_run_eager_and_are_counted():
    model = qwen3()
    tower = model.model.visual
    with engine_of(cuda_graph_impl="none") as engine:
        engine.attach(model)
        for grid in ([[1, 16, 16]], [[1, 2, 2]] * 5):
            assert tower(_patches(grid), grid_thw=torch.tensor(grid)).pooler_output.shape[0] == len(_patches(grid)) // 4
        row = next(row for row in engine.graphs() if row["module"] == "model.visual")
        assert row["eager"] == {"above_largest_budget": 1, "too_many_images": 1}


@pytest.mark.parametrize("frozen", ["model.visual", "model.visual.merger", "model.language_model"])
def test_freezing_one_part_works(frozen):
    def make():
        model = qwen3()
        model.get_submodule(frozen).requires_grad_(False)
        return model

    expected, model = eager(make()), make()
    with engine_of() as engine:
        engine.attach(model)
        assert_same(train(model), expected)
        encoder, language = rows_of(engine)
        if frozen == "model.visual":
            assert all(row["eager"] == {"no_gradient": 10} and not row["graphs"] for row in encoder)
        else:
            assert all(row["replays"] >= 7 for row in encoder)
        assert all(row["replays"] == 9 for row in language)


def test_the_encoder_alone_and_the_language_model_alone():
    for options, captured in (
        ({"cuda_graph_impl": "none"}, "encoder"),
        ({"vision_cuda_graph_impl": "none"}, "language"),
    ):
        expected = eager(qwen3()) if captured == "encoder" else train(qwen3())
        model = qwen3()
        with engine_of(**options) as engine:
            engine.attach(model)
            assert_same(train(model), expected)
            encoder, language = rows_of(engine)
            assert bool(encoder) == (captured == "encoder") and bool(language) == (captured == "language")


def test_a_derived_length_is_logged_with_a_warning(caplog):
    model = qwen3()
    with caplog.at_level(logging.WARNING), engine_of(vision_token_budgets=None) as engine:
        engine.attach(model)
    assert "derived 16 patches per microbatch from 64 position embeddings" in caplog.text
    caplog.clear()
    with engine_of(vision_token_budgets=None, max_vision_cuda_graph_seq_length=784) as engine:
        engine.attach(model)
    assert not caplog.text


def test_what_is_captured_as_a_packed_tower():
    assert is_packed_tower(qwen3().model.visual) and is_packed_tower(qwen2_5().model.visual)
    assert not is_packed_tower(torch.nn.Linear(2, 2))
    assert isinstance(qwen3().model.visual, Qwen3VLVisionModel)
    assert isinstance(qwen2_5().model.visual, Qwen2_5_VisionTransformerPretrainedModel)


def test_what_can_not_be_captured_is_refused():
    with engine_of() as engine, pytest.raises(ConfigError, match="has no vision tower"):
        engine.attach(torch.nn.Linear(2, 2))
    with engine_of(vision_cuda_graph_impl="transformer_engine") as engine:
        with pytest.raises(ConfigError, match="captures Megatron-Core's encoders"):
            engine.attach(qwen3())
    with engine_of(vision_token_budgets=(3,)) as engine, pytest.raises(GraphConfigError, match="below 4 patches"):
        engine.attach(qwen3())
    model = qwen3()
    with engine_of() as engine:
        with pytest.raises(GraphConfigError, match="already"):
            engine.attach(model, modules=["model.visual.blocks.0"])
        assert "forward" not in vars(model.model.visual.blocks[0])
        engine.attach(model)


@pytest.mark.parametrize("make", MODELS)
def test_plain_attach_refuses_layers_that_read_lengths_on_the_host(make):
    """Without the attention implementation of this package, transformers splits the batch by `lengths.tolist()`."""

    def same_batch(model):
        return [one for _ in range(4) for one in train(model, steps=1)]  # the first batch in each step

    expected, model = same_batch(make()), make()
    with engine_of(vision_cuda_graph_impl="none", vision_token_budgets=None) as engine:
        (name,) = engine.attach(model, modules=["model.visual.blocks.2"])
        assert_same(same_batch(model), expected)
        (row,) = [row for row in engine.graphs() if row["module"] == name]
        assert row["replays"] == 0 and row["failed"] == 1 and "tolist()" in row["failure"]
