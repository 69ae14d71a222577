"""Refuse `numpy()` and `tolist()` during recording: they read a CPU tensor without a dispatcher call.

A tensor on a GPU cannot be read this way at all, or only with a synchronisation that ends a capture.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graph_cache.errors import CaptureRefused

HOST_READ_METHODS = ("numpy", "tolist")

_allowed: dict[int, Callable[[torch.Tensor], bool]] = {}  # by id of the recording thread
_originals: dict[str, Any] = {}  # attributes that other code has set on torch.Tensor itself
_lock = threading.Lock()


@contextmanager
def refuse_host_reads(allowed: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Make this thread's host reads raise CaptureRefused within the block, except for tensors that `allowed` accepts.

    Other threads are unaffected.
    """
    thread_id = threading.get_ident()
    with _lock:
        if not _allowed:
            _originals.update(
                {name: vars(torch.Tensor)[name] for name in HOST_READ_METHODS if name in vars(torch.Tensor)}
            )
            for name in HOST_READ_METHODS:
                # Shadow the inherited methods: a TorchFunctionMode would disable fast paths of torch.nn.
                setattr(torch.Tensor, name, _refusing_reader(name, getattr(torch.Tensor, name)))
        _allowed[thread_id] = allowed
    try:
        yield
    finally:
        with _lock:
            del _allowed[thread_id]
            if not _allowed:
                for name in HOST_READ_METHODS:
                    if name in _originals:
                        setattr(torch.Tensor, name, _originals.pop(name))
                    else:
                        delattr(torch.Tensor, name)


def _refusing_reader(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        allowed = _allowed.get(threading.get_ident())
        if allowed is not None and not allowed(tensor):
            raise CaptureRefused(
                f"Tensor.{name}(): the host reads a tensor's values here, and a replay would not read "
                "them again. Keep them in a tensor, or pass them as a keyword of the graph's key"
            )
        return original(tensor, *args, **kwargs)

    return read
