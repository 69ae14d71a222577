"""Admission: which requests are served now, and which are refused, over all API workers of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import QueueFull, RequestError
from server.observability.metrics import QUEUE_FULL
from server.observability.shared_counters import SharedCounter
from server.serving.lifecycle import Lifecycle
from server.serving.output_budget import OutputBudget, Share

# Gauges of an API worker: its sequences in flight, and its requests without a complete response.
IN_FLIGHT, UNANSWERED = "in_flight", "unanswered"


class Reservation:
    """What one request holds: queue capacity, in sequences, and a share of `Admission.outputs`.

    Capacity is released as the sequences end; everything else when the request is over.
    """

    def __init__(self, admission: Admission, sequences: int):
        self._admission, self._held = admission, sequences
        self.started = 0  # sequences of the request that were sent to the engine
        self.share = Share()
        admission.add_in_flight(sequences)

    def release(self, sequences: int) -> None:
        """Release this many sequences. Called when they end in the engine, even if their output is still unread."""
        sequences = min(sequences, self._held)
        self._held -= sequences
        self._admission.add_in_flight(-sequences)

    def release_all(self) -> None:
        """Release everything that is still held: the request is over."""
        self.release(self._held)
        self._admission.outputs.release(self.share)


class Admission:
    """A bounded queue: at most `max_num_seqs` sequences run and `max_waiting` wait, of all API workers together.

    `outputs` limits what their outputs take. `refused` counts refusals by reason.
    """

    def __init__(self, lifecycle: Lifecycle, refused: SharedCounter):
        self._lifecycle, self._refused = lifecycle, refused
        self._client, self._config, self._counters = lifecycle.client, lifecycle.config, lifecycle.counters
        self.in_flight = 0  # sequences of this API worker that hold queue capacity
        self.unanswered = 0  # admitted requests of this API worker without a complete response
        self._in_flight = self._counters.gauge_index(IN_FLIGHT)
        self._unanswered = self._counters.gauge_index(UNANSWERED)
        self.outputs = OutputBudget(self._config.max_total_logprob_bytes, lambda one: self._client.abort(one))

    def check_capacity(self, sequences: int, param: str) -> None:
        """Raise what `reserve` would raise now for this many sequences, without reserving capacity.

        Use it to refuse a huge batch before anything is allocated per prompt. `param` names the field of the prompts.
        """
        self._lifecycle.check_serving()
        self._check_max_sequences(sequences, param)
        self._check_capacity(self.all_in_flight, sequences)

    @contextmanager
    def reserve(self, sequences: int, param: str = "n") -> Iterator[Reservation]:
        """Reserve capacity for `sequences` in the bounded queue. Enter it before tokenizing the prompts.

        `Jobs.run` releases capacity when the engine is done with a sequence, so a client that doesn't read its
        response does not block others. The rest is released on exit.

        Raises:
            QueueFull: the sequences don't fit now.
            RequestError: they exceed the limit; names `param`.
            WireError, EngineDead: the server is loading, draining, or its engine is dead.
        """
        self._lifecycle.check_serving()
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

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait up to `seconds` for running ones. Returns whether all have been answered."""
        self._lifecycle.draining = True
        until = time.monotonic() + seconds
        while self.unanswered and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self.unanswered

    @property
    def _capacity(self) -> int:
        """Maximum number of sequences that run or wait."""
        return self._client.info().max_num_seqs + self._config.max_waiting

    def _check_max_sequences(self, sequences: int, param: str) -> None:
        limit = self._config.max_sequences_per_request
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
        waiting = self._client.stats().num_waiting
        if others + sequences > self._capacity:
            self._refused.add(QUEUE_FULL)
            raise QueueFull(
                f"the request asks for {sequences} sequences and {others} are in flight, but at most {self._capacity} "
                "can run and wait: retry later"
            )
        if waiting >= self._config.max_waiting > 0:
            self._refused.add(QUEUE_FULL)
            raise QueueFull(
                f"{waiting} sequences are waiting already, and the limit is {self._config.max_waiting}: retry later"
            )

    @property
    def all_in_flight(self) -> int:
        """Sequences in flight of all API workers."""
        return int(self._counters.total_gauge(IN_FLIGHT))

    @property
    def all_unanswered(self) -> int:
        """Admitted requests of all API workers without a complete response."""
        return int(self._counters.total_gauge(UNANSWERED))

    def _add_unanswered(self, requests: int) -> None:
        self.unanswered += requests
        self._counters.values[self._unanswered] = self.unanswered

    def add_in_flight(self, sequences: int) -> None:
        """Count this many more sequences of this API worker as in flight; fewer if negative."""
        self.in_flight += sequences
        self._counters.values[self._in_flight] = self.in_flight
