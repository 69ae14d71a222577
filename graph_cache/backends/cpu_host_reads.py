"""Refuse host reads during recording that read a CPU tensor without a dispatcher call.

- Methods of tensors: `numpy()`, `tolist()`, `__dlpack__()`, and the conversions to numbers with which `torch.tensor`,
  `new_tensor` and `LongTensor` read the tensors in a list; `apply_()`, `map_()` and `map2_()`, which run Python code.
- `tensor_split` and `ctc_loss` with tensors of indices and lengths.
- TorchScript's `tolist()`.

`one_hot` with a number of classes reads its argument only to check it. It is recorded as the `scatter_` that it
computes, which checks the same at each replay.

A tensor on a GPU cannot be read this way at all, or only with a synchronisation that ends a capture.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graph_cache.backends.cpu_call_site import host_read_refusal
from graph_cache.errors import CaptureRefused

HOST_READ_METHODS = (
    "numpy",
    "tolist",
    "__dlpack__",
    "__bool__",
    "__int__",
    "__index__",
    "__float__",
    "__complex__",
)
PYTHON_METHODS = ("apply_", "map_", "map2_")  # run a Python function on each element
# Functions whose kernels read tensors on the host before anything is dispatched, and the arguments that they read.
FUNCTIONS: dict[tuple[Any, str], tuple[tuple[int, ...], tuple[str, ...]]] = {
    (torch, "tensor_split"): ((1,), ("tensor_indices_or_sections",)),
    (torch.Tensor, "tensor_split"): ((1,), ("tensor_indices_or_sections",)),
    (torch, "ctc_loss"): ((2, 3), ("input_lengths", "target_lengths")),
}
ONE_HOT = torch.nn.functional, "one_hot"
SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)

SHADOWED = (*HOST_READ_METHODS, *PYTHON_METHODS)
_allowed: dict[int, Callable[[torch.Tensor], bool]] = {}  # by id of the recording thread
_originals: dict[str, Any] = {}  # attributes that other code has set on torch.Tensor itself
_functions: dict[tuple[Any, str], Any] = {}  # of FUNCTIONS, what their owners had as an attribute
_script_calls: dict[Any, Any] = {}  # the original `__call__` of TorchScript's types
_lock = threading.Lock()


@contextmanager
def refuse_host_reads(allowed: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Make this thread's host reads raise CaptureRefused within the block, except for tensors that `allowed` accepts.

    Other threads are unaffected.
    """
    thread_id = threading.get_ident()
    with _lock:
        if not _allowed:
            _originals.update({name: vars(torch.Tensor)[name] for name in SHADOWED if name in vars(torch.Tensor)})
            for name in SHADOWED:
                # Shadow the inherited methods: a TorchFunctionMode would disable fast paths of torch.nn.
                setattr(torch.Tensor, name, _refusing_reader(name, getattr(torch.Tensor, name)))
            for owner, name in FUNCTIONS:
                _functions[owner, name] = vars(owner).get(name)
                setattr(owner, name, _refusing_function(owner, name, getattr(owner, name)))
            _functions[ONE_HOT], torch.nn.functional.one_hot = torch.nn.functional.one_hot, _recorded_one_hot
            for scripted in SCRIPTED:
                _script_calls[scripted] = scripted.__call__
                scripted.__call__ = _refusing_call(scripted.__call__)
        _allowed[thread_id] = allowed
    try:
        yield
    finally:
        with _lock:
            del _allowed[thread_id]
            if not _allowed:
                torch.nn.functional.one_hot = _functions.pop(ONE_HOT)
                for owner, name in FUNCTIONS:
                    original = _functions.pop((owner, name))
                    delattr(owner, name) if original is None else setattr(owner, name, original)
                for scripted in SCRIPTED:
                    scripted.__call__ = _script_calls.pop(scripted)
                for name in SHADOWED:
                    if name in _originals:
                        setattr(torch.Tensor, name, _originals.pop(name))
                    else:
                        delattr(torch.Tensor, name)


def _refusing_reader(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        allowed = _allowed.get(threading.get_ident())
        if allowed is not None and (name in PYTHON_METHODS or not allowed(tensor)):
            raise CaptureRefused(host_read_refusal(f"Tensor.{name}()"))
        return original(tensor, *args, **kwargs)

    return read


def _refusing_function(owner: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    positions, keywords = FUNCTIONS[owner, name]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        allowed = _allowed.get(threading.get_ident())
        if allowed is not None:
            found = [args[index] for index in positions if index < len(args)]
            found += [kwargs[keyword] for keyword in keywords if keyword in kwargs]
            if not all(allowed(value) for value in found if isinstance(value, torch.Tensor)):
                raise CaptureRefused(host_read_refusal(f"{name}()"))
        return original(*args, **kwargs)

    return call


def _recorded_one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    allowed = _allowed.get(threading.get_ident())
    known = type(num_classes) is int and num_classes > 0 and tensor.dtype is torch.int64 and tensor.numel() > 0
    if allowed is None or not known:
        return _functions[ONE_HOT](tensor, num_classes)
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def _refusing_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in _allowed and _reads_a_list(scripted):
            raise CaptureRefused(
                f"{scripted.name}: this TorchScript code reads a tensor's values with tolist(), and a replay would "
                "not read them again. Keep them in a tensor"
            )
        return original(scripted, *args, **kwargs)

    return call


def _reads_a_list(scripted: Any) -> bool:
    """Return whether this TorchScript code, or code that it calls, contains `tolist()`."""
    return bool(scripted.inlined_graph.findAllNodes("prim::tolist", recurse=True))
