"""Digest of a CUDA graph: its nodes in order, with kernels, grids and arguments.

Queries the driver API. Numbers of 4 and 8 bytes are compared by value. Addresses are only counted as such: another
capture may place temporary tensors and workspaces elsewhere, and the cache watches the addresses of all others. Other
arguments (structures of PyTorch's elementwise kernels, TMA descriptors) and addresses of the host, such as cuBLAS
passes, are unverified, as are all arguments before CUDA 12.4.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_char_p, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_cache.backends.cuda_nodes import (
    CHILD_GRAPH,
    MEMCPY,
    check,
    driver_library,
    graph_under_capture,
    memcpy_of,
    memory_type_result,
    nodes_of,
)
from graph_cache.utils.digest import Digest, hashed

_KERNEL, _MEMSET = 0, 2  # of CUgraphNodeType
_MAX_ARGUMENTS = 4096
_START_BRK = 44  # fields of /proc/self/stat between the name in parentheses and start_brk


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", ctypes.POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]


class _MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("target", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    ]


ADDRESS = "address"  # stands for an argument
_HOST_START, _HOST_END = 1 << 32, 1 << 47  # of the host's stack, its libraries and most heaps


@dataclass(frozen=True)
class Node:
    """One node: its kind with sizes and names, its arguments, and the bytes of arguments that are left out."""

    kind: tuple[Any, ...]
    arguments: tuple[int | str, ...] = ()
    unverified_bytes: int = 0


def captured_nodes(stream: int) -> list[Node]:
    """Return the nodes of the capture in progress on this CUstream; none if no capture is in progress.

    Raises CaptureError if the driver reports an error.
    """
    driver = driver_library()
    graph = graph_under_capture(driver, stream)
    if graph is None:
        return []
    argument = functools.cache(lambda value: _argument(driver, value))  # most values occur in many kernels
    return list(_nodes(driver, graph, argument))


def digest_of(nodes: list[Node]) -> Digest:
    """Return the digest of a graph's nodes; empty without nodes."""
    if not nodes:
        return Digest()
    parts = [(node.kind, node.arguments) for node in nodes]
    return Digest(hashed(parts), len(nodes), sum(node.unverified_bytes for node in nodes))


def _nodes(driver: ctypes.PyDLL, graph: c_void_p, argument: Callable[[int], int | str | None]) -> Iterator[Node]:
    for node, kind in nodes_of(driver, graph):
        if kind == _KERNEL:
            yield _kernel(driver, node, argument)
        elif kind == MEMCPY:
            copy = memcpy_of(driver, node)
            yield Node(("memcpy", copy.width, copy.height, copy.depth), (ADDRESS, ADDRESS))
        elif kind == _MEMSET:
            params = _MemsetParams()
            check(driver.cuGraphMemsetNodeGetParams(node, byref(params)))
            sizes = (params.value, params.element_bytes, params.width, params.height)
            yield Node(("memset", *sizes), (ADDRESS,))
        elif kind == CHILD_GRAPH:
            child = c_void_p()
            check(driver.cuGraphChildGraphNodeGetGraph(node, byref(child)))
            yield from _nodes(driver, child, argument)
        else:
            yield Node(("node", kind))


def _kernel(driver: ctypes.PyDLL, node: c_void_p, argument: Callable[[int], int | str | None]) -> Node:
    params = _KernelParams()
    check(driver.cuGraphKernelNodeGetParams_v2(node, byref(params)))
    name, sizes = _signature(params.function, params.kernel)
    kind = ("kernel", name, *params.grid, *params.block, params.shared_bytes, *sizes)
    if not params.arguments:
        return Node(kind, (), sum(sizes))
    found: list[int | str] = []
    unverified = 0
    for place, size in zip(params.arguments[: len(sizes)], sizes, strict=True):
        value: int | str | None = None  # also for an empty structure, which is one undefined byte
        if size == 8:
            value = argument(c_uint64.from_address(place).value)
        elif size == 4:
            value = c_uint32.from_address(place).value
        if value is None:
            unverified += size
        else:
            found.append(value)
    return Node(kind, tuple(found), unverified)


def _argument(driver: ctypes.PyDLL, value: int) -> int | str | None:
    """Return what stands for an argument of 8 bytes in a digest; None if it is unverified."""
    if value and memory_type_result(driver, value) == 0:
        return ADDRESS
    return None if value in _host_addresses() else value


@functools.cache
def _host_addresses() -> range:
    """Return where this process may have host memory: its stack, its libraries and its heap.

    The heap of a position-dependent executable begins below 4 GiB. An argument without contents, such as the function
    object of `torch.where`, holds whatever was on the stack, often an address in the heap.
    """
    start = _HOST_START
    if sys.platform == "linux":
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start = min(start, int(fields[_START_BRK]) or start)
    return range(start, _HOST_END)


@functools.lru_cache(maxsize=4096)
def _signature(function: int | None, kernel: int | None) -> tuple[str, tuple[int, ...]]:
    """Return the name of a kernel and the sizes of its arguments in bytes; none if the driver does not tell."""
    driver = driver_library()
    prefix, handle = ("cuFunc", c_void_p(function)) if function else ("cuKernel", c_void_p(kernel))
    name = c_char_p()
    get_name, get_info = getattr(driver, f"{prefix}GetName", None), getattr(driver, f"{prefix}GetParamInfo", None)
    if get_name is None or get_name(byref(name), handle):
        return "", ()
    sizes: list[int] = []
    offset, size = c_size_t(), c_size_t()
    while get_info is not None and len(sizes) < _MAX_ARGUMENTS:
        if get_info(handle, c_size_t(len(sizes)), byref(offset), byref(size)):
            break  # no further argument
        sizes.append(size.value)
    return (name.value or b"").decode(), tuple(sizes)
