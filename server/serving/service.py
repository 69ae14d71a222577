"""A request's way through the server: admitted, tokenised, handed to the engine's client, and its deltas timed.

Owns what is in flight on the HTTP side and the engine client's start and end. Knows no route and no wire format.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import EngineDead, EngineError, PromptTooLong, QueueFull, RequestError
from engine.protocol.outputs import CompletionOutput, OutputDelta, RequestOutput
from engine.protocol.request import SamplingParams
from server.config import ServerConfig
from server.http.connections import TAKES_CONNECTIONS
from server.http.errors import WireError
from server.observability.metrics import RequestMetrics, RequestWatch
from server.observability.shared_counters import SharedCounters
from server.serving.tokenization import Tokenization

if TYPE_CHECKING:
    from engine.client.async_client import Client


# Gauges of a front: its sequences under way, 1 once it has what it needs for requests.
IN_FLIGHT, STARTED = "in_flight", "started"


@dataclass(kw_only=True)
class Job:
    """One prompt on its way: `public_id` is what the client sees, `output` fills up as deltas come."""

    public_id: str
    output: RequestOutput
    params: SamplingParams
    priority: int = 0
    started: float = field(default_factory=time.perf_counter)
    watch: RequestWatch | None = None  # once it runs

    @property
    def prompt_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.output.prompt_token_ids)

    @property
    def choices(self) -> list[CompletionOutput]:
        """What each of the n sequences has answered so far."""
        return self.output.outputs


class Places:
    """What one request holds of the bounded queue: given back as its sequences end, the rest with its admission."""

    def __init__(self, service: Service, sequences: int):
        self._service, self._held = service, sequences
        service._take_places(sequences)

    def give_back(self, sequences: int) -> None:
        """So many of the request's sequences have ended in the engine, whether their answer is read or not."""
        sequences = min(sequences, self._held)
        self._held -= sequences
        self._service._take_places(-sequences)

    def give_back_all(self) -> None:
        """The request is over."""
        self.give_back(self._held)


class Service:
    """The engine's client as the routes use it: `begin` starts it beside the server, `close` ends it.

    It is one of several fronts where `counters` has several rows: what it counts there is theirs together.
    `settled` is set once the start has succeeded or failed, `startup_error` holds what it failed of. Used from the
    event loop's thread only.
    """

    def __init__(
        self, client: Client, config: ServerConfig, counters: SharedCounters | None = None, began: float | None = None
    ):
        self.client, self.config = client, config
        self.counters = counters if counters is not None else SharedCounters()
        self.metrics = RequestMetrics(self.counters)
        self.startup: asyncio.Task[None] | None = None
        self.startup_error: BaseException | None = None
        self.before_ready: Callable[[], None] | None = None  # what takes a moment, and must not once requests come
        self.draining = False
        self.settled = asyncio.Event()
        self.began = time.time() if began is None else began
        self._closed = False
        self._tokens: Tokenization | None = None
        self.in_flight = 0  # sequences of this API worker that hold places
        self.unanswered = 0  # admitted requests of this API worker whose answer is not complete
        self._in_flight = self.counters.gauge(IN_FLIGHT)
        self._started = self.counters.gauge(STARTED)
        self._numbers = itertools.count()

    def begin(self) -> None:
        """Start the client in a task, so that health and readiness answer while the model loads."""
        self.startup = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self.client.start()
            info = self.client.info()
            tokens = Tokenization(self.client.tokenizer, info.max_model_len, info.vocab_size)
            if self.before_ready is not None:
                self.before_ready()
            self._tokens, self.counters.values[self._started] = tokens, 1.0
        except Exception as exc:
            self.startup_error = exc
        finally:
            self.settled.set()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests from now on and wait until all are answered, at most `seconds`; whether all were."""
        self.draining = True
        until = time.monotonic() + seconds
        while self.unanswered and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self.unanswered

    async def close(self) -> None:
        """End the client, started or not, and with it every request. A second call does nothing."""
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
        """The model's tokenizer; WireError 503 until it is loaded."""
        if self._tokens is None:
            self._require_started()
            raise WireError(
                503, f"{self._why_not_started()}; try again soon", type="service_unavailable_error", code="loading",
                retry_after=2,
            )  # fmt: skip
        return self._tokens

    def reasons_not_ready(self) -> list[str]:
        """Why readiness fails; empty when requests are answered."""
        if self.draining:
            return ["shutting down"]
        if self.startup_error is not None:
            return [f"the engine did not start: {self.startup_error}"]
        loading = self.counters.total_gauge(TAKES_CONNECTIONS) - self.counters.total_gauge(STARTED)
        if not self.started or loading > 0:  # another front may be the one to get the next request
            return [self._why_not_started()]
        health = self.client.health()
        return [] if health.ready else [health.reason or "the engine is not ready"]

    def model_names(self) -> tuple[str, ...]:
        """The names under which clients may ask for the model; the first is the one shown."""
        if self.config.served_model_name:
            return self.config.served_model_name
        return tuple(dict.fromkeys((self.client.info().name, self.config.engine.model)))

    def check_model(self, name: str | None) -> None:
        """WireError 404 for a model that isn't served here; no name at all means the one that is."""
        names = self.model_names() if self.started else ()
        if name is not None and names and name not in names:
            raise WireError(
                404, f"the model {name[:200]!r} is not served here; served: {', '.join(names)}",
                type="not_found_error", param="model", code="model_not_found",
            )  # fmt: skip

    def check_room(self, sequences: int, param: str) -> None:
        """Raise what `admission` would raise now for so many sequences, and hold no place.

        For a batch whose sequences can't all be counted before something is made for each prompt; `param` names the
        field that holds the prompts.
        """
        self._check_serving()
        self._check_possible(sequences, param)
        self._check_room_beside(self.all_in_flight, sequences)

    @contextmanager
    def admission(self, sequences: int, param: str = "n") -> Iterator[Places]:
        """Hold places for `sequences` in the bounded queue; taken before anything is tokenised.

        `run` and `finish` give a place back when the engine is done with its sequence: a client that doesn't read its
        answer keeps nobody out. The rest is given back at the end.

        Raises QueueFull if they don't fit now, RequestError that names `param` if they never can, WireError or
        EngineDead if nothing is served at all.
        """
        self._check_serving()
        self._check_possible(sequences, param)
        places = Places(self, sequences)  # before looking: of two fronts that do it at once, none overlooks the other
        self.unanswered += 1
        try:
            self._check_room_beside(self.all_in_flight - sequences, sequences)
            yield places
        finally:
            self.unanswered -= 1
            places.give_back_all()

    @property
    def _room(self) -> int:
        """Sequences that may run and wait together."""
        return self.client.info().max_num_seqs + self.config.max_waiting

    def _check_serving(self) -> None:
        _ = self.tokens
        if self.draining:
            raise WireError(
                503, "the server is shutting down", type="service_unavailable_error", code="draining", retry_after=5
            )
        health = self.client.health()
        if not health.ready:
            raise EngineDead(f"the engine does not answer: {health.reason}")

    def _check_possible(self, sequences: int, param: str) -> None:
        if sequences > self._room:
            raise RequestError(
                f"{param}: the request asks for {sequences} sequences at once, and {self._room} are possible", param
            )

    def _check_room_beside(self, others: int, sequences: int) -> None:
        waiting = self.client.stats().num_waiting
        if others + sequences > self._room:
            raise QueueFull(
                f"the request asks for {sequences} sequences beside {others} under way, and at most {self._room} may "
                "run and wait; try later"
            )
        if waiting >= self.config.max_waiting > 0:
            raise QueueFull(f"{waiting} sequences wait already, and at most {self.config.max_waiting} may; try later")

    @property
    def all_in_flight(self) -> int:
        """Sequences that all fronts hold places for."""
        return int(self.counters.total_gauge(IN_FLIGHT))

    def _take_places(self, sequences: int) -> None:
        self.in_flight += sequences
        self.counters.values[self._in_flight] = self.in_flight

    async def job(
        self, public_id: str, prompt: str | list[int], param: str, params: SamplingParams, priority: int,
        add_special_tokens: bool = True,
    ) -> Job:  # fmt: skip
        """A prompt made ready to run; `param` is what its field is called. Raises RequestError, PromptTooLong."""
        if isinstance(prompt, str):
            ids = await self.tokens.encode(prompt, param, add_special_tokens)
            return self.tokenized_job(public_id, prompt, ids, param, params, priority)
        return self.tokenized_job(public_id, None, prompt, param, params, priority)

    def tokenized_job(
        self, public_id: str, prompt: str | None, ids: list[int], param: str, params: SamplingParams, priority: int
    ) -> Job:
        """As `job`, of token ids. Refuses here what the engine would refuse later, so that the field is named."""
        info = self.client.info()
        params.check_vocab(info.vocab_size)
        self.tokens.check(ids, param)
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if len(ids) + wanted > info.max_model_len:
            raise PromptTooLong(
                f"{len(ids)} prompt tokens and {wanted} to generate exceed the context of {info.max_model_len} tokens: "
                "shorten the prompt or ask for fewer",
                param=param if len(ids) >= info.max_model_len else "max_tokens",
            )
        output = RequestOutput.empty(public_id, prompt, ids, params.n)
        return Job(public_id=public_id, output=output, params=params, priority=priority)

    async def run(self, job: Job, places: Places) -> AsyncGenerator[list[OutputDelta], None]:
        """The deltas of a job as they come, each added to its choice. Closing this aborts the engine's request.

        Places are given back as the engine ends the job's sequences.

        Raises EngineError for a sequence that the engine failed.
        """
        watch = job.watch = self.metrics.watch(job)
        # The client's id may be any request's, several at a time: the engine gets one of its own.
        engine_id = f"{job.public_id}:{next(self._numbers)}"
        arrivals = self.client.stream(
            engine_id,
            prompt=None,
            prompt_token_ids=job.output.prompt_token_ids,
            params=job.params,
            priority=job.priority,
            on_end=places.give_back,
        )
        try:
            async with aclosing(arrivals):
                async for deltas in arrivals:
                    for delta in deltas:
                        if delta.finish_reason == "error":
                            raise EngineError(f"the engine failed at request {job.public_id}: {delta.error}")
                        job.output.add(delta)
                    watch.saw(deltas)
                    yield deltas
        except EngineError:
            watch.ended(failed=True)
            raise
        finally:
            watch.ended()

    async def finish(self, jobs: list[Job], places: Places) -> None:
        """Run jobs side by side to their ends; one failure cancels the others."""

        async def one(job: Job) -> None:
            async with aclosing(self.run(job, places)) as arrivals:
                async for _ in arrivals:
                    pass

        if len(jobs) == 1:
            await one(jobs[0])
            return
        tasks = [asyncio.create_task(one(job)) for job in jobs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _require_started(self) -> None:
        if self.startup_error is not None:
            raise EngineDead(f"the engine did not start: {self.startup_error}")

    def _why_not_started(self) -> str:
        """What the start is at; where the engine is ready already, this front or another one still loads."""
        return self.client.health().reason or "the model is being loaded"
