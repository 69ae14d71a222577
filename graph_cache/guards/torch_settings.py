"""PyTorch's global settings that select kernels: a graph holds the kernels that they selected at its capture.

Read at every call, so `settings` loops over getters of PyTorch's C extension.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from operator import call
from typing import Any, NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack, _PreserveDispatchKeyGuard
from torch.backends import mha
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from graph_cache.errors import CaptureRefused

Settings = tuple[Hashable, ...]
Autocast = tuple[torch.dtype | None, ...]  # for each of AUTOCAST_DEVICES its dtype, or None if autocast is off
AUTOCAST_DEVICES = ("cpu", "cuda")
NO_AUTOCAST: Autocast = (None, None)


class Setting(NamedTuple):
    """A setting's name, its current value, and its setter; None if an earlier value can't be restored exactly."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None


def _named(name: str, getter: str, setter: str | None, *arguments: str) -> Setting:
    """Return a setting by the names of PyTorch's functions."""
    get = getattr(torch._C, getter)
    return Setting(
        name,
        functools.partial(get, *arguments) if arguments else get,
        None if setter is None else getattr(torch._C, setter),
    )


def _set_deterministic(enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


SDP_BACKENDS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
SETTINGS = (
    *[_named(f"{name} attention", f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in SDP_BACKENDS],
    _named("priority of attention backends", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    _named(
        "reduced-precision math attention",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    Setting(
        "fast path of nn.MultiheadAttention",
        functools.partial(getattr, mha, "_is_fastpath_enabled"),
        mha.set_fastpath_enabled,
    ),
    Setting("deterministic algorithms", torch.are_deterministic_algorithms_enabled, _set_deterministic),
    _named(
        "deterministic fill",
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
    ),
    _named("cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    _named("cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    _named("cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    _named("mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    _named("mkldnn.deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    _named("nnpack", "_get_nnpack_enabled", "_set_nnpack_enabled"),
    _named("fp16 accumulation", "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    _named("reduced-precision fp16 sums", "_get_cublas_allow_fp16_reduced_precision_reduction", None),
    _named("reduced-precision bf16 sums", "_get_cublas_allow_bf16_reduced_precision_reduction", None),
    _named("BLAS backend", "_get_blas_preferred_backend", None),
    _named("linear algebra backend", "_get_linalg_preferred_backend", None),
    # Setting one of these to its current value would fix a value that it inherits.
    *[
        _named(f"fp32_precision of {library} {operation}", "_get_fp32_precision_getter", None, library, operation)
        for library in ("cuda", "mkldnn")
        for operation in ("matmul", "conv", "rnn")
    ],
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("anomaly detection", torch.is_anomaly_enabled, None),
)
_GETTERS = [setting.get for setting in SETTINGS]
_FP32 = slice(len(SETTINGS) - 8, len(SETTINGS) - 2)  # the fp32_precision settings
_BLAS, _LINALG = _FP32.start - 2, _FP32.start - 1
_PRIORITY = len(SDP_BACKENDS)  # index of the one that is a list


def settings() -> Settings:
    """Return the current values of all settings, and the default device last."""
    values = list(map(call, _GETTERS))
    values[_BLAS], values[_LINALG] = int(values[_BLAS]), int(values[_LINALG])  # comparing these enumerations is slow
    values[_FP32] = ["ieee" if value == "none" else value for value in values[_FP32]]  # unset, or set to the default
    values[_PRIORITY] = tuple(values[_PRIORITY])
    values.append(_default_device() if _len_torch_function_stack() else None)
    return tuple(values)


def _default_device() -> torch.device | None:
    """Return the device of the innermost context that sets a default device, or None."""
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return contexts[-1].device if contexts else None


def modes_active() -> bool:
    """Whether a TorchDispatchMode or a TorchFunctionMode other than a default device is active.

    It sees or changes each operation, and a replay runs none.
    """
    return bool(_len_torch_dispatch_stack()) or (
        bool(_len_torch_function_stack())
        and not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    )


@contextmanager
def recreated(wanted: Settings) -> Iterator[None]:
    """Set these settings within the block.

    Raises CaptureRefused if one of them differs from its current value and can't be set and restored exactly.
    """
    now = settings()
    if now == wanted:
        yield
        return
    different = [(setting, old, new) for setting, old, new in zip(SETTINGS, now, wanted, strict=False) if old != new]
    fixed = [setting.name for setting, _, _ in different if setting.set is None]
    if fixed:
        raise CaptureRefused(
            f"the call ran with another {', '.join(fixed)} than the step begins with: set it for the whole step"
        )
    try:
        for setting, _, new in different:
            if setting.set is not None:
                setting.set(list(new) if isinstance(new, tuple) else new)
        with nullcontext() if now[-1] == wanted[-1] else DeviceContext(wanted[-1] or torch.device("cpu")):
            yield
    finally:
        for setting, old, _ in different:
            if setting.set is not None:
                setting.set(list(old) if isinstance(old, tuple) else old)


def free_frames(error: BaseException) -> None:
    """Free what the frames of a caught exception hold.

    An exception within the repr of a tensor leaves a guard in them. Whenever it is freed, it restores the dispatch
    state of the thread at its creation, such as an autocast region that has ended since.
    """
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    with _PreserveDispatchKeyGuard():
        for one in chain:
            traceback.clear_frames(one.__traceback__)
            for frame, _ in traceback.walk_tb(one.__traceback__):
                frame.f_locals  # noqa: B018 (a snapshot of the locals, if there is one, is emptied by reading it)


def records_gradients() -> bool:
    """Return whether operations record gradients: inference mode prevents it also where the gradient mode is on."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def autocast_state() -> Autocast:
    """Return the current dtype of autocast on each of AUTOCAST_DEVICES, or None where it is off."""
    return tuple(
        [torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in AUTOCAST_DEVICES]
    )
