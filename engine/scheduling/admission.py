"""Whether a request may enter: how many pages it needs now and at its end, and who would have to make room.

Owns that arithmetic, the scheduler's bounds, and its private record of a request. Only answers questions: it takes no
page and moves no request. Must not know batches, tensors or HTTP.
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
    """The scheduler's bookkeeping is broken or misused: the message lists everything found."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Bounds of one scheduler, in sequences and tokens; `max_waiting` None: no bound on the queue."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: at least 1 is needed")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step must hold one token of each running sequence; raise the one or lower the other"
            )


class QueuedRequest:
    """What the scheduler remembers of a request beside the record that the loop sees."""

    __slots__ = ("chain", "final_pages", "final_tokens", "key", "preemptions", "registered", "request")

    def __init__(self, request: Request, key: tuple[int, float, int], final_tokens: int, final_pages: int):
        self.request = request
        self.key = key  # (priority, arrival, order of add): unique, and the order of everything
        self.final_tokens = final_tokens  # whose KV it needs at its very end
        self.final_pages = final_pages
        self.chain: PrefixChain | None = None
        self.registered = 0  # leading pages that were offered to the prefix cache, or came from it
        self.preemptions = 0

    @property
    def pages_remaining(self) -> int:
        """Pages it may still ask for while it runs."""
        return self.final_pages - len(self.request.pages)


class Admission:
    """The rules of entry over one pool and, optionally, its prefix cache."""

    def __init__(self, pool: PagePool, prefix_cache: PrefixCache | None, max_model_len: int):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.max_model_len = max_model_len

    def token_limit(self, request: Request) -> int:
        """Prompt and output tokens together at which `request` is at its end; see Scheduler.token_limit."""
        limit = min(self.max_model_len, self.pool.capacity * self.pool.page_size + 1)
        max_tokens = request.params.max_tokens
        return limit if max_tokens is None else min(limit, request.prompt_len + max_tokens)

    def entry_for(self, request: Request, order: int) -> QueuedRequest:
        """The record of a new request, the `order`-th added. Raises PromptTooLong if it can never fit."""
        self._check_fits(request)
        final_tokens = max(request.prompt_len, self.token_limit(request) - 1)
        key = (request.priority, request.arrival_time, order)
        return QueuedRequest(request, key, final_tokens, self.pool.pages_for(final_tokens))

    def pages_now(self, entry: QueuedRequest) -> int:
        """Pages to enter with: the whole text so far and, unless it ends before, the token after it."""
        return self.pool.pages_for(min(len(entry.request.token_ids) + 1, entry.final_tokens))

    def matched_pages(self, entry: QueuedRequest, weight_version: str) -> list[int]:
        """Cached pages that the request could begin with, not referenced; the entry's chain is renewed if stale.

        None for a request that wants its prompt's logprobs: those need every prompt token computed.
        """
        if self.prefix_cache is None:
            return []
        if entry.chain is None or not self.prefix_cache.is_current(entry.chain):
            entry.chain = self.prefix_cache.chain(weight_version)
        if entry.request.params.prompt_logprobs is not None:
            return []
        return self.prefix_cache.lookup(entry.chain, entry.request.token_ids)

    def shortfall(self, entry: QueuedRequest, matched: Sequence[int], others: Sequence[QueuedRequest]) -> int:
        """Pages lacking for `entry` to enter beside `others`; it fits at 0 or below.

        Beside others it must also find a reserve free: what each of them and itself may yet ask for, up to one page
        each, doubled with every time it was preempted. So it isn't thrown out again a few tokens later, and after
        some preemptions it waits until it can't be. With no others there is no reserve: what fits the pool enters.
        """
        needed = self.pages_now(entry) - len(matched)
        idle_matched = sum(1 for page in matched if self.pool.ref_count(page) == 0)
        missing = needed - (self.pool.num_free - idle_matched)
        if not others:
            return missing
        share = 1 << min(entry.preemptions, _MAX_DOUBLINGS)
        if missing + share * (len(others) + 1) <= 0:
            return 0  # even the most that the reserve can be is free: no need to sum it up
        reserve = min(entry.final_pages - self.pages_now(entry), share)
        reserve += sum(min(other.pages_remaining, share) for other in others)
        return missing + reserve

    def victims(
        self, entry: QueuedRequest, matched: Sequence[int], running: Sequence[QueuedRequest], slot_free: bool
    ) -> list[QueuedRequest] | None:
        """Which of `running` (in order) must be preempted for `entry` to enter; None if even all it may don't do.

        Only requests of a strictly lower priority, last in order first, no more than needed. The reserve counts
        only those ahead of `entry`, as nobody behind can take its pages.
        """
        ahead = list(takewhile(lambda other: other.key < entry.key, running))
        missing = self.shortfall(entry, matched, ahead)
        selected: list[QueuedRequest] = []
        released: Counter[int] = Counter()  # references that go with those chosen; a shared page needs all of them
        kept = set(matched)
        for other in reversed(running):
            if missing <= 0 and (slot_free or selected):
                break
            if other.key[0] <= entry.key[0]:
                return None
            selected.append(other)
            released.update(other.request.pages)
            missing -= sum(
                1 for page in other.request.pages if released[page] == self.pool.ref_count(page) and page not in kept
            )
        return selected if missing <= 0 and (slot_free or selected) else None

    def _check_fits(self, request: Request) -> None:
        prompt, max_tokens = request.prompt_len, request.params.max_tokens
        total = prompt + (1 if max_tokens is None else max_tokens)  # without a bound, room for one token will do
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
                f"{self.pool.capacity}: shorten the prompt, lower max_tokens, or give the cache more pages",
                param=param,
            )
