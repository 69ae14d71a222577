"""Check the scheduler's invariants: states, order, slots and page references. For the idle check and tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.scheduling.admission import QueuedRequest
from engine.scheduling.cache_groups import CacheGroups
from engine.scheduling.page_pool import PagePool
from engine.scheduling.request import RequestState

_WAITING_STATES = (RequestState.WAITING, RequestState.PREEMPTED)


def queue_problems(
    live: Iterable[str], waiting: Sequence[QueuedRequest], running: Sequence[QueuedRequest]
) -> list[str]:
    """Check that each live request is in exactly one queue, in order and in a state that fits the queue."""
    found = []
    for queue, name in ((waiting, "waiting"), (running, "running")):
        keys = [entry.key for entry in queue]
        if keys != sorted(keys):
            found.append(f"the {name} queue is out of order")
    queued = Counter(entry.request.request_id for entry in (*waiting, *running))
    ids = set(live)
    found += [f"request {name!r} is live but in no queue" for name in sorted(ids - queued.keys())]
    found += [f"request {name!r} is in a queue but not live" for name in sorted(queued.keys() - ids)]
    found += [f"request {name!r} is in the queues {times} times" for name, times in queued.items() if times > 1]
    for entry in waiting:
        request = entry.request
        if request.state not in _WAITING_STATES:
            found.append(f"{request!r} is waiting in state {request.state.value}")
        if request.page_tables or request.slot is not None or request.num_computed:
            found.append(f"{request!r} is waiting but has pages, a slot or computed tokens")
    found += [
        f"{entry.request!r} is running in state {entry.request.state.value}"
        for entry in running
        if entry.request.state is not RequestState.RUNNING
    ]
    return found


def slot_problems(free_slots: Sequence[int], running: Sequence[QueuedRequest], max_num_seqs: int) -> list[str]:
    """Check that each slot is either free or held by one running request."""
    seen = Counter([*free_slots, *(entry.request.slot for entry in running)])
    if seen == Counter(range(max_num_seqs)):
        return []
    return [f"free and held slots are {dict(seen)}, expected each of 0..{max_num_seqs - 1} once"]


def page_problems(
    pool: PagePool, groups: CacheGroups, running: Sequence[QueuedRequest], rising: Iterable[int] = ()
) -> list[str]:
    """Check that each page's reference count matches its running requests, and that each request has enough pages.

    Counts all groups' tables, so a page in two of them must have two references. `rising`: the pages that promotions
    from lower tiers reference.
    """
    found = []
    held: Counter[int] = Counter(rising)
    for entry in running:
        request = entry.request
        if not len(request.page_tables) == len(request.num_freed) == len(groups.windows):
            found.append(f"{request!r} must have {len(groups.windows)} page tables")
            continue
        pages = request.held_pages()
        held.update(pages)
        if len(set(pages)) != len(pages):
            found.append(f"{request!r} holds a page twice: {pages}")
        least, most = pool.pages_for(request.num_computed), pool.pages_for(entry.final_tokens)
        first_needed = groups.first_needed(request.num_computed)
        for group, (table, freed) in enumerate(zip(request.page_tables, request.num_freed, strict=True)):
            if not least <= len(table) <= most:
                found.append(f"{request!r} must have {least} to {most} pages in group {group}, it has {len(table)}")
            if any(table[:freed]) or not all(table[freed:]) or freed > first_needed[group]:
                found.append(f"{request!r} freed {freed} pages, not those before its window, in group {group}: {table}")
    for page in range(pool.num_pages):
        if pool.ref_count(page) != held[page]:
            found.append(
                f"page {page} has {pool.ref_count(page)} references, running requests and promotions hold {held[page]}"
            )
    return found
