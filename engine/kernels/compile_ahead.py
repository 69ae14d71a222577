"""Compile Triton kernels in parallel, before the launches that need them.

Triton compiles a kernel at its first launch, so kernels compile one after the other. `compile_ahead` runs the same host
code without launching anything, records the specialisations that it would launch, and compiles them on all cores. The
launches then find every kernel in Triton's cache.

This file is all that depends on how Triton compiles. Imports triton: import this module only on CUDA.
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton

logger = logging.getLogger(__name__)

_PACKAGE = "engine.kernels."  # other packages may use the results of their kernels as indices: these are launched
_patch_lock = threading.Lock()


class CompiledAhead(NamedTuple):
    """What `compile_ahead` did.

    - kernels: number of specialisations, compiled or read from Triton's cache on disk.
    - failed: how many of them did not compile.
    - recording_seconds, compile_seconds: time of the run without launches, and of the compilation.
    """

    kernels: int
    failed: int
    recording_seconds: float
    compile_seconds: float


def compile_ahead(
    run: Callable[[], None],
    device: torch.device,
    *,
    workers: int | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> CompiledAhead | None:
    """Compile, in parallel, the kernels of this package that `run` launches. Returns None if Triton can't do it.

    `run` is called once, in this thread, and launches none of them: the memory that they would write keeps its
    contents, so `run` must not use it as indices. Kernels that this process has compiled before are left out.

    `workers` is the number of threads; by default the CPU cores that this process may use, divided by `num_ranks`.
    Threads are enough: Triton's passes and LLVM release Python's global lock, and ptxas is a process. Each rank begins
    with other kernels, and then finds most of those of the other ranks in the cache folder that they share.

    A kernel that fails to compile is logged; its first launch raises the error. If `run` raises, nothing is compiled.
    """
    if not _is_supported():
        logger.info("Triton %s can't compile ahead: each kernel is compiled at its first launch", triton.__version__)
        return None
    started = time.perf_counter()
    tasks = _Tasks(device)
    mode = triton.AsyncCompileMode(tasks, ignore_errors=True)
    context = contextvars.Context()  # compilations within it are submitted to `tasks`; others run as usual
    context.run(mode.__enter__)
    with _recorded_launches(context.run):
        run()
    recorded = time.perf_counter()
    tasks.run(workers or max(1, _num_cores() // num_ranks), rank, num_ranks)
    context.run(mode.__exit__, None, None, None)  # puts the kernels into Triton's caches in memory
    errors = tasks.errors()
    result = CompiledAhead(len(tasks.tasks), len(errors), recorded - started, time.perf_counter() - recorded)
    logger.info(
        "compiled %d kernels, or read them from Triton's cache, in %.1f s after %.1f s of recording",
        result.kernels, result.compile_seconds, result.recording_seconds,
    )  # fmt: skip
    if errors:
        logger.error("%d of them failed to compile; the first error: %r", result.failed, errors[0])
    return result


def _is_supported() -> bool:
    """Return whether this Triton has the interfaces used here. Release 3.6 has them."""
    run = getattr(triton.JITFunction, "run", None)
    parameters = inspect.signature(run).parameters if run is not None else {}
    return hasattr(triton, "AsyncCompileMode") and {"grid", "warmup"} <= parameters.keys()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _recorded_launches(compile_in: Callable[..., Any]) -> Iterator[None]:
    """Replace this thread's launches: call `compile_in(launch, …, warmup=True)` once per specialisation instead.

    With `warmup=True` Triton's own method compiles a kernel and does not launch it.
    """
    thread, seen = threading.get_ident(), set[Hashable]()
    with _patch_lock:
        launch = triton.JITFunction.run

        def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or not kernel.__module__.startswith(_PACKAGE):
                return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            key = (id(kernel), *map(_label, args), *((name, _label(value)) for name, value in kwargs.items()))
            if key not in seen:  # Triton's own check takes 0.2 ms until the kernel is compiled
                seen.add(key)
                compile_in(launch, kernel, *args, grid=grid, warmup=True, **kwargs)
            return None

        triton.JITFunction.run = record
        try:
            yield
        finally:
            triton.JITFunction.run = launch


def _label(value: Any) -> Hashable:
    """Return a key that is equal only for arguments for which Triton compiles the same kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):  # a TMA descriptor
        return type(value), value.base.dtype, tuple(value.block_shape), repr(getattr(value, "layout", None))
    return type(value), value


class _Task(Future):
    """One compilation. Runs when a worker calls `run`, or when its result is wanted, whichever comes first."""

    def __init__(self, compile_kernel: Callable[[], Any]):
        super().__init__()
        self._compile_kernel, self._lock = compile_kernel, threading.Lock()

    def run(self) -> None:
        with self._lock:
            if self.done():
                return
            try:
                self.set_result(self._compile_kernel())
            except Exception as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(timeout)


class _Tasks:
    """The executor of an AsyncCompileMode. Collects compilations until `run`.

    Running them at once would slow down the thread that records, which shares Python's global lock with them.
    """

    def __init__(self, device: torch.device):
        self.tasks: list[_Task] = []
        self._device = device
        self._loaded: set[Hashable] = set()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:
        """Add a task. AsyncCompileMode calls this once per kernel."""
        self.tasks.append(_Task(lambda: self._loaded_once(compile_kernel())))
        return self.tasks[-1]

    def run(self, workers: int, rank: int, num_ranks: int) -> None:
        """Run all tasks in this many threads, this rank's first."""
        order = sorted(range(len(self.tasks)), key=lambda index: (index - rank) % num_ranks)
        with ThreadPoolExecutor(workers, "compile-ahead", self._set_device) as pool:
            for index in order:
                pool.submit(self.tasks[index].run)

    def errors(self) -> list[BaseException]:
        """Return the errors of the tasks that have run."""
        return [error for task in self.tasks if (error := task.exception()) is not None]

    def _set_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _loaded_once(self, kernel: Any) -> Any:
        """Load the first kernel of each signature as its launch would, since Triton 3.6 builds a launcher in C then."""
        signature = kernel.src.fn.__name__, tuple(kernel.src.signature.values())
        if self._device.type == "cuda" and signature not in self._loaded:
            self._loaded.add(signature)
            kernel.run  # noqa: B018 (a property that loads the kernel)
        return kernel
