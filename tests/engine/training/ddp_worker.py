"""One rank of a DistributedDataParallel job for test_ddp.py: compares eager and graphed training.

`python ddp_worker.py RANK WORLD FILE WHAT [cuda]`; prints "same" and the number of replays, or fails. WHAT is attached:
`layers` of the wrapped model, the `default` of the wrapper, or the `wrapper` itself, which is refused.
"""

from __future__ import annotations

import contextlib
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine import Engine, EngineConfig

WIDTH = 64


class Net(nn.Module):
    """Residual blocks with dropout, with enough parameters for several gradient buckets."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(model: DistributedDataParallel, rank: int, device: str) -> list[torch.Tensor]:
    """Train 8 steps of two microbatches, the first under no_sync; return every loss and gradient."""
    torch.manual_seed(7 + rank)
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for _ in range(8):
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                x = torch.randn(4, WIDTH, generator=generator).to(device)
                loss = model(x).pow(2).mean()
                loss.backward()
                seen.append(loss.detach().clone())
        seen += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return seen


def main() -> None:
    rank, world, file, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    on_gpu = sys.argv[5:] == ["cuda"]
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Net().to(device)
    options = {"bucket_cap_mb": 0.1, "device_ids": [rank] if on_gpu else None}
    eager = DistributedDataParallel(copy.deepcopy(model), **options)
    graphed = DistributedDataParallel(copy.deepcopy(model), **options)
    engine = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2))
    layers = [f"module.layers.{index}" for index in range(3)]
    engine.attach(graphed, modules={"layers": layers, "default": None, "wrapper": [""]}[what])
    graphed_values, eager_values = train(graphed, rank, device), train(eager, rank, device)
    wrong = [
        index
        for index, (one, other) in enumerate(zip(graphed_values, eager_values, strict=True))
        if not torch.equal(one, other)
    ]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(graphed_values)} values differ, the first at {wrong[0]}")
    if what == "wrapper":
        assert "contains DistributedDataParallel" in engine.graphs()[0]["failure"]
    replays = sum(row["replays"] for row in engine.graphs())
    engine.detach()
    dist.destroy_process_group()
    print("same", replays)


if __name__ == "__main__":
    main()
