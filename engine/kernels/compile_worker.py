"""Compile Triton kernels in child processes, which put them into Triton's cache on disk.

Threads of one process would wait for each other: Triton holds Python's global lock for part of a compilation. A child
imports neither torch nor CUDA, so it starts in 0.2 s and takes no memory of the GPU. Modules with kernels must not
import torch either. Imports triton: import this module only on CUDA.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import threading
from multiprocessing.connection import Connection
from typing import Any

import triton
import triton.language as tl
from triton.runtime import cache

from engine.utils.processes.child import ChildProcess


class CompileWorkers:
    """A child process for each thread that compiles, started by the first compilation in that thread."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._children: list[ChildProcess] = []
        self._is_closed = False

    def compile(self, source: Any, target: Any, options: dict[str, Any]) -> None:
        """Put one kernel into Triton's cache on disk. Takes the arguments of `triton.compile`.

        Raises RuntimeError if the kernel does not compile or the child can't be started, has ended or is closed, and
        what pickle raises.
        """
        task = io.BytesIO()
        _Pickler(task).dump((source, target, options))
        try:
            pipe = self._pipe()
            pipe.send_bytes(task.getvalue())
            error = pipe.recv()
        except (EOFError, OSError) as failure:
            raise RuntimeError(f"a process that compiles kernels failed: {failure!r}") from failure
        if error is not None:
            raise RuntimeError(error)

    def close(self) -> None:
        """End the processes. No thread may be in `compile`."""
        self._is_closed = True
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
            child.pipe.close()

    def _pipe(self) -> Connection:
        """Return the pipe to this thread's child. Raises OSError if there can't be one."""
        if self._is_closed:
            raise OSError("it is closed")
        if not hasattr(self._of_thread, "pipe"):
            child = ChildProcess("a compiling process", f"{__name__}:main", cache.triton_key())
            self._children.append(child)
            self._of_thread.pipe = child.pipe
        return self._of_thread.pipe


class _Pickler(pickle.Pickler):
    """Pickle a kernel as its name, since the child imports it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, triton.JITFunction):
            return import_kernel, (value.__module__, value.__name__)
        return NotImplemented


def import_kernel(module: str, name: str) -> Any:
    """Return the kernel called `name` of a module, with the key that it has in other processes."""
    kernel = getattr(importlib.import_module(module), name)
    compute_key(kernel)
    return kernel


def compute_key(kernel: Any) -> None:
    """Compute the key of a kernel's source in Triton's cache, after the keys of the functions that it calls.

    Triton 3.6 leaves the constants of a called function out of a key if it has not computed that function's key before:
    a key would depend on which kernels a process has compiled.
    """
    for name in kernel.fn.__code__.co_names:
        for callee in (kernel.__globals__.get(name), getattr(tl, name, None)):
            # a name may be another object's attribute, and equal this kernel's
            if isinstance(callee, triton.JITFunction) and callee is not kernel and callee.hash is None:
                compute_key(callee)
    _ = kernel.cache_key


def main(pipe: Connection, triton_key: str) -> None:
    """Compile the kernels that the parent sends until it ends. Answers None, or the error as text.

    `triton_key` is Triton's hash of the package's files, which takes a second to compute.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context would take memory that the parent has planned to use
    cache.triton_key = lambda: triton_key
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        error = None
        try:
            source, target, options = pickle.loads(task)
            triton.compile(source, target=target, options=options)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        pipe.send(error)
