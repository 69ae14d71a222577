"""Values in a form that compares bit for bit, and the log of a run."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import types
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

REGISTRIES = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl", "_flat_weight_refs"}
DEPTH = 6


def bits(value: Any, depth: int = DEPTH) -> Any:
    """Return a value that equals another one exactly if both hold the same types, structure and bits."""
    if isinstance(value, torch.Tensor):
        return _tensor_bits(value)
    if isinstance(value, float):
        return type(value).__name__, value.hex()
    if isinstance(value, (type(None), bool, int, str, bytes, complex, enum.Enum, torch.dtype, torch.device)):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.Generator):
        return "generator", _tensor_bits(value.get_state())
    if depth == 0 or isinstance(value, (type, types.FunctionType, types.MethodType)):
        return type(value).__name__
    if isinstance(value, numpy.ndarray):
        return "ndarray", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, tuple((repr(key), bits(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (list, tuple, collections.deque, array.array, bytearray)):
        return type(value).__name__, tuple(bits(item, depth - 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, tuple(sorted(map(repr, value)))
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        return type(value).__name__, bits(vars(value), depth - 1)
    return type(value).__name__


def _tensor_bits(tensor: torch.Tensor) -> Any:
    if is_lazy(tensor):
        return "tensor without a shape"
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return "tensor", str(tensor.dtype), tuple(tensor.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return parameters, gradients, buffers and Python attributes of a model."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            found[f"parameter {path}.{name}"] = bits(parameter)
            if parameter is not None:
                found[f"gradient {path}.{name}"] = bits(parameter.grad)
                found[f"requires_grad {path}.{name}"] = parameter.requires_grad
        for name, buffer in module._buffers.items():
            found[f"buffer {path}.{name}"] = bits(buffer)
        for name, value in vars(module).items():
            if name not in REGISTRIES and not name.startswith("_torchdynamo"):  # ids of the compiler
                found[f"attribute {path}.{name}"] = bits(value)
    return found


class Log:
    """Labelled values in the order in which a run produced them."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []

    def add(self, label: str, value: Any) -> None:
        self.entries.append((label, value))

    def add_all(self, label: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.entries.append((f"{label}: {name}", value))


def first_difference(wanted: Log, found: Log) -> str | None:
    """Return the label of the first entry that differs, or None."""
    for (label, value), (other_label, other) in zip(wanted.entries, found.entries, strict=False):
        if label != other_label:
            return f"{label} against {other_label}"
        if value != other:
            return f"{label}{_describe(value, other)}"
    longer = max(wanted.entries, found.entries, key=len)
    shorter = min(len(wanted.entries), len(found.entries))
    return None if len(longer) == shorter else f"only one run has {longer[shorter][0]}"


def _describe(value: Any, other: Any) -> str:
    def shown(one: Any) -> str:
        if isinstance(one, tuple) and one and one[0] == "tensor":
            dtype = getattr(torch, one[1].removeprefix("torch."))
            numbers = torch.frombuffer(bytearray(one[3]), dtype=dtype).tolist()[:4] if one[3] else []
            return f"{one[1]} {list(one[2])} {numbers}"
        return str(one)[:80]

    return f" (eager {shown(value)}; captured {shown(other)})"
