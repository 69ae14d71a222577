"""Compile Triton kernels in parallel, before the launches that need them.

Triton compiles a kernel at its first launch, so kernels compile one after the other. `compile_ahead` runs the same host
code without launching anything, records the specialisations that it would launch, and compiles them meanwhile on all
cores, in the processes of compile_worker.py. The launches then find every kernel in Triton's cache.

This file and compile_worker.py are all that depends on how Triton compiles. Imports triton: import this module only on
CUDA.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import make_backend
from triton.runtime import cache

from engine.kernels.compile_worker import CompileWorkers, compute_key

logger = logging.getLogger(__name__)

_PACKAGE = "engine.kernels."  # other packages may use the results of their kernels as indices: these are launched
_MAX_WORKERS = 32  # of about 200 MB each; with more, the kernel that takes longest determines the time
_patch_lock = threading.Lock()


class CompiledAhead(NamedTuple):
    """What `compile_ahead` did.

    - kernels: number of specialisations, compiled or read from Triton's cache on disk.
    - failed: how many of them did not compile, or could not be loaded.
    - recording_seconds: time of the run without launches, during which kernels compile already.
    - remaining_seconds: time from then until all are compiled and loaded.
    """

    kernels: int
    failed: int
    recording_seconds: float
    remaining_seconds: float


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

    `workers` is the largest number of compiling processes; by default the CPU cores that this process may use less one,
    divided by `num_ranks`. None starts while Triton's cache on disk has every kernel. Each rank compiles its share of
    the kernels first, and then finds most of the others in the cache folder, which the ranks share.

    A kernel that a process fails to compile is compiled in this one. If that fails too, it is logged, and the kernel's
    first launch raises the error. If `run` raises, the compilations that have begun are finished.
    """
    _compute_keys()
    if not _is_supported():
        logger.info("Triton %s can't compile ahead: each kernel is compiled at its first launch", triton.__version__)
        return None
    started = time.perf_counter()
    hash_triton().join()
    tasks = _Tasks(device, workers or max(1, min(_MAX_WORKERS, (_num_cores() - 1) // num_ranks)), rank, num_ranks)
    mode = triton.AsyncCompileMode(tasks, ignore_errors=True)
    context = contextvars.Context()  # compilations within it are submitted to `tasks`; others run as usual
    context.run(mode.__enter__)
    with tasks:
        with _recorded_launches(context.run):
            run()
        recorded = time.perf_counter()
        tasks.finish()
    context.run(mode.__exit__, None, None, None)  # puts the kernels into Triton's caches in memory
    errors = tasks.errors()
    result = CompiledAhead(len(tasks.tasks), len(errors), recorded - started, time.perf_counter() - recorded)
    logger.info(
        "compiled %d kernels, or read them from Triton's cache, in %.1f s, of which %.1f s after the recording",
        result.kernels, result.recording_seconds + result.remaining_seconds, result.remaining_seconds,
    )  # fmt: skip
    if tasks.process_errors:
        logger.warning(
            "%d kernels were compiled in this process, as the process meant for it failed; the first error: %s",
            len(tasks.process_errors), tasks.process_errors[0],
        )  # fmt: skip
    if errors:
        logger.error("%d of them failed to compile or load; the first error: %r", result.failed, errors[0])
    return result


def _compute_keys() -> None:
    """Compute the keys of this package's kernels, so that any later launch finds what another start has compiled."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    compute_key(value)


def _is_supported() -> bool:
    """Return whether this Triton has the interfaces used here. Release 3.6 has them."""
    run = getattr(triton.JITFunction, "run", None)
    parameters = inspect.signature(run).parameters if run is not None else {}
    has_interface = hasattr(triton, "AsyncCompileMode") and hasattr(cache, "triton_key")
    return has_interface and {"grid", "warmup"} <= parameters.keys()


@functools.cache
def hash_triton() -> threading.Thread:
    """Return the thread that computes Triton's hash of the package's files, which is part of every key of its cache.

    The hash takes about a second, mostly without Python's global lock: call this early, while other things load.
    """
    hash_files = getattr(cache, "triton_key", int)  # int: other versions have none
    thread = threading.Thread(target=hash_files, daemon=True, name="hash-triton")
    thread.start()
    return thread


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
                compute_key(kernel)  # of a module that was imported meanwhile
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
    """The executor of an AsyncCompileMode: a thread per compiling process. Use it in a `with` block, and `finish` it.

    - tasks: all tasks, in the order of submission.
    - process_errors: why kernels that compile were compiled in this process.
    """

    def __init__(self, device: torch.device, workers: int, rank: int, num_ranks: int):
        self.tasks: list[_Task] = []
        self.process_errors: list[Exception] = []
        self._device, self._rank, self._num_ranks = device, rank, num_ranks
        self._load_errors: list[BaseException] = []
        self._loaded: set[Hashable] = set()
        self._processes = CompileWorkers()
        self._pool = ThreadPoolExecutor(workers, "compile-ahead", self._set_device)

    def __enter__(self) -> _Tasks:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._processes.close()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:
        """Add a task, and start it if it is in this rank's share. AsyncCompileMode calls this once per kernel."""
        task = _Task(lambda: self._loaded_once(self._compile(compile_kernel)))
        if self._turn(len(self.tasks)) == 0:
            self._pool.submit(task.run)
        self.tasks.append(task)
        return task

    def finish(self) -> None:
        """Run the tasks outside this rank's share, wait for all, and load their kernels."""
        for index in sorted(range(len(self.tasks)), key=self._turn):
            if self._turn(index) > 0:
                self._pool.submit(self.tasks[index].run)
        self._pool.shutdown()
        for task in self.tasks:
            if task.exception() is None:
                try:
                    self._load(task.result())
                except Exception as error:  # too much shared memory, for example
                    self._load_errors.append(error)

    def errors(self) -> list[BaseException]:
        """Return the errors of the tasks that have run, and of loading their kernels."""
        return [error for task in self.tasks if (error := task.exception()) is not None] + self._load_errors

    def _turn(self, index: int) -> int:
        """Return when this rank compiles a kernel: 0 for its own share, then 1, 2, .. for the next ranks' shares."""
        return (index - self._rank) % self._num_ranks

    def _set_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        """Return what `compile_kernel` does, which then reads a kernel that was compiled in another process."""
        process_error = None
        try:
            self._compile_in_process(inspect.getclosurevars(compile_kernel).nonlocals)
        except Exception as error:
            process_error = error
        kernel = compile_kernel()
        if process_error is not None:
            self.process_errors.append(process_error)
        return kernel

    def _compile_in_process(self, variables: Mapping[str, Any]) -> None:
        """Put the kernel of a Triton task into the cache on disk. `variables`: closure variables of its function."""
        source, target, options = (variables[name] for name in ("src", "target", "options"))
        key = cache.get_cache_key(source, make_backend(target), options, variables["env_vars"])
        folder = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        if folder.get_group(f"{source.name[:150]}.json") is None:  # as triton.compile looks it up
            self._processes.compile(source, target, options.__dict__)

    def _loaded_once(self, kernel: Any) -> Any:
        """Load the first kernel of each signature as its launch would, since Triton 3.6 builds a launcher in C then."""
        signature = kernel.src.fn.__name__, tuple(kernel.src.signature.values())
        if signature not in self._loaded:
            self._loaded.add(signature)
            self._load(kernel)
        return kernel

    def _load(self, kernel: Any) -> None:
        if self._device.type == "cuda":
            kernel.run  # noqa: B018 (a property that loads the kernel)
