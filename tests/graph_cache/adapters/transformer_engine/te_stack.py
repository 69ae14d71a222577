"""Small stacks of layers attached with TransformerEngineGraphs, and steps in the order of a pipeline stage."""

from __future__ import annotations

import torch
from torch import nn

from graph_cache.adapters.transformer_engine import TransformerEngineGraphs
from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from graph_cache.training.attached import Part
from graph_cache.training.capture_context import CaptureContext
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker

WIDTH = 8
ONE_AT_A_TIME = [1, -1]
TWO_WARMUP_FORWARDS = [1, 1, 1, -1, 1, -1, -1, -1]  # 4 microbatches, the first of three stages


class Block(nn.Module):
    """A layer with keyword arguments that returns (hidden, None), like Megatron's layers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden, mask=None, scale=1.0, context=None):
        out = torch.tanh(self.inner(self.norm(hidden))) * scale
        return hidden + (out if mask is None else out * mask), context


class Stack(nn.Module):
    def __init__(self, layers: int = 3):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, **kwargs):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden, _ = layer(hidden, **kwargs)
        return hidden


def stack(layers: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(layers)


def capture_context() -> CaptureContext:
    return CaptureContext(GraphPool(backend_for("cpu")), CacheStats())


def parts(model: Stack, chunk: int = 0) -> list[Part]:
    return [Part(f"chunks.{chunk}.layers.{index}", layer, chunk=chunk) for index, layer in enumerate(model.layers)]


def attached(model: Stack, order=ONE_AT_A_TIME, maker: StaticMaker | None = None, **options) -> TransformerEngineGraphs:
    return TransformerEngineGraphs(parts(model), order, capture_context(), maker=maker or StaticMaker(), **options)


def batch(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: Stack, order, inputs, numbered: bool = True, **kwargs) -> list[float]:
    """Run one step of one chunk in this order and return the losses. Gradients accumulate on the parameters."""
    losses, waiting = [], []
    for entry in order:
        if entry > 0:
            if numbered:
                for layer in model.layers:
                    layer.current_microbatch = len(losses)
            loss = model(inputs[len(losses)], **kwargs).square().mean()
            losses.append(loss.item())
            waiting.append(loss)
        else:
            waiting.pop(0).backward()
    return losses


def train(model: Stack, order, steps: int = 6, **kwargs) -> list[list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(steps):
        count = sum(entry > 0 for entry in order)
        found.append(step(model, order, [batch(100 * number + one) for one in range(count)], **kwargs))
        optimizer.step()
        optimizer.zero_grad()
    return found


def reasons(graphs: TransformerEngineGraphs) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, _, reason), count in graphs.context.stats.fallbacks.items():
        found[reason] = found.get(reason, 0) + count
    return found


def replays(graphs: TransformerEngineGraphs) -> int:
    return graphs.context.stats.replays.total()


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a.parameters(), b.parameters(), strict=True))


def warmed(model: Stack, order=ONE_AT_A_TIME, maker: StaticMaker | None = None, **options) -> TransformerEngineGraphs:
    """Attach and capture. The next call replays."""
    kwargs = options.pop("kwargs", {})
    graphs = attached(model, order, maker, **options)
    for number in range(4):
        step(model, order, [batch(number)] * order.count(1), **kwargs)
    assert replays(graphs) > 0
    graphs.context.stats.fallbacks.clear()
    graphs.context.stats.replays.clear()
    model.zero_grad()
    return graphs
