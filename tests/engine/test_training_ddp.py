"""DistributedDataParallel over graphed modules: two processes, buckets, no_sync, equal to eager bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run_ranks(tmp_path, *extra):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    ranks = [
        subprocess.Popen([sys.executable, str(Path(__file__).with_name("ddp_worker.py")), str(rank), "2",
                          str(tmp_path / "rendezvous"), *extra],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (output, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors[-2000:]
        # 16 forwards of 3 layers; a microbatch is a round, and two of those warm up.
        assert output.split() == ["same", "42"]


def test_two_processes_train_as_they_would_eager(tmp_path):
    run_ranks(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_they_would_eager(tmp_path):
    run_ranks(tmp_path, "cuda")
