"""Training step time and peak memory: eager, graphs per layer, a whole iteration, and torch's own graphs.

`python benchmarks/training_step.py --batches 1,4,8 --out results.json` on a GPU. A GPT of 24 layers of width 1,024 in
bf16, 512 tokens, AdamW, random tokens; each way in a process of its own, so that peaks don't mix.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine import Engine, EngineConfig

WAYS = ("eager", "layer", "iteration", "compile", "make_graphed_callables")
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
    if way == "compile":
        called = torch.compile(model, mode="reduce-overhead")
    elif way == "make_graphed_callables":
        width = model.embed.embedding_dim
        samples = tuple((torch.randn(batch, length, width, device=device, dtype=torch.bfloat16, requires_grad=True),)
                        for _ in model.layers)
        torch.cuda.make_graphed_callables(tuple(model.layers), samples)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if way == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        loss = called(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    if way == "layer":
        engines.append(Engine(EngineConfig(mode="training")))
        engines[0].attach(model, modules=[f"layers.{index}" for index in range(len(model.layers))])
    elif way == "iteration":
        engines.append(Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration")))
        return engines[0].capture_iteration(step, device=device), engines
    return step, engines


def measure(way: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Median step in ms, peak MiB, and the losses, which must agree between ways."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(args.layers, args.width, args.length).to(device).bfloat16()
    generator = torch.Generator().manual_seed(1)
    data = [[torch.randint(VOCABULARY, (batch, args.length), generator=generator).to(device) for _ in range(2)]
            for _ in range(4)]
    run, engines = prepare(way, model, batch, args.length)
    times, losses = [], []
    for index in range(args.warm + args.steps):
        started = time.perf_counter()
        losses.append(run(*data[index % 4]).item())
        times.append((time.perf_counter() - started) * 1e3)
    found = {"way": way, "batch": batch, "ms": round(statistics.median(times[args.warm:]), 3),
             "last_losses": [round(loss, 4) for loss in losses[-3:]]}
    if device == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
    for engine in engines:
        rows = engine.graphs()
        found["replays"], found["failed"] = sum(row["replays"] for row in rows), sum(row["failed"] for row in rows)
        engine.detach()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.ways, int(args.batches), args)))
        return
    rows = []
    sizes = [f"--{name}={getattr(args, name)}" for name in ("layers", "width", "length", "warm", "steps")]
    for batch in args.batches.split(","):
        for way in args.ways.split(","):
            command = [sys.executable, __file__, "--one", "--batches", batch, "--ways", way, *sizes]
            done = subprocess.run(command, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {
                "way": way, "batch": int(batch), "error": done.stderr.strip().splitlines()[-1][:200]}
            rows.append(row)
            eager = next((one for one in rows if one["batch"] == int(batch) and one["way"] == "eager"), {})
            if "ms" in row and "ms" in eager:
                row["times_eager"] = round(eager["ms"] / row["ms"], 2)
                row["memory_over_eager"] = round(row.get("peak_mib", 0) / eager.get("peak_mib", 1), 3)
            print(json.dumps(row), flush=True)
    if args.out:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        args.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
