"""Layers of transformers in training graphs on a GPU in bf16: experts and Mamba-2 hybrids against eager."""

from __future__ import annotations

import os

import pytest
import torch

from engine import Engine, EngineConfig
from tests.engine.training.test_transformers import (
    bamba,
    build,
    ids_of,
    layers_of,
    mixtral,
    nemotron_h,
    qwen3_moe,
    train,
    zamba2,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
STEPS = 10


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def loss_of(model, step):
    ids = ids_of(step).cuda()
    return model(input_ids=ids, labels=ids).loss


def with_router_loss(model, step):
    ids = ids_of(step).cuda()
    return model(input_ids=ids, labels=ids, output_router_logits=True).loss


def check(make, each):
    expected, model = train(build(make).cuda().bfloat16(), each), build(make).cuda().bfloat16()
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
        engine.attach(model, modules=layers_of(model))
        torch.testing.assert_close(train(model, each), expected, rtol=0, atol=0)
        for row in engine.graphs():
            assert (row["replays"], row["failed"]) == (STEPS - 2, 0), row
            assert row["eager"] == {"warming_up": 2}


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.parametrize("each", [loss_of, with_router_loss])
def test_experts_replay_and_equal_eager_bit_for_bit(make, each):
    check(make, each)


@pytest.mark.parametrize("make", [bamba, zamba2, nemotron_h])
def test_mamba_2_hybrids_replay_and_equal_eager_bit_for_bit(make):
    """With transformers' torch path; its kernels need mamba-ssm and causal-conv1d."""
    check(make, loss_of)
