"""The lifecycle of the engine client: its start and end, whether it serves, and what it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDead
from engine.text.parsing.tool_use import ToolUse
from engine.text.scoring import Scoring
from server.config import ServerConfig
from server.http.connections import ACCEPTING
from server.http.errors import WireError
from server.observability.shared_counters import SharedCounters
from server.serving.chat_formats import ChatFormats
from server.serving.tokenization import Tokenization

if TYPE_CHECKING:
    from engine.client.async_client import Client

STARTED = "started"  # gauge of an API worker: 1 once it can serve


class Lifecycle:
    """An engine client from `begin` to `close`.

    If `counters` has several rows, this is one of several API workers and the counts are summed over them. `settled` is
    set once startup has succeeded or failed; `startup_error` is the error if it failed. `draining` refuses new
    requests. Not thread-safe: use it from the event loop's thread only.
    """

    def __init__(
        self, client: Client, config: ServerConfig, counters: SharedCounters | None = None,
        start_time: float | None = None,
    ):  # fmt: skip
        self.client, self.config = client, config
        self.counters = counters if counters is not None else SharedCounters()
        self.startup: asyncio.Task[None] | None = None
        self.startup_error: BaseException | None = None
        self.before_ready: Callable[[], None] | None = None  # slow work to do before the first request
        self.draining = False
        self.settled = asyncio.Event()
        self.start_time = time.time() if start_time is None else start_time
        self._closed = False
        self._tokens: Tokenization | None = None
        self.chat_formats: ChatFormats  # set before `tokens`
        self.scoring: Scoring  # set before `tokens`
        self._started = self.counters.gauge_index(STARTED)

    def begin(self) -> None:
        """Start the client in a task, so that health and readiness probes are answered while the model loads."""
        self.startup = asyncio.create_task(self._start())

    async def _start(self) -> None:
        config = self.config
        try:
            await self.client.start()
            tokenizer, info = self.client.tokenizer, self.client.info()
            self.chat_formats = ChatFormats(
                tokenizer, config.tool_call_parser, config.reasoning_parser, config.close_objects
            )
            tokens = Tokenization(
                tokenizer, info.max_model_len, info.vocab_size, config.template_seconds, config.max_prompt_chars
            )
            self.scoring = Scoring(tokenizer, info)
            if self.before_ready is not None:
                self.before_ready()
            self._tokens, self.counters.values[self._started] = tokens, 1.0
        except Exception as exc:
            self.startup_error = exc
        finally:
            self.settled.set()

    async def close(self) -> None:
        """Close the client, started or not, and abort every request. A second call does nothing."""
        self.draining = True
        if self._closed:
            return
        self._closed = True
        if self.startup is not None:
            self.startup.cancel()
            await asyncio.gather(self.startup, return_exceptions=True)
        if self._tokens is not None:
            self._tokens.close()
        await self.client.close()

    @property
    def started(self) -> bool:
        """Whether the engine has loaded its model."""
        return self._tokens is not None

    @property
    def tokens(self) -> Tokenization:
        """The model's tokenizer. Raises WireError 503 until the model is loaded, EngineDead if loading failed."""
        if self._tokens is None:
            if self.startup_error is not None:
                raise EngineDead(f"the engine did not start: {self.startup_error}")
            raise WireError(
                503, f"{self._loading_reason()}; try again soon", type="service_unavailable_error", code="loading",
                retry_after=2,
            )  # fmt: skip
        return self._tokens

    def chat_formats_of(self, use: ToolUse | None) -> ChatFormats:
        """Return the model's formats, for an output that may use tools in this way.

        Raises WireError 503 until the model is loaded, RequestError if its tool calls can't be parsed.
        """
        _ = self.tokens
        self.chat_formats.check(use)
        return self.chat_formats

    def reasons_not_ready(self) -> list[str]:
        """Return why the server is not ready; an empty list if it is."""
        if self.draining:
            return ["shutting down"]
        if self.startup_error is not None:
            return [f"the engine did not start: {self.startup_error}"]
        loading = self.counters.total_gauge(ACCEPTING) - self.counters.total_gauge(STARTED)
        if not self.started or loading > 0:  # another worker may get the next request
            return [self._loading_reason()]
        health = self.client.health()
        return [] if health.ready else [health.reason or "the engine is not ready"]

    def model_names(self) -> tuple[str, ...]:
        """Return the model names that clients may use. The first one is reported in responses."""
        if self.config.served_model_name:
            return self.config.served_model_name
        return tuple(dict.fromkeys((self.client.info().name, self.config.engine.model)))

    def sampling_defaults(self) -> Mapping[str, Any]:
        """Return the model's sampling parameters for fields that a request leaves out; empty until it is loaded."""
        return self.client.info().sampling_defaults if self.started else {}

    def check_model(self, name: str | None) -> None:
        """Raise WireError 404 for a model that is not served. None stands for the served model."""
        names = self.model_names() if self.started else ()
        if name is not None and names and name not in names:
            raise WireError(
                404, f"the model {name[:200]!r} is not served; served models: {', '.join(names)}",
                type="not_found_error", param="model", code="model_not_found",
            )  # fmt: skip

    def check_serving(self) -> None:
        """Raise WireError 503 while loading or draining, EngineDead while there is no engine."""
        _ = self.tokens
        if self.draining:
            raise WireError(
                503, "the server is shutting down", type="service_unavailable_error", code="draining", retry_after=5
            )
        health = self.client.health()
        if not health.ready:
            raise EngineDead(f"the engine is not available: {health.reason}")

    def load(self) -> dict[str, float]:
        """Return what load balancers ask for, with vLLM's names."""
        stats = self.client.stats()
        return {"kv_cache_usage_perc": float(stats.kv_cache_usage), "num_requests_waiting": float(stats.num_waiting)}

    def _loading_reason(self) -> str:
        """Return the engine's startup reason; without one, this or another API worker is still loading."""
        return self.client.health().reason or "the model is being loaded"
