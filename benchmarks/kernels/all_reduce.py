"""All-reduce over two GPUs inside a CUDA graph: NCCL, PyTorch's symmetric memory and our kernel, µs each.

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 python -m benchmarks kernels.all_reduce --json FILE

Two GPUs of one host. Each graph holds 36 linear layers of half an 8B model's width (4,096 outputs of 2,048 inputs,
bf16), each followed by the all-reduce of its output. A figure is what the all-reduce adds to a layer. The variables
turn NVLink multicast off, which hosts that are shared may not allow.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks import harness
from benchmarks.timing import capture

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.distributed.one_shot_all_reduce import OneShotAllReduce
    from engine.kernels.linear_weight import LinearWeight
    from engine.kernels.small_batch_gemm import Scratch, linear

NEEDS = "2 GPUs"
RANKS, WIDTH, INPUTS, LAYERS, REPLAYS = 2, 4096, 2048, 36, 20
DTYPE = torch.bfloat16


def ways(memory: OneShotAllReduce, layer: Callable[..., None]) -> dict[str, Callable[[Tensor], None]]:
    """By name, functions that run all layers, each adding the sum of all ranks' products to `hidden`."""
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
    graph = capture(lambda: fn(hidden), error_mode="thread_local")  # NCCL's watchdog thread may call CUDA meanwhile
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
    """Measure all sizes in one of the processes; rank 0 leaves the rows in results.json of the folder."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/meeting", RANKS), rank=rank, world_size=RANKS)
    memory = OneShotAllReduce(dist.group.WORLD, WIDTH, DTYPE, device)
    results = []
    weights = [torch.randn(WIDTH, INPUTS, device=device, dtype=DTYPE) * 0.01 for _ in range(LAYERS)]
    for rows in sizes:
        x = torch.randn(rows, INPUTS, device=device, dtype=DTYPE)
        scratch = Scratch(rows, rows, WIDTH, WIDTH, 32768, DTYPE, device)

        def layer(index: int, out: Tensor, add: bool, x: Tensor = x, scratch: Scratch = scratch) -> None:
            linear(x, LinearWeight.plain(weights[index]), out, scratch, add=add)

        found = {
            name: micros(fn, torch.zeros(rows, WIDTH, device=device, dtype=DTYPE))
            for name, fn in ways(memory, layer).items()
        }
        added = {name: round(time - found["alone"], 2) for name, time in found.items() if name != "alone"}
        if rank == 0:
            results.append({"rows": rows, "layer_us": round(found["alone"], 2), "added_us": added})
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--rows", type=harness.counts, default=[1, 8, 32, 64, 128])
    args = parser.parse_args(argv)
    harness.require_gpus(parser, RANKS)
    report = harness.Report(__spec__.name, args, argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, args.rows), nprocs=RANKS)
        for row in json.loads(Path(folder, "results.json").read_text()):
            report.add(row)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
