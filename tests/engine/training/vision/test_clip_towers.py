"""Towers with images of one size (CLIP, SigLIP, LLaVA's): captured per layer, batches padded to budgets on request."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from engine import Engine, EngineConfig
from engine.training.vision.image_batches import PaddedImageBatches, takes_images_of_one_size

SIDE, PATCH = 16, 4
PATCHES = (SIDE // PATCH) ** 2
BUDGETS = (2 * PATCHES, 4 * PATCHES)
IMAGES = [1, 3, 2, 4, 1, 3, 2, 4, 3, 1]  # per batch, for ten steps
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
IMAGE = 60


def clip():
    torch.manual_seed(0)
    return CLIPVisionModel(CLIPVisionConfig(**TOWER))


def siglip():
    torch.manual_seed(0)
    return SiglipVisionModel(SiglipVisionConfig(**TOWER))


def llava():
    torch.manual_seed(0)
    text = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "use_cache": False,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**TOWER), text_config=text, image_token_id=IMAGE, vision_feature_layer=-1
    )
    return LlavaForConditionalGeneration(config)


def pixels(step):
    count = IMAGES[step % len(IMAGES)]
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(step))


def tower_step(model, step):
    return model(pixels(step)).pooler_output.square().mean()


def llava_step(model, step):
    images = pixels(step)
    ids = torch.randint(0, IMAGE, (1, 80), generator=torch.Generator().manual_seed(step))
    ids[0, 1 : 1 + len(images) * PATCHES] = IMAGE
    return model(input_ids=ids, pixel_values=images, labels=ids).loss


def train(model, step_of, steps=10):
    """Return the loss and all gradients of each step."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = step_of(model, step)
        loss.backward()
        log.append([loss.detach().clone(), *[one.grad.clone() for one in model.parameters() if one.grad is not None]])
        optimizer.step()
    return log


def eager(model, tower, step_of):
    padding = PaddedImageBatches(tower, BUDGETS)
    padding.begin()
    log = train(model, step_of)
    padding.end()
    return log


def engine_of(**options):
    settings = {
        "cuda_graph_warmup_steps": 1,
        "cuda_graph_impl": "none",
        "vision_cuda_graph_impl": "local",
        "vision_token_budgets": BUDGETS,
    }
    return Engine(EngineConfig(mode="training", **settings | options))


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("make", [clip, siglip])
@pytest.mark.parametrize("scope", [[], ["attn", "mlp"]], ids=["layers", "parts"])
def test_a_tower_replays_and_equals_eager_on_the_padded_batch(make, scope):
    expected = make()
    expected, model = eager(expected, expected, tower_step), make()
    hooks = [(len(one._forward_pre_hooks), len(one._forward_hooks)) for one in model.modules()]  # noqa: SLF001
    with engine_of(vision_cuda_graph_scope=scope) as engine:
        assert len(engine.attach(model)) == (4 if scope else 2)
        assert_same(train(model, tower_step), expected)
        for row in engine.graphs():
            assert (row["replays"], row["failed"]) == (8, 0) and set(row["eager"]) <= {"warming_up", "unseen_signature"}
    assert hooks == [(len(one._forward_pre_hooks), len(one._forward_hooks)) for one in model.modules()]  # noqa: SLF001
    for ours, theirs in zip(expected, train(make(), tower_step), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_llava_replays_both_parts_and_equals_eager_on_the_padded_batch():
    expected = llava()
    expected, model = eager(expected, expected.model.vision_tower, llava_step), llava()
    with engine_of(cuda_graph_impl="local") as engine:
        names = engine.attach(model)
        assert sum("vision_tower" in name for name in names) == sum("language_model" in name for name in names) == 2
        assert_same(train(model, llava_step), expected)
        for row in engine.graphs():
            assert row["replays"] == (8 if "vision_tower" in row["module"] else 9) and not row["failed"]


def test_outputs_are_cut_back():
    model, images = clip(), pixels(1)
    plain = model(images, output_hidden_states=True)
    with engine_of() as engine:
        engine.attach(model)
        shapes = []
        handle = model.get_submodule("encoder.layers.0").register_forward_pre_hook(
            lambda _, args, kwargs: shapes.append(len(args[0] if args else kwargs["hidden_states"])), with_kwargs=True
        )
        padded = model(pixel_values=images, output_hidden_states=True)
        handle.remove()
        assert shapes == [4]
    for one, other in ((plain.pooler_output, padded.pooler_output), *zip(plain.hidden_states, padded.hidden_states)):  # noqa: B905
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_batches_that_can_not_be_padded_run_eager_and_are_counted():
    class Masked(CLIPVisionModel):
        def forward(self, pixel_values, weights=None, **options):
            out = super().forward(pixel_values, **options)
            return out.pooler_output if weights is None else out.pooler_output * weights[:, None]

    torch.manual_seed(0)
    model = Masked(CLIPVisionConfig(**TOWER))
    many, few = torch.randn(5, 3, SIDE, SIDE), torch.randn(3, 3, SIDE, SIDE)
    expected = model(many), model(few, weights=torch.arange(3.0))
    with engine_of() as engine:
        engine.attach(model)
        assert_same((model(many), model(few, weights=torch.arange(3.0))), expected)
        row = next(row for row in engine.graphs() if row["module"] == "Masked")
        assert row["eager"] == {"above_largest_budget": 1, "argument_per_image": 1}


def test_nothing_is_padded_without_a_length():
    model = clip()
    with engine_of(vision_token_budgets=None) as engine:
        engine.attach(model)
        assert not model._forward_pre_hooks and not model._forward_hooks  # noqa: SLF001
        for _ in range(3):
            model(pixels(1)).pooler_output.sum().backward()
        assert all(row["replays"] == 2 for row in engine.graphs())


def test_a_tower_whose_statistics_cover_the_batch_is_not_padded():
    model = clip()
    assert takes_images_of_one_size(model) and not takes_images_of_one_size(nn.Linear(2, 2))
    model.extra = nn.BatchNorm1d(3)
    assert not takes_images_of_one_size(model)
