"""The async door to an engine: submit, stream, abort, drain. What a server uses, and all that it uses.

Owns the requests in flight on the caller's side: their text, their queues, and that each ends, also when the engine
dies. The loop runs in a process of its own (ProcessTransport) or in a thread of this one (ThreadTransport), behind the
same interface. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, RequestError
from engine.messages import Abort, Ask, Dead, EngineStats, Events, ModelInfo, Ready, Reply, Report, Snapshot, Submit
from engine.model_source import ModelSource, resolve_model
from engine.outputs import OutputDelta, OutputProcessor
from engine.request import EngineRequest, SamplingParams, check_prompt_ids, resolve_seed, split_n
from engine.tokenizer import Tokenizer
from engine.transport import ProcessTransport, ThreadTransport, Transport

HANG_SECONDS = 30.0  # without a report while requests run; the slowest step or capture must stay below it
STOP_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """alive: the loop exists. ready: it answers requests. `reason` says why not; `warm` is the warm-up's progress."""

    alive: bool
    ready: bool
    reason: str = ""
    warm: dict[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """What a server may ask of an engine. All methods are called on one event loop."""

    tokenizer: Tokenizer | None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def generate(self, request_id: str, *, prompt: str | None = None, prompt_token_ids: list[int] | None = None,
                 params: SamplingParams, priority: int = 0) -> AsyncIterator[OutputDelta]: ...

    async def abort(self, request_id: str) -> None: ...

    async def graphs(self) -> list[dict[str, Any]]: ...

    async def drain(self, timeout: float) -> bool: ...

    def stats(self) -> EngineStats: ...

    def health(self) -> Health: ...

    def info(self) -> ModelInfo: ...


def make_client(config: EngineConfig, *, in_process: bool = False) -> EngineClient:
    """A client whose engine runs in its own process, or with `in_process` in a thread of this one."""
    return EngineClient(config, ThreadTransport(config) if in_process else ProcessTransport(config))


class EngineClient:
    """The one implementation of Client, over any transport."""

    def __init__(self, config: EngineConfig, transport: Transport):
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self._transport = transport
        self._info: ModelInfo | None = None
        self._stats = EngineStats()
        self._queues: dict[str, asyncio.Queue[OutputDelta | EngineError]] = {}  # by parent request
        self._parents: dict[str, str] = {}  # child -> parent
        self._processor: OutputProcessor | None = None
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._ready: asyncio.Future[None] | None = None
        self._death: str | None = None
        self._last_report = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load tokenizer and model side by side; returns when requests are answered.

        Raises ConfigError or ModelError as the engine does, EngineDead if it ended otherwise.
        """
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        try:
            source: ModelSource = await asyncio.to_thread(resolve_model, self.config.model)  # fetched once, before both
            self._transport.start(self._from_transport)
            self.tokenizer = await asyncio.to_thread(Tokenizer.try_load, source)
            self._processor = OutputProcessor(self.tokenizer)
            await self._ready
        except BaseException:
            self._ready.cancel()
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine; requests under way end with EngineDead."""
        await asyncio.to_thread(self._transport.stop, STOP_SECONDS)
        self._die("the engine was closed")

    async def drain(self, timeout: float) -> bool:
        """Wait until no request is under way, at most `timeout` seconds; whether all ended."""
        until = time.monotonic() + timeout
        while self._queues and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self._queues

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, *, prompt: str | None = None, prompt_token_ids: list[int] | None = None,
                       params: SamplingParams, priority: int = 0) -> AsyncIterator[OutputDelta]:
        """Stream what the n sequences of a request give; deltas carry `.index`. Ends when all have ended.

        Closing the iterator early aborts all of them. Raises RequestError for a request that can't be accepted,
        EngineDead if the engine ends, EngineError if a sequence fails.
        """
        self._require_alive()
        ids = self._prompt_ids(prompt, prompt_token_ids)
        if request_id in self._queues:
            raise RequestError(f"request id {request_id!r} is in use by a request under way", param="request_id")
        children = split_n(request_id, params, resolve_seed(params))
        queue = self._queues[request_id] = asyncio.Queue()
        open_children = {child.request_id for child in children}
        try:
            for child in children:
                self._processor.add(child.request_id, child.params, ids, request_id=request_id, index=child.index)
                self._parents[child.request_id] = request_id
            self._transport.send(Submit([
                EngineRequest(request_id=child.request_id, prompt_token_ids=ids, params=child.params, priority=priority,
                              seed=child.seed) for child in children
            ]))
            while open_children:
                item = await queue.get()
                if isinstance(item, EngineError):
                    raise item
                if item.finish_reason is not None:
                    open_children.discard(item.child_id)
                yield item
        finally:
            self._forget(request_id, [child.request_id for child in children], open_children)

    def _forget(self, request_id: str, children: list[str], still_open: set[str]) -> None:
        self._queues.pop(request_id, None)
        known = [child for child in children if self._parents.pop(child, None) is not None]
        for child in known:
            self._processor.remove(child)
        if still_open and known and self._death is None:
            self._abort(sorted(still_open))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason "abort". Unknown ids are left alone."""
        children = [child for child, parent in self._parents.items() if parent == request_id]
        if children and self._death is None:
            self._abort(children)

    def _abort(self, children: list[str]) -> None:
        try:
            self._transport.send(Abort(children))
        except EngineDead as gone:  # its death is reported by the transport, and ends everything anyway
            self._die(str(gone))

    def _prompt_ids(self, prompt: str | None, prompt_token_ids: list[int] | None) -> list[int]:
        if prompt_token_ids is None:
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: give token ids", param="prompt")
            prompt_token_ids = self.tokenizer.encode(prompt)
        return check_prompt_ids(prompt_token_ids, self.info().vocab_size)

    # ---- questions -------------------------------------------------------------------------------------------------

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the loop between two steps and return its value."""
        self._require_alive()
        number = next(self._numbers)
        future = self._replies[number] = self._loop.create_future()
        self._transport.send(Ask(number, method, args))
        return await future

    async def graphs(self) -> list[dict[str, Any]]:
        """The graph cache as rows of plain values."""
        return await self.ask("graphs")

    def stats(self) -> EngineStats:
        """The latest snapshot, a fraction of a second old."""
        return self._stats

    def info(self) -> ModelInfo:
        """The model as it was loaded. Raises EngineDead before `start` has returned."""
        if self._info is None:
            raise EngineDead("the engine has not loaded its model yet")
        return self._info

    def health(self) -> Health:
        """Whether requests would be answered, from the reports that came; asks nothing of the engine."""
        warm = dict(self._stats.warm)
        if self._death is not None:
            return Health(alive=False, ready=False, reason=self._death, warm=warm)
        if self._info is None:
            return Health(alive=True, ready=False, reason="the model is being loaded", warm=warm)
        silent = time.monotonic() - self._last_report
        if silent > HANG_SECONDS:
            return Health(alive=True, ready=False, reason=f"the engine has not reported for {silent:.0f} s", warm=warm)
        return Health(alive=True, ready=True, warm=warm)

    def _require_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)
        if self._info is None:
            raise EngineDead("the engine has not loaded its model yet")

    # ---- reports ---------------------------------------------------------------------------------------------------

    def _from_transport(self, report: Report) -> None:
        """Called by the transport's thread; hands the report to the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._take, report)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            return

    def _take(self, report: Report) -> None:
        self._last_report = time.monotonic()
        if isinstance(report, Events):
            for event in report.events:
                self._deliver(event)
        elif isinstance(report, Snapshot):
            self._stats = report.stats
        elif isinstance(report, Reply):
            future = self._replies.pop(report.number, None)
            if future is not None and not future.done():
                future.set_exception(report.error) if report.error else future.set_result(report.value)
        elif isinstance(report, Ready):
            self._info = report.info
            if not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(report, Dead):
            self._die(report.reason or "the engine was stopped", report.refused)

    def _deliver(self, event: Any) -> None:
        parent = self._parents.get(event.request_id)
        if parent is None:
            return  # its caller went away; the abort is on its way
        delta = self._processor.process(event)
        if delta is None:
            return
        if delta.abort:
            self._abort([delta.child_id])
        if delta.finish_reason == "error":
            self._queues[parent].put_nowait(event.refusal or EngineError(event.error))
        else:
            self._queues[parent].put_nowait(delta)

    def _die(self, reason: str, refused: Exception | None = None) -> None:
        """The engine is gone: everyone who waits is told, once."""
        if self._death is not None:
            return
        self._death = reason
        error = EngineDead(f"the engine ended: {reason}")
        for queue in self._queues.values():
            queue.put_nowait(error)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
        self._replies.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(refused or error)
