"""Operator requests to a running loop: warm and drop graphs, load weights from disk, record a profile.

Each runs on the loop's thread between two steps and returns plain values.
"""

from __future__ import annotations

import errno
import gzip
import tempfile
import time
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import RequestError
from engine.executor.interface import Executor
from engine.worker.model_runner import ModelRunner

ASKED = "asked"  # invalidation reason of graphs that an operator dropped


class ControlledLoop(Protocol):
    """The part of EngineLoop that operations use."""

    executor: Executor
    warm_requested: bool

    @property
    def runner(self) -> ModelRunner: ...

    def load_weights(self, path: str, version: str) -> int: ...


class Operations:
    """Operator methods of one loop, called through `Client.ask("operations.…")`."""

    def __init__(self, loop: ControlledLoop):
        self._loop = loop
        self._profiler: torch.profiler.profile | None = None

    def warm(self) -> int:
        """Start capturing the missing graphs of the warm-up plan between steps. Returns how many are missing."""
        missing = len(self._loop.runner.cache.pending())
        self._loop.warm_requested = missing > 0
        return missing

    def invalidate(self) -> int:
        """Drop every graph; the warm-up mode decides when each is captured again. Returns the number dropped."""
        return self._loop.executor.call("invalidate", ASKED)

    def load_weights(self, path: str, version: str) -> int:
        """Update the weights from a safetensors file or a folder of them. Returns the number of tensors written.

        Raises WeightUpdateError if the files can't be read or don't match the model; the old weights stay in use.
        """
        return self._loop.load_weights(path, version)

    def profile_start(self) -> None:
        """Start recording all CPU and GPU operations. Costs time and memory until `profile_stop`."""
        if self._profiler is not None:
            raise RequestError("a profile is already being recorded: stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        self._profiler = profiler

    def profile_stop(self, folder: str) -> str:
        """Stop recording and write a Chrome trace into `folder`. Returns the file's path."""
        if self._profiler is None:
            raise RequestError("no profile is being recorded: start one first")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = Path(folder) / f"encore-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            with gzip.open(path) as trace:
                if not trace.read(1):  # PyTorch doesn't notice that its temporary file could not be written
                    raise OSError(errno.ENOSPC, f"no space left in {tempfile.gettempdir()}, or the file is too large")
        except OSError as error:
            path.unlink(missing_ok=True)
            raise RequestError(f"can't write the profile to {path}: {error.strerror or error}") from error
        return str(path)
