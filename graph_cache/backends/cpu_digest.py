"""Digest of a recorded run: its operations in order, with memory numbered by first use."""

from __future__ import annotations

from typing import Any

import torch

from graph_cache.backends.cpu_tape import Ref, Tape
from graph_cache.utils.digest import Digest, Numbers, hashed

PLAIN = frozenset((type(None), bool, int, float, complex, str))


def digest_of(tape: Tape) -> Digest:
    """Return the digest of a tape. Values of host tensors and of constants that it reads are not part of it."""
    numbers = Numbers()
    calls = [
        (op.func.name(), _spelled(op.args, numbers), _spelled(op.kwargs, numbers), _spelled(op.outs, numbers), op.grad)
        for op in tape.ops
    ]
    return Digest(hashed(calls), len(calls))


def _spelled(value: Any, numbers: Numbers) -> Any:
    """Return a value in a form of which the text is equal in every process."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is Ref:
        geometry = (value.dtype, value.size, value.stride, value.offset, value.conjugated, value.negated)
        return ("buffer", value.buffer, *geometry)
    if isinstance(value, (list, tuple)):
        return [_spelled(one, numbers) for one in value]
    if isinstance(value, dict):
        return [(key, _spelled(one, numbers)) for key, one in value.items()]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return "tensor", value.layout, value.dtype, tuple(value.shape)
        storage = numbers.of(value.untyped_storage()._cdata)
        return "tensor", storage, value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    if isinstance(value, torch.Generator):
        return "generator"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return type(value).__name__
