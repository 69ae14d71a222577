"""Asynchronous copies of small tensors between host and device, through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def ids_to(device: torch.device, values: Sequence) -> Tensor:
    """Copy host integers (a list, or a list of rows) to an int64 tensor on the device, asynchronously."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without synchronizing. On a CPU, return the tensor itself."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def upload_buffer(rows: int, columns: int, device: torch.device) -> np.ndarray:
    """Return an int32 array [rows, columns] of zeros, from which `upload` copies to the device without another copy."""
    return torch.zeros(rows, columns, dtype=torch.int32, pin_memory=device.type == "cuda").numpy()


class Download:
    """An asynchronous copy of a device tensor to the host.

    The copy is enqueued at construction, so that work enqueued later doesn't delay it. On a CPU no copy is made and
    `read` returns `source` itself: pass a tensor that is not written to afterwards.
    """

    def __init__(self, source: Tensor):
        self._host = source
        self._copied: torch.cuda.Event | None = None
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """Wait for the copy and return the host tensor."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
