"""What passes between the front and the loop, in one process or across two: plain values that pickle.

Owns the commands, the reports and the snapshots. Knows no transport, no tensors and no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.protocol.request import EngineRequest, TokenEvent


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a front must know of the model that is served."""

    name: str
    architecture: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    weight_format: str
    weight_version: str
    logprobs_mode: str
    graph_buckets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the loop's counters and gauges. `graphs` is the graph cache's own snapshot as plain data."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)
    warm: dict[str, Any] = field(default_factory=dict)
    weight_version: str = ""
    last_error: str = ""
    idle_check_failures: int = 0


CLIENT_ID_SPAN = 2**40  # numbers that one front may give away; a front's begin at its own number times this


def client_of(name: str | int) -> int:
    """Which front gave a sequence its id, or an Ask its number."""
    return int(name.partition(".")[0]) if isinstance(name, str) else name // CLIENT_ID_SPAN


# ---- commands, to the loop -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """Take these sequences on; each is answered by TokenEvents until one carries finish_reason."""

    requests: list[EngineRequest]


@dataclass(frozen=True)
class Abort:
    """End these sequences; each live one is answered by a last event with finish_reason "abort"."""

    request_ids: list[str]


@dataclass(frozen=True)
class Ask:
    """Call a named method of the loop between steps; answered by one Reply with the same number."""

    number: int
    method: str
    args: tuple = ()


@dataclass(frozen=True)
class ClientDisconnected:
    """A front is gone: abort what it has under way. Never reaches a loop: packing.py makes an Abort of it."""

    client: int


@dataclass(frozen=True)
class Stop:
    """End the loop: running sequences are aborted."""


# ---- reports, from the loop ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The model is loaded and requests are answered."""

    info: ModelInfo


@dataclass(frozen=True)
class Tokens:
    """One new token for each of several sequences, and nothing else to say of them: the columns of plain events."""

    request_ids: list[str]
    token_ids: list[int]  # parallel
    weight_version: str
    graph_bucket: int | None


@dataclass(frozen=True)
class Events:
    """What one step gave. Of a sequence, what is in `tokens` came before what is in `events`.

    The loop fills `events` alone; a transport that leaves the process moves what it can into `tokens` (packing.py).
    """

    events: list[TokenEvent]
    tokens: list[Tokens] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """The loop is alive; sent several times a second while it steps or waits."""

    stats: EngineStats


@dataclass(frozen=True)
class Reply:
    """The answer to an Ask: a value, or the error that it ended with."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class AddressedReports:
    """Reports, each for one front and pickled already: (front's number, the report). Passed on unopened."""

    parcels: list[tuple[int, bytes]]


@dataclass(frozen=True)
class Dead:
    """The loop has ended. `reason` is empty after a Stop; `refused`: the start failed of the configuration or model."""

    reason: str
    refused: Exception | None = None


@dataclass(frozen=True)
class Lost:
    """A loop that served has ended or was killed, and another one is about to be started: the next report is its Ready,
    another Lost, or a Dead. `restarts` counts this one too. Sent by a supervisor, never by a loop.
    """

    reason: str
    restarts: int


Command = Submit | Abort | Ask | ClientDisconnected | Stop
Report = Ready | Events | Snapshot | Reply | AddressedReports | Lost | Dead
