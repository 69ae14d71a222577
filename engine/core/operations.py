"""What an operator asks of a running loop: warm, drop and recapture graphs, load weights from disk, take a profile.

Each runs between two steps, on the loop's thread, and returns plain values. Knows the loop; no HTTP and no keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import ModelError, RequestError, WeightUpdateError
from engine.loader.weights import iterate_shards, safetensors_files
from engine.worker.model_runner import ModelRunner

ASKED = "asked"  # the reason under which graphs dropped by an operator are counted


class ControlledLoop(Protocol):
    """The part of EngineLoop that operations use."""

    runner: ModelRunner
    warm_requested: bool

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> int: ...


class Operations:
    """The operator's methods of one loop; called by `Client.ask("operations.…")`."""

    def __init__(self, loop: ControlledLoop):
        self._loop = loop
        self._profiler: torch.profiler.profile | None = None

    def warm(self) -> int:
        """Capture what is wanted ahead and missing, between steps from now on; returns how many graphs that is."""
        missing = len(self._loop.runner.cache.pending())
        self._loop.warm_requested = missing > 0
        return missing

    def invalidate(self) -> int:
        """Drop every graph; they come back by the warm-up mode's rule. Returns how many there were."""
        return self._loop.runner.cache.invalidate(ASKED)

    def load_weights(self, path: str, version: str) -> int:
        """Update the weights from a safetensors file, or a folder of them. Returns how many tensors were written.

        Raises WeightUpdateError, with the old weights serving on, for what can't be read or doesn't fit.
        """
        source = Path(path)
        try:
            if not source.exists():
                raise ModelError(f"{path!r} is not there; give a safetensors file or a folder on the server's machine")
            files = safetensors_files(source) if source.is_dir() else [source]
            return self._loop.update_weights(iterate_shards(files), version)
        except ModelError as error:
            raise WeightUpdateError(str(error)) from error

    def profile_start(self) -> None:
        """Record every operation from here on, on CPU and GPU. Costs time and memory until `profile_stop`."""
        if self._profiler is not None:
            raise RequestError("a profile is being recorded already: stop that one first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        self._profiler = profiler

    def profile_stop(self, folder: str) -> str:
        """End the recording and write it into `folder` as a Chrome trace; returns the file's path."""
        if self._profiler is None:
            raise RequestError("no profile is being recorded: start one first")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = Path(folder) / f"encore-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            raise RequestError(f"the profile can't be written to {path}: {error.strerror or error}") from error
        return str(path)
