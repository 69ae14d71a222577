"""Share weight storage with a trainer: its parameters become views of the engine's storage, matched by HF name.

Afterwards the engine serves what the optimizer writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.errors import WeightUpdateError
from engine.layers.weight_slot import Slot, WeightSlot


class ServedModel(Protocol):
    """A model of the engine."""

    def weight_slots(self) -> Mapping[str, Slot]: ...


def share_weights(trainer: nn.Module, model: ServedModel) -> int:
    """Copy the trainer's values into the engine's storage and make its parameters views of it.

    Returns the number of parameters. All or nothing: raises WeightUpdateError with every problem (names, shapes,
    dtypes, devices, quantised layers) before anything changes. Parameter objects are kept, and so are their optimizer
    states and hooks. Graphs of the trainer that were captured earlier still read the old storage: share first.
    """
    slots = model.weight_slots()
    parameters = dict(trainer.named_parameters())
    problems = [f"{name}: the trainer has no such parameter" for name in slots if name not in parameters]
    problems += [f"{name}: the engine's model has no such weight" for name in parameters if name not in slots]
    targets: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        slot = slots.get(name)
        if slot is None:
            continue
        if type(slot) is not WeightSlot:
            problems.append(
                f"{name}: the engine stores it quantised, or as part of another tensor; serve plain weights without "
                "quantization, or host the Megatron-Core model instead of sharing it"
            )
            continue
        targets[name] = slot.target
        for attribute, found, expected in (
            ("shape", tuple(parameter.shape), slot.shape),
            ("dtype", parameter.dtype, slot.dtype),
            ("device", parameter.device, slot.target.device),
        ):
            if found != expected:
                problems.append(f"{name}: {attribute} {found} in the trainer, {expected} in the engine")
    if problems:
        raise WeightUpdateError("the weights can't be shared: " + "; ".join(problems[:20]))
    with torch.no_grad():
        for name, parameter in parameters.items():
            slots[name].write(parameter)
            parameter.data = targets[name]
    return len(parameters)
