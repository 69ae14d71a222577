"""Graphs captured by Transformer Engine: steps match eager, unchecked calls fall back, and captures clean up."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)
te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402

from graph_cache.adapters.transformer_engine import TransformerEngineGraphs  # noqa: E402
from graph_cache.backends import backend_for  # noqa: E402
from graph_cache.core.pool import GraphPool  # noqa: E402
from graph_cache.core.stats import CacheStats  # noqa: E402
from graph_cache.errors import GraphConfigError, GraphError  # noqa: E402
from graph_cache.training.capture_context import CaptureContext  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
]  # Transformer Engine and its compilers emit many warnings

WIDTH, INNER, LENGTH, BATCH = 256, 512, 128, 2
ONE_AT_A_TIME = [1, -1]
TWO_OUTSTANDING = [1, 1, -1, 1, -1, 1, -1, -1]  # 4 microbatches, the first of two stages
needs_fp8 = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="fp8 needs compute capability 8.9")


class Layer(nn.Module):
    """Norm, MLP and residual, called with keywords and returning (hidden, None), like Megatron's layers."""

    def __init__(self):
        super().__init__()
        self.mlp = te.LayerNormMLP(WIDTH, INNER, params_dtype=torch.bfloat16)

    def forward(self, hidden_states, attention_mask=None, is_first_microbatch=None):
        return hidden_states + self.mlp(hidden_states, is_first_microbatch=is_first_microbatch), None


class Attending(nn.Module):
    """Transformer Engine's own layer, causal, without dropout."""

    def __init__(self):
        super().__init__()
        self.layer = te.TransformerLayer(
            WIDTH, INNER, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16
        )

    def forward(self, hidden_states, attention_mask=None, is_first_microbatch=None):
        return self.layer(hidden_states, is_first_microbatch=is_first_microbatch), None


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Layer, layers: int = 3):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x, **kwargs):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden, _ = layer(hidden_states=hidden, attention_mask=None, **kwargs)
        return hidden


def stack(kind: type[nn.Module] = Layer, layers: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(kind, layers)


def attached(model: Stack, order=ONE_AT_A_TIME, **options) -> TransformerEngineGraphs:
    context = CaptureContext(GraphPool(backend_for("cuda")), CacheStats())
    return TransformerEngineGraphs(
        [(f"layers.{index}", layer) for index, layer in enumerate(model.layers)], order, context, **options
    )


def batch(seed: int, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(length, BATCH, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)


def precision(recipe):
    return nullcontext() if recipe is None else te.autocast(enabled=True, recipe=recipe)


def train(model: Stack, order=ONE_AT_A_TIME, steps: int = 8, recipe=None, tells_first: bool = False) -> list[float]:
    """Return losses of steps in this order. With `tells_first` each call passes `is_first_microbatch`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for number in range(steps):
        waiting, begun = [], 0
        for entry in order:
            if entry > 0:
                for layer in model.layers:
                    layer.current_microbatch = begun
                kwargs = {"is_first_microbatch": begun == 0} if tells_first else {}
                with precision(recipe):
                    loss = model(batch(100 * number + begun), **kwargs).float().square().mean()
                losses.append(loss.item())
                waiting.append(loss)
                del loss  # an old autograd graph would keep its stream's nodes alive in the capture
                begun += 1
            else:
                waiting.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reasons(graphs: TransformerEngineGraphs) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, _, reason), count in graphs.context.stats.fallbacks.items():
        found[reason] = found.get(reason, 0) + count
    return found


def close_to(found: list[float], expected: list[float], tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def take_weights(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.copy_(theirs)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("order", [ONE_AT_A_TIME, TWO_OUTSTANDING, [1, 1, -1, -1]])
@pytest.mark.parametrize("kind", [Layer, Attending])
def test_bf16_steps_match_eager_losses(kind, order):
    model, eager = stack(kind), stack(kind)
    graphs = attached(model, order)
    close_to(train(model, order), train(eager, order))
    assert set(reasons(graphs)) == {"warming_up"}
    assert graphs.context.stats.replays.total() == 8 * 3 * order.count(1) - reasons(graphs)["warming_up"] > 0
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
    graphs.detach()


@needs_fp8
@pytest.mark.parametrize("order", [ONE_AT_A_TIME, TWO_OUTSTANDING])
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=16), Float8CurrentScaling()])
def test_fp8_steps_match_eager_losses(recipe, order):
    model, eager = stack(), stack()
    graphs = attached(model, order)
    close_to(train(model, order, recipe=recipe), train(eager, order, recipe=recipe), 5e-2)
    assert set(reasons(graphs)) == {"warming_up"} and graphs.context.stats.replays.total() > 0
    graphs.detach()


@needs_fp8
def test_cached_fp8_weights_are_updated_every_step():
    model, eager = stack(), stack()
    recipe = DelayedScaling(amax_history_len=16)
    graphs = attached(model, TWO_OUTSTANDING, caches_weights=True)
    found = train(model, TWO_OUTSTANDING, steps=12, recipe=recipe)
    close_to(found, train(eager, TWO_OUTSTANDING, steps=12, recipe=recipe, tells_first=True), 5e-2)
    assert found[-1] < found[0]  # with stale weights the loss would not decrease
    assert set(reasons(graphs)) == {"warming_up"}
    graphs.detach()


@needs_fp8
def test_a_call_in_another_precision_runs_eager():
    model = stack()
    graphs = attached(model)
    train(model, steps=4, recipe=DelayedScaling())
    before = graphs.context.stats.replays.total()
    train(model, steps=1)
    assert graphs.context.stats.replays.total() == before and reasons(graphs)["unseen_signature"] == 3
    train(model, steps=1, recipe=DelayedScaling())  # another object, equal
    assert graphs.context.stats.replays.total() == before + 3
    graphs.detach()


@needs_fp8
def test_another_recipe_drops_and_recaptures_graphs():
    model, eager = stack(), stack()
    graphs = attached(model)
    found, expected = [], []
    for recipe, steps in ((DelayedScaling(), 5), (Float8CurrentScaling(), 1), (DelayedScaling(), 5)):
        found += train(model, steps=steps, recipe=recipe)
        expected += train(eager, steps=steps, recipe=recipe)
    close_to(found, expected, 5e-2)
    assert graphs.context.stats.invalidations == {"stale_address": 1}
    assert graphs.context.stats.captures["layers.0", "module", "recorded"] == 2
    graphs.detach()


def test_a_changed_shape_runs_eager_correctly():
    model, eager = stack(), stack()
    graphs = attached(model)
    train(model, steps=4)
    take_weights(eager, model)
    for length in (2 * LENGTH, LENGTH):
        out, expected = model(batch(7, length)), eager(batch(7, length))
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        for value in (out, expected):
            value.float().square().mean().backward()
        for one, other in zip(grads(model), grads(eager), strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
    assert reasons(graphs)["unseen_signature"] == 3
    graphs.detach()


def test_more_microbatches_than_were_captured_run_eager_correctly():
    model, eager = stack(), stack()
    order = [1, 1, -1, -1]
    graphs = attached(model, order)
    train(model, order, steps=4)
    take_weights(eager, model)
    for one in (model, eager):
        losses = []
        for microbatch in range(4):
            for layer in one.layers:
                layer.current_microbatch = microbatch
            losses.append(one(batch(microbatch)).float().square().mean())
        for loss in losses:
            loss.backward()
    for one, other in zip(grads(model), grads(eager), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
    assert reasons(graphs)["no_free_instance"] == 6
    graphs.detach()


def test_backwards_in_another_order_raise():
    model = stack()
    graphs = attached(model, [1, 1, -1, -1])
    train(model, [1, 1, -1, -1], steps=4)
    losses = []
    for microbatch in range(2):
        for layer in model.layers:
            layer.current_microbatch = microbatch
        losses.append(model(batch(microbatch)).float().mean())
    with pytest.raises(GraphError, match="order"):
        losses[1].backward()
    del losses
    graphs.detach()


def test_kept_gradients_are_not_overwritten_by_later_replays():
    model = stack()
    graphs = attached(model, TWO_OUTSTANDING)
    train(model, TWO_OUTSTANDING, steps=4)
    x = batch(1).requires_grad_()
    for layer in model.layers:
        layer.current_microbatch = 0
    hidden = x
    for layer in model.layers:
        hidden, _ = layer(hidden_states=hidden, attention_mask=None)
    hidden.float().square().mean().backward()
    kept = [x.grad, *(parameter.grad for layer in model.layers for parameter in layer.parameters())]
    copies = [grad.clone() for grad in kept]
    for layer in model.layers:
        layer.zero_grad()
    train(model, TWO_OUTSTANDING, steps=2)
    assert all(torch.equal(grad, copied) for grad, copied in zip(kept, copies, strict=True))
    graphs.detach()


def test_replays_draw_fresh_random_numbers():
    class Dropping(Layer):
        def forward(self, hidden_states, attention_mask=None):
            return nn.functional.dropout(super().forward(hidden_states)[0], 0.5), None

    model = stack(Dropping, layers=1)
    graphs = attached(model)
    train(model, steps=4)
    x, found = batch(0), []
    for _ in range(2):
        out = model(x)
        found.append(out.detach().clone())
        out.float().sum().backward()
    assert reasons(graphs) == {"warming_up": 3} and not torch.equal(*found)
    graphs.detach()


def test_a_capture_does_not_change_the_rng_state():
    model = stack()
    graphs = attached(model)
    train(model, steps=3)
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(5)
    train(model, steps=1)  # captures
    assert torch.equal(torch.rand(4, device="cuda"), expected) and graphs.context.stats.replays.total() > 0
    graphs.detach()


def test_another_thread_that_is_paused_does_not_break_the_capture():
    """It allocates and synchronizes continuously, like an engine's loop, which CUDA's global mode forbids."""
    turn, ended, rounds = threading.Lock(), threading.Event(), []

    def loop():
        while not ended.is_set():
            with turn:
                torch.empty(len(rounds) % 7 + 1, 1 << 20, device="cuda").zero_()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                rounds.append(None)
            ended.wait(0.001)  # a lock is not fair

    @contextmanager
    def paused():
        with turn:
            yield

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        model = stack()
        graphs = attached(model, TWO_OUTSTANDING, paused=paused)
        train(model, TWO_OUTSTANDING, steps=5)
    finally:
        ended.set()
        thread.join()
    assert graphs.context.stats.failed_captures.total() == 0 and graphs.context.stats.replays.total() > 0 and rounds
    graphs.detach()


def test_a_failed_capture_leaves_the_device_and_the_layers_as_before():
    class Reading(Layer):
        def forward(self, hidden_states, attention_mask=None):
            if torch.cuda.is_current_stream_capturing():
                hidden_states.sum().item()  # can't be captured
            return super().forward(hidden_states)

    model, eager = stack(Reading), stack(Reading)
    stream = torch.cuda.current_stream()
    graphs = attached(model)
    close_to(train(model), train(eager))
    assert reasons(graphs) == {"warming_up": 9, "capture_failed": 15}
    assert graphs.context.stats.failed_captures.total() == 3
    assert torch.cuda.current_stream() == stream and gc.isenabled() and not graphs.context.pool.capturing
    torch.rand(4, device="cuda")  # its generator is no longer in a capture
    graphs.detach()
    healthy = stack()
    again = attached(healthy)
    train(healthy, steps=5)
    assert again.context.stats.replays.total() == 6
    again.detach()


def memory() -> tuple[int, int]:
    """Return bytes allocated and reserved, without cached blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one per stream
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_closing_frees_memory_and_restores_forwards():
    model = stack()
    train(model, TWO_OUTSTANDING, steps=2)  # allocates everything that eager steps keep
    allocated, reserved = memory()
    attributes = [set(vars(layer)) for layer in model.layers]
    graphs = attached(model, TWO_OUTSTANDING)
    train(model, TWO_OUTSTANDING, steps=5)
    rows = graphs.table()
    held = graphs.context.pool.nbytes()
    assert len(rows) == 3 * 4 and rows[0]["engine"] == "transformer_engine"
    assert 0 < sum(row["bytes"] for row in rows) <= held and memory()[1] >= reserved + held
    graphs.detach()
    graphs.detach()
    now = memory()
    assert now[0] <= allocated + (1 << 20) and now[1] <= reserved + (4 << 20) and graphs.context.pool.nbytes() == 0
    assert [set(vars(layer)) for layer in model.layers] == attributes
    train(model, steps=1)


def test_cleared_graphs_are_captured_again():
    model = stack()
    graphs = attached(model)
    train(model, steps=4)
    graphs.clear()
    before = graphs.context.stats.replays.total()
    train(model, steps=4)
    assert graphs.context.stats.replays.total() == before + 3
    assert graphs.context.stats.captures["layers.0", "module", "recorded"] == 2
    graphs.detach()


def test_reserved_options_and_foreign_generators_are_refused():
    model = stack()
    with pytest.raises(GraphConfigError, match="_order"):
        attached(model, options={"_order": [1, -1]})
    with pytest.raises(GraphConfigError, match="no_such_option"):
        attached(model, options={"no_such_option": 1})
    context = CaptureContext(GraphPool(backend_for("cuda")), CacheStats(), [torch.Generator("cuda")])
    with pytest.raises(GraphConfigError, match="use_te_rng_tracker"):
        TransformerEngineGraphs([("layer", model.layers[0])], ONE_AT_A_TIME, context)
    graphs = attached(model, options={"num_warmup_iters": 1})
    train(model, steps=4)
    assert graphs.context.stats.replays.total() == 3
    graphs.detach()
