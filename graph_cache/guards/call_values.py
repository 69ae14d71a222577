"""Walk the arguments and results of ATen calls.

They are tensors, numbers and the like, in tuples, lists and dictionaries. PyTorch's pytrees, which know many more
types, take several times as long for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Types that most arguments have: the walk takes half of the time if they are not asked for what they contain.
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
OTHERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_LEAVES = _TENSORS | OTHERS


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors among the values, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind in OTHERS:
            continue
        if kind in _TENSORS or isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of the value with `change(leaf)` in place of each leaf. Every tuple becomes a plain one."""
    if type(value) in _LEAVES:
        return change(value)
    if isinstance(value, tuple):
        return tuple([change(one) if type(one) in _LEAVES else map_leaves(change, one) for one in value])
    if isinstance(value, list):
        return [change(one) if type(one) in _LEAVES else map_leaves(change, one) for one in value]
    if isinstance(value, dict):
        return {key: map_leaves(change, one) for key, one in value.items()}
    return change(value)
