"""Messages between clients and the engine loop: commands, reports and statistics snapshots.

All messages are picklable plain data, used within one process or across two. Transports live in engine/client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError
from engine.protocol.pooling import PoolingConfig
from engine.protocol.request import EngineRequest, SamplingParams, TokenEvent


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Properties of the served model that clients need."""

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
    input_modalities: tuple[str, ...] = ("text",)  # of messages
    page_size: int  # tokens per KV cache page
    hidden_state_size: int = 0  # values of a hidden state; 0: requests can't ask for them
    routed_experts: tuple[int, int] | None = None  # layers with experts, experts per token; None: not to be asked for
    num_experts: int = 0  # of a layer
    num_pages: int  # of the KV cache
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    async_scheduling: bool
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of a server's requests
    hidden_size: int = 0  # values of an embedding
    num_labels: int = 0  # outputs of the classification head; 0: there is none
    generates_text: bool = True  # whether the checkpoint has an LM head
    pooling: PoolingConfig = field(default_factory=PoolingConfig, hash=False)
    num_parameters: int = 0  # of the whole model; 0: unknown

    def check_head(self, params: SamplingParams) -> None:
        """Raise RequestError if the model lacks the head that a request with these parameters needs."""
        needs_logits = params.max_tokens != 0 or params.prompt_logprobs is not None
        if needs_logits and not self.generates_text:
            raise RequestError(
                f"{self.name} has no LM head, so it generates no text: use it for "
                + ("scores (/v1/score, /pooling)" if self.num_labels else "embeddings (/v1/embeddings, /pooling)"),
                param="model",
            )
        if params.pooling == "classify" and not self.num_labels:
            raise RequestError(
                f"{self.name} has no classification head (…ForSequenceClassification): use embeddings", param="task"
            )


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the loop's counters and gauges.

    `num_deferred` of the waiting sequences wait for their grammars. `pause` is the mode of a pause, or "". `released`:
    the parts of memory that sleep; `weights_discarded`: how the weights slept last. `num_threads` is how many a step on
    a CPU uses; 0 on a GPU. `graphs` is the graph cache's snapshot as plain data, `histograms` the snapshots of
    engine.utils.histogram. Of the tiers below the prefix cache: `tier_hits`, prompt tokens that came up, and
    `tier_bytes`, each by tier; `tier_failed_reads` and `tier_dropped`, blocks (see TierCounts).
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafts: int = 0
    accepted_by_position: dict[int, int] = field(default_factory=dict)
    histograms: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)
    warm: dict[str, Any] = field(default_factory=dict)
    weight_version: str = ""
    last_error: str = ""
    idle_check_failures: int = 0
    pause: str = ""
    released: tuple[str, ...] = ()
    weights_discarded: bool = False
    num_threads: int = 0
    tier_hits: dict[str, int] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    tier_failed_reads: int = 0
    tier_dropped: int = 0


CLIENT_ID_SPAN = 2**40  # IDs per client: client c uses [c * CLIENT_ID_SPAN, (c + 1) * CLIENT_ID_SPAN)


def client_of(name: str | int) -> int:
    """Return the index of the client that issued a sequence id or an Ask number."""
    return int(name.partition(".")[0]) if isinstance(name, str) else name // CLIENT_ID_SPAN


# ---- commands, to the loop -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """Add sequences; the loop answers each with TokenEvents, the last of which carries finish_reason."""

    requests: list[EngineRequest]


@dataclass(frozen=True)
class Abort:
    """Abort sequences; each live one gets a last event with finish_reason "abort"."""

    request_ids: list[str]


@dataclass(frozen=True)
class Ask:
    """Call a method of the loop between steps; the loop answers with one Reply of the same number."""

    number: int
    method: str
    args: tuple = ()


@dataclass(frozen=True)
class ClientDisconnected:
    """A client disconnected: abort its sequences. event_codec.py turns it into an Abort before the loop sees it."""

    client: int


@dataclass(frozen=True)
class Stop:
    """Stop the loop and abort running sequences."""


# ---- reports, from the loop ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The model is loaded and the loop accepts requests."""

    info: ModelInfo


@dataclass(frozen=True)
class Tokens:
    """One new token for each of several sequences, in columns: a compact form of events that carry nothing else.

    `logprobs` are the records of their log-probabilities (engine/protocol/logprobs.py), or empty.
    """

    request_ids: list[str]
    token_ids: list[int]  # parallel to request_ids
    weight_version: str
    graph_bucket: int | None
    logprobs: list[bytes] = field(default_factory=list)  # parallel to request_ids


@dataclass(frozen=True)
class Events:
    """The output of one step. For a given sequence, `tokens` precede `events`.

    The loop fills only `events`; for other processes, event_codec.py moves plain events into `tokens`.
    """

    events: list[TokenEvent]
    tokens: list[Tokens] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """Heartbeat with statistics, sent several times a second while the loop steps or waits."""

    stats: EngineStats


@dataclass(frozen=True)
class Reply:
    """The answer to an Ask: the method's return value, or the exception it raised."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class AddressedReports:
    """Reports for individual clients as (client index, pickled report) pairs; forwarded without unpickling."""

    parcels: Sequence[tuple[int, bytes | memoryview]]


@dataclass(frozen=True)
class Dead:
    """The loop has ended. `reason` is empty after a Stop; `refused` is set if the config or model prevented startup."""

    reason: str
    refused: Exception | None = None


@dataclass(frozen=True)
class Lost:
    """A running loop ended or was killed and is being restarted. Sent by the supervisor, never by a loop.

    The next report is Ready, another Lost, or Dead. `restarts` includes this restart.
    """

    reason: str
    restarts: int


Command = Submit | Abort | Ask | ClientDisconnected | Stop
Report = Ready | Events | Snapshot | Reply | AddressedReports | Lost | Dead
