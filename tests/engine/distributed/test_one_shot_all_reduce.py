"""Sums through memory that ranks map of each other: what they give, what they leave behind, and their end."""

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
def test_a_rank_that_has_heard_all_others_adds_their_shares_in_order(rank, flag):
    """One rank's launch, the others' done by hand: they have told it already, or nobody is to wait for them."""
    ranks, count, block, first = 3, 100, 32, 24
    programs = -(-count // block)
    generator = torch.Generator().manual_seed(0)
    hidden, *shares = (torch.randn(count, generator=generator).to(DEVICE, DTYPE) for _ in range(ranks + 1))
    flags = [torch.zeros(first + programs * ranks, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]
    flags[rank][first:] = flag
    flags[rank][first + rank :: ranks] = 0
    addresses = [torch.tensor([one.data_ptr() for one in them], device=DEVICE) for them in (shares, flags)]
    wanted = hidden.float()
    for share in shares:
        wanted += share.float()
    all_reduce_kernel[(programs,)](hidden, *addresses, first, count, RANK=rank, RANKS=ranks, BLOCK=block, PDL=False)
    assert torch.equal(hidden, wanted.to(DTYPE))
    for other in range(ranks):
        left = flags[other][first:].view(programs, ranks).tolist()
        told = [1 if other != rank and index == rank else 0 for index in range(ranks)]
        heard = [flag if flag == 2 and index != rank else 0 for index in range(ranks)]
        assert left == [heard if other == rank else told] * programs
        assert not flags[other][:first].any()


def meet(rank: int, folder: str) -> tuple[dist.ProcessGroup, torch.device]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/meeting", 2), rank=rank, world_size=2)
    return dist.group.WORLD, device


def sums(rank: int, folder: str) -> None:
    """Eager and replayed sums of many shapes; each must be what every rank can compute by itself."""
    group, device = meet(rank, folder)
    memory = make_one_shot_all_reduce(group, WIDTH, DTYPE, device)
    assert memory is not None
    order = random.Random(5)

    def inputs(step: int, rows: int) -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(step)
        return [torch.randn(rows, WIDTH, dtype=DTYPE, device=device, generator=generator) for _ in range(3)]

    def wanted(step: int, rows: int) -> torch.Tensor:
        hidden, first, second = (one.float() for one in inputs(step, rows))
        return (hidden + first + second).to(DTYPE)

    for step in range(300):
        rows = order.choice([1, 2, 7, 8, 33, MAX_ROWS])
        hidden, *shares = inputs(step, rows)
        if order.random() < 0.2 and rank == step % 2:
            time.sleep(0.002)
        memory.share(rows, step % 2).copy_(shares[rank])
        memory.all_reduce_shared(hidden, step % 2)
        assert torch.equal(hidden, wanted(step, rows)), step
    graphs = {}
    for rows in (1, 8, MAX_ROWS):
        statics = [one.clone() for one in inputs(0, rows)]
        graphs[rows] = torch.cuda.CUDAGraph(), statics
        with torch.cuda.graph(graphs[rows][0], capture_error_mode="thread_local"):
            for turn in (0, 1, 0, 1):
                memory.share(rows, turn).copy_(statics[1 + rank])
                memory.all_reduce_shared(statics[0], turn)
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


def left_alone(rank: int, folder: str) -> None:
    group, device = meet(rank, folder)
    memory = OneShotAllReduce(group, WIDTH, DTYPE, device)
    dist.barrier()
    if rank == 0:  # the other one never tells
        hidden = torch.zeros(4, WIDTH, dtype=DTYPE, device=device)
        for turn in (0, 1, 0):
            memory.all_reduce_shared(hidden, turn)
        time.sleep(0.5)
        assert not torch.cuda.current_stream().query()
        memory.abandon()
        torch.cuda.synchronize()
        Path(folder, "left").touch()
    dist.barrier()
    dist.destroy_process_group()


@two_gpus
def test_two_gpus_agree_on_every_sum_eager_and_replayed(tmp_path):
    torch.multiprocessing.spawn(sums, (str(tmp_path),), nprocs=2)


@two_gpus
def test_a_rank_that_waits_for_one_that_is_gone_can_be_let_go(tmp_path):
    torch.multiprocessing.spawn(left_alone, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "left").exists()


@pytest.mark.skipif(INTERPRETED or GPUS == 0, reason="needs a CUDA device")
def test_shares_of_two_turns_lie_apart():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        memory = OneShotAllReduce(dist.group.WORLD, WIDTH, DTYPE, torch.device("cuda", 0))
        first, second = memory.share(MAX_ROWS, 0), memory.share(MAX_ROWS, 1)
        assert first.data_ptr() + first.numel() * first.element_size() == second.data_ptr()
        hidden = torch.ones(3, WIDTH, dtype=DTYPE, device="cuda")
        memory.share(3, 1).fill_(2)
        memory.all_reduce_shared(hidden, 1)
        assert bool((hidden == 3).all())
    finally:
        dist.destroy_process_group()
