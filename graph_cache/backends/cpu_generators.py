"""Record that code saves and restores the state of a random generator, as checkpoints and `fork_rng` do.

While a run is recorded, `torch.get_rng_state` and `torch.set_rng_state` are operations on the tape: a replay saves the
state that the generator has then, and restores that one. Only a state that a recorded run has saved can be restored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graph_cache.backends.saved_states import replaced

_library = torch.library.Library("encore_generators", "DEF")
_library.define("save(Generator generator) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("restore(Generator generator, Tensor state) -> ()", tags=(torch.Tag.nondeterministic_seeded,))


def _restore(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state.clone())  # PyTorch reads the storage from its beginning, whatever the offset


_library.impl("save", lambda generator: generator.get_state(), "CompositeExplicitAutograd")
_library.impl("restore", _restore, "CompositeExplicitAutograd")

SAVED = "_encore_saved_state"  # attribute of a tensor that a recorded run has filled with a state
OWNERS: tuple[Any, ...] = (torch, torch.random)


@contextmanager
def recorded_states(generators: Container[object], refuse: Callable[[], None]) -> Iterator[None]:
    """Record in this thread, within the block, that the state of the default generator is saved or restored.

    `generators` are the C++ objects of the registered ones. `refuse` is called before another state is set.
    """
    default, thread = torch.default_generator, threading.get_ident()
    if default._cdata not in generators:  # type: ignore[attr-defined]
        yield
        return
    get_state, set_state = torch.get_rng_state, torch.set_rng_state

    def saved() -> Tensor:
        if threading.get_ident() != thread:
            return get_state()
        state = torch.ops.encore_generators.save(default)
        setattr(state, SAVED, True)
        return state

    def restored(state: Tensor) -> None:
        if threading.get_ident() != thread:
            return set_state(state)
        if not getattr(state, SAVED, False):
            refuse()
            return set_state(state)
        torch.ops.encore_generators.restore(default, state)

    with replaced(OWNERS, get_rng_state=saved, set_rng_state=restored):
        yield
