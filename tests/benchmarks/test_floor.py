"""The floor of a prefill, and the timeline of a step."""

from dataclasses import replace

import torch

from benchmarks.serving.embeddings import floor_ms
from benchmarks.shapes import write_shape
from benchmarks.step.decode_step import timeline
from benchmarks.step.prefill_step import operations
from engine.models import config_from_folder
from engine.models.decoder import Decoder


def test_a_prefill_takes_its_operations_or_the_reading_of_its_weights(tmp_path):
    config = config_from_folder(write_shape("qwen3-0.6b", tmp_path))
    weights = 440_000_000
    operations = 8 * (2 * weights * 512 + 2 * 28 * 16 * 128 * 512**2)
    assert floor_ms(config, weights, 8, 512, (700.0, 3000.0)) == operations / 700 / 1e9
    assert floor_ms(config, weights, 1, 1, (700.0, 3000.0)) == 2 * weights / 3000 / 1e6


def test_windows_bound_the_operations_of_attention(tmp_path):
    config = config_from_folder(write_shape("tiny", tmp_path))
    full, windowed = (
        operations(Decoder(replace(config, windows=windows), torch.float32, "cpu", max_len=64), 40)
        for windows in ((), (16, None, 16, None))
    )
    unseen = 24 * 25 // 2  # pairs of a query and a key before its window
    assert full - windowed == 2 * 4 * unseen * config.num_heads * config.head_dim


def test_a_launch_takes_the_time_from_the_end_of_the_one_before_in_the_median_layer():
    kernels = ["embed", *["qkv", "decode_kernel", "down"] * 3, "head"]
    durations = [1, 2, 3, 4, 2, 9, 5, 2, 3, 9, 7]
    ends = [sum(durations[: index + 1]) for index in range(len(durations))]
    found = [(name, end - 10.0, end) for name, end in zip(kernels, ends, strict=True)]  # all start early
    assert timeline(found) == [("decode_kernel", 6), ("down", 4.5), ("qkv", 2), ("after the layers: head", 7)]
