"""Stand-ins for a module's parameters while it is captured: leaves of their own on the same storage.

Autograd ties a parameter's accumulation to the stream on which it was first used, and a captured backward may not touch
that stream; hooks on parameters belong to the real ones, which see the gradients that a replay returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

MAIN_GRAD = "main_grad"  # Megatron's name for the buffer that a parameter's gradients are added up in
ADDED = "grad_added_to_main_grad"  # its flag by which a backward says that it has added to that buffer itself


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The module's parameters that want gradients, each once, in order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class ParameterAliases:
    """Context in which a module's parameters are replaced; `trainable` lists stand-ins as `trainable(module)` does.

    A stand-in has the attributes of its parameter; what the module's code sets on it stays off the parameter.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._aliases = {id(parameter): _alias(parameter) for parameter in module.parameters()}
        self._replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    @property
    def trainable(self) -> list[Tensor]:
        return [self._aliases[id(parameter)] for parameter in trainable(self._module)]

    def __enter__(self) -> None:
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._replaced.append((module._parameters, name, parameter))
                    module._parameters[name] = self._aliases[id(parameter)]
            _refresh_flat_weights(module)

    def __exit__(self, *exc_info: object) -> None:
        while self._replaced:
            owner, name, parameter = self._replaced.pop()
            owner[name] = parameter
        for module in self._module.modules():
            _refresh_flat_weights(module)


def _alias(parameter: nn.Parameter) -> Tensor:
    alias = parameter.detach()
    if type(parameter) is nn.Parameter:  # compiled code asks for the very type: another would be compiled for anew
        alias = nn.Parameter(alias, requires_grad=parameter.requires_grad)
    vars(alias).update(vars(parameter))
    if hasattr(alias, ADDED):
        setattr(alias, ADDED, False)
    return alias.requires_grad_(parameter.requires_grad)


class MainGrads(Mapping[str, Tensor]):
    """The `main_grad` buffers of a module's parameters, by the parameter's name: those it has at the time of asking."""

    def __init__(self, module: nn.Module):
        self._parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if isinstance(getattr(parameter, MAIN_GRAD, None), Tensor)
        }

    def __getitem__(self, name: str) -> Tensor:
        main_grad = getattr(self._parameters[name], MAIN_GRAD, None)
        if main_grad is None:
            raise KeyError(name)
        return main_grad

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their parameters beside the registry."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
