"""Inspect a CUDA capture in progress: whether it is empty, and its copies from or to pageable host memory.

A replay cannot repeat such a copy: its node stores only the host address. If the memory was a local variable (as in the
backward of cuDNN attention, at lengths that it pads), it is freed before the replay, which then reads or overwrites
unrelated memory. Queries the driver API, whose calls used here are unchanged since CUDA 11.3; PyTorch offers none.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from graph_cache.errors import CaptureError

_ACTIVE = 1  # of CUstreamCaptureStatus
MEMCPY, CHILD_GRAPH = 1, 4  # of CUgraphNodeType
_HOST, _UNIFIED = 1, 4  # of CUmemorytype
_MEMORY_TYPE = 2  # of CUpointer_attribute: fails for pageable memory only
_INVALID_VALUE = 1  # of CUresult


class _MemcpySide(ctypes.Structure):
    """One side of a CUDA_MEMCPY3D."""

    _fields_ = [
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("lod", c_size_t),
        ("memory_type", c_int),
        ("host", c_void_p),
        ("device", c_void_p),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    ]

    @property
    def address(self) -> int | None:
        """The address, if it may be host memory."""
        return {_HOST: self.host, _UNIFIED: self.device}.get(self.memory_type)


class _Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        ("source", _MemcpySide),
        ("target", _MemcpySide),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    ]


def has_nodes(stream: int) -> bool:
    """Return whether the capture in progress on this CUstream has recorded any node.

    True if unknown: no capture is in progress, or the driver reports an error.
    """
    driver = driver_library()
    try:
        graph = graph_under_capture(driver, stream)
        return graph is None or _node_count(driver, graph) > 0
    except CaptureError:
        return True


def pageable_copies(stream: int) -> list[str]:
    """Return descriptions of the copies from and to pageable host memory in the capture in progress on this CUstream.

    Empty if no capture is in progress, as after an invalidated one. Contents of conditional nodes are not examined.
    Raises CaptureError if the driver reports an error.
    """
    driver = driver_library()
    graph = graph_under_capture(driver, stream)
    found: list[str] = []
    if graph is None:
        return found
    for copy in _memcpy_nodes(driver, graph):
        size = copy.width * copy.height * copy.depth
        if _is_pageable(driver, copy.source.address):
            found.append(f"{size} bytes from {copy.source.address:#x}")
        if _is_pageable(driver, copy.target.address):
            found.append(f"{size} bytes to {copy.target.address:#x}")
    return found


@functools.cache
def driver_library() -> ctypes.PyDLL:
    """Return the driver library. Calls keep the GIL: each takes a microsecond, and there are thousands."""
    return ctypes.PyDLL("libcuda.so.1")


def graph_under_capture(driver: ctypes.PyDLL, stream: int) -> c_void_p | None:
    """Return the graph that this CUstream is being captured into."""
    status, number, graph = c_int(), c_uint64(), c_void_p()
    # Request no dependencies: the call fails if the capture's last edges carry data.
    check(driver.cuStreamGetCaptureInfo_v2(c_void_p(stream), byref(status), byref(number), byref(graph), None, None))
    return graph if status.value == _ACTIVE else None


def _node_count(driver: ctypes.PyDLL, graph: c_void_p) -> int:
    count = c_size_t()
    check(driver.cuGraphGetNodes(graph, None, byref(count)))
    return count.value


def nodes_of(driver: ctypes.PyDLL, graph: c_void_p) -> Iterator[tuple[c_void_p, int]]:
    """Yield the nodes of a graph, each with its CUgraphNodeType."""
    count = c_size_t(_node_count(driver, graph))
    nodes = (c_void_p * count.value)()
    check(driver.cuGraphGetNodes(graph, nodes, byref(count)))
    node_type = c_int()
    for node in map(c_void_p, nodes):
        check(driver.cuGraphNodeGetType(node, byref(node_type)))
        yield node, node_type.value


def memcpy_of(driver: ctypes.PyDLL, node: c_void_p) -> _Memcpy3D:
    """Return the parameters of a memcpy node."""
    copy = _Memcpy3D()
    check(driver.cuGraphMemcpyNodeGetParams(node, byref(copy)))
    return copy


def _memcpy_nodes(driver: ctypes.PyDLL, graph: c_void_p) -> Iterator[_Memcpy3D]:
    for node, kind in nodes_of(driver, graph):
        if kind == MEMCPY:
            yield memcpy_of(driver, node)
        elif kind == CHILD_GRAPH:
            child = c_void_p()
            check(driver.cuGraphChildGraphNodeGetGraph(node, byref(child)))
            yield from _memcpy_nodes(driver, child)


def memory_type_result(driver: ctypes.PyDLL, address: int) -> int:
    """Return the CUresult of a query of the type of memory at this address: success if CUDA knows the memory."""
    result: int = driver.cuPointerGetAttribute(byref(c_int()), c_int(_MEMORY_TYPE), c_uint64(address))
    return result


def _is_pageable(driver: ctypes.PyDLL, address: int | None) -> bool:
    if address is None:
        return False
    result = memory_type_result(driver, address)
    if result != _INVALID_VALUE:
        check(result)
    return result == _INVALID_VALUE


def check(result: int) -> None:
    """Raise CaptureError for a CUresult other than success."""
    if result:
        raise CaptureError(f"the driver could not report the captured nodes: CUresult {result}")
