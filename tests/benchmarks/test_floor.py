"""The floor of a prefill."""

from benchmarks.serving.embeddings import floor_ms
from benchmarks.shapes import write_shape
from engine.models import config_from_folder


def test_a_prefill_takes_its_operations_or_the_reading_of_its_weights(tmp_path):
    config = config_from_folder(write_shape("qwen3-0.6b", tmp_path))
    weights = 440_000_000
    operations = 8 * (2 * weights * 512 + 2 * 28 * 16 * 128 * 512**2)
    assert floor_ms(config, weights, 8, 512, (700.0, 3000.0)) == operations / 700 / 1e9
    assert floor_ms(config, weights, 1, 1, (700.0, 3000.0)) == 2 * weights / 3000 / 1e6
