"""The eager run that a capture is compared with: the state before it, and what it left behind.

Owns taking back: warm-up runs and the capture itself leave static tensors and generators as they found them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per element -> what to compare them as


class Reference:
    """State of the static tensors and generators before a run, and their values after it.

    `statics` lists the tensors that the run reads and writes; it may grow during the first run (outputs are allocated
    then), in which case the newcomers come last and have no earlier state.
    """

    def __init__(self, statics: Callable[[], list[torch.Tensor]], generators: Sequence[torch.Generator]):
        self.generators = tuple(generators)
        self._statics = statics
        self._initial = [tensor.clone() for tensor in statics()]
        self._generator_states = [generator.get_state() for generator in self.generators]
        self._expected: list[torch.Tensor] = []

    def rewind(self) -> None:
        """Put static tensors and generators back to where they were."""
        for tensor, value in zip(self._statics(), self._initial, strict=False):
            tensor.copy_(value)
        for generator, state in zip(self.generators, self._generator_states, strict=True):
            generator.set_state(state)

    def with_noise(self) -> Reference:
        """A reference that starts from other values: floating point statics get noise from 0 to 1, always the same."""
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in self._statics():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=noise))
        return Reference(self._statics, self.generators)

    def remember(self) -> None:
        """Take the static tensors' present values as the ones that a faithful replay leaves behind."""
        self._expected = [tensor.clone() for tensor in self._statics()]

    def differences(self) -> int:
        """How many static tensors differ from the remembered ones in any bit (NaN payloads included)."""
        return sum(not same_bits(tensor, value) for tensor, value in zip(self._statics(), self._expected, strict=True))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bytes, NaN payloads and signs of zero included."""
    return torch.equal(_raw(one), _raw(other))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    # One element may keep any stride, which a view as another type doesn't take.
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(INTEGERS.get(flat.itemsize, torch.uint8))
