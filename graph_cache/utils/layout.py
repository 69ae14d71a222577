"""Tensors in memory laid out as a caller's: kernels, and so the last bits of results, depend on strides."""

from __future__ import annotations

import torch
from torch import Tensor


def is_expanded(tensor: Tensor) -> bool:
    """Whether a dimension repeats the same memory."""
    return 0 in tensor.stride() and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory other than by `expand`, such as sliding windows: no copy can fill it."""
    reach = 1
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in dimensions:
        if size == 0:
            return False
        if stride == 0 or size == 1:
            continue
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def distinct(tensor: Tensor) -> Tensor:
    """Return a view of the tensor without the repetitions of `expand`, which can be copied into."""
    if not is_expanded(tensor):
        return tensor
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy without history, in new memory with the same strides, also of size-1 and expanded dimensions."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and 1 not in tensor.shape:
        return tensor.clone(memory_format=torch.contiguous_format)
    if tensor.is_neg() or tensor.is_conj():
        return tensor.clone()  # kernels that don't know lazy tensors compute on such a copy
    if overlaps(tensor):
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = tensor.as_strided((reach,), (1,), tensor.storage_offset()).clone()
        return memory.as_strided(tensor.shape, tensor.stride())
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    distinct(copy).copy_(distinct(tensor))
    return copy


def replica_of(tensor: Tensor) -> Tensor:
    """Return `copy_of` the tensor, which is lazily negated or conjugated if the tensor is.

    Kernels that know lazy tensors round differently on a copy that is not.
    """
    if tensor.is_neg():
        return torch._neg_view(replica_of(torch._neg_view(tensor)))
    return replica_of(tensor.conj()).conj() if tensor.is_conj() else copy_of(tensor)


def copy_into(static: Tensor, tensor: Tensor) -> None:
    """Copy a tensor into a static one of equal shape and strides, without a trace in autograd's version counters."""
    if is_expanded(static):
        distinct(static.data).copy_(distinct(tensor))
    else:
        static.data.copy_(tensor)
