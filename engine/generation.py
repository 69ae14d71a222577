"""Generations of an embedded engine: the requests of one call, and the loop that several calls share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from engine.core.loop import EngineLoop
from engine.errors import EngineDead, EnginePaused
from engine.protocol.outputs import RequestOutput, Sample
from engine.protocol.request import EngineRequest, TokenEvent
from engine.text.output_processor import OutputProcessor
from engine.text.tokenizer import Tokenizer

PAUSED_SECONDS = 0.005  # between two looks whether a pause has ended


class Generation:
    """The requests of one call, their outputs, and the samples that have finished and were not taken yet."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._processor = OutputProcessor(tokenizer)
        self._prompt_of: dict[str, int] = {}  # index of the prompt of each sequence
        self._running: set[str] = set()  # ids of sequences
        self.outputs: list[RequestOutput] = []
        self.requests: list[EngineRequest] = []
        self.finished: deque[Sample] = deque()
        self.num_tokens = 0

    def add(self, output: RequestOutput, sequences: list[EngineRequest]) -> None:
        """Add a prompt with an empty output and its sequences, in order of their index."""
        self.outputs.append(output)
        for index, request in enumerate(sequences):
            name = request.request_id
            self._processor.add(
                name, request.params, output.prompt_token_ids, request_id=output.request_id, index=index
            )
            self._prompt_of[name] = len(self.outputs) - 1
            self._running.add(name)
        self.requests += sequences

    def start_longest_first(self, expected_tokens: list[int]) -> None:
        """Order the requests by how many tokens the samples of their prompt may take, in tokens per prompt."""
        self.requests.sort(key=lambda request: -expected_tokens[self._prompt_of[request.request_id]])

    @property
    def num_running(self) -> int:
        """The number of sequences that have not finished."""
        return len(self._running)

    def take(self, event: TokenEvent) -> str | None:
        """Add an event to the output of its sequence. Returns the sequence's id if a stop string ended it."""
        delta = self._processor.process(event)
        if delta is None:
            return None
        prompt = self._prompt_of[delta.child_id]
        output = self.outputs[prompt]
        output.add(delta)
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._running.discard(delta.child_id)
            self.finished.append(Sample(prompt, output.outputs[delta.index]))
        return delta.child_id if delta.abort else None


class SharedLoop:
    """Steps one loop for several generations, each of which may be advanced by another thread.

    Whichever is advanced runs a step for all of them, so their requests run in the same batches.
    """

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self._owners: dict[str, Generation] = {}  # by sequence id

    def run(self, generation: Generation) -> Iterator[Sample]:
        """Queue the requests of a generation and yield its samples as they finish. Closing it aborts what is left.

        Raises EnginePaused during a pause. A later pause makes it wait for the end, which another thread must bring.
        """
        pool = self._loop.executor.graphs.pool
        names = [request.request_id for request in generation.requests]
        try:
            with pool.turn():
                if self._loop.pause_mode is not None:
                    paused = "the engine is paused, so that this call would not return: call resume() first"
                    raise EnginePaused(self._loop.obstacle or paused)
                for request in generation.requests:
                    self._loop.add(request)
                    self._owners[request.request_id] = generation
            while generation.num_running:
                with pool.turn():
                    if generation.num_running and not generation.finished:
                        self._step()
                    waits = self._loop.has_work and not self._loop.can_step
                if waits:
                    time.sleep(PAUSED_SECONDS)  # another thread needs the turn to resume
                while generation.finished:
                    yield generation.finished.popleft()
        finally:
            with pool.turn():
                self._loop.abort(names)  # after an exception; finished requests are ignored
                for name in names:
                    self._owners.pop(name, None)
                self._dispatch(self._loop.take_events())

    def advance(self) -> None:
        """Run a step, if all live requests belong to generations: then no event is lost. The caller has the turn."""
        if self._loop.can_step and all(one.request_id in self._owners for one in self._loop.live_requests()):
            self._step()

    def _step(self) -> None:
        if not self._loop.has_work:
            raise EngineDead("the engine lost requests of this call: was its loop stepped by other code meanwhile?")
        self._dispatch(self._loop.step())
        if self._loop.has_work:
            self._loop.capture_between_steps()

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            owner = self._owners.get(event.request_id)
            ended = None if owner is None else owner.take(event)
            if ended is not None:
                self._loop.abort([ended])
