"""Find seeds that code gives to random generators during a recording, also those that a generator has already.

A replay begins where the last one ended, and not at the seed again. The state of the generator shows this only if it
differed before. So the generator gets a mark: another initial seed, which no number depends on. A seed removes it, and
a state that the run itself has saved, as `fork_rng` and checkpoints do, holds it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from graph_cache.guards.namespaces import set_state, state_of

_SEED = slice(0, 8)  # the bytes of a generator's state that hold its initial seed


@contextmanager
def marked(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Mark generators of the host within the block."""
    mark = os.urandom(8)
    before = [(generator, state_of(generator)[_SEED]) for generator in generators]
    for generator, _ in before:
        _set_seed(generator, mark)
    try:
        yield
    finally:
        for generator, seed in before:
            if state_of(generator)[_SEED] == mark:
                _set_seed(generator, seed)


def _set_seed(generator: torch.Generator, seed: bytes) -> None:
    """Set the initial seed that a generator tells, and no other part of its state."""
    set_state(generator, seed + state_of(generator)[_SEED.stop :])
