"""DistributedDataParallel over graphed modules: two processes with buckets and no_sync equal eager bit for bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import outputs_of

ROOT = Path(__file__).parents[3]


def outputs_of_two(worker, tmp_path, *extra):
    folders = os.pathsep.join([str(ROOT), *sys.path])
    environment = dict(os.environ, PYTHONPATH=folders, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    path = str(Path(__file__).with_name(worker))
    commands = [[sys.executable, path, str(rank), "2", str(tmp_path / "rendezvous"), *extra] for rank in range(2)]
    return outputs_of(commands, 120, env=environment)


# 16 forwards of 3 layers or one model; each microbatch is a step, and the first two warm up.
REPLAYS = {"layers": 42, "default": 14, "wrapper": 0}


def run_ranks(tmp_path, what, *extra):
    for output in outputs_of_two("ddp_worker.py", tmp_path, what, *extra):
        assert output.split() == ["same", str(REPLAYS[what])]


@pytest.mark.parametrize("what", REPLAYS)
def test_two_processes_train_like_eager(tmp_path, what):
    run_ranks(tmp_path, what)


def test_a_collective_is_rejected_by_a_cpu_graph_and_runs_eager(tmp_path):
    assert [output.split() for output in outputs_of_two("all_reduce_worker.py", tmp_path)] == [["0", "1", "True"]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_like_eager(tmp_path):
    run_ranks(tmp_path, "layers", "cuda")
