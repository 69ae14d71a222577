"""A pipeline stage's order of forwards and backwards, as Transformer Engine writes it, and what follows from it alone.

3 is a forward of the third chunk, -3 a backward of it, -3.5 the weight gradients of the backward before; a chunk's
backwards take its microbatches in the order of its forwards. Pure Python: knows no tensor and no schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    """An entry of an order; chunk and microbatch count from 0. `last`: nothing of this microbatch's chunk follows."""

    what: EventKind
    chunk: int
    microbatch: int
    last: bool


def events(order: Sequence[float]) -> list[Event]:
    """The entries of an order, read. Raises GraphConfigError for one that can't be run to its end.

    Every chunk needs as many forwards as the others, each with one backward after it, and either none of its backwards
    or each of them followed by its weight gradients.
    """
    done: dict[EventKind, defaultdict[int, int]] = {what: defaultdict(int) for what in EventKind}
    delayed = {_chunk(entry) for entry in order if ceil(entry) != entry}
    found = []
    for position, entry in enumerate(order):
        chunk, what = _chunk(entry), _what(entry)
        microbatch = done[what][chunk]
        done[what][chunk] += 1
        before = {
            EventKind.FORWARD: None,
            EventKind.BACKWARD: EventKind.FORWARD,
            EventKind.WEIGHTS: EventKind.BACKWARD,
        }[what]
        wanted = None if before is None else done[before][chunk]
        if (
            entry == 0
            or abs(entry - ceil(entry)) not in (0, 0.5)
            or (what is EventKind.FORWARD and entry != ceil(entry))
        ):
            raise GraphConfigError(
                f"order: {entry} at position {position} means nothing: forwards are 1, 2, …, "
                "backwards -1, -2, …, weight gradients -1.5, -2.5, …"
            )
        if wanted is not None and (microbatch >= wanted or (what is EventKind.WEIGHTS and microbatch != wanted - 1)):
            raise GraphConfigError(
                f"order: {entry} at position {position} has no {before.value} before it that it could belong to"
            )
        found.append(
            Event(what, chunk, microbatch, what is (EventKind.WEIGHTS if chunk in delayed else EventKind.BACKWARD))
        )
    _check_counts(done, delayed)
    return found


def _chunk(entry: float) -> int:
    return abs(ceil(entry)) - 1


def _what(entry: float) -> EventKind:
    if entry > 0:
        return EventKind.FORWARD
    return EventKind.BACKWARD if ceil(entry) == entry else EventKind.WEIGHTS


def _check_counts(done: dict[EventKind, defaultdict[int, int]], delayed: set[int]) -> None:
    forwards = done[EventKind.FORWARD]
    if sorted(forwards) != list(range(len(forwards))) or len(set(forwards.values())) != 1:
        counts = {chunk + 1: count for chunk, count in sorted(forwards.items())}
        raise GraphConfigError(f"order: forwards of each chunk are {counts}: every chunk from 1 on needs as many")
    for chunk, count in forwards.items():
        for what in (EventKind.BACKWARD, *([EventKind.WEIGHTS] if chunk in delayed else [])):
            if done[what][chunk] != count:
                raise GraphConfigError(
                    f"order: chunk {chunk + 1} has {count} forwards and {done[what][chunk]} entries "
                    f"for {what.value}: each microbatch needs one"
                )


def outstanding(order: Sequence[float]) -> list[int]:
    """For each chunk, how many of its microbatches are at most between their forward and the end of their backward."""
    counts: defaultdict[int, int] = defaultdict(int)
    for chunk, _, slot in slots(order):
        counts[chunk] = max(counts[chunk], slot + 1)
    return [counts[chunk] for chunk in sorted(counts)]


def slots(order: Sequence[float]) -> list[tuple[int, int, int]]:
    """(chunk, microbatch, slot) of each forward in order, all from 0: which of its chunk's static inputs it gets.

    Two microbatches of a chunk share a slot only if one's life is over when the other's begins; each takes the lowest
    free one, so there are as many as are outstanding at most.
    """
    taken: defaultdict[int, dict[int, int]] = defaultdict(dict)  # of each chunk: slot -> microbatch
    found = []
    for event in events(order):
        mine = taken[event.chunk]
        if event.what is EventKind.FORWARD:
            slot = next(slot for slot in range(len(mine) + 1) if slot not in mine)
            mine[slot] = event.microbatch
            found.append((event.chunk, event.microbatch, slot))
        elif event.last:
            del mine[next(slot for slot, microbatch in mine.items() if microbatch == event.microbatch)]
    return found


class GraphSlots:
    """The graphs of a captured order, one place for each layer and microbatch, and which may be replayed now.

    Places count through chunks, then microbatches, then layers. Graphs captured one after another share memory: what
    one leaves for its backward was kept from those captured until then, and from no others. So a graph may be replayed
    beside those only that were outstanding when it was captured.
    """

    def __init__(self, order: Sequence[float], layers_per_chunk: Sequence[int]):
        found = events(order)
        chunks = 1 + max(event.chunk for event in found)
        if chunks != len(layers_per_chunk):
            raise GraphConfigError(
                f"order: it has {chunks} chunks, found {len(layers_per_chunk)} lists of layers: give one for each chunk"
            )
        self.microbatches = sum(event.what is EventKind.FORWARD for event in found) // chunks
        self.alive = 0  # a bit for each place between its forward and the end of its backward
        self._layers = list(layers_per_chunk)
        self._starts = [self.microbatches * sum(self._layers[:chunk]) for chunk in range(chunks)]
        self._beside: dict[EventKind, dict[int, int]] = {what: {} for what in EventKind}
        self._owing = 0
        self._is_delayed: dict[int, bool] = {}  # place -> whether its weight gradients come after its backward
        self.read_next: dict[int, int] = {}  # place -> whose backward comes next
        self._capture_order(found)

    def _capture_order(self, found: Sequence[Event]) -> None:
        alive, last_backward = 0, None
        for event in found:
            for place in self._of(event):
                self._beside[event.what][place] = alive
                if event.what is EventKind.FORWARD:
                    alive |= 1 << place
                elif event.what is EventKind.BACKWARD:
                    if last_backward is not None:
                        self.read_next[last_backward] = place
                    last_backward = place
                if event.last:
                    alive &= ~(1 << place)
                    self._is_delayed[place] = event.what is EventKind.WEIGHTS

    def _of(self, event: Event) -> Iterator[int]:
        layers = range(self._layers[event.chunk])
        for layer in layers if event.what is EventKind.FORWARD else reversed(layers):
            yield self.at(event.chunk, event.microbatch, layer)

    def at(self, chunk: int, microbatch: int, layer: int) -> int:
        """The place of a layer, by its number within its chunk."""
        return self._starts[chunk] + microbatch * self._layers[chunk] + layer

    def may_begin(self, place: int) -> bool:
        """Whether its forward may be replayed now, beside what is outstanding."""
        return not self.alive & ~self._beside[EventKind.FORWARD][place]

    def begin(self, place: int) -> None:
        """Its forward is replayed now."""
        self.alive |= 1 << place

    def go_back(self, place: int) -> None:
        """Its backward is replayed now. Raises GraphError where another order was captured."""
        self._check(place, EventKind.BACKWARD)
        if self._is_delayed[place]:
            self._owing |= 1 << place
        else:
            self.end(place)

    def owes_weights(self, place: int) -> bool:
        """Whether its backward was replayed, and its weight gradients are to come."""
        return bool(self._owing >> place & 1)

    def compute_weights(self, place: int) -> None:
        """The weight gradients that it owes are replayed now. Raises GraphError where another order was captured."""
        self._check(place, EventKind.WEIGHTS)
        self.end(place)

    def _check(self, place: int, what: EventKind) -> None:
        others = self.alive & ~self._beside[what][place]
        if others:
            raise GraphError(
                f"{what.value} of graph {place} came while {others.bit_count()} others were outstanding "
                "that were not when it was captured, and whose memory it would overwrite: run backwards "
                "in the order that was given for the capture"
            )

    def end(self, place: int) -> None:
        """Its life is over, by its backward or because that will never come."""
        self.alive &= ~(1 << place)
        self._owing &= ~(1 << place)
