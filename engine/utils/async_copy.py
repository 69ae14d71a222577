"""Small copies between the host and the device that don't wait for the work before them.

Owns pinned memory for the way there and back. Knows no request and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ids_to(device: torch.device, values: Sequence) -> Tensor:
    """Host integers (a list, or a list of rows) as int64 on the device."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for the device; on a CPU the tensor itself."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Download:
    """A result on its way to the host: the copy is enqueued at construction, so later work doesn't delay it.

    `source` must not be written to before the copy, which on a CPU is never made: give it a tensor of its own.
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
        """The result on the host, when it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
