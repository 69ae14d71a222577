"""Let a backward draw its forward's random numbers again, as checkpoints do, where each is a CUDA graph.

While PyTorch captures, the state of a generator is a seed and an offset from the state with which a replay begins. A
checkpoint saves such a state in the forward and sets it in the backward, but a replay of the backward begins with
another state. So each replay of the forward keeps the generator's state, and the replay of a backward that sets a saved
one begins with it, and leaves the generator as it was.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graph_cache.backends.saved_states import SavedStates, replaced
from graph_cache.errors import CaptureRefused

OWNERS: tuple[Any, ...] = (torch.cuda, torch.cuda.random)
LAYOUT = struct.Struct("<QQ")  # of a generator's state: seed, offset
STEP = 4  # of offsets


class CudaSavedStates(SavedStates):
    """The states of the device's default generator that one captured forward saves by `torch.cuda.get_rng_state`.

    Other ways of setting a state that another capture has saved are refused by PyTorch: captures have different seeds.
    """

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._seed: int | None = None  # of the forward's capture, once it has saved a state
        self._base: Tensor | None = None  # the generator's state before the last replay of the forward
        self._are_set = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        get_state = torch.cuda.get_rng_state

        def saved(device: Any = "cuda") -> Tensor:
            state = get_state(device)
            if self._captures(device):
                self._seed, _ = _seed_and_offset(state)
            return state

        with replaced(OWNERS, get_rng_state=saved):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        if self._seed is None:
            yield
            return
        set_state = torch.cuda.set_rng_state
        own, _ = _seed_and_offset(self._generator.get_state())
        is_away = False  # whether the last state that was set is one of the forward's

        def restored(state: Tensor, device: Any = "cuda") -> None:
            nonlocal is_away
            if self._captures(device):
                seed, offset = _seed_and_offset(state)
                if is_away := seed == self._seed:
                    self._are_set = True
                    state = _state_of(own, offset)
            set_state(state, device)

        with replaced(OWNERS, set_rng_state=restored):
            yield
        if not self._are_set:
            return
        _, drawn = _seed_and_offset(self._generator.get_state())
        if is_away or drawn:
            raise CaptureRefused(
                "the backward sets a state of the random generator that the forward has saved, and draws other random "
                "numbers too: a graph draws all of its numbers from one state"
            )
        self._generator.set_state(_state_of(own, STEP))  # a graph that draws nothing would keep another graph's state

    @contextmanager
    def eager_backward(self) -> Iterator[None]:
        set_state = torch.cuda.set_rng_state

        def restored(state: Tensor, device: Any = "cuda") -> None:
            seed, offset = _seed_and_offset(state)
            if self._base is not None and seed == self._seed:
                seed, base = _seed_and_offset(self._base)
                state = _state_of(seed, base + offset)
            set_state(state, device)

        with replaced(OWNERS, set_rng_state=restored):
            yield

    def around_forward(self, replay: Callable[[], None]) -> Callable[[], None]:
        if self._seed is None:
            return replay

        def keeping() -> None:
            self._base = self._generator.get_state()
            replay()

        return keeping

    def around_backward(self, replay: Callable[[], None]) -> Callable[[], None]:
        if not self._are_set:
            return replay

        def returning() -> None:
            assert self._base is not None
            state = self._generator.get_state()
            self._generator.set_state(self._base)
            try:
                replay()
            finally:
                self._generator.set_state(state)

        return returning

    def _captures(self, device: Any) -> bool:
        """Whether this thread captures on the generator's device, which `device` names."""
        if not torch.cuda.is_current_stream_capturing():
            return False
        index = device if isinstance(device, int) else torch.device(device).index
        return self._generator.device.index == (torch.cuda.current_device() if index in (None, -1) else index)


def _seed_and_offset(state: Tensor) -> tuple[int, int]:
    """Read a state without an operation, since a capture would see it."""
    return LAYOUT.unpack(ctypes.string_at(state.data_ptr(), LAYOUT.size))


def _state_of(seed: int, offset: int) -> Tensor:
    return torch.frombuffer(bytearray(LAYOUT.pack(seed, offset)), dtype=torch.uint8)
