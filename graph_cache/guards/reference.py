"""Reference state for checking a capture: the inputs before an eager run, and the values that it left.

Also restores that state: warm-up runs and the capture leave static tensors and generators unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graph_cache.guards.audit import StorageAudit
from graph_cache.guards.values import same_bits


class Reference:
    """State of the static tensors and generators before a run, and the tensors' values after it.

    `statics` lists the tensors that the run reads and writes. It may grow during the first run, which allocates
    outputs; new tensors come last and have no earlier state. `audit` has saved what else the runs overwrite.
    """

    def __init__(
        self,
        statics: Callable[[], list[torch.Tensor]],
        generators: Sequence[torch.Generator],
        audit: StorageAudit | None = None,
    ):
        self.generators = tuple(generators)
        self._audit = audit
        self._statics = statics
        self._initial = [tensor.clone() for tensor in statics()]
        self._generator_states = [generator.get_state() for generator in self.generators]
        self._expected: list[torch.Tensor] | None = None

    def statics(self) -> list[torch.Tensor]:
        """Return the tensors that the run reads and writes."""
        return self._statics()

    @property
    def is_known(self) -> bool:
        """Whether the values that a correct run leaves are known."""
        return self._expected is not None

    @property
    def restores_all(self) -> bool:
        """Whether `rewind` restores all memory that the runs write, not only the static tensors."""
        return self._audit is not None

    def rewind(self) -> None:
        """Restore static tensors, other memory that was written, and generators to their state before the run."""
        if self._audit is not None:
            self._audit.undo()
        for tensor, value in zip(self._statics(), self._initial, strict=False):
            tensor.copy_(value)
        for generator, state in zip(self.generators, self._generator_states, strict=True):
            generator.set_state(state)

    def with_noise(self, integers: bool = False) -> Reference:
        """Fill floating-point statics with fixed noise in [0, 1), and return a reference that starts from there.

        With `integers`, fill integer statics with 0 or 1 too, and boolean ones with True or False.
        """
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in self._statics():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=noise, device="cpu"))
                elif integers and not tensor.is_complex():
                    tensor.copy_(torch.randint(2, tensor.shape, generator=noise, device="cpu"))
        return Reference(self._statics, self.generators, self._audit)

    def remember(self) -> None:
        """Record the current values of the static tensors as those that a correct replay leaves."""
        self._expected = [tensor.clone() for tensor in self._statics()]

    def differences(self) -> int:
        """Return how many static tensors differ from the recorded values in any bit (NaN payloads included)."""
        expected = self._expected or []
        return sum(not same_bits(tensor, value) for tensor, value in zip(self._statics(), expected, strict=True))
