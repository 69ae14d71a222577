"""The service behind the routes: admission, tokenization, running jobs on the engine client, and request metrics.

It also starts and closes the engine client and counts the sequences in flight. It is independent of HTTP formats.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.client.output_queue import LOGPROB_BYTES
from engine.errors import EngineDead, EngineError, PromptTooLong, QueueFull, RequestError
from engine.protocol.messages import ModelInfo
from engine.protocol.outputs import CompletionOutput, OutputDelta, RequestOutput
from engine.protocol.request import SamplingParams
from engine.protocol.sampling_params import ALL_TOKENS
from engine.text.parsing.tool_use import ToolUse
from engine.text.scoring import Scoring
from server.config import ServerConfig
from server.http.connections import ACCEPTING
from server.http.direct import DirectWriter
from server.http.errors import WireError
from server.http.json_text import encoded
from server.http.sender import REQUEST_ID, SENDER
from server.http.streaming import WriteEvent, event, large_event
from server.observability.metrics import QUEUE_FULL, RequestMetrics, RequestWatch
from server.observability.shared_counters import SharedCounters
from server.schemas.truncation import Truncation
from server.serving.chat_formats import ChatFormats
from server.serving.output_budget import OutputBudget, Share, size_of
from server.serving.tokenization import Tokenization

if TYPE_CHECKING:
    from engine.client.async_client import Client


# Gauges of an API worker: its sequences in flight; its requests without a complete response; 1 once it can serve.
IN_FLIGHT, UNANSWERED, STARTED = "in_flight", "unanswered", "started"
INLINE_LOGPROB_BYTES = 256 * 1024  # of an answer that is written on the event loop, in some milliseconds
ARRAY_BYTES = INLINE_LOGPROB_BYTES + 1  # of an answer with hidden states: a thread writes it, whatever their number
MAX_HIDDEN_VALUES = 2**22  # of the hidden states of a prompt's sequences: 16 MiB
YIELD_CHARS = 8192  # of prompts between two turns of other tasks: tokenizing them takes some milliseconds


@dataclass(kw_only=True)
class Job:
    """One prompt of a request. `public_id` is the id that the client sees; `output` accumulates the deltas.

    `names`: further ids under which a client may abort it, besides `public_id` and the request's X-Request-Id.
    """

    public_id: str
    output: RequestOutput
    params: SamplingParams
    max_tokens: int  # of a sequence; without params.max_tokens, what the context holds after the prompt
    priority: int = 0
    started: float = field(default_factory=time.perf_counter)
    watch: RequestWatch | None = None  # set by Service.run
    names: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.output.prompt_token_ids)

    @property
    def choices(self) -> list[CompletionOutput]:
        """The output of each of the n sequences so far."""
        return self.output.outputs


class Reservation:
    """The queue capacity that one request holds, in sequences.

    Released as its sequences end; the rest when its admission ends.
    """

    def __init__(self, service: Service, sequences: int):
        self._service, self._held = service, sequences
        self.engine_ids: set[str] = set()  # of the request's running jobs
        self.started = 0  # sequences of the request that were sent to the engine
        self.logprobs = Share(self._abort)
        service.add_in_flight(sequences)

    def release(self, sequences: int) -> None:
        """Release this many sequences. Called when they end in the engine, even if their output is still unread."""
        sequences = min(sequences, self._held)
        self._held -= sequences
        self._service.add_in_flight(-sequences)

    def release_all(self) -> None:
        """Release everything that is still held: the request is over."""
        self.release(self._held)
        self._service.outputs.release(self.logprobs)

    def _abort(self) -> None:
        for engine_id in self.engine_ids:
            self._service.abort_soon(engine_id)


def _check_hidden_values(prompt_tokens: int, params: SamplingParams, info: ModelInfo) -> None:
    """Raise RequestError if the sequences of a request may have more than MAX_HIDDEN_VALUES in all."""
    tokens = info.max_model_len - 1
    if params.max_tokens is not None:
        tokens = min(tokens, prompt_tokens + max(0, params.max_tokens - 1))
    if params.n * tokens * info.hidden_state_size > MAX_HIDDEN_VALUES:
        most = MAX_HIDDEN_VALUES // (params.n * info.hidden_state_size)
        raise RequestError(
            f"return_hidden_states: {params.n} sequences of {tokens} vectors of {info.hidden_state_size} values are "
            f"more than {MAX_HIDDEN_VALUES} values, the limit of a prompt: shorten it, lower max_tokens or lower n, "
            f"to {most} vectors of a sequence",
            param="return_hidden_states",
        )


def _check_logprobs(prompt_tokens: int, params: SamplingParams, vocab_size: int, config: ServerConfig) -> None:
    """Raise RequestError for more alternatives to a token than the server allows, or a prompt with too many in all."""
    most = vocab_size if config.max_logprobs == ALL_TOKENS else config.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        wanted = vocab_size if count == ALL_TOKENS else min(count or 0, vocab_size)
        if wanted > most:
            what = f" asks for all {vocab_size} tokens of the vocabulary" if count == ALL_TOKENS else ""
            raise RequestError(
                f"{name}={count}{what}: at most {most} alternatives to a token are allowed (--max-logprobs): ask for "
                "fewer",
                param=name,
            )
        if name == "prompt_logprobs" and wanted * prompt_tokens * LOGPROB_BYTES > config.max_total_logprob_bytes:
            raise RequestError(
                f"{name}={count}: {wanted} alternatives to each of {prompt_tokens} tokens of the prompt are more than "
                "the server holds (--max-total-logprob-bytes): ask for fewer, or shorten the prompt",
                param=name,
            )


class Service:
    """The engine client with admission control, for the routes. `begin` starts the client, `close` stops it.

    If `counters` has several rows, this is one of several API workers and the counts are summed over them. `settled` is
    set once startup has succeeded or failed; `startup_error` is the error if it failed. Not thread-safe: use it from
    the event loop's thread only.
    """

    def __init__(
        self,
        client: Client,
        config: ServerConfig,
        counters: SharedCounters | None = None,
        start_time: float | None = None,
    ):
        self.client, self.config = client, config
        self.counters = counters if counters is not None else SharedCounters()
        self.metrics = RequestMetrics(self.counters)
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
        self.in_flight = 0  # sequences of this API worker that hold queue capacity
        self.unanswered = 0  # admitted requests of this API worker without a complete response
        self._in_flight = self.counters.gauge_index(IN_FLIGHT)
        self._unanswered = self.counters.gauge_index(UNANSWERED)
        self._started = self.counters.gauge_index(STARTED)
        self._numbers = itertools.count()
        self.outputs = OutputBudget(config.max_total_logprob_bytes)
        self.unread_hints: set[str] = set()  # that the log has named
        self._aborts: set[asyncio.Task[None]] = set()
        self._unyielded = 0  # characters and token ids of prompts since the event loop last ran other tasks

    def begin(self) -> None:
        """Start the client in a task, so that health and readiness probes are answered while the model loads."""
        self.startup = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self.client.start()
            info = self.client.info()
            self.chat_formats = ChatFormats(
                self.client.tokenizer,
                self.config.tool_call_parser,
                self.config.reasoning_parser,
                self.config.close_objects,
            )
            tokens = Tokenization(
                self.client.tokenizer,
                info.max_model_len,
                info.vocab_size,
                self.config.template_seconds,
                self.config.max_prompt_chars,
            )
            self.scoring = Scoring(self.client.tokenizer, info)
            if self.before_ready is not None:
                self.before_ready()
            self._tokens, self.counters.values[self._started] = tokens, 1.0
        except Exception as exc:
            self.startup_error = exc
        finally:
            self.settled.set()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait up to `seconds` for running ones. Returns whether all have been answered."""
        self.draining = True
        until = time.monotonic() + seconds
        while self.unanswered and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self.unanswered

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
            self._require_started()
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

    def check_capacity(self, sequences: int, param: str) -> None:
        """Raise what `admission` would raise now for this many sequences, without reserving capacity.

        Use it to refuse a huge batch before anything is allocated per prompt. `param` names the field of the prompts.
        """
        self.check_serving()
        self._check_max_sequences(sequences, param)
        self._check_capacity(self.all_in_flight, sequences)

    @contextmanager
    def admission(self, sequences: int, param: str = "n") -> Iterator[Reservation]:
        """Reserve capacity for `sequences` in the bounded queue. Enter it before tokenizing the prompts.

        `run` and `finish` release capacity when the engine is done with a sequence, so a client that doesn't read its
        response does not block others. The rest is released on exit.

        Raises:
            QueueFull: the sequences don't fit now.
            RequestError: they exceed the limit; names `param`.
            WireError, EngineDead: the server is loading, draining, or its engine is dead.
        """
        self.check_serving()
        self._check_max_sequences(sequences, param)
        # Reserve before checking: of two workers that admit at the same time, at least one sees the other.
        reservation = Reservation(self, sequences)
        self._add_unanswered(1)
        try:
            self._check_capacity(self.all_in_flight - sequences, sequences)
            yield reservation
        finally:
            self._add_unanswered(-1)
            reservation.release_all()

    @property
    def _capacity(self) -> int:
        """Maximum number of sequences that run or wait."""
        return self.client.info().max_num_seqs + self.config.max_waiting

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

    def _check_max_sequences(self, sequences: int, param: str) -> None:
        limit = self.config.max_sequences_per_request
        if sequences > limit:
            raise RequestError(
                f"{param}: the request asks for {sequences} sequences, and at most {limit} are allowed "
                "(--max-sequences-per-request): send several requests",
                param,
            )
        if sequences > self._capacity:
            raise RequestError(
                f"{param}: the request asks for {sequences} sequences, but at most {self._capacity} can run and wait",
                param,
            )

    def _check_capacity(self, others: int, sequences: int) -> None:
        waiting = self.client.stats().num_waiting
        if others + sequences > self._capacity:
            self.metrics.refused.add(QUEUE_FULL)
            raise QueueFull(
                f"the request asks for {sequences} sequences and {others} are in flight, but at most {self._capacity} "
                "can run and wait: retry later"
            )
        if waiting >= self.config.max_waiting > 0:
            self.metrics.refused.add(QUEUE_FULL)
            raise QueueFull(
                f"{waiting} sequences are waiting already, and the limit is {self.config.max_waiting}: retry later"
            )

    def load(self) -> dict[str, float]:
        """Return what load balancers ask for, with vLLM's names."""
        stats = self.client.stats()
        return {"kv_cache_usage_perc": float(stats.kv_cache_usage), "num_requests_waiting": float(stats.num_waiting)}

    @property
    def all_in_flight(self) -> int:
        """Sequences in flight of all API workers."""
        return int(self.counters.total_gauge(IN_FLIGHT))

    @property
    def all_unanswered(self) -> int:
        """Admitted requests of all API workers without a complete response."""
        return int(self.counters.total_gauge(UNANSWERED))

    def _add_unanswered(self, requests: int) -> None:
        self.unanswered += requests
        self.counters.values[self._unanswered] = self.unanswered

    def add_in_flight(self, sequences: int) -> None:
        """Count this many more sequences of this API worker as in flight; fewer if negative."""
        self.in_flight += sequences
        self.counters.values[self._in_flight] = self.in_flight

    async def job(
        self, public_id: str, prompt: str | list[int], param: str, params: SamplingParams, priority: int,
        add_special_tokens: bool = True, truncation: Truncation | None = None,
    ) -> Job:  # fmt: skip
        """Tokenize a prompt and return its job. `param` is the name of its field for errors.

        Raises RequestError, PromptTooLong.
        """
        await self._yield_after(len(prompt))
        if isinstance(prompt, str):
            ids = await self.tokens.encode(prompt, param, add_special_tokens)
            return self.tokenized_job(public_id, prompt, ids, param, params, priority, truncation)
        return self.tokenized_job(public_id, None, prompt, param, params, priority, truncation)

    async def _yield_after(self, size: int) -> None:
        """Let other tasks run if the prompts of this size and before it have taken some milliseconds."""
        self._unyielded += size
        if self._unyielded > YIELD_CHARS:
            self._unyielded = 0
            await asyncio.sleep(0)

    def tokenized_job(
        self, public_id: str, prompt: str | None, ids: list[int], param: str, params: SamplingParams, priority: int,
        truncation: Truncation | None = None,
    ) -> Job:  # fmt: skip
        """Return the job of a tokenized prompt, shortened by `truncation`.

        Checks here what the engine would refuse later, so that the error names the field `param`.
        """
        if truncation is not None:
            reserved = max(1, params.min_tokens if params.max_tokens is None else params.max_tokens)
            kept = truncation.apply(ids, self.client.info().max_model_len, reserved)
            ids, prompt = kept, prompt if len(kept) == len(ids) else None
        if params.structured_outputs is not None and self.config.close_objects == "all":
            params = dataclasses.replace(params, structured_outputs=params.structured_outputs.closed())
        info = self.client.info()
        default_limit = info.sampling_defaults.get("max_tokens")
        if params.max_tokens is None and default_limit is not None:
            room = max(1, info.max_model_len - len(ids))
            limit = max(min(default_limit, room), params.min_tokens)
            params = dataclasses.replace(params, max_tokens=limit)
        _check_logprobs(len(ids), params, info.vocab_size, self.config)
        params = params.for_vocab(info.vocab_size)
        self.tokens.check(ids, param)
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        if len(ids) + max_tokens > info.max_model_len:
            raise PromptTooLong(
                f"{len(ids)} prompt tokens and {max_tokens} to generate exceed the context of {info.max_model_len} "
                "tokens: shorten the prompt or ask for fewer",
                param=param if len(ids) >= info.max_model_len else "max_tokens",
            )
        if len(ids) + params.min_tokens > info.max_model_len:
            raise PromptTooLong(
                f"{len(ids)} prompt tokens and min_tokens={params.min_tokens} exceed the context of "
                f"{info.max_model_len} tokens: shorten the prompt or lower min_tokens",
                param="min_tokens",
            )
        params.check_hidden_states(info.hidden_state_size)
        params.check_support(info.logprobs_mode)
        info.check_head(params)
        if params.return_hidden_states:
            _check_hidden_values(len(ids), params, info)
        output = RequestOutput.empty(public_id, prompt, ids, params.n)
        limit = info.max_model_len - len(ids) if params.max_tokens is None else params.max_tokens
        return Job(public_id=public_id, output=output, params=params, max_tokens=limit, priority=priority)

    async def run(
        self, job: Job, reservation: Reservation, direct: DirectWriter | None = None
    ) -> AsyncGenerator[list[OutputDelta], None]:
        """Run a job: yield its deltas as they arrive, after adding them to `job.output`.

        With `direct`, plain deltas that arrive while the caller waits are written and not yielded, if that is possible.
        Closing the iterator aborts the engine request. Capacity is released as the engine ends the job's sequences.
        Raises EngineError if a sequence failed in the engine.
        """
        if reservation.logprobs.error is not None:
            raise reservation.logprobs.error
        watch = job.watch = self.metrics.watch(job)
        # Clients may send the same id several times at once, so the engine gets a unique one.
        engine_id = f"{job.public_id}:{next(self._numbers)}"
        first_index = reservation.started
        reservation.started += job.params.n

        def written(delta: OutputDelta) -> bool:
            if direct is None or not delta.is_plain or not direct.is_ready:
                return False
            job.output.add(delta)
            watch.observe_deltas([delta])
            direct.write(delta)
            return True

        arrivals = self.client.stream(
            engine_id,
            prompt=None,
            prompt_token_ids=job.output.prompt_token_ids,
            params=job.params,
            priority=job.priority,
            on_end=reservation.release,
            on_hidden_states=partial(self.outputs.add_hidden_states, reservation.logprobs),
            on_delta=None if direct is None else written,
            first_index=first_index,
            sender=SENDER.get(),
            names=tuple(filter(None, (job.public_id, REQUEST_ID.get(), *job.names))),
        )
        reservation.engine_ids.add(engine_id)
        try:
            async with aclosing(arrivals):
                async for deltas in arrivals:
                    self.outputs.add(reservation.logprobs, deltas)
                    for delta in deltas:
                        if delta.finish_reason == "error":
                            raise EngineError(f"the engine failed to process request {job.public_id}: {delta.error}")
                        job.output.add(delta)
                    watch.observe_deltas(deltas)
                    yield deltas
        except EngineError:
            watch.close(failed=True)
            raise
        finally:
            reservation.engine_ids.discard(engine_id)
            watch.close()

    def abort_soon(self, engine_id: str) -> None:
        """Abort a running job in the engine; its stream ends with finish_reason "abort"."""
        task = asyncio.create_task(self.client.abort(engine_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def write(
        self, jobs: list[Job], build: Callable[[Callable[[Any], Any]], Any], reservation: Reservation
    ) -> Any:
        """Return the JSON answer that `build` returns; Encoded by a thread if it is large, or has hidden states.

        `build(part)` passes each choice to `part`, which may encode it, so that not all are in memory as objects. The
        jobs have no log-probabilities and hidden states any more after it. Send the answer before the admission ends.
        """
        reservation.logprobs.is_sent = True
        outputs = [job.output for job in jobs]
        size = sum(size_of(one.prompt_logprobs) for one in outputs)
        choices = [choice for one in outputs for choice in one.outputs]
        size += sum(size_of(choice.logprobs) + ARRAY_BYTES * bool(choice.hidden_state_parts) for choice in choices)
        if size <= INLINE_LOGPROB_BYTES:
            return build(lambda value: value)
        answer = await self.tokens.in_thread(lambda: encoded(build(encoded)))
        for one in outputs:
            one.prompt_logprobs = None
        for choice in choices:
            choice.logprobs, choice.hidden_state_parts = None, []
        return answer

    async def write_events(self, size: int, write: Callable[[WriteEvent], bytes]) -> bytes:
        """Return events of a stream with `size` bytes of log-probabilities; written by a thread if they are many."""
        if size <= INLINE_LOGPROB_BYTES:
            return write(event)
        return await self.tokens.in_thread(lambda: write(large_event))

    async def finish(self, jobs: list[Job], reservation: Reservation) -> None:
        """Run jobs concurrently until all have finished. If one fails, cancel the others."""

        async def run_one(job: Job) -> None:
            async with aclosing(self.run(job, reservation)) as arrivals:
                async for _ in arrivals:
                    pass

        if len(jobs) == 1:
            await run_one(jobs[0])
            return
        tasks = [asyncio.create_task(run_one(job)) for job in jobs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _require_started(self) -> None:
        if self.startup_error is not None:
            raise EngineDead(f"the engine did not start: {self.startup_error}")

    def _loading_reason(self) -> str:
        """Return the engine's startup reason; without one, this or another API worker is still loading."""
        return self.client.health().reason or "the model is being loaded"
