"""Decompose composite operations under a dispatch mode as eager does.

Under inference mode a dispatch mode sees composite operations whole, with autograd's dispatch keys excluded. The views
inside then lose `requires_grad`, by which some composite kernels choose how they compute: `linear` of a transposed
input folds its batch dimension only for a weight that requires a gradient, and rounds differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from graph_cache.guards.dispatch_mode import DispatchMode

# Fused operations that call composite ones, which see `requires_grad` in eager.
FUSED = frozenset(("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"))
_AUTOCAST = {"CPU": DispatchKey.AutocastCPU, "CUDA": DispatchKey.AutocastCUDA}


@functools.cache
def is_composite(func: OpOverload, device_types: frozenset[str]) -> bool:
    """Return whether eager also runs this operation as other operations, given arguments on these devices."""
    kernels = [device_type.upper() for device_type in device_types] or ["CPU"]
    return has_composite_kernel(func) and not any(_registered(func, key) for key in kernels)


def has_composite_kernel(func: OpOverload) -> bool:
    """Return whether this operation may run as other operations."""
    return _registered(func, "CompositeImplicitAutograd")


class Follower(Protocol):
    """Observes the operations that a mode runs."""

    def before(self, func: OpOverload, inputs: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> None:
        """Observe a call before it runs, or is decomposed; `inputs` are the tensors in its arguments."""

    def writes(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        """Observe what the call is about to write. Composite operations write by others."""

    def after(self, inputs: list[Tensor], result: Any) -> None:
        """Observe the result of the call."""


Call = tuple[OpOverload, tuple, dict[str, Any]]
Rewrite = Callable[[OpOverload, tuple, dict[str, Any]], Call]


class DecomposingMode(DispatchMode):
    """A dispatch mode that can run a composite operation with the dispatch keys of the code that calls it.

    `followers` observe the operations too, and `rewrites` may replace calls first by others with equal results: each
    further mode on the stack would cost as much as several of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[Follower] = []
        self.rewrites: list[Rewrite] = []
        self._outer_keys: tuple[Any, Any] | None = None  # of the composite operation that is running
        self._keys = _current_keys()

    def __enter__(self) -> Self:
        if self._outer_keys is None:
            self._keys = _current_keys()
        return super().__enter__()

    def rewritten(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Return the call that runs in the place of this one."""
        for rewrite in self.rewrites:
            func, args, kwargs = rewrite(func, args, kwargs)
        return func, args, kwargs

    def decompose(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the kernel of a composite operation, with its operations dispatched to this mode one by one."""
        before, keys = self._outer_keys, self._keys_inside(func)
        self._outer_keys = keys  # also of composite operations inside this one
        # Where autograd itself makes the results views, nothing is lost.
        guard = nullcontext() if _registered(func, "ADInplaceOrView") else torch._C._ForceDispatchKeyGuard(*keys)
        try:
            with guard:
                _push_mode(self)  # as `with self`, of which the rest has been done
                try:
                    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
                finally:
                    _pop_mode()
        finally:
            self._outer_keys = before

    def run(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation that is not composite."""
        if func._schema.name in FUSED:
            with torch._C._ForceDispatchKeyGuard(*self._calling_keys()):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def is_in_autocast(self) -> bool:
        """Whether the code that called this operation is in an autocast region of the CPU."""
        _, excluded = self._calling_keys()
        return not excluded.has(_AUTOCAST["CPU"])

    def _calling_keys(self) -> tuple[Any, Any]:
        """Return the dispatch keys of the code that called this operation: with autocast, if it is on there."""
        if self._outer_keys is not None:
            return self._outer_keys
        included, excluded = self._keys
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            _, now = _current_keys()
        for key in _AUTOCAST.values():
            excluded = excluded.add(key) if now.has(key) else excluded.remove(key)
        return included, excluded

    def _keys_inside(self, func: OpOverload) -> tuple[Any, Any]:
        included, excluded = self._calling_keys()
        for device, key in _AUTOCAST.items():
            if _registered(func, f"Autocast{device}"):  # its arguments are cast already
                excluded = excluded.add(key)
        return included, excluded


@contextmanager
def rewriting(rewrite: Rewrite) -> Iterator[None]:
    """Replace the calls of the block, in the innermost mode if it is one of this package's."""
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, DecomposingMode):
        mode = _RewritingMode()
    mode.rewrites.append(rewrite)
    try:
        with mode if isinstance(mode, _RewritingMode) else nullcontext():
            yield
    finally:
        mode.rewrites.remove(rewrite)


class _RewritingMode(DecomposingMode):
    """A mode that replaces calls, and nothing more."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # False would run compiled functions uncompiled, which rounds differently

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func, args, kwargs = self.rewritten(func, args, kwargs or {})
        return func(*args, **kwargs)


def _current_keys() -> tuple[Any, Any]:
    """Return the included and excluded dispatch keys of the calling code."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@functools.cache
def _registered(func: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
