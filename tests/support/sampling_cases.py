"""Shared code of the sampling kernel tests: logits, random numbers, and the tolerance against torch's samples."""

from __future__ import annotations

import torch

from engine.protocol.request import mix64
from engine.sampling import ops as draw
from tests.support.kernels import DEVICE

LEFT = -7  # initial value of rows that are not sampled


def random_logits(rows, vocab_size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).to(DEVICE, dtype)


def uniforms(rows, seed):
    """Return a random number per row: float64 [rows]."""
    return draw.uniform(torch.tensor([mix64(seed)]), torch.arange(rows))


def scaled_logits(logits, temperatures):
    """Return the sampler's scaled logits, float32 [rows, V], with row maximum 0."""
    x = logits.float()
    return (x - x.amax(1, keepdim=True)) / temperatures.float().unsqueeze(1)


def assert_replays_follow(draw, drawn, logits, numbers_of):
    """Assert that replays of a captured `draw` match `drawn` after logits and random numbers change."""
    (rows, vocab_size), numbers = logits.shape, numbers_of(len(logits))
    token_ids = drawn(logits, numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        draw(logits, *numbers.unbind(1), token_ids)
    for seed in range(3):
        logits.copy_(random_logits(rows, vocab_size, logits.dtype, seed))
        numbers.copy_(numbers_of(rows, seed=seed))
        graph.replay()
        assert token_ids.equal(drawn(logits, numbers))


def assert_nearly_all_equal(found, wanted):
    """Assert that at least 99.9% are equal. exp may differ from torch's in its last bit, which can change a sample."""
    assert (found == wanted).sum() >= 0.999 * len(wanted)
