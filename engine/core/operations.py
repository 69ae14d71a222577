"""Commands to a running loop: report, pause, warm and drop graphs, update weights, record a profile.

Each runs on the loop's thread between two steps and returns plain values.
"""

from __future__ import annotations

import errno
import gzip
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.core.kv_blocks import KVBlockStore
from engine.core.loop import EngineLoop
from engine.core.weight_updates import WeightUpdates
from engine.errors import RequestError


class Operations:
    """The table of commands that a client may `ask` for by name. A new one is a method and a line of the table."""

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self._profiler: torch.profiler.profile | None = None
        weights = WeightUpdates(loop)
        blocks = KVBlockStore(loop)
        self._commands: dict[str, Callable[..., Any]] = {
            "graphs": loop.graphs,
            "stats": loop.stats,
            "idle_check": loop.idle_check,
            "warm": self.warm,
            "invalidate": self.invalidate,
            "pause": loop.pause,
            "resume": loop.resume,
            "is_paused": lambda: loop.pause_mode is not None,
            "num_awaited": loop.num_awaited,
            "begin_sleep": loop.sleep.begin,
            "release": loop.sleep.release,
            "wake_up": loop.sleep.wake_up,
            "is_sleeping": lambda: loop.sleep.is_sleeping,
            "abort_requests": loop.abort_requests,
            "reset_prefix_cache": loop.reset_prefix_cache,
            "list_kv_blocks": blocks.list_,
            "lookup_kv_blocks": blocks.lookup,
            "export_kv_blocks": blocks.export,
            "import_kv_blocks": blocks.import_,
            "load_weights": loop.load_weights,
            "start_weight_update": weights.start,
            "update_weights_from_disk": weights.load,
            "join_weight_group": weights.groups.join,
            "leave_weight_group": weights.groups.leave,
            "update_weights_from_group": weights.receive,
            "update_weights_from_memory": weights.open,
            "finish_weight_update": weights.finish,
            "rename_weights": loop.rename_weights,
            "weight_version": lambda: loop.weight_version,
            "randomize_weights": weights.randomize,
            "weight_checksums": weights.checksums,
            "weight_values": weights.values,
            "profile_start": self.profile_start,
            "profile_stop": self.profile_stop,
        }

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Run the command `name` and return its result, or a Pending one.

        Raises RequestError if there is no command of that name.
        """
        if name not in self._commands:
            raise RequestError(f"unknown command {name!r}: use one of {', '.join(self._commands)}", param="method")
        return self._commands[name](*arguments)

    def warm(self) -> int:
        """See Captures.request. Raises RequestError while memory is released."""
        self._loop.sleep.check_graphs()
        return self._loop.captures.request()

    def invalidate(self) -> int:
        """See Captures.invalidate. Raises RequestError while memory is released."""
        self._loop.sleep.check_graphs()
        return self._loop.captures.invalidate()

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
