"""Settings of the events that tell routers which prefixes the KV cache holds, with vLLM's names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from graph_cache.utils.validation import did_you_mean, is_whole_number

SETTING = "kv_events_config"
PUBLISHERS = ("null", "zmq")
TRANSPORTS = ("tcp://", "ipc://", "inproc://")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Which events of the prefix cache are published, and where. Names and defaults are vLLM's.

    - `enable_kv_cache_events`: publish events of pages stored and removed.
    - `publisher`: "zmq", the default with events on, or "null", which publishes nothing.
    - `endpoint`: address of the PUB socket. It binds an address with `*`, `::` or `0.0.0.0`, or one of ipc or inproc;
      it connects to any other, as vLLM's does, so that one subscriber can listen to several servers.
    - `replay_endpoint`: address on which a ROUTER socket sends earlier batches again; None: none does.
    - `buffer_steps`: number of batches kept for that.
    - `hwm`: messages that ZeroMQ holds for a slow subscriber; it drops further ones.
    - `max_queue_size`: batches that wait for the publishing thread; further ones are dropped.
    - `topic`: the first frame of each message, such as `kv@<pod>@<model>`.

    Raises ConfigError for an invalid value.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise _invalid("enable_kv_cache_events", self.enable_kv_cache_events, "true or false")
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        if self.publisher not in PUBLISHERS:
            raise _invalid("publisher", self.publisher, " or ".join(PUBLISHERS))
        if self.publisher == "zmq" and not self.enable_kv_cache_events:
            raise ConfigError(
                f'{SETTING}: publisher="zmq" publishes nothing without "enable_kv_cache_events": true: add that, or '
                "leave publisher out"
            )
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is None and name == "replay_endpoint":
                continue
            if not isinstance(address, str) or not address.startswith(TRANSPORTS):
                raise _invalid(name, address, f"an address that begins with {', '.join(TRANSPORTS)}")
        if self.endpoint == self.replay_endpoint:
            raise _invalid("replay_endpoint", self.replay_endpoint, "another address than endpoint")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if not is_whole_number(getattr(self, name), 1):
                raise _invalid(name, getattr(self, name), "a whole number of at least 1")
        if not isinstance(self.topic, str):
            raise _invalid("topic", self.topic, "a string")

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def of(cls, value: object) -> KVEventsConfig:
        """Return the settings given as an object of this class, a mapping or JSON text. Raises ConfigError."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"{SETTING}={value!r} is not valid JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise ConfigError(f'{SETTING}={value!r} must be a JSON object such as {{"enable_kv_cache_events": true}}')
        known = [field.name for field in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                raise ConfigError(f"{SETTING}: unknown key {key!r}{did_you_mean(str(key), known)}")
        return cls(**value)


def _invalid(name: str, value: object, needed: str) -> ConfigError:
    return ConfigError(f"{SETTING}: {name}={value!r} must be {needed}")
