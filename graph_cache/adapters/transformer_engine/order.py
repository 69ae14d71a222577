"""Parse a pipeline stage's order of forwards and backwards in Transformer Engine's notation, and derive from it the
static input buffers and which graphs may be outstanding together.

3 is a forward of the third chunk, -3 its backward, -3.5 the delayed weight gradients (backward_dw) of the preceding
backward. The backwards of a chunk process microbatches in the order of its forwards. Pure Python.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from math import ceil
from typing import NamedTuple

from graph_cache.errors import GraphConfigError, GraphError


class EventKind(Enum):
    """What an entry of an order does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradients"


class Event(NamedTuple):
    """An entry of an order. Chunk and microbatch count from 0. `last`: the final event of its chunk and microbatch."""

    kind: EventKind
    chunk: int
    microbatch: int
    last: bool


def parse_order(order: Sequence[float]) -> list[Event]:
    """Parse an order into events. Raises GraphConfigError for an invalid order.

    All chunks need the same number of forwards, each followed by one backward. In a chunk either every backward or none
    is followed by its weight gradients.
    """
    counts_by_kind: dict[EventKind, defaultdict[int, int]] = {kind: defaultdict(int) for kind in EventKind}
    delayed = {_chunk(entry) for entry in order if ceil(entry) != entry}
    entries = []
    for position, entry in enumerate(order):
        chunk, kind = _chunk(entry), _kind_of(entry)
        microbatch = counts_by_kind[kind][chunk]
        counts_by_kind[kind][chunk] += 1
        before = {
            EventKind.FORWARD: None,
            EventKind.BACKWARD: EventKind.FORWARD,
            EventKind.WEIGHTS: EventKind.BACKWARD,
        }[kind]
        available = None if before is None else counts_by_kind[before][chunk]
        if (
            entry == 0
            or abs(entry - ceil(entry)) not in (0, 0.5)
            or (kind is EventKind.FORWARD and entry != ceil(entry))
        ):
            raise GraphConfigError(
                f"order: {entry} at position {position} is not a valid entry: forwards are 1, 2, …, "
                "backwards -1, -2, …, weight gradients -1.5, -2.5, …"
            )
        if available is not None and (
            microbatch >= available or (kind is EventKind.WEIGHTS and microbatch != available - 1)
        ):
            raise GraphConfigError(f"order: {entry} at position {position} has no matching {before.value} before it")
        entries.append(
            Event(kind, chunk, microbatch, kind is (EventKind.WEIGHTS if chunk in delayed else EventKind.BACKWARD))
        )
    _check_counts(counts_by_kind, delayed)
    return entries


def _chunk(entry: float) -> int:
    return abs(ceil(entry)) - 1


def _kind_of(entry: float) -> EventKind:
    if entry > 0:
        return EventKind.FORWARD
    return EventKind.BACKWARD if ceil(entry) == entry else EventKind.WEIGHTS


def _check_counts(counts_by_kind: dict[EventKind, defaultdict[int, int]], delayed: set[int]) -> None:
    forwards = counts_by_kind[EventKind.FORWARD]
    if sorted(forwards) != list(range(len(forwards))) or len(set(forwards.values())) != 1:
        counts = {chunk + 1: count for chunk, count in sorted(forwards.items())}
        raise GraphConfigError(
            f"order: forwards of each chunk are {counts}: every chunk from 1 on needs the same number"
        )
    for chunk, count in forwards.items():
        for kind in (EventKind.BACKWARD, *([EventKind.WEIGHTS] if chunk in delayed else [])):
            if counts_by_kind[kind][chunk] != count:
                raise GraphConfigError(
                    f"order: chunk {chunk + 1} has {count} forwards and {counts_by_kind[kind][chunk]} entries "
                    f"for {kind.value}: each microbatch needs one"
                )


def max_outstanding(order: Sequence[float]) -> list[int]:
    """Return for each chunk the maximum number of outstanding microbatches (forward done, backward not finished)."""
    now: defaultdict[int, int] = defaultdict(int)
    most: defaultdict[int, int] = defaultdict(int)
    for event in parse_order(order):
        if event.kind is EventKind.FORWARD:
            now[event.chunk] += 1
            most[event.chunk] = max(most[event.chunk], now[event.chunk])
        elif event.last:
            now[event.chunk] -= 1
    return [most[chunk] for chunk in sorted(most)]


def assign_buffers(
    order: Sequence[float], inputs: Sequence[Sequence[Sequence[Hashable]]]
) -> dict[tuple[int, int, int], list[int]]:
    """Assign a static buffer to each input of each graph. Returns (chunk, microbatch, layer) -> buffer numbers.

    `inputs`: the signatures (shape, dtype, …) of the inputs of each layer, by chunk. Graphs of any chunks share a
    buffer if its signature fits and they are never outstanding together. A forward takes the lowest free buffers, so a
    signature has as many buffers as inputs that are outstanding at a time, the least possible.
    """
    free: defaultdict[Hashable, list[int]] = defaultdict(list)  # heaps of buffers by signature
    found: dict[tuple[int, int, int], list[int]] = {}
    count = 0
    for event in parse_order(order):
        for layer, signatures in enumerate(inputs[event.chunk]):
            key = event.chunk, event.microbatch, layer
            if event.kind is EventKind.FORWARD:
                found[key] = []
                for signature in signatures:
                    if free[signature]:
                        found[key].append(heapq.heappop(free[signature]))
                    else:
                        found[key].append(count)
                        count += 1
            elif event.last:
                for signature, buffer in zip(signatures, found[key], strict=True):
                    heapq.heappush(free[signature], buffer)
    return found


class GraphSlots:
    """The graphs of a captured order, one index per layer and microbatch, and which of them may be replayed now.

    Indices count chunks, then microbatches, then layers. Graphs share memory in capture order: a graph does not
    overwrite activations that were outstanding when it was captured, but may overwrite any others. So a graph may be
    replayed only while the outstanding graphs are a subset of those at its capture.
    """

    def __init__(self, order: Sequence[float], layers_per_chunk: Sequence[int]):
        entries = parse_order(order)
        chunks = 1 + max(event.chunk for event in entries)
        if chunks != len(layers_per_chunk):
            raise GraphConfigError(
                f"order: it has {chunks} chunks, found {len(layers_per_chunk)} lists of layers: give one for each chunk"
            )
        self.microbatches = sum(event.kind is EventKind.FORWARD for event in entries) // chunks
        self.alive = 0  # bit mask of graphs between forward and end of backward
        self._layers = list(layers_per_chunk)
        self._starts = [self.microbatches * sum(self._layers[:chunk]) for chunk in range(chunks)]
        self._alive_at_capture: dict[EventKind, dict[int, int]] = {kind: {} for kind in EventKind}
        self._awaiting_backward_dw = 0
        self._has_delayed_weights: dict[int, bool] = {}  # graph index -> whether it has backward_dw
        self.next_backward: dict[int, int] = {}  # graph index -> index of the next backward
        self._capture_order(entries)

    def _capture_order(self, entries: Sequence[Event]) -> None:
        alive, last_backward = 0, None
        for event in entries:
            for index in self._indices_of(event):
                self._alive_at_capture[event.kind][index] = alive
                if event.kind is EventKind.FORWARD:
                    alive |= 1 << index
                elif event.kind is EventKind.BACKWARD:
                    if last_backward is not None:
                        self.next_backward[last_backward] = index
                    last_backward = index
                if event.last:
                    alive &= ~(1 << index)
                    self._has_delayed_weights[index] = event.kind is EventKind.WEIGHTS

    def _indices_of(self, event: Event) -> Iterator[int]:
        layers = range(self._layers[event.chunk])
        for layer in layers if event.kind is EventKind.FORWARD else reversed(layers):
            yield self.index_of(event.chunk, event.microbatch, layer)

    def index_of(self, chunk: int, microbatch: int, layer: int) -> int:
        """Return the graph index of a layer, given its number within the chunk."""
        return self._starts[chunk] + microbatch * self._layers[chunk] + layer

    def may_replay_forward(self, index: int) -> bool:
        """Return whether the forward may be replayed with the currently outstanding graphs."""
        return not self.alive & ~self._alive_at_capture[EventKind.FORWARD][index]

    def run_forward(self, index: int) -> None:
        """Record that the forward is replayed."""
        self.alive |= 1 << index

    def run_backward(self, index: int) -> None:
        """Record that the backward is replayed. Raises GraphError if the order differs from the captured one."""
        self._check(index, EventKind.BACKWARD)
        if self._has_delayed_weights[index]:
            self._awaiting_backward_dw |= 1 << index
        else:
            self.release(index)

    def awaits_backward_dw(self, index: int) -> bool:
        """Return whether the backward was replayed but not yet the delayed weight gradients."""
        return bool(self._awaiting_backward_dw >> index & 1)

    def run_backward_dw(self, index: int) -> None:
        """Record that the delayed weight gradients are replayed. Raises GraphError if the order differs."""
        self._check(index, EventKind.WEIGHTS)
        self.release(index)

    def _check(self, index: int, kind: EventKind) -> None:
        others = self.alive & ~self._alive_at_capture[kind][index]
        if others:
            raise GraphError(
                f"{kind.value} of graph {index} came while {others.bit_count()} graphs were outstanding "
                "that were not outstanding at its capture, and whose memory it would overwrite: run backwards "
                "in the order that was given for the capture"
            )

    def release(self, index: int) -> None:
        """Mark the graph as no longer outstanding: its backward is done or will never run."""
        self.alive &= ~(1 << index)
        self._awaiting_backward_dw &= ~(1 << index)
