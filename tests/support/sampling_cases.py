"""Helpers for tests of the sampling kernels: logits, random numbers, and the comparison with torch."""

from __future__ import annotations

import torch

from engine.protocol.request import mix64
from engine.sampling import ops
from tests.support.kernels import DEVICE

UNTOUCHED = -7  # token of a row that was not sampled


def random_logits(rows, vocab_size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).to(DEVICE, dtype)


def uniforms(rows, seed):
    """Random numbers in [0, 1), float64 [rows]."""
    return ops.uniform(torch.tensor([mix64(seed)]), torch.arange(rows))


def scaled_logits(logits, temperatures):
    """z float32 [rows, V] as in the sampler, row maximum 0."""
    x = logits.float()
    return (x - x.amax(1, keepdim=True)) / temperatures.float().unsqueeze(1)


def assert_replays_follow(launch, sample, logits, params_of):
    """Check that replays of a captured `launch` equal `sample` after logits and parameters changed."""
    (rows, vocab_size), row_params = logits.shape, params_of(len(logits))
    token_ids = sample(logits, row_params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch(logits, *row_params.unbind(1), token_ids)
    for seed in range(3):
        logits.copy_(random_logits(rows, vocab_size, logits.dtype, seed))
        row_params.copy_(params_of(rows, seed=seed))
        graph.replay()
        assert token_ids.equal(sample(logits, row_params))


def assert_nearly_all_equal(found, wanted):
    """Allow for exp to differ from torch in its last bit, which changes one token in millions."""
    assert (found == wanted).sum() >= 0.999 * len(wanted)
