"""DistributedDataParallel over graphed modules: two processes, buckets, no_sync, equal to eager bit for bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import outputs_of

ROOT = Path(__file__).parents[2]


def run_ranks(tmp_path, *extra):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    worker = str(Path(__file__).with_name("ddp_worker.py"))
    commands = [[sys.executable, worker, str(rank), "2", str(tmp_path / "rendezvous"), *extra] for rank in range(2)]
    for output in outputs_of(commands, 120, env=environment):
        # 16 forwards of 3 layers; a microbatch is a round, and two of those warm up.
        assert output.split() == ["same", "42"]


def test_two_processes_train_as_they_would_eager(tmp_path):
    run_ranks(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_they_would_eager(tmp_path):
    run_ranks(tmp_path, "cuda")
