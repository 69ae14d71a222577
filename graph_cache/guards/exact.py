"""Compute operations in float64, so that kernels of different shapes give the same results.

A matrix product of three rows rounds differently than one of four. Computed in float64 and rounded to the dtype of each
operation, both agree but for rare ties, and what differs then depends on the shape itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map

from graph_cache.guards.dispatch_mode import DispatchMode

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
# Kernels of a library that choose their algorithm by dtype: float64 has other algorithms.
OWN_ALGORITHMS = ("aten::_cudnn_rnn", "aten::_cudnn_init")
ULPS = 4  # by which results may differ after a tie


class Exact(DispatchMode):
    """Dispatch mode that computes floating-point operations in float64 and rounds their results as usual.

    Views, operations in place and random numbers are computed as usual. `is_complete`: no other operation was.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.is_complete = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator) or func._schema.name.startswith(OWN_ALGORITHMS):
            self.is_complete = False
            return result
        aliases = func._schema.is_mutable or any(value.alias_info is not None for value in func._schema.returns)
        if aliases or torch.Tag.nondeterministic_seeded in func.tags:
            return result
        try:
            wide = func(*tree_map(_wider, args), **tree_map(_wider, kwargs))
        except Exception:  # of any kind: there is no such kernel
            self.is_complete = False
            return result
        return tree_map(_rounded, result, wide)


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two results of runs in an `Exact` that is complete are the same, but for ties."""
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if torch.equal(one, other) or not one.numel():
        return True
    eps = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
    one, other = one.double(), other.double()
    difference = (one - other).abs().nan_to_num(nan=torch.inf)
    difference[(one == other) | (one.isnan() & other.isnan())] = 0
    largest = one.where(one.isfinite(), 0).abs().max()
    return bool((difference <= ULPS * eps * largest).all())


def _wider(value: Any) -> Any:
    return value.to(WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER else value


def _rounded(result: Any, wide: Any) -> Any:
    if isinstance(result, Tensor) and result.dtype in WIDER and wide.shape == result.shape:
        return torch.empty_like(result).copy_(wide)
    return result
