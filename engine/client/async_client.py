"""Async client of an engine: submit, stream, abort, drain. The only interface that a server uses.

The client keeps the caller's side of running requests: detokenization, one queue per request, and an end for each
request even if the engine dies. The loop runs in a separate process (ProcessTransport) or in a thread of this one
(ThreadTransport).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from engine.checkpoint.source import ModelSource, resolve_model
from engine.client.config_check import refuse_unsupported
from engine.client.counters import totals_after_exit
from engine.client.output_queue import OutputQueue, deltas_until_end, merge_deltas
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport, Run, ThreadTransport, Transport, run_loop
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, ReaderTooSlow, RequestError
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.messages import (
    CLIENT_ID_SPAN,
    Abort,
    Ask,
    Dead,
    EngineStats,
    Events,
    Lost,
    ModelInfo,
    Ready,
    Reply,
    Report,
    Snapshot,
    Submit,
    Tokens,
)
from engine.protocol.outputs import OutputDelta
from engine.protocol.request import EngineRequest, SamplingParams, TokenEvent, check_prompt_ids, resolve_seed, split_n
from engine.protocol.sleep import parts_of_level
from engine.text.bad_words import bad_word_ids
from engine.text.load_warnings import unlogged
from engine.text.output_processor import OutputProcessor
from engine.text.tokenizer import Tokenizer
from engine.utils.daemon_thread import in_background, in_daemon_thread

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0  # without a report, after which the engine is not ready; the supervisor kills it later
STOP_SECONDS = 10.0
SLICE_SECONDS = 0.005  # of delivering tokens, between which probes and other requests get their turn
PAUSE_POLL_SECONDS = 0.05  # between two looks whether the requests that a pause waits for have ended


@dataclass(frozen=True, kw_only=True)
class Health:
    """State of an engine.

    alive: the loop runs or is being restarted. ready: it answers requests. reason: why it is not ready. warm: warm-up
    progress. restarts: how often the loop was restarted. silent: seconds since its last report.
    """

    alive: bool
    ready: bool
    reason: str = ""
    warm: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    silent: float = 0.0


class RequestId(str):
    """An id that no other request to the engine has, of any client. Its sequences derive theirs from it."""


class Client(Protocol):
    """Interface of an engine for a server. Call all methods from one event loop."""

    tokenizer: Tokenizer | None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def new_id(self) -> RequestId: ...

    def generate(
        self,
        request_id: str,
        *,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        params: SamplingParams,
        priority: int = 0,
    ) -> AsyncGenerator[OutputDelta, None]: ...

    def stream(
        self,
        request_id: str,
        *,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        params: SamplingParams,
        priority: int = 0,
        on_end: Callable[[int], None] | None = None,
        on_hidden_states: Callable[[Sequence[np.ndarray]], None] | None = None,
        on_delta: Callable[[OutputDelta], bool] | None = None,
        first_index: int = 0,
        sender: str = "",
        adapter: str = "",
        names: Sequence[str] = (),
    ) -> AsyncGenerator[list[OutputDelta], None]: ...

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, mode: str = "abort") -> None: ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def sleep(self, level: int = 1, mode: str | None = None) -> None: ...

    async def release(self, parts: Sequence[str], discards: bool = False, mode: str | None = None) -> None: ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    async def is_sleeping(self) -> bool: ...

    async def abort_requests(self, names: Sequence[str] | None = None) -> int: ...

    async def ask(self, method: str, *args: Any) -> Any: ...

    async def graphs(self) -> list[dict[str, Any]]: ...

    async def drain(self, timeout: float) -> bool: ...

    def stats(self) -> EngineStats: ...

    def health(self) -> Health: ...

    def info(self) -> ModelInfo: ...


def make_client(
    config: EngineConfig, *, in_process: bool = False, restarts: RestartPolicy | None = None, run: Run = run_loop
) -> EngineClient:
    """Create a client whose engine runs in a separate process, restarted by the policy `restarts`.

    With `in_process` the engine runs in a thread of this process and is never restarted. `run` is the function that the
    engine process runs.
    """
    if in_process:
        return EngineClient(config, ThreadTransport(config))
    return EngineClient(config, Supervisor(lambda: ProcessTransport(config, run=run), restarts))


def _load_tokenizer(source: ModelSource) -> Tokenizer | None:
    with unlogged():  # the engine logs the warnings, once for all clients
        return Tokenizer.try_load(source)


def _prepare_chat(tokenizer: Tokenizer) -> None:
    """Import what chats need while the model loads: the first one would wait for it. An error is left to that one."""
    try:
        tokenizer.prepare_chat()
    except Exception as error:
        logger.debug("chats could not be prepared: %s", error)


class EngineClient:
    """Implementation of Client over any transport.

    `client`: this client's number among the clients of one engine. Never reuse a number, even after a client has ended.
    """

    def __init__(self, config: EngineConfig, transport: Transport, hang_seconds: float = HANG_SECONDS, client: int = 0):
        self.config, self.hang_seconds = config, hang_seconds
        self.tokenizer: Tokenizer | None = None
        self._transport = transport
        self._info: ModelInfo | None = None
        self._stats = EngineStats()
        self._queues: dict[str, OutputQueue] = {}  # by parent request
        self._parents: dict[str, str] = {}  # child -> parent
        self._processor: OutputProcessor  # set by `start`, like `_loop`
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._reports: deque[Iterator[None]] = deque()  # what is left to do of each
        self._client, self._numbers = client, itertools.count(client * CLIENT_ID_SPAN)
        self._ready: asyncio.Future[None] | None = None
        self._beginning: asyncio.Task[ModelSource] | None = None
        self._end_reason: str | None = None  # why there is no loop, or None
        self._is_final = False  # the loop will not be restarted
        self._restarts = 0
        self._last_report = time.monotonic()
        self._loop: asyncio.AbstractEventLoop

    # ---- start and close -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to load the model, for callers with other work to do before `start`."""
        if self._beginning is None:
            self._loop = asyncio.get_running_loop()
            self._ready = self._loop.create_future()
            self._beginning = self._loop.create_task(self._begin())

    async def _begin(self) -> ModelSource:
        # Downloaded once, before the engine and the tokenizer use it. A stop waits for neither.
        source: ModelSource = await in_daemon_thread(resolve_model, self.config.model, refuse_unsupported)
        self._transport.start(self._on_report)
        return source

    async def start(self) -> None:
        """Load tokenizer and model in parallel; return when the engine answers requests.

        Raises the engine's ConfigError or ModelError, or EngineDead if it ended for another reason.
        """
        self.begin()
        assert self._beginning is not None and self._ready is not None
        try:
            source = await self._beginning
            self.tokenizer = await in_daemon_thread(_load_tokenizer, source)
            self._processor = OutputProcessor(self.tokenizer)
            if self.tokenizer is not None and self.tokenizer.has_chat_template:
                in_background(partial(_prepare_chat, self.tokenizer), "encore-prepare-chat")
            await self._ready
        except BaseException:
            self._ready.cancel()
            await self.close()
            raise

    async def close(self) -> None:
        """Stop the engine. Running requests raise EngineDead."""
        if self._beginning is not None:
            self._beginning.cancel()  # does nothing once the engine's process runs
        await asyncio.to_thread(self._transport.stop, STOP_SECONDS)
        self._end("the engine was closed")

    async def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until no request is running; return whether all have ended."""
        deadline = time.monotonic() + timeout
        while self._queues and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._queues

    # ---- requests --------------------------------------------------------------------------------------------------

    def new_id(self) -> RequestId:
        """Return a new id for a request to this engine."""
        return RequestId(f"{self._client}.{next(self._numbers)}")

    async def generate(
        self,
        request_id: str,
        *,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        params: SamplingParams,
        priority: int = 0,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream single deltas, as `stream`. A delta holds the output of several steps if the reader falls behind."""
        pieces = self.stream(
            request_id, prompt=prompt, prompt_token_ids=prompt_token_ids, params=params, priority=priority
        )
        async with aclosing(pieces):
            async for deltas in pieces:
                for delta in merge_deltas(deltas):
                    yield delta

    async def stream(
        self,
        request_id: str,
        *,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        params: SamplingParams,
        priority: int = 0,
        on_end: Callable[[int], None] | None = None,
        on_hidden_states: Callable[[Sequence[np.ndarray]], None] | None = None,
        on_delta: Callable[[OutputDelta], bool] | None = None,
        first_index: int = 0,
        sender: str = "",
        adapter: str = "",
        names: Sequence[str] = (),
    ) -> AsyncGenerator[list[OutputDelta], None]:
        """Stream the output of the n sequences of a request until all have ended; `delta.index` names the sequence.

        The engine knows the request by its `request_id` from `new_id`. Any other string is a name in this client only,
        which may be used again once the request has ended.

        A delta is one step's output for one sequence; each list holds all deltas since the previous list. Closing the
        iterator early aborts all sequences. `on_end(count)` is called when the engine is done with `count` sequences,
        and `on_hidden_states(parts)` when hidden states arrive, even if the caller does not read. `on_delta(delta)` is
        offered each delta that arrives while the caller waits for the next list, and returns whether it took it: lists
        leave those out. `first_index` is the number of sequences before these in the same request of a client with
        several prompts. `sender` says who sent it, of all that share this client, and `abort_requests` finds it by its
        `names`. `adapter` names the adapter that computes it. Raises RequestError for an invalid request, EngineDead if
        the engine ends, ReaderTooSlow if unread output exceeds the limit of `engine.client.output_queue`, EngineError
        if a sequence fails.
        """
        self._require_alive()
        ids = self._prompt_ids(prompt, prompt_token_ids)
        params = params.for_vocab(self.info().vocab_size)
        banned = bad_word_ids(self.tokenizer, params.bad_words)
        if request_id in self._queues:
            raise RequestError(f"request id {request_id!r} is in use by a running request", param="request_id")
        # A caller may reuse an id that it chose while events of the earlier request are still on their way.
        unique_id = request_id if isinstance(request_id, RequestId) else self.new_id()
        children = split_n(str(unique_id), params, resolve_seed(params))
        queue = self._queues[request_id] = OutputQueue(
            len(children), on_end, on_hidden_states, params.logprobs or 0, on_delta
        )
        open_children = {child.request_id for child in children}
        try:
            for child in children:
                self._processor.add(child.request_id, child.params, ids, request_id=request_id, index=child.index)
                self._parents[child.request_id] = request_id
            self._transport.send(
                Submit(
                    [
                        EngineRequest(
                            request_id=child.request_id,
                            prompt_token_ids=ids,
                            params=child.params,
                            priority=priority,
                            seed=child.seed,
                            bad_word_ids=banned,
                            index=first_index + child.index,
                            sender=sender,
                            adapter=adapter,
                            names=tuple(names),
                        )
                        for child in children
                    ]
                )
            )
            while open_children:
                deltas, error = deltas_until_end(await queue.take(), open_children)
                if deltas:
                    yield deltas
                if error is not None:
                    raise error
        finally:
            self._forget(request_id, [child.request_id for child in children], open_children)

    def _forget(self, request_id: str, children: list[str], still_open: set[str]) -> None:
        self._queues.pop(request_id, None)
        known = [child for child in children if self._parents.pop(child, None) is not None]
        for child in known:
            self._processor.remove(child)
        if still_open and known and self._end_reason is None:
            self._abort(sorted(still_open))

    async def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        children = [child for child, parent in self._parents.items() if parent == request_id]
        if children and self._end_reason is None:
            self._abort(children)

    def _abort(self, children: list[str]) -> None:
        try:
            self._transport.send(Abort(children))
        except EngineDead as error:  # the Dead report ends all requests anyway
            logger.debug("nothing to abort: %s", error)

    def _prompt_ids(self, prompt: str | None, prompt_token_ids: list[int] | None) -> list[int]:
        if prompt_token_ids is None:
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: give token ids", param="prompt")
            prompt_token_ids = self.tokenizer.encode(prompt)
        return check_prompt_ids(prompt_token_ids, self.info().vocab_size)

    # ---- pause -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "abort") -> None:
        """Pause the engine, for all of its clients, until `resume`; see EngineLoop.pause for the modes.

        With the mode "wait" this returns once the running requests have ended. Raises RequestError for an unknown mode,
        or if the pause is ended or changed meanwhile.
        """
        await self.ask("pause", mode)
        while mode == "wait" and await self.ask("num_awaited"):
            await asyncio.sleep(PAUSE_POLL_SECONDS)

    async def resume(self) -> None:
        """End the pause. Without one it does nothing."""
        await self.ask("resume")

    async def is_paused(self) -> bool:
        """Return whether the engine is paused, by this client or another one."""
        return await self.ask("is_paused")

    async def sleep(self, level: int = 1, mode: str | None = None) -> None:
        """Release the memory of weights, KV cache and graphs until `wake_up`; see Engine.sleep."""
        await self.release(parts_of_level(level), level == 2, mode)

    async def release(self, parts: Sequence[str], discards: bool = False, mode: str | None = None) -> None:
        """Release these parts of memory, of MEMORY_PARTS, until `wake_up`; with `discards` the weights are lost."""
        found = await self.ask("begin_sleep", parts, discards, mode)
        while found == "wait" and await self.ask("num_awaited"):
            await asyncio.sleep(PAUSE_POLL_SECONDS)
        await self.ask("release", parts, discards)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore the memory with these tags, or all; see Engine.wake_up."""
        await self.ask("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Return whether any memory is released, or a sleep of level 0 goes on."""
        return await self.ask("is_sleeping")

    async def abort_requests(self, names: Sequence[str] | None = None) -> int:
        """Abort the requests, of all clients, that have one of the `names`; without names all. Return their number."""
        return await self.ask("abort_requests", names)

    # ---- queries ---------------------------------------------------------------------------------------------------

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the loop between two steps and return its value. Raises what the method raises."""
        self._require_alive()
        number = next(self._numbers)
        future = self._replies[number] = self._loop.create_future()
        try:
            self._transport.send(Ask(number, method, args))
            return await future
        finally:
            self._replies.pop(number, None)

    async def graphs(self) -> list[dict[str, Any]]:
        """Return the graph cache as rows of plain values."""
        return await self.ask("graphs")

    def stats(self) -> EngineStats:
        """Return the latest snapshot, which is a fraction of a second old."""
        return self._stats

    @property
    def num_pending(self) -> int:
        """Number of requests, their sequences, and questions that this client still tracks; 0 once all have ended."""
        sequences = 0 if self._processor is None else len(self._processor)
        return len(self._queues) + len(self._parents) + sequences + len(self._replies)

    def info(self) -> ModelInfo:
        """Return the loaded model's description. Raises EngineDead before `start` has returned."""
        if self._info is None:
            raise EngineDead("the engine has not loaded its model yet")
        return self._info

    def health(self) -> Health:
        """Return the engine's state, judged by the reports received; sends nothing to the engine."""
        silent = time.monotonic() - self._last_report
        reason = ""
        if self._end_reason is not None:
            reason = self._end_reason
        elif self._info is None:
            reason = _startup_progress(self._stats.warm)
        elif silent > self.hang_seconds:
            reason = f"the engine has not reported for {silent:.0f} s"
        return Health(
            alive=not self._is_final,
            ready=not reason,
            reason=reason,
            warm=dict(self._stats.warm),
            restarts=self._restarts,
            silent=silent,
        )

    def _require_alive(self) -> None:
        if self._end_reason is not None:
            raise EngineDead(self._end_reason)
        if self._info is None:
            raise EngineDead("the engine has not loaded its model yet")

    # ---- reports ---------------------------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        """Pass a report to the event loop. Called from the transport's thread."""
        try:
            self._loop.call_soon_threadsafe(self._handle_report, report)
        except RuntimeError:  # the event loop is closed
            return

    def _handle_report(self, report: Report) -> None:
        self._last_report = time.monotonic()
        self._reports.append(self._handling(report))
        if len(self._reports) == 1:
            self._continue_reports()

    def _continue_reports(self) -> None:
        """Handle reports in order for up to SLICE_SECONDS, then let the event loop do what else is ready."""
        until = time.monotonic() + SLICE_SECONDS
        try:
            while self._reports:
                for _ in self._reports[0]:
                    if time.monotonic() > until:
                        return
                self._reports.popleft()
        finally:
            if self._reports:
                self._loop.call_soon(self._continue_reports)

    def _handling(self, report: Report) -> Iterator[None]:
        """Handle a report; yield where the rest may wait."""
        if isinstance(report, Events):
            for columns in report.tokens:
                yield from self._deliver_columns(columns)
            for event in report.events:
                self._deliver(event)
                yield
        elif isinstance(report, Snapshot):
            self._stats = report.stats
        elif isinstance(report, Reply):
            future = self._replies.pop(report.number, None)
            if future is not None and not future.done():
                future.set_exception(report.error) if report.error else future.set_result(report.value)
        elif isinstance(report, Ready):
            self._mark_ready(report.info)
        elif isinstance(report, Lost):
            self._restarts = report.restarts
            self._fail_pending(report.reason, "; it is being restarted")
        elif isinstance(report, Dead):
            self._end(report.reason or "the engine was stopped", report.refused)

    def _mark_ready(self, info: ModelInfo) -> None:
        """Record that a loop is ready: the first one or a restarted one."""
        self._info, self._end_reason = info, None
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _deliver(self, event: TokenEvent) -> None:
        parent = self._parents.get(event.request_id)
        if parent is None:
            return  # the caller closed the stream; the abort is on its way
        delta = self._processor.process(event)
        if delta is None:
            return
        if delta.finish_reason == "error":
            self._queues[parent].put(event.refusal or EngineError(event.error))
            self._queues[parent].end(1)
        else:
            self._queue_delta(parent, delta)

    def _deliver_columns(self, columns: Tokens) -> Iterator[None]:
        """Deliver many plain events, and yield after each; the hot path of a busy server."""
        parents, process_one = self._parents, self._processor.one
        version, bucket = columns.weight_version, columns.graph_bucket
        logprobs = columns.logprobs or [b""] * len(columns.token_ids)
        for child_id, token_id, record in zip(columns.request_ids, columns.token_ids, logprobs, strict=True):
            parent = parents.get(child_id)
            if parent is not None:
                delta = process_one(child_id, token_id, version, bucket, TokenLogprobs([record]) if record else None)
                if delta is not None:
                    self._queue_delta(parent, delta)
                    yield

    def _queue_delta(self, parent: str, delta: OutputDelta) -> None:
        if delta.abort:
            self._abort([delta.child_id])
        if not self._queues[parent].add(delta):
            self._abort_slow_reader(parent)

    def _abort_slow_reader(self, request_id: str) -> None:
        """Abort a request whose reader is too slow and drop its unread output."""
        children = [child for child, parent in self._parents.items() if parent == request_id]
        for child in children:
            del self._parents[child]
            self._processor.remove(child)
        self._abort(children)
        self._queues[request_id].give_up(
            ReaderTooSlow("the answer was not read as fast as it was generated, and was aborted: read it faster")
        )

    def _fail_pending(self, reason: str, what_next: str = "") -> None:
        """Fail all waiting requests and queries because the loop has ended; keep its counters."""
        self._end_reason = reason + what_next
        self._stats = totals_after_exit(self._stats, reason)
        message = f"the engine ended: {self._end_reason}"
        for queue in self._queues.values():  # one instance each: a shared one would collect all tracebacks
            queue.put(EngineDead(message))
            queue.end_all()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDead(message))
        self._replies.clear()

    def _end(self, reason: str, refused: Exception | None = None) -> None:
        """Fail everything because the loop has ended for good. Later calls do nothing."""
        if self._is_final:
            return
        self._is_final = True
        self._fail_pending(reason)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(refused or EngineDead(f"the engine ended: {reason}"))


def _startup_progress(warm: Mapping[str, Any]) -> str:
    """Describe the progress of a start. `warm` is empty until the model is loaded."""
    if not warm:
        return "the model is being loaded"
    captured = warm["captured"]
    return f"graphs are being captured: {captured} of {captured + warm['pending']} so far"
