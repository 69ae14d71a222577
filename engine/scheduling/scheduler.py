"""Chooses what each step runs: the queues, slots and pages of every request between `add` and its end.

Order is (priority, arrival, order of `add`), everywhere. Running decodes come first, then prompts under way, then new
admissions, all under one token budget. A request enters only with the pages of its whole text, so a prompt never
stalls half-way; a decode that finds no page preempts the last request in order, which keeps its place and is
recomputed. The first request in order is never preempted for another, so something always moves forward.
Must not know tensors, models or HTTP. One owner thread, the engine loop's; nothing here locks.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from engine.errors import QueueFull, RequestError
from engine.scheduling.admission import Admission, QueuedRequest, SchedulerConfig, SchedulerInvariantError
from engine.scheduling.batch import Batch, PrefillChunk
from engine.scheduling.invariants import page_problems, queue_problems, slot_problems
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.progress import RequestProgress
from engine.scheduling.request import Request, RequestState

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerInvariantError"]

_ORDER_KEY = attrgetter("key")


class Scheduler:
    """Queues, slots and page accounting over one pool and, optionally, its prefix cache.

    Each request given to `add` is waiting (PREEMPTED ones too), running, or final, and stays findable until final.
    `weight_version` is stamped on requests when they are admitted; change it with `set_weight_version`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        prefix_cache: PrefixCache | None = None,
        *,
        weight_version: str = "",
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.weight_version = weight_version
        self.num_preemptions = 0
        self.prompt_tokens = 0  # of all requests that were ever admitted
        self.ended: Counter[str] = Counter()  # finish reason -> requests
        self._clock = clock
        self._admission = Admission(pool, prefix_cache, config.max_model_len)
        self._entries: dict[str, QueuedRequest] = {}
        self._waiting: list[QueuedRequest] = []  # both in order of key
        self._running: list[QueuedRequest] = []
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first
        self._blocked_head: QueuedRequest | None = None  # head that did not fit; nothing was released since
        self._added = self._last_lease = 0
        self._progress = RequestProgress(pool.page_size, prefix_cache, self._entries)

    @property
    def has_work(self) -> bool:
        return bool(self._entries)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, preempted ones included."""
        return len(self._waiting)

    def get(self, request_id: str) -> Request | None:
        """The live request of this id, or None once it has ended."""
        entry = self._entries.get(request_id)
        return entry.request if entry is not None else None

    def requests(self) -> list[Request]:
        """All live requests, in the order they were added; a new list."""
        return [entry.request for entry in self._entries.values()]

    def token_limit(self, request: Request) -> int:
        """Prompt and output tokens together at which the loop must end `request` with "length".

        The least of max_tokens, the context and the pool; the last token's KV is never stored, so the pool allows
        one token more than it holds.
        """
        return self._admission.token_limit(request)

    def add(self, request: Request) -> None:
        """Queue a WAITING request. Raises PromptTooLong if it can never fit, QueueFull at max_waiting, RequestError
        for an empty prompt or an id in use; then nothing was accepted.
        """
        if request.request_id in self._entries:
            raise RequestError(f"request_id {request.request_id!r} is in use by a live request", param="request_id")
        if request.prompt_len == 0:
            raise RequestError("the prompt is empty: give at least one token", param="prompt_token_ids")
        if request.state is not RequestState.WAITING or request.pages or request.slot is not None:
            raise SchedulerInvariantError(f"{request!r} was scheduled before: give add() a new record")
        entry = self._admission.entry_for(request, self._added)
        if self.config.max_waiting is not None and len(self._waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already, the bound is {self.config.max_waiting}")
        self._added += 1
        request.max_length = self.token_limit(request)
        self._entries[request.request_id] = entry
        insort(self._waiting, entry, key=_ORDER_KEY)

    def abort(self, request_id: str) -> bool:
        """End a live request as ABORTED; False if no such request lives.

        Safe at any time, steps under way or not: see `finish`.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self.finish(entry.request, RequestState.ABORTED, "abort")
        return True

    def finish(self, request: Request, state: RequestState, reason: str | None = None) -> None:
        """End a live request in a final state; slot and pages come back, the record keeps its tokens.

        Steps under way may hold work of it: `dispatch` and `complete` skip that, and slot and pages go to another only
        with a later `schedule`, whose work the device runs after it.
        `reason` (default: the state's name) is counted in `ended`. A running request that FAILED also empties the
        prefix cache: what it computed, and whatever others built on that, is in doubt. Raises SchedulerInvariantError
        for a request not live here, and EngineError, changing nothing, for a transition that its state forbids.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or entry.request is not request:
            raise SchedulerInvariantError(f"{request!r} is not live in this scheduler: it ended before or never began")
        if not state.is_final:
            raise SchedulerInvariantError(f"finish({request.request_id!r}) needs a final state, not {state.value}")
        running = request.state is RequestState.RUNNING
        request.state = state
        if running and state is RequestState.FAILED and self.prefix_cache is not None:
            self.prefix_cache.reset()
        _remove_from_queue(self._running if running else self._waiting, entry)
        if running:
            self._release(entry)
        del self._entries[request.request_id]
        self.ended[reason if reason is not None else state.value] += 1

    def set_weight_version(self, version: str) -> None:
        """From now on admitted requests are of this version, and no KV from before is ever shared with them.

        Running requests go on with the KV they have (call `preempt_all` first to have them recomputed); what they
        compute from here is of mixed versions and stays out of the prefix cache.
        """
        self.weight_version = version
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    def preempt_all(self) -> list[Request]:
        """Send every running request back to its place in the queue, to be recomputed: the KV memory is going away.

        Does not count against them in the admission reserve. Returns those requests.
        """
        preempted = list(self._running)
        for entry in preempted:
            self._requeue(entry)
        return [entry.request for entry in preempted]

    def schedule(self) -> Batch:
        """Choose the next step's work; falsy if there is none. Pages and slots of what it lists are theirs already.

        A token in flight counts as present, so this may run before it was read; a request that will be at its limit
        with it is left out. Computes nothing and appends nothing: without `dispatch`, the next call lists the same
        work again. Raises SchedulerInvariantError if a running request has nothing to compute or outgrew
        `token_limit`: the loop should have finished it.
        """
        batch = Batch()
        if self._waiting and self._running and self._waiting[0].key[0] < self._running[-1].key[0]:
            self._admit_urgent(batch)
        prefilling = self._schedule_decodes(batch)
        budget = self.config.max_num_batched_tokens - len(batch.decodes)
        for entry in prefilling:
            if budget == 0:
                break
            budget -= _add_chunk(batch, entry.request, budget)
        self._admit_in_order(batch, budget)
        batch.positions = [request.num_computed for request in batch.decodes]
        batch.leases = [request.lease for request in batch.decodes]
        return batch

    def dispatch(self, batch: Batch) -> None:
        """Book a step that was enqueued: its tokens count as computed, and each request whose last token was among
        them has one more token in flight. Requests that ended or were sent back since `schedule` are skipped.
        """
        self._progress.dispatch(batch)

    def complete(self, batch: Batch, new_tokens: Sequence[int | None]) -> None:
        """Book a step that was dispatched and read: a token for each of `batch.sampled` is appended. Full pages are
        offered to the prefix cache.

        Requests that ended or were sent back meanwhile are skipped. One whose token is None gets none, and must be
        finished before the next `schedule`. The loop decides on finishing afterwards.
        """
        self._progress.complete(batch, new_tokens)

    def problems(self) -> list[str]:
        """Every broken invariant of lines, slots, pages and caches, in words; O(pages), for checks."""
        found = self.pool.problems() + page_problems(self.pool, self._running)
        found += queue_problems(self._entries, self._waiting, self._running)
        found += slot_problems(self._free_slots, self._running, self.config.max_num_seqs)
        return found + (self.prefix_cache.problems() if self.prefix_cache is not None else [])

    def check(self) -> None:
        """Raise SchedulerInvariantError listing every broken invariant; for tests."""
        found = self.problems()
        if found:
            raise SchedulerInvariantError("the scheduler is broken: " + "; ".join(found))

    def idle_check(self) -> None:
        """Raise SchedulerInvariantError, listing every leak at once, unless all requests ended and everything came
        back: slots, pages (cached ones may keep their contents), maps and lines.
        """
        found = [f"{request!r} is still live" for request in self.requests()]
        if self.pool.num_in_use:
            found.append(f"{self.pool.num_in_use} of {self.pool.capacity} pages are still referenced")
        if len(self._free_slots) != self.config.max_num_seqs:
            found.append(f"{self.config.max_num_seqs - len(self._free_slots)} slots are still taken")
        found += self.problems()
        if found:
            raise SchedulerInvariantError("not idle: " + "; ".join(found))

    def _schedule_decodes(self, batch: Batch) -> list[QueuedRequest]:
        """List the decodes, in order, each with a page for its token; returns those with more than one to compute."""
        page_size = self.pool.page_size
        running, decodes = self._running, batch.decodes
        prefilling: list[QueuedRequest] = []
        index = 0
        while index < len(running):  # it shrinks from its end where pages lack, never before `index`
            entry = running[index]
            request = entry.request
            computed, length = request.num_computed, request.length
            remaining = length - computed
            if length >= request.max_length and length > len(request.token_ids):
                pass  # ends with the token in flight
            elif remaining == 1:
                if computed < len(request.pages) * page_size or self._allocate_next_page(entry, batch):
                    decodes.append(request)
            elif remaining > 1:
                prefilling.append(entry)
            else:
                raise SchedulerInvariantError(
                    f"{request!r} has nothing to compute: complete() brought no token and nobody finished it"
                )
            index += 1
        return prefilling

    def _allocate_next_page(self, entry: QueuedRequest, batch: Batch) -> bool:
        """Give a decode its next page, preempting from the end of the line; False if it had to go itself."""
        if entry.pages_remaining <= 0:
            raise SchedulerInvariantError(
                f"{entry.request!r} outgrew its limit of {self.token_limit(entry.request)} tokens: finish it there"
            )
        while not self.pool.num_free:
            victim = self._running[-1]
            self._preempt(victim, batch)
            if victim is entry:
                return False
        entry.request.pages += self.pool.allocate(1)
        return True

    def _admit_urgent(self, batch: Batch) -> None:
        """Admit requests that a running one of lower priority keeps waiting, preempting where slots or pages lack."""
        while self._waiting and self._running:
            head, last = self._waiting[0], self._running[-1]
            if head is self._blocked_head or head.key[0] >= last.key[0] or self._budget_left_for(head) <= 0:
                return
            matched = self._admission.matched_pages(head, self.weight_version)
            victims = self._admission.victims(head, matched, self._running, bool(self._free_slots))
            if victims is None:
                self._blocked_head = head
                return
            for victim in victims:
                self._preempt(victim, batch)
            self._admit(head, matched, batch)

    def _budget_left_for(self, head: QueuedRequest) -> int:
        """What the step's budget leaves to `head`, were it admitted: no sooner is anybody preempted for it."""
        budget = self.config.max_num_batched_tokens
        for entry in self._running:
            remaining = entry.request.length - entry.request.num_computed
            budget -= remaining if entry.key < head.key or remaining == 1 else 0
        return budget

    def _admit_in_order(self, batch: Batch, budget: int) -> None:
        """Admit from the head of the queue while budget, slots and pages last; nobody overtakes a head that waits."""
        while budget > 0 and self._waiting and self._free_slots and self._waiting[0] is not self._blocked_head:
            head = self._waiting[0]
            if head.request in batch.preempted:  # making room for others and taking it back would be for nothing
                return
            matched = self._admission.matched_pages(head, self.weight_version)
            if self._admission.shortfall(head, matched, self._running) > 0:
                if not self._running:  # it fits an empty pool, so waiting on would be for ever
                    raise SchedulerInvariantError(f"{head.request!r} can't enter an idle engine: {self.problems()}")
                self._blocked_head = head
                return
            self._admit(head, matched, batch)
            if len(head.request.token_ids) - head.request.num_computed == 1:
                batch.decodes.append(head.request)
                budget -= 1
            else:
                budget -= _add_chunk(batch, head.request, budget)

    def _admit(self, entry: QueuedRequest, matched: list[int], batch: Batch) -> None:
        """Move the head of the queue to the running line with its slot and all pages of its text."""
        request = entry.request
        if self.prefix_cache is not None:
            self.prefix_cache.acquire(matched)  # before allocating, or the allocation might evict them
        fresh = self.pool.allocate(self._admission.pages_now(entry) - len(matched))
        del self._waiting[0]
        insort(self._running, entry, key=_ORDER_KEY)
        request.state = RequestState.RUNNING
        request.pages = matched + fresh
        request.slot = heappop(self._free_slots)
        self._last_lease += 1
        request.lease = self._last_lease
        request.num_computed = len(matched) * self.pool.page_size
        request.weight_version = self.weight_version
        entry.registered = len(matched)
        if request.first_scheduled_time is None:  # a recomputation is neither news nor a hit worth counting
            request.first_scheduled_time = self._clock()
            request.cached_tokens = request.num_computed
            self.prompt_tokens += request.prompt_len
            if self.prefix_cache is not None:
                self.prefix_cache.record_lookup(len(request.token_ids), request.num_computed)
        batch.admitted.append(request)

    def _preempt(self, entry: QueuedRequest, batch: Batch) -> None:
        """Send a running request back because others need its room, and remember that for its next admission."""
        self._requeue(entry)
        entry.preemptions += 1
        batch.preempted.append(entry.request)

    def _requeue(self, entry: QueuedRequest) -> None:
        """Move a running request to its place in the queue: no slot, no pages, everything to recompute."""
        entry.request.state = RequestState.PREEMPTED
        _remove_from_queue(self._running, entry)
        self._release(entry)
        self.num_preemptions += 1
        insort(self._waiting, entry, key=_ORDER_KEY)

    def _release(self, entry: QueuedRequest) -> None:
        """Slot and pages come back: the only place where they do. A token in flight is given up; where the request
        runs again it comes again, from the same seed and position.
        """
        request = entry.request
        self.pool.free(request.pages)
        heappush(self._free_slots, request.slot)
        request.pages = []
        request.slot = None
        request.lease = request.num_computed = 0
        request.length = len(request.token_ids)
        self._blocked_head = None


def _add_chunk(batch: Batch, request: Request, budget: int) -> int:
    """Add the next chunk of at most `budget` tokens; returns its length."""
    remaining = len(request.token_ids) - request.num_computed
    length = min(remaining, budget)
    batch.prefills.append(PrefillChunk(request, request.num_computed, length, length == remaining, request.lease))
    return length


def _remove_from_queue(queue: list[QueuedRequest], entry: QueuedRequest) -> None:
    """Remove `entry` from a line in order of key."""
    index = bisect_left(queue, entry.key, key=_ORDER_KEY)
    if index == len(queue) or queue[index] is not entry:
        raise SchedulerInvariantError(f"{entry.request!r} is not where its key puts it in the line")
    del queue[index]
