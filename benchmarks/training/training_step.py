"""A training step of a GPT: eager, per-layer and whole-iteration graphs, PyTorch's own graphs, compiled or not.

    python -m benchmarks training.training_step --batches 1,4,8 --json FILE

24 layers of width 1,024 in bf16, 512 tokens, AdamW, random tokens. Each way runs in a separate process, so that peaks
of memory do not mix. --recapture drops and captures the graphs of our ways five times instead, and shows the memory
that stays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import harness
from benchmarks.training.step_timing import COLUMNS, add_arguments, run_ways, timed
from engine import Engine, EngineConfig

NEEDS = "CPU or 1 GPU"
WAYS = ("eager", "layer", "iteration", "layer_compiled", "iteration_compiled", "compile", "make_graphed_callables")
OURS = tuple(way for way in WAYS if way.startswith(("layer", "iteration")))
RECAPTURES, RECAPTURE_STEPS = 5, 6  # rounds, and steps in each: past warm-up, and two replays
VOCABULARY = 32000


class Layer(nn.Module):
    """A decoder layer: layer norms, causal attention, GELU."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, layers: int, width: int, length: int):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def prepare(way: str, model: Model, batch: int, length: int) -> tuple[Callable[..., torch.Tensor], list[Engine]]:
    """The training step in one of the ways."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda")
    called: Callable[..., torch.Tensor] = model
    engines: list[Engine] = []
    if way == "layer_compiled":
        for layer in model.layers:
            layer.compile()
    elif way == "iteration_compiled":
        called = torch.compile(model)
    elif way == "compile":
        called = torch.compile(model, mode="reduce-overhead")
    elif way == "make_graphed_callables":
        width = model.embed.embedding_dim
        samples = tuple(
            (torch.randn(batch, length, width, device=device, dtype=torch.bfloat16, requires_grad=True),)
            for _ in model.layers
        )
        torch.cuda.make_graphed_callables(tuple(model.layers), samples)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if way == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        loss = called(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    if way.startswith("layer"):
        engines.append(Engine(EngineConfig(mode="training")))
        engines[0].attach(model, modules=[f"layers.{index}" for index in range(len(model.layers))])
    elif way.startswith("iteration"):
        engines.append(Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration")))
        return engines[0].capture_iteration(step, device=device), engines
    return step, engines


def set_up(way: str, batch: int, args: argparse.Namespace) -> tuple[Callable[[int], torch.Tensor], list[Engine], Model]:
    """A function that runs step number n on that step's data, what captures it, and its model."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(args.layers, args.width, args.length).to(device).bfloat16()
    generator = torch.Generator().manual_seed(1)
    data = [
        [torch.randint(VOCABULARY, (batch, args.length), generator=generator).to(device) for _ in range(2)]
        for _ in range(4)
    ]
    run, engines = prepare(way, model, batch, args.length)
    return lambda number: run(*data[number % 4]), engines, model


def recapture(step: Callable[[int], torch.Tensor], engine: Engine, model: Model) -> dict[str, Any]:
    """Memory with graphs and after dropping them, captured anew each time: whether it all comes back, and one pool."""
    rounds, pools = [], set()
    for index in range(RECAPTURES):
        for number in range(RECAPTURE_STEPS):
            step(index * RECAPTURE_STEPS + number).item()
        row = {"graphs": sum(row["graphs"] for row in engine.graphs())}
        pools.add(id(engine.pool))
        row["with_graphs"] = held(engine)
        model.zero_grad()  # gradients may lie where a graph left them: who holds one holds its memory
        engine.clear()
        row["without"] = held(engine)
        rounds.append(row)
    last, first = rounds[-1]["with_graphs"], rounds[0]["with_graphs"]
    growth = {name: round((last[name] - first[name]) / max(1, first[name]), 5) for name in first}
    last, first = rounds[-1]["without"], rounds[0]["without"]
    left = {name: round((last[name] - first[name]) / max(1, first[name]), 5) for name in first}
    engine.detach()
    return {
        "one_pool": len(pools) == 1,
        "growth": growth,
        "growth_without": left,
        "within_1_percent": max(*growth.values(), *left.values()) <= 0.01,
        "rounds": rounds,
    }


def held(engine: Engine) -> dict[str, int]:
    """Bytes held now: of the device and of the pool of graphs."""
    found = {"pool": engine.pool.nbytes()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return found


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    add_arguments(parser, WAYS, WAYS)
    parser.add_argument("--recapture", action="store_true", help="drop and capture five times; our ways only")
    args = parser.parse_args(argv)
    if args.one:
        step, engines, model = set_up(args.ways[0], args.batches[0], args)
        found = recapture(step, engines[0], model) if args.recapture else timed(step, engines, args.warm, args.steps)
        print(json.dumps(found))
        return 0
    ways = [way for way in args.ways if way in OURS or not args.recapture]
    report = harness.Report(__spec__.name, args, argv)
    run_ways(__spec__.name, ways, args, ["--recapture"] * args.recapture, report)
    report.finish(None if args.recapture else COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
