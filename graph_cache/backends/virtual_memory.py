"""An allocator of PyTorch's for GPU memory whose addresses stay while its physical memory is released.

PyTorch calls it while it holds its allocator's lock, for which a thread with Python's lock may wait. So it must not run
Python: it is 70 lines of C, compiled at the first use, which call the driver's functions for virtual memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from graph_cache.backends.cuda_nodes import driver_library
from graph_cache.errors import GraphConfigError, GraphError

_OUT_OF_MEMORY = 2  # of CUresult
_FUNCTIONS = {
    "cuMemGetAllocationGranularity": "size_t *, const void *, int",
    "cuMemAddressReserve": "uint64_t *, size_t, size_t, uint64_t, unsigned long long",
    "cuMemAddressFree": "uint64_t, size_t",
    "cuMemCreate": "uint64_t *, size_t, const void *, unsigned long long",
    "cuMemRelease": "uint64_t",
    "cuMemMap": "uint64_t, size_t, size_t, uint64_t, unsigned long long",
    "cuMemUnmap": "uint64_t, size_t",
    "cuMemSetAccess": "uint64_t, size_t, const void *, size_t",
    "cuCtxSynchronize": "void",
    "cuThreadExchangeStreamCaptureMode": "int *",
}
"""Functions of the driver and their arguments, as in cuda.h with its types written out."""

_SOURCE = r"""
#include <stddef.h>
#include <stdint.h>

typedef struct { int type, id; } Location;                           /* CUmemLocation */
typedef struct { Location location; int flags; } Access;             /* CUmemAccessDesc */
typedef struct {                                                     /* CUmemAllocationProp */
    int type, handle_types;
    Location location;
    void *metadata;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} Properties;

enum { RELAXED = 2 };  /* of CUstreamCaptureMode: this thread may be capturing, and a mapping is no part of that */

static Properties properties_of(int device) {
    Properties found = {1, 0, {1, device}, NULL, 0, 0, 0, {0}};      /* pinned memory of this device, not shared */
    return found;
}

/* Round up to whole physical pages; 0 if the driver refuses. */
static size_t rounded(size_t size, int device) {
    Properties properties = properties_of(device);
    size_t page = 0;
    if (cuMemGetAllocationGranularity(&page, &properties, 0) || !page) return 0;
    return (size + page - 1) / page * page;
}

/* Map new physical memory at a reserved address. The mapping alone keeps it: unmapping frees it. */
int encore_map(uint64_t address, size_t size, int device) {
    Properties properties = properties_of(device);
    Access access = {{1, device}, 3};                                /* read and write */
    uint64_t memory = 0;
    size_t whole = rounded(size, device);
    int result = cuMemCreate(&memory, whole, &properties, 0);
    if (result) return result;
    result = cuMemMap(address, whole, 0, memory, 0);
    cuMemRelease(memory);
    if (result) return result;
    result = cuMemSetAccess(address, whole, &access, 1);
    if (result) cuMemUnmap(address, whole);
    return result;
}

int encore_unmap(uint64_t address, size_t size, int device) {
    return cuMemUnmap(address, rounded(size, device));
}

void *encore_alloc(size_t size, int device, void *stream) {
    uint64_t address = 0;
    size_t whole = rounded(size, device);
    int mode = RELAXED;
    (void)stream;
    if (!whole || cuMemAddressReserve(&address, whole, 0, 0, 0)) return NULL;
    cuThreadExchangeStreamCaptureMode(&mode);
    if (encore_map(address, size, device)) {
        cuMemAddressFree(address, whole);
        address = 0;
    }
    cuThreadExchangeStreamCaptureMode(&mode);
    return (void *)address;
}

/* Also of memory that is unmapped now: the driver then refuses to unmap it again, which changes nothing. */
void encore_free(void *pointer, size_t size, int device, void *stream) {
    size_t whole = rounded(size, device);
    int mode = RELAXED;
    (void)stream;
    cuThreadExchangeStreamCaptureMode(&mode);
    cuCtxSynchronize();
    cuMemUnmap((uint64_t)pointer, whole);
    cuMemAddressFree((uint64_t)pointer, whole);
    cuThreadExchangeStreamCaptureMode(&mode);
}
"""


@functools.cache
def virtual_memory() -> VirtualMemory:
    """Return the allocator of this process. Raises GraphConfigError if it can't be compiled."""
    return VirtualMemory()


class VirtualMemory:
    """The compiled functions: `allocator` for a torch.cuda.MemPool, `map` and `unmap` for its segments."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="encore-") as folder:
            path = _compile(Path(folder))
            self._library = ctypes.CDLL(str(path))
            driver = driver_library()
            for name in _FUNCTIONS:
                pointer = ctypes.c_void_p.in_dll(self._library, f"_{name}")
                pointer.value = ctypes.cast(getattr(driver, name), ctypes.c_void_p).value
            self._pluggable = torch.cuda.memory.CUDAPluggableAllocator(str(path), "encore_alloc", "encore_free")
        self.allocator: Any = self._pluggable.allocator()

    def map(self, address: int, size: int, device: int) -> None:
        """Map new physical memory, with undefined contents. Raises GraphError."""
        self._call("encore_map", address, size, device)

    def unmap(self, address: int, size: int, device: int) -> None:
        """Free the physical memory of `size` bytes that were allocated, or mapped, at once. Raises GraphError."""
        self._call("encore_unmap", address, size, device)

    def _call(self, name: str, address: int, size: int, device: int) -> None:
        function = getattr(self._library, name)
        result = function(ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_int(device))
        if result == _OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(device)
            raise GraphError(
                f"the GPU has no room for {size >> 20} MiB more: {free >> 20} of {total >> 20} MiB are free; free "
                "memory (in PyTorch, drop tensors and call torch.cuda.empty_cache()) and try again"
            )
        if result:
            raise GraphError(f"{name.removeprefix('encore_')} of {size} bytes failed: CUresult {result}")


def _compile(folder: Path) -> Path:
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise GraphConfigError(
            "memory that can be released needs a C compiler, and none of cc, gcc and clang was found: install one, or "
            "name it in CC"
        )
    pointers = [f"int (*_{name})({arguments});\n#define {name} _{name}" for name, arguments in _FUNCTIONS.items()]
    source, library = folder / "virtual_memory.c", folder / "virtual_memory.so"
    head, _, rest = _SOURCE.partition("typedef")
    source.write_text("\n".join([head, *pointers, f"typedef{rest}"]))
    command = [*compiler.split(), "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise GraphConfigError(
            f"memory that can be released needs a C compiler, and {compiler} failed: {said.strip()[:500]}"
        ) from error
    return library
