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
    """Return the median time of a call; on a CPU the process's own time, whatever else the machine does."""
    clock, times = time.process_time if device == "cpu" else time.perf_counter, []
    for _ in range(50):
        started = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - started)
    return statistics.median(times) * 1e6


def encoder() -> torch.nn.Module:
    layers = (torch.nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True) for _ in range(LAYERS))
    return torch.nn.Sequential(*layers)


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 128), torch.nn.GELU(), torch.nn.Linear(128, WIDTH))


def main(device: str) -> None:
    torch.manual_seed(0)
    cache = GraphCache(device=device)
    print("model    rows      eager   replayed  equal")
    for name, make in (("encoder", encoder), ("mlp", mlp)):
        model = make().eval().to(device)
        run = cache.graphed(
            name,
            lambda x, model=model: model(x),
            {"x": BufferSpec((BATCH, TOKENS, WIDTH), torch.float32)},
            independent_rows=True,
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
            gain = f"{eager / replayed:.1f} times as fast" if replayed < eager else "slower: see --help"
            row = f"{name:8} {rows:4} {eager:7.0f} us {replayed:7.0f} us"
            print(f"{row}  {'yes' if equal else 'no':5}  {gain}", flush=True)
    print(cache.stats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="small operations gain nothing from more (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    main(options.device)
