"""Megatron on two GPUs with pipeline and data parallelism: graphs equal eager, and the processes exit."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.ranks import outputs_of

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
LACKING = [name for name in ("transformer_engine", "megatron") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices: torch.cuda.device_count() is {GPUS}"),
    pytest.mark.skipif(bool(LACKING), reason=f"needs {' and '.join(LACKING)}"),
]
WORKER = Path(__file__).with_name("ranks_worker.py")


def trained(layout, folder):
    """Run both ranks and return their results. Both must exit in time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(WORKER.parents[4]), *sys.path])}
    commands = [[sys.executable, str(WORKER), str(rank), str(folder), layout] for rank in range(2)]
    found = list(map(json.loads, outputs_of(commands, 180, env=environment)))
    ended = time.monotonic()
    assert all(ended - one["done_at"] < 10 for one in found)
    for one in found:
        assert one["same"] == [True] * 8
        assert all(row["graphs"] >= 1 and row["replays"] > 0 and row["failed"] == 0 for row in one["rows"]), one["rows"]
    return found


def test_virtual_stages_with_overlapped_reduction_train_as_eager_and_exit(tmp_path):
    found = trained("pipeline", tmp_path)
    assert [one["losses"] for one in found] == [0, 4]  # one per microbatch, on the last stage
    assert [len(one["rows"]) for one in found] == [4, 4]  # two layers of each chunk


def test_replicas_with_overlapped_reduction_and_gathering_train_as_eager_and_exit(tmp_path):
    found = trained("data", tmp_path)
    assert [one["losses"] for one in found] == [4, 4]
    assert [len(one["rows"]) for one in found] == [8, 8]
