"""One-shot all-reduce: results, flags after a launch, CUDA graph replays and abandoning."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED  # isort: skip  (before what imports triton)

import torch.distributed as dist
import torch.multiprocessing

from engine.distributed.one_shot_all_reduce import MAX_ROWS, OneShotAllReduce, make_one_shot_all_reduce
from engine.kernels.all_reduce_kernels import all_reduce_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices: torch.cuda.device_count() is {GPUS}")
WIDTH = 4096


@pytest.mark.interpretable
@pytest.mark.parametrize("flag", [1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_kernel_adds_partial_sums_in_rank_order_and_resets_flags(rank, flag):
    """Launch one rank with the flags of its peers set by hand: already signalled (1) or abandoned (2)."""
    world_size, count, block, first = 3, 100, 32, 24
    programs = -(-count // block)
    generator = torch.Generator().manual_seed(0)
    hidden, *partials = (torch.randn(count, generator=generator).to(DEVICE, DTYPE) for _ in range(world_size + 1))
    flags = [torch.zeros(first + programs * world_size, dtype=torch.int32, device=DEVICE) for _ in range(world_size)]
    flags[rank][first:] = flag
    flags[rank][first + rank :: world_size] = 0
    addresses = [
        torch.tensor([tensor.data_ptr() for tensor in tensors], device=DEVICE) for tensors in (partials, flags)
    ]
    wanted = hidden.float()
    for partial in partials:
        wanted += partial.float()
    all_reduce_kernel[(programs,)](
        hidden, *addresses, first, count, RANK=rank, WORLD_SIZE=world_size, BLOCK=block, PDL=False
    )
    assert torch.equal(hidden, wanted.to(DTYPE))
    for peer in range(world_size):
        found = flags[peer][first:].view(programs, world_size).tolist()
        signalled = [1 if peer != rank and index == rank else 0 for index in range(world_size)]
        received = [flag if flag == 2 and index != rank else 0 for index in range(world_size)]
        assert found == [received if peer == rank else signalled] * programs
        assert not flags[peer][:first].any()


def init_rank(rank: int, folder: str) -> tuple[dist.ProcessGroup, torch.device]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/meeting", 2), rank=rank, world_size=2)
    return dist.group.WORLD, device


def check_sums(rank: int, folder: str) -> None:
    """Compare eager and replayed sums of many shapes with the sum that each rank computes by itself."""
    group, device = init_rank(rank, folder)
    one_shot = make_one_shot_all_reduce(group, WIDTH, DTYPE, device)
    assert one_shot is not None
    order = random.Random(5)

    def inputs(step: int, rows: int) -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(step)
        return [torch.randn(rows, WIDTH, dtype=DTYPE, device=device, generator=generator) for _ in range(3)]

    def wanted(step: int, rows: int) -> torch.Tensor:
        hidden, first, second = (tensor.float() for tensor in inputs(step, rows))
        return (hidden + first + second).to(DTYPE)

    for step in range(300):
        rows = order.choice([1, 2, 7, 8, 33, MAX_ROWS])
        hidden, *partials = inputs(step, rows)
        if order.random() < 0.2 and rank == step % 2:
            time.sleep(0.002)
        one_shot.share(rows, step % 2).copy_(partials[rank])
        one_shot.all_reduce_shared(hidden, step % 2)
        assert torch.equal(hidden, wanted(step, rows)), step
    graphs = {}
    for rows in (1, 8, MAX_ROWS):
        statics = [tensor.clone() for tensor in inputs(0, rows)]
        graphs[rows] = torch.cuda.CUDAGraph(), statics
        with torch.cuda.graph(graphs[rows][0], capture_error_mode="thread_local"):
            for buffer_index in (0, 1, 0, 1):
                one_shot.share(rows, buffer_index).copy_(statics[1 + rank])
                one_shot.all_reduce_shared(statics[0], buffer_index)
    for step in range(300):
        rows = order.choice(list(graphs))
        graph, statics = graphs[rows]
        for static, value in zip(statics, inputs(step, rows), strict=True):
            static.copy_(value)
        expected = statics[0].clone()
        for _ in range(4):
            expected = (expected.float() + statics[1].float() + statics[2].float()).to(DTYPE)
        graph.replay()
        assert torch.equal(statics[0], expected), step
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def check_abandon(rank: int, folder: str) -> None:
    group, device = init_rank(rank, folder)
    one_shot = OneShotAllReduce(group, WIDTH, DTYPE, device)
    dist.barrier()
    if rank == 0:  # the peer never signals
        hidden = torch.zeros(4, WIDTH, dtype=DTYPE, device=device)
        for buffer_index in (0, 1, 0):
            one_shot.all_reduce_shared(hidden, buffer_index)
        time.sleep(0.5)
        assert not torch.cuda.current_stream().query()
        one_shot.abandon()
        torch.cuda.synchronize()
        Path(folder, "left").touch()
    dist.barrier()
    dist.destroy_process_group()


@two_gpus
def test_two_gpus_agree_on_every_sum_eager_and_replayed(tmp_path):
    torch.multiprocessing.spawn(check_sums, (str(tmp_path),), nprocs=2)


@two_gpus
def test_abandon_releases_a_rank_that_waits_for_a_dead_peer(tmp_path):
    torch.multiprocessing.spawn(check_abandon, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "left").exists()


@pytest.mark.skipif(INTERPRETED or GPUS == 0, reason="needs a CUDA device")
def test_the_two_partial_sum_buffers_do_not_overlap():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one_shot = OneShotAllReduce(dist.group.WORLD, WIDTH, DTYPE, torch.device("cuda", 0))
        first, second = one_shot.share(MAX_ROWS, 0), one_shot.share(MAX_ROWS, 1)
        assert first.data_ptr() + first.numel() * first.element_size() == second.data_ptr()
        hidden = torch.ones(3, WIDTH, dtype=DTYPE, device="cuda")
        one_shot.share(3, 1).fill_(2)
        one_shot.all_reduce_shared(hidden, 1)
        assert bool((hidden == 3).all())
    finally:
        dist.destroy_process_group()
