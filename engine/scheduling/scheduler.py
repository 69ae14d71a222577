"""The scheduler: choose the requests and tokens of each step, and manage queues, slots and KV pages.

Requests are ordered by (priority, arrival, order of `add`) everywhere; each further sequence of one client's request
counts as arriving 10 s later. A step takes running decodes first, then partially prefilled prompts, then new requests,
under one token budget, of which a new prompt that takes at most half is kept its part. The budget is smaller in a step
with decodes.

A large request does not hold up others. Its further sequences are preempted for requests before them in order. Short
requests, of few prompt and output tokens, run ahead of the order in up to 1/16 of the slots, one of which they may take
from the last running request; meanwhile other prompts get a quarter of the budget. Prompt tokens with log-probabilities
count twice in the budget.

A request is admitted only with pages for all its tokens so far (in a cache group with a window: for the largest chunk
and the window before it), so a prefill never stalls half-way. A request that finds no free page preempts the last
request in order, which keeps its place in the queue and is recomputed. The first request in order is never preempted
for another, so there is always progress.

Works on plain integers, no tensors. Not thread-safe: the engine loop's thread owns it.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter

from engine.errors import RequestError
from engine.protocol.kv_moves import Moved
from engine.scheduling import progress
from engine.scheduling.admission import (
    RECOMPUTED_TOKENS,
    Admission,
    QueuedRequest,
    SchedulerConfig,
    SchedulerInvariantError,
)
from engine.scheduling.batch import Batch, PrefillChunk, VerifyRow
from engine.scheduling.invariants import page_problems, queue_problems, slot_problems
from engine.scheduling.lower_tiers import LowerTiers
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestState
from engine.speculation.drafter import Drafter, DraftRow

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerInvariantError"]

_ORDER_KEY = attrgetter("key")


class Scheduler:
    """Schedules requests over one page pool and, optionally, its prefix cache.

    A request given to `add` is waiting (preempted ones included) or running until it ends; `get` finds it until then.
    A request gets the current `weight_version` on admission; change it with `set_weight_version`. `drafter` proposes
    draft tokens for the decodes of a step; None: there are none. `tiers`: below the prefix cache; None: there are none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        prefix_cache: PrefixCache | None = None,
        *,
        weight_version: str = "",
        drafter: Drafter | None = None,
        tiers: LowerTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.tiers = tiers
        self.weight_version = weight_version
        self.num_preemptions = 0
        self.prompt_tokens = 0  # of all requests admitted so far
        self._drafter = drafter
        self._clock = clock
        self._admission = Admission(pool, prefix_cache, config)
        self._groups = self._admission.groups
        self._one_page_each = [1] * len(config.groups)
        self._entries: dict[str, QueuedRequest] = {}
        self._waiting: list[QueuedRequest] = []  # all queues are sorted by key
        self._waiting_short: list[QueuedRequest] = []  # the short requests in `_waiting`
        self._running: list[QueuedRequest] = []
        self._num_short_running = 0
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first
        # Short requests that run ahead of the order, at most. A single slot is never taken from the request in it.
        self._short_slots = max(1, min(8, config.max_num_seqs // 16)) if config.max_num_seqs > 1 else 0
        self._blocked_head: QueuedRequest | None = None  # head that did not fit, until something is released
        self._recomputed: list[QueuedRequest] = []  # what `preempt_all` preempted, in order, until it is ready again
        self._added = self._last_lease = 0

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
        """Return the live request with this id, or None if there is none."""
        entry = self._entries.get(request_id)
        return entry.request if entry is not None else None

    def requests(self) -> list[Request]:
        """Return all live requests in the order they were added, as a new list."""
        return [entry.request for entry in self._entries.values()]

    def token_limit(self, request: Request) -> int:
        """Return the length, prompt and output tokens together, at which the loop must end `request` with "length".

        It is the minimum over max_tokens, the context and the pool. The last token's KV is never stored, so the pool
        allows one token more than it holds.
        """
        return self._admission.token_limit(request)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises PromptTooLong if it can never fit, and RequestError for an empty prompt or an id in use. The scheduler is
        unchanged then.
        """
        if request.request_id in self._entries:
            raise RequestError(f"request_id {request.request_id!r} is in use by a live request", param="request_id")
        if request.prompt_len == 0:
            raise RequestError("the prompt is empty: give at least one token", param="prompt_token_ids")
        if request.state is not RequestState.WAITING or request.page_tables or request.slot is not None:
            raise SchedulerInvariantError(f"{request!r} was already scheduled: give add() a new record")
        entry = self._admission.entry_for(request, self._added)
        self._added += 1
        request.max_length = self.token_limit(request)
        self._entries[request.request_id] = entry
        self._enqueue(entry)

    def abort(self, request_id: str) -> bool:
        """Abort a live request; returns False if there is none with this id.

        Safe with steps in flight: see `finish`.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self.finish(entry.request, RequestState.ABORTED)
        return True

    def finish(self, request: Request, state: RequestState) -> None:
        """End a live request in a final state and free its slot and pages. The record keeps its tokens.

        Safe with steps in flight: `dispatch` and `complete` skip this request's part of them, and slot and pages are
        reused only by a later `schedule`, whose work the device runs afterwards. If a running request FAILED, the
        prefix cache is reset, because the pages it computed, and pages that others computed from them, may be wrong.
        Raises SchedulerInvariantError for a request that is not live, and EngineError, changing nothing, for an invalid
        state transition.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or entry.request is not request:
            raise SchedulerInvariantError(f"{request!r} is not live in this scheduler: it has ended or was never added")
        if not state.is_final:
            raise SchedulerInvariantError(f"finish({request.request_id!r}) needs a final state, not {state.value}")
        running = request.state is RequestState.RUNNING
        request.state = state
        if running and state is RequestState.FAILED and self.prefix_cache is not None:
            self.prefix_cache.reset()
        if running:
            _remove_from_queue(self._running, entry)
            self._release(entry)
        else:
            self._dequeue(entry)
        del self._entries[request.request_id]
        if self._drafter is not None:
            self._drafter.forget(request.request_id)

    def set_weight_version(self, version: str) -> None:
        """Set the weight version of requests admitted from now on; they never share KV of earlier versions.

        Running requests continue with the KV they have; call `preempt_all` first to have them recomputed. What they
        compute from now on mixes versions and stays out of the prefix cache.
        """
        self.weight_version = version
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    def rename_weights(self, version: str) -> None:
        """Give the weights another version: live requests have it too and keep their KV.

        Prefixes that were cached under the old version are found no more, so they are dropped.
        """
        self.weight_version = version
        if self.prefix_cache is not None:
            self.prefix_cache.reset()
        for entry in self._entries.values():
            entry.request.weight_version = version

    def preempt_all(self, *, without_tokens: bool = False) -> list[Request]:
        """Preempt every running request, because its KV becomes invalid. Returns those requests.

        `without_tokens`: only those that have no output token yet.

        Each goes back to its place in the queue and is recomputed. Does not raise their admission reserve.
        """
        preempted = [entry for entry in self._running if not (without_tokens and entry.request.output_len)]
        for entry in preempted:
            self._requeue(entry)
        self._recomputed = sorted({*self._recomputed, *preempted}, key=_ORDER_KEY)
        return [entry.request for entry in preempted]

    def schedule(self) -> Batch:
        """Choose the next step's batch and allocate its slots and pages. The batch is falsy if there is no work.

        A token in flight counts as present, so this may run before it is read; a request that reaches its maximum
        length with it is left out. Does not advance requests: without `dispatch`, the next call returns the same work
        again. Raises SchedulerInvariantError if a running request has nothing to compute or exceeds `token_limit`,
        that is, if the loop failed to end it.
        """
        batch = Batch()
        if self._waiting and self._running:
            self._admit_urgent(batch)
            self._admit_short(batch)
        prefilling = sorted(self._schedule_decodes(batch), key=lambda entry: not entry.is_short)
        limit = self._recomputed_tokens(batch) if self._recomputed else None
        drafts = 0
        if self._drafter is not None:
            left = self.config.step_tokens(bool(batch.decodes)) - len(batch.decodes)
            drafts = left - self._add_drafts(batch, self._drafter, left)
        budget = self.config.prompt_tokens(len(batch.decodes) + len(batch.verifies), drafts, limit)
        kept = self._tokens_kept_for_head(budget)
        for entry in prefilling:
            budget = self._budget_for(entry, budget)
            if budget <= kept or self._is_full(batch):
                break
            budget -= _add_chunk(batch, entry.request, budget - kept)
        self._admit_in_order(batch, budget)
        batch.positions = [request.num_computed for request in batch.decodes]
        batch.leases = [request.lease for request in batch.decodes]
        return batch

    def dispatch(self, batch: Batch) -> None:
        """Update progress for a batch that was enqueued.

        Its tokens count as computed, and each request whose last known token was among them has one more token in
        flight. Full pages of prompt chunks are cached. Requests that ended or were preempted since `schedule` are
        skipped.
        """
        progress.dispatch(batch)
        for chunk in batch.prefills:  # later steps may read these pages: the device runs them afterwards
            if chunk.request.lease == chunk.lease:
                self._cache_pages(chunk.request, chunk.start + chunk.length)

    def complete(self, batch: Batch, new_tokens: Sequence[int | None], verified: Sequence[Sequence[int]] = ()) -> None:
        """Append the tokens of a dispatched batch and cache the pages that they fill.

        `new_tokens` has one token for each of `batch.sampled`, `verified` the accepted tokens of each of
        `batch.verifies`. Requests that ended or were preempted meanwhile are skipped. A request that gets no token must
        be finished before the next `schedule`. Checking stop conditions is left to the loop.
        """
        for request, computed in progress.complete(batch, new_tokens, verified, self.pool.page_size):
            self._cache_pages(request, computed)

    def finish_moves(self, moved: Moved) -> None:
        """Take what the workers have moved between the tiers; requests that waited for it can be admitted now."""
        assert self.tiers is not None
        self.tiers.finish(moved)
        if moved.promoted:
            self._blocked_head = None

    def _cache_pages(self, request: Request, computed: int) -> None:
        """Add the pages filled by `computed` tokens to the prefix cache, which ignores those started before a reset.

        A page is cached only when all its tokens are known. Pages that left their windows before are not cached.
        """
        if self.prefix_cache is None:
            return
        entry = self._entries[request.request_id]
        full = computed // self.pool.page_size
        if full > entry.registered:
            assert entry.chain is not None  # created at admission
            self.prefix_cache.insert(entry.chain, request.token_ids, request.page_tables, entry.registered, full)
            entry.registered = full

    def problems(self) -> list[str]:
        """Describe every broken invariant of queues, slots, pages and prefix cache. O(pages); for checks."""
        rising = () if self.tiers is None else self.tiers.held_pages()
        found = self.pool.problems() + page_problems(self.pool, self._groups, self._running, rising)
        found += queue_problems(self._entries, self._waiting, self._running)
        found += slot_problems(self._free_slots, self._running, self.config.max_num_seqs)
        found += self.tiers.problems() if self.tiers is not None else []
        return found + (self.prefix_cache.problems() if self.prefix_cache is not None else [])

    def check(self) -> None:
        """Raise SchedulerInvariantError listing every broken invariant; for tests."""
        found = self.problems()
        if found:
            raise SchedulerInvariantError("the scheduler is broken: " + "; ".join(found))

    def idle_check(self) -> None:
        """Raise SchedulerInvariantError, listing every leak, unless all requests ended and freed their slots and pages.

        Cached pages may keep their contents.
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
        """Add the decodes to `batch` in order, each with pages for its token. Returns the requests in prefill."""
        running, decodes, has_windows = self._running, batch.decodes, self._groups.has_windows
        prefilling: list[QueuedRequest] = []
        index = 0
        while index < len(running):  # preemption removes entries from the end of `running`
            entry = running[index]
            request = entry.request
            computed, length = request.num_computed, request.length
            remaining = length - computed
            if length >= request.max_length and length > len(request.token_ids):
                pass  # the token in flight is its last
            elif remaining == 1 and not request.is_pooled:
                if computed < entry.pages_until or self._update_pages(entry, batch):
                    decodes.append(request)
            elif remaining > 0:
                if not has_windows or self._update_pages(entry, batch):
                    prefilling.append(entry)
            else:
                raise SchedulerInvariantError(
                    f"{request!r} has nothing to compute: it got no token from complete() and was not finished"
                )
            index += 1
        return prefilling

    def _recomputed_tokens(self, batch: Batch) -> int | None:
        """Return how many tokens a step recomputes at most; None if none are left to recompute.

        Beside decodes, which wait for the step, there are few. Without any, as many as make the first request ready.
        """
        self._recomputed = [
            entry
            for entry in self._recomputed
            if self._entries.get(entry.request.request_id) is entry
            and (entry.request.slot is None or entry.request.length - entry.request.num_computed > 1)
        ]
        if not self._recomputed:
            return None
        if batch.decodes:
            return RECOMPUTED_TOKENS
        first = self._recomputed[0].request
        return max(RECOMPUTED_TOKENS, (len(first.token_ids) - first.num_computed) * first.prompt_token_cost)

    def _add_drafts(self, batch: Batch, drafter: Drafter, budget: int) -> int:
        """Turn decodes for which there are draft tokens into rows that verify them; return the budget left.

        Drafts fill the pages that a request has anyway, so they never preempt another.
        """
        tokens_left = self.config.max_verify_tokens
        wanted = {
            request.request_id: DraftRow(request.request_id, request.token_ids, count)
            for request in batch.decodes
            if (count := self._max_drafts(request)) > 0
        }
        proposed = dict(zip(wanted, drafter.propose(list(wanted.values())), strict=True))
        decodes = []
        for request in batch.decodes:
            drafts = tuple(proposed.get(request.request_id, ()))[: max(0, min(budget, tokens_left - 1))]
            if not drafts:
                decodes.append(request)
                continue
            batch.verifies.append(VerifyRow(request, request.num_computed, drafts, request.lease))
            budget -= len(drafts)
            tokens_left -= 1 + len(drafts)
        batch.decodes = decodes
        return budget

    def _max_drafts(self, request: Request) -> int:
        """Return how many draft tokens a decode may have, apart from the budget of the step."""
        if not request.may_have_drafts or request.length != len(request.token_ids):
            return 0
        pages_until = self._entries[request.request_id].pages_until
        return min(
            self.config.num_speculative_tokens,
            pages_until - request.num_computed - 1,
            request.max_length - request.length - 1,
        )

    def _update_pages(self, entry: QueuedRequest, batch: Batch) -> bool:
        """Allocate the pages of a running request's next tokens, and free those that left their windows.

        Preempts from the end of the queue for them; returns False if the request itself was preempted.
        """
        request, pool = entry.request, self.pool
        if request.length > entry.final_tokens:
            raise SchedulerInvariantError(
                f"{request!r} exceeds its limit of {self.token_limit(request)} tokens: it must end there"
            )
        missing = self._slide_windows(entry) if self._groups.has_windows else self._one_page_each
        needed = sum(missing)
        while needed > pool.num_free:
            victim = self._running[-1]
            self._preempt(victim, batch)
            if victim is entry:
                return False
        for group, count in enumerate(missing):
            request.page_tables[group] += pool.allocate(count)
        decodes = request.num_computed + 1 == request.length
        entry.pages_until = pool.pages_for(request.length) * pool.page_size if decodes else 0
        return True

    def _slide_windows(self, entry: QueuedRequest) -> list[int]:
        """Free a request's pages that left their windows. Returns per group how many pages its next tokens need.

        Pages that the prefix cache will take when their step completes stay until then, unless the pool lacks pages.
        """
        request, pool = entry.request, self.pool
        num_free = pool.num_free
        self._free_outside_windows(request, entry.registered if self.prefix_cache is not None else None)
        lengths = self._groups.table_lengths(request.num_computed, request.length)
        missing = [max(0, n - len(table)) for n, table in zip(lengths, request.page_tables, strict=True)]
        if sum(missing) > pool.num_free:
            self._free_outside_windows(request)
        if pool.num_free - sum(missing) > num_free:
            self._blocked_head = None
        return missing

    def _free_outside_windows(self, request: Request, limit: int | None = None) -> None:
        """Free pages that no query at `num_computed` or later reads, below table entry `limit`; the entries become 0.

        Enqueued steps may still read or write these pages. That is safe: a page is reused first by the step that is
        being scheduled, which the device runs after them, and that step's own queries read no freed entry.
        """
        for group, first in enumerate(self._groups.first_needed(request.num_computed)):
            start, stop = request.num_freed[group], first if limit is None else min(first, limit)
            if stop > start:
                table = request.page_tables[group]
                self.pool.free(table[start:stop])
                table[start:stop] = [0] * (stop - start)
                request.num_freed[group] = stop

    def _admit_urgent(self, batch: Batch) -> None:
        """Admit requests for which running ones make way, and preempt those if slots or pages are short."""
        while self._waiting and self._running:
            head, last = self._waiting[0], self._running[-1]
            if head is self._blocked_head or not last.makes_way_for(head) or self._budget_left_for(head) <= 0:
                return
            candidates = [other for other in reversed(self._running) if other.makes_way_for(head)]
            if not self._admit_with_preemption(head, candidates, batch):
                self._blocked_head = head
                return

    def _admit_short(self, batch: Batch) -> None:
        """Admit short requests ahead of the order, while fewer than their share of the slots run.

        Without a free slot, each takes that of the last running request that is not short, or waits a step if that was
        admitted in this one. Requests of a higher priority, and a head that lacks pages, are not overtaken.
        """
        if not self._waiting_short:
            return
        room = self._short_slots - self._num_short_running
        # Each decode takes a token. One is left in any case: of a slot that is free or taken from another request.
        room = min(room, max(1, self.config.max_num_batched_tokens - len(self._running)))
        while room > 0 and self._waiting_short and not self._head_lacks_pages():
            entry = self._waiting_short[0]
            if entry.key[0] > self._waiting[0].key[0] or entry.request in batch.preempted:
                return
            others = (o for o in self._running[:0:-1] if not o.is_short and o.key[0] >= entry.key[0])
            last = [other for other in islice(others, 1) if other.request not in batch.admitted]
            if self.tiers is not None:
                matched = self._admission.matched_tables(entry, self.weight_version)
                has_room = self._admission.shortfall(entry, matched, self._running) <= 0
                if has_room and self._waits_for_blocks(entry, matched):
                    return
            if not self._admit_with_preemption(entry, last, batch):
                return
            room -= 1

    def _head_lacks_pages(self) -> bool:
        """Return whether pages, not slots, keep the head of the queue waiting."""
        head = self._waiting[0]
        if self._free_slots and head is not self._blocked_head:
            matched = self._admission.matched_tables(head, self.weight_version)
            if self._admission.shortfall(head, matched, self._running) > 0:
                self._blocked_head = head
        return head is self._blocked_head

    def _admit_with_preemption(self, entry: QueuedRequest, candidates: Iterable[QueuedRequest], batch: Batch) -> bool:
        """Admit a waiting request, preempting some of `candidates` if needed. Returns False if it can't be admitted."""
        matched = self._admission.matched_tables(entry, self.weight_version)
        victims = self._admission.victims(entry, matched, self._running, candidates, bool(self._free_slots))
        if victims is None:
            return False
        lacks_pages = bool(self._free_slots)
        for victim in victims:
            self._preempt(victim, batch, lacks_pages)
        self._admit(entry, matched, batch)
        return True

    def _budget_left_for(self, head: QueuedRequest) -> int:
        """Return the token budget left for `head` if it were admitted. Without any, preempting for it is useless.

        Without a free slot, the last running request makes way, so its token does not count.
        """
        taken, has_decodes = 0, False
        for entry in self._running if self._free_slots else self._running[:-1]:
            request = entry.request
            remaining = request.length - request.num_computed
            has_decodes |= remaining == 1
            if entry.key < head.key or remaining == 1:
                taken += 1 if remaining == 1 else remaining * request.prompt_token_cost
        return self.config.step_tokens(has_decodes) - taken

    def _budget_for(self, entry: QueuedRequest, budget: int) -> int:
        """Return the budget left for this prompt and those after it: less if a short request waits for the step."""
        if entry.is_short or not self._num_short_running:
            return budget
        return min(budget, max(1, self.config.max_num_batched_tokens // 4))

    def _tokens_kept_for_head(self, budget: int) -> int:
        """Return how much of the budget partially prefilled prompts leave to the next one, if half is enough for it."""
        if not self._waiting or not self._free_slots or self._waiting[0] is self._blocked_head:
            return 0
        request = self._waiting[0].request
        cost = len(request.token_ids) * request.prompt_token_cost
        return cost if cost <= budget // 2 else 0

    def _admit_in_order(self, batch: Batch, budget: int) -> None:
        """Admit requests from the head of the queue while budget, slots and pages last.

        Only a request whose next page this step computes is skipped, with a slot kept for it: in the next step it finds
        the page in the prefix cache. So the samples of a prompt compute it once.
        """
        begun: set[bytes] | None = None  # digests of the pages that this step fills
        skipped = 0
        while budget > 0 and skipped < min(len(self._waiting), len(self._free_slots)):
            head = self._waiting[skipped]
            if head is self._blocked_head or self._is_full(batch):
                return
            if head.request in batch.preempted:  # re-admitting it would take back the pages it just freed
                return
            matched = self._admission.matched_tables(head, self.weight_version)
            if begun is None:
                begun = self._pages_begun(batch)
            if self._next_page(head, matched) in begun:
                skipped += 1
                continue
            if self._admission.shortfall(head, matched, self._running) > 0:
                is_rising = self.tiers is not None and self.tiers.num_rising > 0  # which holds pages for a while
                if not self._running and not is_rising:  # it must fit an idle pool, so it would wait forever
                    raise SchedulerInvariantError(f"{head.request!r} doesn't fit an idle engine: {self.problems()}")
                self._blocked_head = head
                return
            if self._waits_for_blocks(head, matched):
                skipped += 1
                continue
            self._admit(head, matched, batch)
            budget = self._budget_for(head, budget)
            if len(head.request.token_ids) - head.request.num_computed == 1 and not head.request.is_pooled:
                batch.decodes.append(head.request)
                budget -= 1
            else:
                budget -= _add_chunk(batch, head.request, budget)
                begun.update(self._pages_of(head, batch.prefills[-1]))

    def _waits_for_blocks(self, entry: QueuedRequest, matched: list[list[int]]) -> bool:
        """Return whether blocks of a request's prefix rise from lower tiers; begins that, once per admission."""
        if self.tiers is None or entry.chain is None or entry.request.params.needs_whole_prompt:
            return False
        if entry.promotion is not None:
            return not entry.promotion.is_done
        promotion = self.tiers.promote(entry.chain, entry.request.token_ids, len(matched[0]))
        if promotion is not None and promotion.chain is entry.chain:
            entry.promotion = promotion
        return promotion is not None

    def _pages_begun(self, batch: Batch) -> set[bytes]:
        """Return the digests of the pages that the prompt chunks of a batch fill; empty without a prefix cache."""
        return {
            page for chunk in batch.prefills for page in self._pages_of(self._entries[chunk.request.request_id], chunk)
        }

    def _pages_of(self, entry: QueuedRequest, chunk: PrefillChunk) -> list[bytes]:
        """Return the digests of the pages that a prompt chunk fills; empty without a prefix cache."""
        if self.prefix_cache is None or entry.chain is None:
            return []
        size, tokens = self.pool.page_size, entry.request.token_ids
        pages = range(chunk.start // size, (chunk.start + chunk.length) // size)
        return [entry.chain.digest(index, tokens, size) for index in pages]

    def _next_page(self, entry: QueuedRequest, matched: list[list[int]]) -> bytes | None:
        """Return the digest of the first page that a request would compute; None if it wouldn't be shared."""
        if self.prefix_cache is None or entry.chain is None or entry.request.params.needs_whole_prompt:
            return None
        return self.prefix_cache.next_page(entry.chain, entry.request.token_ids, len(matched[0]))

    def _is_full(self, batch: Batch) -> bool:
        """Return whether the batch has as many prefill chunks as a step may have."""
        limit = self.config.max_prefill_chunks
        return limit is not None and len(batch.prefills) >= limit

    def _admit(self, entry: QueuedRequest, matched: list[list[int]], batch: Batch) -> None:
        """Move a waiting request to the running queue, with a slot, a new lease and pages for its tokens."""
        request, pool = entry.request, self.pool
        num_matched = len(matched[0]) if matched else 0
        computed = num_matched * pool.page_size
        if self.prefix_cache is not None:
            self.prefix_cache.acquire(matched)  # before `allocate`, which could evict them
        lengths = self._admission.table_lengths(entry, computed)
        fresh = [pool.allocate(length - num_matched) for length in lengths]
        self._dequeue(entry)
        insort(self._running, entry, key=_ORDER_KEY)
        request.state = RequestState.RUNNING
        request.page_tables = [found + new for found, new in zip(matched, fresh, strict=True)]
        request.num_freed = self._groups.first_needed(computed)
        request.slot = heappop(self._free_slots)
        self._num_short_running += entry.is_short
        self._last_lease += 1
        request.lease = self._last_lease
        request.num_computed = computed
        entry.promotion = None
        request.weight_version = self.weight_version
        entry.registered = num_matched
        has_windows = self._groups.has_windows
        entry.pages_until = 0 if has_windows else max(lengths, default=0) * pool.page_size
        if request.first_scheduled_time is None:  # count a request once, not again when it is recomputed
            request.first_scheduled_time = self._clock()
            request.cached_tokens = request.num_computed
            self.prompt_tokens += request.prompt_len
            if self.prefix_cache is not None:
                self.prefix_cache.record_lookup(len(request.token_ids), request.num_computed)
        batch.admitted.append(request)

    def _preempt(self, entry: QueuedRequest, batch: Batch, lacks_pages: bool = True) -> None:
        """Preempt a running request to free its slot and pages. For want of pages, its next admission reserves more."""
        self._requeue(entry)
        if entry in self._recomputed:
            self._recomputed.remove(entry)  # it may wait for long, and other steps should not be small until then
        entry.preemptions += lacks_pages
        batch.preempted.append(entry.request)

    def _requeue(self, entry: QueuedRequest) -> None:
        """Move a running request back to its place in the waiting queue, without slot, pages or computed tokens."""
        entry.request.state = RequestState.PREEMPTED
        _remove_from_queue(self._running, entry)
        self._release(entry)
        self.num_preemptions += 1
        entry.request.num_preemptions += 1
        self._enqueue(entry)

    def _enqueue(self, entry: QueuedRequest) -> None:
        insort(self._waiting, entry, key=_ORDER_KEY)
        if entry.is_short:
            insort(self._waiting_short, entry, key=_ORDER_KEY)

    def _dequeue(self, entry: QueuedRequest) -> None:
        _remove_from_queue(self._waiting, entry)
        if entry.is_short:
            _remove_from_queue(self._waiting_short, entry)

    def _release(self, entry: QueuedRequest) -> None:
        """Free a request's slot and pages; nothing else frees them.

        A token in flight is dropped. If the request runs again, it is sampled again from the same seed and position.
        """
        request = entry.request
        self.pool.free(request.held_pages())
        heappush(self._free_slots, request.slot)
        self._num_short_running -= entry.is_short
        request.page_tables = []
        request.num_freed = []
        request.slot = None  # type: ignore[assignment]  # see Request
        request.lease = request.num_computed = 0
        request.length = len(request.token_ids)
        self._blocked_head = None


def _add_chunk(batch: Batch, request: Request, budget: int) -> int:
    """Add the request's next prefill chunk, which takes at most `budget` (one token in any case); returns its cost."""
    remaining, cost = len(request.token_ids) - request.num_computed, request.prompt_token_cost
    length = min(remaining, max(1, budget // cost))
    batch.prefills.append(PrefillChunk(request, request.num_computed, length, length == remaining, request.lease))
    return length * cost


def _remove_from_queue(queue: list[QueuedRequest], entry: QueuedRequest) -> None:
    """Remove `entry` from a queue sorted by key."""
    index = bisect_left(queue, entry.key, key=_ORDER_KEY)
    if index == len(queue) or queue[index] is not entry:
        raise SchedulerInvariantError(f"{entry.request!r} is missing or out of order in its queue")
    del queue[index]
