"""Graph any callable with a batch dimension, and compare and time it eager and replayed.

A stack of encoder layers gains on a CPU, because it has many small operations. A small MLP loses: the checks and copies
of a call cost more than its three operations. `python examples/capture_core.py` runs on a CPU, or on a GPU with
`--device cuda`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from graph_cache import BATCH, BufferSpec, GraphCache

WIDTH, TOKENS, LAYERS = 64, 8, 6


def microseconds(run: Callable[[], object], device: str) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(50):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def encoder() -> torch.nn.Module:
    layers = (torch.nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True) for _ in range(LAYERS))
    return torch.nn.Sequential(*layers)


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 128), torch.nn.GELU(), torch.nn.Linear(128, WIDTH))


def main(device: str) -> None:
    torch.manual_seed(0)
    cache = GraphCache(device=device)
    for name, make in (("encoder", encoder), ("mlp", mlp)):
        model = make().eval().to(device)
        run = cache.graphed(
            name,
            lambda x, model=model: model(x),
            {"x": BufferSpec((BATCH, TOKENS, WIDTH), torch.float32)},
            buckets=(1, 2, 4),
            watch=model,  # if a parameter moves, its graphs are dropped
        )
        cache.warm()
        for rows in (1, 2, 4):
            x = torch.randn(rows, TOKENS, WIDTH, device=device)
            with torch.inference_mode():
                expected = model(x)
                eager = microseconds(lambda x=x, model=model: model(x), device)
            replayed = microseconds(lambda x=x, run=run: run(x), device)
            equal = torch.equal(run(x), expected)
            print(f"{name}, {rows} rows: eager {eager:.0f} us, replayed {replayed:.0f} us, equal bit for bit: {equal}")
    print("replays:", dict(cache.stats.replays))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    main(parser.parse_args().device)
