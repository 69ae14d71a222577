"""What a server is built from: one frozen object that contains the engine's settings.

Owns the HTTP side's names, defaults and refusals; the engine's own are EngineConfig's. `from_dict` takes both kinds
in one flat mapping, as the command line has them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from graph_cache.validation import did_you_mean, is_whole_number

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOG_FORMATS = ("text", "json")
# A front streams about 20,000 tokens a second; the other processors are the engine's and the clients'.
MAX_API_WORKERS, PROCESSORS_PER_API_WORKER = 4, 4
CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # a container sees its own there


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server. Raises ConfigError for a value that can't be meant.

    `served_model_name`: the names that clients may give as "model", the first one is shown; none means the model's
    own. `max_waiting`: sequences that may wait beyond those running, past which requests are refused with 429.
    `max_body_bytes`: a larger body is refused with 413 before it is parsed. `max_connections`: more are answered 503.
    `header_seconds`: how long a request's headers may take. `write_seconds`: how long a client may take nothing of an
    answer that waits for it, after which its connection is closed. `keep_alive_seconds`: how long an idle connection
    is kept. `drain_seconds`: how long running requests may go on after SIGTERM. `api_key_file`, `admin_key_file`: one
    accepted key a line; none leaves inference open and the admin routes off. `profile_folder`: where /profile writes,
    off without. `http_workers`: fronts, processes that answer HTTP on the one port; None: one for each four processors,
    at most 4. `in_process`: run the engine in this process instead of its own, which allows one front.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    max_waiting: int = 1024
    max_body_bytes: int = 8 * 1024 * 1024
    max_connections: int = 4096
    header_seconds: float = 10.0
    write_seconds: float = 60.0
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    api_key_file: str | None = None
    admin_key_file: str | None = None
    profile_folder: str | None = None
    http_workers: int | None = None
    in_process: bool = False
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        object.__setattr__(self, "served_model_name", tuple(self.served_model_name))
        if not all(isinstance(name, str) and name for name in self.served_model_name):
            raise ConfigError(f"served_model_name={self.served_model_name!r}: names that are not empty are needed")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host={self.host!r}: an address to listen on is needed, such as 127.0.0.1 or 0.0.0.0")
        _check_int("port", self.port, 0, 65535)
        _check_int("max_waiting", self.max_waiting, 0, 1_000_000)
        _check_int("max_body_bytes", self.max_body_bytes, 1024, 2**31)
        _check_int("max_connections", self.max_connections, 1, 1_000_000)
        if self.http_workers is not None:
            _check_int("http_workers", self.http_workers, 1, 64)
            if self.http_workers > 1 and self.in_process:
                raise ConfigError(
                    f"http_workers={self.http_workers} and in_process: an engine in the server's own "
                    "process has one front; leave one of the two out"
                )
        _check_seconds("header_seconds", self.header_seconds, 0.1)
        _check_seconds("write_seconds", self.write_seconds, 0.1)
        _check_seconds("keep_alive_seconds", self.keep_alive_seconds, 0.1)
        _check_seconds("drain_seconds", self.drain_seconds, 0)
        for name, allowed in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")

    @property
    def api_workers(self) -> int:
        """How many processes answer HTTP."""
        if self.http_workers is not None:
            return self.http_workers
        return 1 if self.in_process else min(MAX_API_WORKERS, max(1, _processors() // PROCESSORS_PER_API_WORKER))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerConfig:
        """Build from one flat mapping of server and engine settings; an unknown key names the nearest known one."""
        own_names = {f.name for f in dataclasses.fields(cls)} - {"engine"}
        engine_names = {f.name for f in dataclasses.fields(EngineConfig)}
        own, engine = {}, {}
        for name, value in values.items():
            if name in own_names:
                own[name] = value
            elif name in engine_names:
                engine[name] = value
            else:
                raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, own_names | engine_names)}")
        return cls(engine=EngineConfig.from_dict(engine), **own)


def _processors() -> int:
    """Those that this process may use."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(min(found, max(1, quota(CGROUP_LIMIT))))


def quota(limit: Path) -> float:
    """Of how many processors a container may use the time, by its cgroup's `cpu.max`; infinite where nothing says."""
    try:
        time, period = limit.read_text().split()
    except OSError:  # no container, not Linux, or cgroups of the first version
        return math.inf
    return math.inf if time == "max" else int(time) / int(period)


def _check_seconds(name: str, value: Any, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r}: a number of seconds is needed")
    if not low <= value <= 86400:
        raise ConfigError(f"{name}={value}: from {low:g} to 86400 seconds are possible")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not is_whole_number(value, low, high):
        raise ConfigError(f"{name}={value!r}: a whole number from {low} to {high} is needed")
