"""Seeds of random generators during a recording."""

from __future__ import annotations

import pytest
import torch

from graph_cache import CaptureRefused
from graph_cache.backends.cpu import CpuBackend
from graph_cache.backends.cpu_seeds import marked

SEEDS = {
    "the same seed": lambda generator: generator.manual_seed(7),
    "another seed": lambda generator: generator.manual_seed(8),
    "a state from before": lambda generator: generator.set_state(torch.Generator().manual_seed(7).get_state()),
}


def test_a_mark_changes_no_number_and_is_removed():
    generator, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    with marked([generator]):
        assert generator.initial_seed() != 7
        found = torch.randn(9, generator=generator)
    assert torch.equal(found, torch.randn(9, generator=other))
    assert generator.initial_seed() == 7 and torch.equal(generator.get_state(), other.get_state())


def test_a_seed_within_a_mark_stays():
    generator = torch.Generator().manual_seed(7)
    with marked([generator]):
        generator.manual_seed(5)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state())


@pytest.mark.parametrize("draws", (True, False), ids=("drawn", "not_drawn"))
@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_seeds_are_refused(seed, draws):
    generator, out, backend = torch.Generator().manual_seed(7), torch.zeros(4), CpuBackend()

    def run() -> None:
        seed(generator)
        out.add_(torch.rand(4, generator=generator) if draws else 1)

    with pytest.raises(CaptureRefused, match="state of a random generator is set"):
        backend.capture(run, backend.new_memory(), [generator], None)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())
    assert torch.equal(out, torch.zeros(4))


def test_a_state_that_the_run_saved_is_restored():
    generator, out, backend = torch.default_generator, torch.zeros(4), CpuBackend()
    before = generator.get_state()

    def run() -> None:
        with torch.random.fork_rng(devices=()):
            out.copy_(torch.rand(4))

    try:
        graph = backend.capture(run, backend.new_memory(), [generator], None)
        assert torch.equal(generator.get_state(), before)
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first) and torch.equal(generator.get_state(), before)
    finally:
        generator.set_state(before)
