"""Aliases of a module's parameters during a capture: separate autograd leaves on the same storage.

Autograd ties a parameter's grad accumulator to the stream of its first use, and a captured backward must not touch that
stream. Hooks stay on the real parameters, which receive the gradients that a replay returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

MAIN_GRAD = "main_grad"  # Megatron's attribute for the buffer in which a parameter's gradients accumulate
ADDED = "grad_added_to_main_grad"  # Megatron's flag: the backward has added to main_grad itself


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, without duplicates, in order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class ParameterAliases:
    """Context that replaces a module's parameters by aliases; `trainable` lists the aliases of `trainable(module)`.

    An alias has a copy of its parameter's attributes. Attributes that the module sets on it don't reach the parameter.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._aliases = {id(parameter): _alias(parameter) for parameter in module.parameters()}
        self._replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._flat_weights: list[tuple[nn.RNNBase, list[Any], list[Any]]] = []

    @property
    def trainable(self) -> list[Tensor]:
        return [self._aliases[id(parameter)] for parameter in trainable(self._module)]

    def __enter__(self) -> None:
        try:
            self._replace()
        except BaseException:
            self.__exit__()
            raise

    def _replace(self) -> None:
        for module in self._module.modules():
            registry: dict[str, Any] = module._parameters
            for name, parameter in registry.items():
                if parameter is not None:
                    self._replaced.append((registry, name, parameter))
                    registry[name] = self._aliases[id(parameter)]
            if isinstance(module, nn.RNNBase):
                self._replace_flat_weights(module)
            for value in vars(module).values():
                self._replace_attributes(value)

    def _replace_attributes(self, value: Any) -> None:
        """Replace parameters among the attributes of a module's helper object, as Megatron's Mamba mixer has one."""
        attributes = None if isinstance(value, (nn.Module, Tensor, type)) else getattr(value, "__dict__", None)
        if type(attributes) is not dict:
            return
        for name, parameter in attributes.items():
            if isinstance(parameter, nn.Parameter) and id(parameter) in self._aliases:
                self._replaced.append((attributes, name, parameter))
                attributes[name] = self._aliases[id(parameter)]

    def __exit__(self, *exc_info: object) -> None:
        while self._replaced:
            owner, name, parameter = self._replaced.pop()
            owner[name] = parameter
        while self._flat_weights:
            recurrent, weights, references = self._flat_weights.pop()
            recurrent._flat_weights[:], recurrent._flat_weight_refs[:] = weights, references

    def _replace_flat_weights(self, module: nn.RNNBase) -> None:
        """Replace parameters in the second list that recurrent modules keep beside the registry, and references to it.

        A forward that finds other parameters than those referenced lists them anew and flattens them, which moves them
        on a GPU. The list itself is watched. Other tensors in it, which a user put there, stay until then.
        """
        weights, references = list(module._flat_weights), list(module._flat_weight_refs)
        self._flat_weights.append((module, weights, references))
        registered = [getattr(module, name, None) for name in module._flat_weights_names]  # aliases by now
        referenced = [None if reference is None else self._alias_of(reference()) for reference in references]
        is_outdated = any(
            weight is not None and reference is not None and found is not weight
            for weight, reference, found in zip(registered, references, referenced, strict=True)
        )
        current = [self._alias_of(weight) for weight in weights]
        if is_outdated:
            current = referenced = registered
        module._flat_weights[:] = current
        module._flat_weight_refs[:] = [None if target is None else weakref.ref(target) for target in referenced]

    def _alias_of(self, value: Any) -> Any:
        return self._aliases.get(id(value), value)


def _alias(parameter: nn.Parameter) -> Tensor:
    alias = parameter.data  # with its own version counter: an optimizer's step does not invalidate saved aliases
    if type(parameter) is nn.Parameter:  # compiled code guards on the exact type: another would recompile
        alias = nn.Parameter(alias, requires_grad=parameter.requires_grad)
    vars(alias).update(vars(parameter))
    if hasattr(alias, ADDED):
        setattr(alias, ADDED, False)
    return alias.requires_grad_(parameter.requires_grad)


class MainGrads(Mapping[str, Tensor]):
    """The `main_grad` buffers of a module's parameters, by parameter name, looked up on each access."""

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
