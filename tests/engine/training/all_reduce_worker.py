"""One of two processes for test_ddp.py that all-reduce gradients inside a captured iteration.

Prints the number of graphs, the failed captures, and whether the failure names the collective.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from engine import Engine, EngineConfig


def main() -> None:
    rank, ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    engine = Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration"))

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    run = engine.capture_iteration(step)
    for index in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + rank))
        found = []
        for run_step in (run, step):
            run_step(x)
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(map(torch.equal, *found)), f"step {index}"
    row = engine.graphs()[0]
    print(row["graphs"], row["failed"], "collective between processes" in row["failure"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
