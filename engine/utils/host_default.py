"""Create tensors on the CPU unless a device is named, whatever default device the calling program has set."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C import _len_torch_function_stack  # torch.get_default_device() would create a tensor to find out


def host_default() -> AbstractContextManager[object]:
    """Return a context in which factories such as `torch.zeros` give CPU tensors.

    A trainer may run under `torch.set_default_device("cuda")`. Without a default device the context does nothing.
    """
    return torch.device("cpu") if _len_torch_function_stack() else nullcontext()
