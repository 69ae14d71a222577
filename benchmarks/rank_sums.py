"""A sum over two GPUs inside a graph: NCCL, PyTorch's one-shot sum of symmetric memory, and ours, µs each.

`python -m benchmarks.rank_sums` on two GPUs of one host. Each graph holds 36 linear layers of half an 8B model's width
(4,096 outputs of 2,048 inputs, bf16), each followed by the sum; the figure is what a sum adds to a layer. Leave NVLink
multicast off where others share the host: TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from engine.distributed.one_shot_all_reduce import OneShotAllReduce
from engine.kernels.small_batch_gemm import Scratch, linear

RANKS, WIDTH, INPUTS, LAYERS, REPLAYS = 2, 4096, 2048, 36, 20
DTYPE = torch.bfloat16


def ways(memory: OneShotAllReduce, layer: Callable[..., None]) -> dict[str, Callable[[Tensor], None]]:
    """By name, what adds LAYERS products to `hidden`, each the sum of all ranks'."""
    group = dist.group.WORLD

    def alone(hidden: Tensor) -> None:
        for index in range(LAYERS):
            layer(index, hidden, add=True)

    def nccl(hidden: Tensor) -> None:
        for index in range(LAYERS):
            layer(index, hidden, add=dist.get_rank() == 0)
            dist.all_reduce(hidden)

    def one_shot(hidden: Tensor) -> None:
        for index in range(LAYERS):
            share = memory.share(len(hidden), index % 2)
            layer(index, share, add=False)
            hidden.add_(torch.ops.symm_mem.one_shot_all_reduce(share, "sum", group.group_name))

    def ours(hidden: Tensor) -> None:
        for index in range(LAYERS):
            layer(index, memory.share(len(hidden), index % 2), add=False)
            memory.all_reduce_shared(hidden, index % 2)

    return {"alone": alone, "nccl": nccl, "one_shot": one_shot, "ours": ours}


def micros(fn: Callable[[Tensor], None], hidden: Tensor) -> float:
    """µs of a layer and its sum, as a median of five windows of replays."""
    fn(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fn(hidden)
    windows = []
    for _ in range(6):  # the first warms up
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        windows.append((time.perf_counter() - started) / REPLAYS / LAYERS * 1e6)
    return statistics.median(windows[1:])


@torch.inference_mode()
def rank_main(rank: int, folder: str, sizes: list[int]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/meeting", RANKS), rank=rank, world_size=RANKS)
    memory = OneShotAllReduce(dist.group.WORLD, WIDTH, DTYPE, device)
    weights = [torch.randn(WIDTH, INPUTS, device=device, dtype=DTYPE) * 0.01 for _ in range(LAYERS)]
    for rows in sizes:
        x = torch.randn(rows, INPUTS, device=device, dtype=DTYPE)
        scratch = Scratch(rows, rows, WIDTH, WIDTH, 32768, DTYPE, device)

        def layer(index: int, out: Tensor, add: bool, x: Tensor = x, scratch: Scratch = scratch) -> None:
            linear(x, weights[index], out, scratch, add=add)

        found = {
            name: micros(fn, torch.zeros(rows, WIDTH, device=device, dtype=DTYPE))
            for name, fn in ways(memory, layer).items()
        }
        added = {name: round(time - found["alone"], 2) for name, time in found.items() if name != "alone"}
        if rank == 0:
            print(json.dumps({"rows": rows, "layer_alone": round(found["alone"], 2), "added": added}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,32,64,128")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, [int(rows) for rows in args.rows.split(",")]), nprocs=RANKS)


if __name__ == "__main__":
    main()
