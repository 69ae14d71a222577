"""Says what is wrong with the scheduler's books: states, order, slots, and who holds which page.

Owns the invariants between queues and pool, stated once, for the idle check and for tests. Only reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.scheduling.admission import QueuedRequest
from engine.scheduling.page_pool import PagePool
from engine.scheduling.request import RequestState

_WAITING_STATES = (RequestState.WAITING, RequestState.PREEMPTED)


def queue_problems(
    live: Iterable[str], waiting: Sequence[QueuedRequest], running: Sequence[QueuedRequest]
) -> list[str]:
    """Whether each live request id stands in exactly one line, in order, in a state that fits the line."""
    found = []
    for queue, name in ((waiting, "waiting"), (running, "running")):
        keys = [entry.key for entry in queue]
        if keys != sorted(keys):
            found.append(f"the {name} line is out of order")
    queued = Counter(entry.request.request_id for entry in (*waiting, *running))
    ids = set(live)
    found += [f"request {name!r} is live but in no line" for name in sorted(ids - queued.keys())]
    found += [f"request {name!r} is in a line but not live" for name in sorted(queued.keys() - ids)]
    found += [f"request {name!r} is in the lines {times} times" for name, times in queued.items() if times > 1]
    for entry in waiting:
        request = entry.request
        if request.state not in _WAITING_STATES:
            found.append(f"{request!r} waits in state {request.state.value}")
        if request.pages or request.slot is not None or request.num_computed:
            found.append(f"{request!r} waits but holds pages, a slot or computed tokens")
    found += [
        f"{entry.request!r} runs in state {entry.request.state.value}"
        for entry in running
        if entry.request.state is not RequestState.RUNNING
    ]
    return found


def slot_problems(free_slots: Sequence[int], running: Sequence[QueuedRequest], max_num_seqs: int) -> list[str]:
    """Whether each slot is free or held by one running request."""
    seen = Counter([*free_slots, *(entry.request.slot for entry in running)])
    if seen == Counter(range(max_num_seqs)):
        return []
    return [f"slots free and held are {dict(seen)}, not each of 0..{max_num_seqs - 1} once"]


def page_problems(pool: PagePool, running: Sequence[QueuedRequest]) -> list[str]:
    """Whether every page's reference count is the number of running requests that hold it, and each holds enough."""
    found = []
    held: Counter[int] = Counter()
    for entry in running:
        request = entry.request
        held.update(request.pages)
        if len(set(request.pages)) != len(request.pages):
            found.append(f"{request!r} holds a page twice: {request.pages}")
        if not pool.pages_for(request.num_computed) <= len(request.pages) <= entry.final_pages:
            found.append(f"{request!r} should hold pages for its computed tokens, {entry.final_pages} at most")
    for page in range(pool.num_pages):
        if pool.ref_count(page) != held[page]:
            found.append(f"page {page} counts {pool.ref_count(page)} references, running requests hold {held[page]}")
    return found
