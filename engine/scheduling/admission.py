"""Admission: how many pages a request needs now and at its end, and which requests to preempt for it.

Also defines the scheduler's limits and its private record of a request. Only computes: it allocates no page and moves
no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.errors import ConfigError, PromptTooLong
from engine.scheduling.page_pool import InvariantError, PagePool
from engine.scheduling.prefix_cache import PrefixCache, PrefixChain
from engine.scheduling.request import Request

_MAX_DOUBLINGS = 16


class SchedulerInvariantError(InvariantError):
    """The scheduler's state is inconsistent or it was misused; the message lists every problem found."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduler, in sequences and tokens. With None there is no such limit.

    - max_waiting: requests that wait for a slot.
    - max_prefill_chunks: prefill chunks in one step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int | None = None
    max_prefill_chunks: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_waiting", "max_prefill_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is invalid: give at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step must hold one token of each running sequence; raise the first or lower the second"
            )


class QueuedRequest:
    """The scheduler's private state of a request, beside the Request that the loop sees."""

    __slots__ = ("chain", "final_pages", "final_tokens", "key", "preemptions", "registered", "request")

    def __init__(self, request: Request, key: tuple[int, float, int], final_tokens: int, final_pages: int):
        self.request = request
        self.key = key  # (priority, arrival, order of add): unique; the sort key of both queues
        self.final_tokens = final_tokens  # number of tokens with stored KV when it ends at its maximum length
        self.final_pages = final_pages
        self.chain: PrefixChain | None = None
        self.registered = 0  # number of leading pages that were added to the prefix cache or came from it
        self.preemptions = 0

    @property
    def pages_remaining(self) -> int:
        """Pages that the request may still allocate while it runs."""
        return self.final_pages - len(self.request.page_tables[0])


class Admission:
    """Admission rules over one page pool and, optionally, its prefix cache."""

    def __init__(self, pool: PagePool, prefix_cache: PrefixCache | None, max_model_len: int):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.max_model_len = max_model_len

    def token_limit(self, request: Request) -> int:
        """Return the maximum length of `request`; see Scheduler.token_limit."""
        limit = min(self.max_model_len, self.pool.capacity * self.pool.page_size + 1)
        max_tokens = request.params.max_tokens
        return limit if max_tokens is None else min(limit, request.prompt_len + max_tokens)

    def entry_for(self, request: Request, order: int) -> QueuedRequest:
        """Create the record of a new request, the `order`-th added. Raises PromptTooLong if it can never fit."""
        self._check_fits(request)
        final_tokens = max(request.prompt_len, self.token_limit(request) - 1)
        key = (request.priority, request.arrival_time, order)
        return QueuedRequest(request, key, final_tokens, self.pool.pages_for(final_tokens))

    def pages_now(self, entry: QueuedRequest) -> int:
        """Return the pages needed on admission: for all tokens so far and, unless it ends first, the next."""
        return self.pool.pages_for(min(len(entry.request.token_ids) + 1, entry.final_tokens))

    def matched_pages(self, entry: QueuedRequest, weight_version: str) -> list[int]:
        """Return the cached pages of the request's prefix, without referencing them. Renews the entry's stale chain.

        Empty for a request with prompt_logprobs, which needs every prompt token computed.
        """
        if self.prefix_cache is None:
            return []
        if entry.chain is None or not self.prefix_cache.is_current(entry.chain):
            entry.chain = self.prefix_cache.chain(weight_version)
        if entry.request.params.prompt_logprobs is not None:
            return []
        return self.prefix_cache.lookup(entry.chain, entry.request.token_ids)

    def shortfall(self, entry: QueuedRequest, matched: Sequence[int], others: Sequence[QueuedRequest]) -> int:
        """Return how many pages are missing to admit `entry` beside `others`; it fits at 0 or below.

        Beside others a reserve must be free as well: for each request including `entry`, the pages it may still
        allocate, up to one page, doubled each time `entry` was preempted. This avoids preempting it again a few tokens
        later; after enough preemptions it waits until it can run to its end. Without others there is no reserve.
        """
        needed = self.pages_now(entry) - len(matched)
        idle_matched = sum(1 for page in matched if self.pool.ref_count(page) == 0)
        missing = needed - (self.pool.num_free - idle_matched)
        if not others:
            return missing
        share = 1 << min(entry.preemptions, _MAX_DOUBLINGS)
        if missing + share * (len(others) + 1) <= 0:
            return 0  # the largest possible reserve is free: no need to sum the exact one
        reserve = min(entry.final_pages - self.pages_now(entry), share)
        reserve += sum(min(other.pages_remaining, share) for other in others)
        return missing + reserve

    def victims(
        self, entry: QueuedRequest, matched: Sequence[int], running: Sequence[QueuedRequest], slot_free: bool
    ) -> list[QueuedRequest] | None:
        """Return which of `running` (in order) to preempt for `entry`, or None if preemption can't make it fit.

        Selects only requests of strictly lower priority, last in order first, and no more than needed. The reserve
        counts only requests ahead of `entry`, because those behind it can't preempt it.
        """
        ahead = list(takewhile(lambda other: other.key < entry.key, running))
        missing = self.shortfall(entry, matched, ahead)
        selected: list[QueuedRequest] = []
        released: Counter[int] = Counter()  # references that `selected` drop; the last one frees a page
        kept = set(matched)
        for other in reversed(running):
            if missing <= 0 and (slot_free or selected):
                break
            if other.key[0] <= entry.key[0]:
                return None
            selected.append(other)
            released.update(other.request.page_tables[0])
            missing -= sum(
                1
                for page in other.request.page_tables[0]
                if released[page] == self.pool.ref_count(page) and page not in kept
            )
        return selected if missing <= 0 and (slot_free or selected) else None

    def _check_fits(self, request: Request) -> None:
        prompt, max_tokens = request.prompt_len, request.params.max_tokens
        total = prompt + (1 if max_tokens is None else max_tokens)  # without max_tokens, one output token must fit
        summary = f"{prompt} prompt tokens and " + ("one more" if max_tokens is None else f"max_tokens={max_tokens}")
        param = "prompt_token_ids" if max_tokens is None or prompt >= self.max_model_len else "max_tokens"
        if total > self.max_model_len:
            raise PromptTooLong(
                f"{summary} exceed the context of {self.max_model_len} tokens: shorten the prompt or lower max_tokens",
                param=param,
            )
        pages = self.pool.pages_for(max(prompt, total - 1))
        if pages > self.pool.capacity:
            raise PromptTooLong(
                f"{summary} need {pages} pages of {self.pool.page_size} tokens, the whole KV cache has "
                f"{self.pool.capacity}: shorten the prompt, lower max_tokens or raise num_pages",
                param=param,
            )
