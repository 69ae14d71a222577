"""Stand-ins for a module's parameters while it is captured: leaves of their own on the same storage.

Autograd ties a parameter's accumulation to the stream on which it was first used, and a captured backward may not touch
that stream; hooks on parameters belong to the real ones, which see the gradients that a replay returns.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The module's parameters that want gradients, each once, in order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class StandIns:
    """Context in which a module's parameters are replaced; `trainable` lists stand-ins as `trainable(module)` does."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._of: dict[int, Tensor] = {
            id(parameter): parameter.detach().requires_grad_(parameter.requires_grad)
            for parameter in module.parameters()
        }
        self._kept: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    @property
    def trainable(self) -> list[Tensor]:
        return [self._of[id(parameter)] for parameter in trainable(self._module)]

    def __enter__(self) -> None:
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._kept.append((module._parameters, name, parameter))
                    module._parameters[name] = self._of[id(parameter)]
            _renew_flat_weights(module)

    def __exit__(self, *exc_info: object) -> None:
        while self._kept:
            owner, name, parameter = self._kept.pop()
            owner[name] = parameter
        for module in self._module.modules():
            _renew_flat_weights(module)


def _renew_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their parameters beside the registry."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
