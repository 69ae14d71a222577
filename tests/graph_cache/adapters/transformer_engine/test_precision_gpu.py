"""Encore's own graphs of plain models with Transformer Engine modules: each precision has its graphs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)
te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402

from engine import Engine, EngineConfig  # noqa: E402
from graph_cache.core.buffers import BufferSpec  # noqa: E402
from graph_cache.core.cache import GraphCache  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="fp8 needs compute capability 8.9"),
]
WIDTH, ROWS, STEPS = 256, 64, 10
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


@pytest.fixture(params=[False, True], ids=["no_flag", "flag_of_other_captures"])
def flag(request):
    """The flag that earlier captures with cached weights leave behind: skip casts."""
    state = FP8GlobalStateManager.quantization_state
    before = state.skip_fp8_weight_update_tensor
    if request.param:
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
    yield
    state.skip_fp8_weight_update_tensor = before


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16),
        te.LayerNormMLP(WIDTH, 2 * WIDTH, params_dtype=torch.bfloat16),
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(
        ROWS, WIDTH, generator=torch.Generator("cuda").manual_seed(step), device="cuda", dtype=torch.bfloat16
    )


def precision(recipe, enabled=True):
    return te.autocast(enabled=True, recipe=recipe) if enabled else nullcontext()


def train(model, forward, is_fp8=lambda step: True):
    """Train; return each loss with all gradients."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        loss = forward(batch(step), is_fp8(step))
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return log


def assert_same(ours, theirs):
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(one, other), f"step {step}, value {index}: {(one - other).abs().max().item()}"


def layers_in(model, recipe):
    def forward(x, fp8):
        with precision(recipe, fp8):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        return loss

    return forward


def test_attached_modules_have_graphs_per_precision(recipe, flag):
    eager, graphed = build(), build()
    is_fp8 = {step: step % 4 != 3 for step in range(STEPS)}.get
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=1)) as engine:
        engine.attach(graphed, modules=["0", "1"])
        ours = train(graphed, layers_in(graphed, recipe), is_fp8)
        rows = engine.graphs()
        engine.detach()
    assert_same(ours, train(eager, layers_in(eager, recipe), is_fp8))
    assert sum(row["replays"] for row in rows) >= 4, rows  # a switch may replace quantizers and so drop graphs


def test_an_iteration_casts_its_weights_at_every_replay(recipe, flag):
    eager, graphed = build(), build()
    with Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=2)) as engine:
        step = engine.capture_iteration(lambda x: layers_in(graphed, recipe)(x, True).detach())
        ours = train(graphed, lambda x, fp8: step(x))
        rows = engine.graphs()
    assert_same(ours, train(eager, layers_in(eager, recipe)))
    assert rows[0]["replays"] >= STEPS - 4 and not rows[0]["failed"], rows


def test_an_iteration_inside_an_autocast_runs_eager(recipe):
    eager, graphed = build(), build()
    with Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=1)) as engine:
        step = engine.capture_iteration(lambda x: layers_in(graphed, None)(x, False).detach())

        def inside(run):
            def forward(x, fp8):
                with precision(recipe, fp8):
                    return run(x)

            return forward

        is_fp8 = {number: number % 2 == 1 for number in range(STEPS)}.get
        ours = train(graphed, inside(step), is_fp8)
        counted = sum(count for labels, count in engine.stats.fallbacks.items() if labels[2] == "precision_autocast")
    assert_same(ours, train(eager, inside(lambda x: layers_in(eager, None)(x, False).detach()), is_fp8))
    assert counted == STEPS // 2


def test_a_cached_function_replays_in_the_precision_of_its_capture_only(recipe):
    model, x = build().eval(), batch(0)
    cache = GraphCache(device="cuda")
    spec = BufferSpec(("batch", WIDTH), torch.bfloat16)
    run = cache.graphed("model", lambda x: model(x), {"x": spec}, buckets=(ROWS,), watch=model)
    with torch.inference_mode():
        for fp8 in (False, False, False, True, False, True, True, False):
            with precision(recipe, fp8):
                assert torch.equal(run(x=x), model(x)), fp8
    assert sum(cache.stats.replays.values()) >= 2  # before fp8 replaces the quantizers


@pytest.mark.parametrize("api", ["attach", "iteration"])
@pytest.mark.parametrize("interrupted", [2, 6])
def test_another_recipe_in_between_replaces_quantizers_and_changes_no_value(recipe, api, interrupted):
    """The eager evaluation comes right before the capture, or after some replays."""
    other = Float8CurrentScaling() if isinstance(recipe, DelayedScaling) else DelayedScaling()

    def with_evaluations(model, run):
        def forward(x, step):
            if step == interrupted:
                with torch.no_grad(), precision(other):
                    model(x)
            return run(x)

        return forward

    eager, graphed = build(), build()
    impl = "local" if api == "attach" else "full_iteration"
    with Engine(EngineConfig(mode="training", cuda_graph_impl=impl, cuda_graph_warmup_steps=2)) as engine:
        if api == "attach":
            engine.attach(graphed, modules=["0", "1"])

        def whole(x):
            return layers_in(graphed, recipe)(x, True).detach()

        run = whole if api == "attach" else engine.capture_iteration(whole)
        ours = train(graphed, with_evaluations(graphed, run), lambda step: step)
        replays = sum(row["replays"] for row in engine.graphs())
    expected = train(eager, with_evaluations(eager, lambda x: layers_in(eager, recipe)(x, True)), lambda step: step)
    assert_same(ours, expected)
    assert replays > 0 or interrupted == 2
