"""Admission: how many pages a request needs now and at its end, and which requests to preempt for it.

Also defines the scheduler's limits and its private record of a request. Only computes: it allocates no page and moves
no request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.errors import ConfigError, PromptTooLong
from engine.scheduling.cache_groups import CacheGroups, Windows, check_windows
from engine.scheduling.lower_tiers import Promotion
from engine.scheduling.page_pool import InvariantError, PagePool
from engine.scheduling.prefix_cache import PrefixCache, PrefixChain
from engine.scheduling.request import Request

_MAX_DOUBLINGS = 16
TURN_SECONDS = 10.0  # each further sequence of a client's request is queued as if it had arrived this much later
SHORT_OUTPUT_TOKENS = 16  # max_tokens of a short request

TOKENS_BESIDE_DECODES = 4096
"""Token budget of a step with decodes. Prefill of an 8B model on a Hopper GPU is 1% slower than with 8,192, and decodes
wait half as long (docs/adr/0003-decodes-and-prompt-chunks-in-one-step.md).
"""

RECOMPUTED_TOKENS = 1024
"""Tokens of a step that recomputes running requests, whose streams stand still until they are ready, beside decodes.

A prefill of an 8B model on an H200 takes 16 to 20 ms for them (from the pauses of 8 and 32 streams in docs/rl.md).
"""

MAX_CUT = 8
"""A budget is cut by at most a MAX_CUTth of it to a bucket. A step of few tokens costs about as much with padding."""


class SchedulerInvariantError(InvariantError):
    """The scheduler's state is inconsistent or it was misused; the message lists every problem found."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduler, in sequences and tokens.

    The waiting queue has no limit: the server bounds it before it tokenizes (`Service.admission`).

    - max_prefill_chunks: prefill chunks in one step. None: no limit.
    - num_speculative_tokens: draft tokens per request and step; needs a drafter.
    - max_verify_tokens: tokens in the rows of one step that verify drafts.
    - prefill_buckets: token counts of the graphs of prompt chunks, ascending; empty if these run without padding.
    - max_mixed_decodes: decodes that share a graph with prompt chunks. With more, all decodes run in a graph apart.
    - groups: the model's cache groups, for each the attention window in tokens, None for full attention. Empty for a
      model without paged layers. A model with recurrent state, which no page holds, must run without a prefix cache.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_prefill_chunks: int | None = None
    groups: Windows = (None,)
    num_speculative_tokens: int = 0
    max_verify_tokens: int = 0
    prefill_buckets: tuple[int, ...] = ()
    max_mixed_decodes: int = 0

    def __post_init__(self) -> None:
        check_windows(self.groups)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prefill_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is invalid: give at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step must hold one token of each running sequence; raise the first or lower the second"
            )

    def step_tokens(self, has_decodes: bool) -> int:
        """Return the token budget of a step. One with decodes is kept shorter, since these wait for its prompts."""
        if not has_decodes:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, max(TOKENS_BESIDE_DECODES, 2 * self.max_num_seqs))

    def prompt_tokens(self, decodes: int, drafts: int = 0, limit: int | None = None) -> int:
        """Return the budget of prompt tokens beside these decodes and draft tokens, so that chunks fill their bucket.

        Decodes that run apart take no room of the bucket. A budget that lies just above a bucket is cut to it. `limit`:
        of all tokens of the step; None: as `step_tokens` says.
        """
        tokens = self.step_tokens(decodes > 0)
        if limit is not None:
            tokens = min(tokens, max(limit, 2 * (decodes + drafts)))
        budget = tokens - decodes - drafts
        joined = decodes if decodes <= self.max_mixed_decodes and not drafts else 0
        if not self.prefill_buckets:
            return budget
        if joined == 0:
            budget = min(tokens, self.max_num_batched_tokens - decodes - drafts)
        index = bisect_right(self.prefill_buckets, budget + joined)
        filled = self.prefill_buckets[index - 1] - joined if index else 0
        return filled if filled >= budget - budget // MAX_CUT else budget


class QueuedRequest:
    """The scheduler's private state of a request, beside the Request that the loop sees."""

    __slots__ = (
        "chain", "final_pages", "final_tokens", "is_short", "key", "pages_until", "preemptions",
        "promotion", "registered", "request",
    )  # fmt: skip

    def __init__(
        self, request: Request, key: tuple[int, float, int], final_tokens: int, final_pages: int, is_short: bool
    ):
        self.request = request
        self.is_short = is_short  # of few prompt and output tokens; see Admission.entry_for
        self.key = key  # (priority, arrival with turns, order of add): unique; the sort key of both queues
        self.final_tokens = final_tokens  # number of tokens with stored KV when it ends at its maximum length
        self.final_pages = final_pages  # number of pages it holds at most when it ends there
        self.pages_until = 0  # its tables need no change to decode at positions below this
        self.chain: PrefixChain | None = None
        self.registered = 0  # number of leading pages that were added to the prefix cache or came from it
        self.preemptions = 0
        self.promotion: Promotion | None = None  # the one begun for it since it was queued

    @property
    def pages_remaining(self) -> int:
        """Pages that the request may still take from the pool while it runs, less those that leave their windows."""
        request = self.request
        held = sum(map(len, request.page_tables)) - sum(request.num_freed)
        return max(0, self.final_pages - held)

    def makes_way_for(self, other: QueuedRequest) -> bool:
        """Return whether this running request is preempted for `other`: of higher priority, or before it in order if
        this is a further sequence of a client's request and `other` is not.
        """
        is_further = self.request.request.index > 0 and other.request.request.index == 0
        return self.key[0] > other.key[0] or (is_further and self.key > other.key)


class Admission:
    """Admission rules over one page pool and, optionally, its prefix cache."""

    def __init__(self, pool: PagePool, prefix_cache: PrefixCache | None, config: SchedulerConfig):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.max_model_len = config.max_model_len
        self._short_prompt_cost = config.max_num_batched_tokens // 2
        self.groups = CacheGroups(config.groups, pool.page_size, config.max_num_batched_tokens)
        if prefix_cache is not None and prefix_cache.groups != config.groups:
            raise ConfigError(f"groups={config.groups} differ from the prefix cache's groups={prefix_cache.groups}")
        self._pool_tokens = self.groups.tokens_in(pool.capacity, config.max_model_len)
        if not self._pool_tokens:
            raise ConfigError(
                f"num_pages={pool.num_pages} is too small for {len(config.groups)} cache groups: give at least "
                f"{self.groups.max_pages(1) + 1}, as page 0 is the scratch page"
            )

    def token_limit(self, request: Request) -> int:
        """Return the maximum length of `request`; see Scheduler.token_limit."""
        limit = min(self.max_model_len, self._pool_tokens + 1)
        max_tokens = request.params.max_tokens
        return limit if max_tokens is None else min(limit, request.prompt_len + max_tokens)

    def entry_for(self, request: Request, order: int) -> QueuedRequest:
        """Create the record of a new request, the `order`-th added. Raises PromptTooLong if it can never fit.

        It is short if its prompt takes at most half of a step's budget and it asks for at most SHORT_OUTPUT_TOKENS.
        """
        self._check_fits(request)
        max_tokens, is_first = request.params.max_tokens, request.request.index == 0
        is_short = is_first and max_tokens is not None and max_tokens <= SHORT_OUTPUT_TOKENS
        is_short = is_short and request.prompt_len * request.prompt_token_cost <= self._short_prompt_cost
        final_tokens = max(request.prompt_len, self.token_limit(request) - 1)
        key = (request.priority, request.arrival_time + TURN_SECONDS * request.request.index, order)
        return QueuedRequest(request, key, final_tokens, self.groups.decode_pages(final_tokens), is_short)

    def table_lengths(self, entry: QueuedRequest, computed: int) -> list[int]:
        """Return each group's page table length on admission with `computed` tokens cached.

        The tables hold all tokens so far and, unless the request ends first, the next; in a window group, as many of
        them as its prefill ever needs at once.
        """
        return self.groups.table_lengths(computed, min(len(entry.request.token_ids) + 1, entry.final_tokens))

    def matched_tables(self, entry: QueuedRequest, weight_version: str) -> list[list[int]]:
        """Return the page tables of the request's cached prefix, without referencing their pages.

        Renews the entry's stale chain. The tables are empty for a request that needs every prompt token computed.
        """
        if self.prefix_cache is None:
            return [[] for _ in self.groups.windows]
        if entry.chain is None or not self.prefix_cache.is_current(entry.chain):
            asked = entry.request.request
            own = asked.adapter, asked.params.cache_salt
            salt = repr((weight_version, *own)) if any(own) else weight_version
            entry.chain = self.prefix_cache.chain(salt, asked.params.cache_salt, asked.adapter)
        if entry.request.params.needs_whole_prompt:
            return [[] for _ in self.groups.windows]
        return self.prefix_cache.lookup(entry.chain, entry.request.token_ids)

    def shortfall(self, entry: QueuedRequest, matched: Sequence[Sequence[int]], others: Sequence[QueuedRequest]) -> int:
        """Return how many pages are missing to admit `entry` beside `others`; it fits at 0 or below.

        Beside others a reserve must be free as well: for each request including `entry`, the pages it may still
        allocate, up to one page per group, doubled each time `entry` was preempted. This avoids preempting it again a
        few tokens later; after enough preemptions it waits until it can run to its end. Without others there is no
        reserve.
        """
        kept = [page for table in matched for page in table if page]
        computed = len(matched[0]) * self.pool.page_size if matched else 0
        held = sum(self.table_lengths(entry, computed)) - sum(self.groups.first_needed(computed))
        needed = held - len(kept)
        idle_matched = sum(1 for page in kept if self.pool.ref_count(page) == 0)
        missing = needed - (self.pool.num_free - idle_matched)
        if not others:
            return missing
        share = len(self.groups.windows) << min(entry.preemptions, _MAX_DOUBLINGS)
        if missing + share * (len(others) + 1) <= 0:
            return 0  # the largest possible reserve is free: no need to sum the exact one
        reserve = min(max(0, entry.final_pages - held), share)
        reserve += sum(min(other.pages_remaining, share) for other in others)
        return missing + reserve

    def victims(
        self,
        entry: QueuedRequest,
        matched: Sequence[Sequence[int]],
        running: Sequence[QueuedRequest],
        candidates: Iterable[QueuedRequest],
        slot_free: bool,
    ) -> list[QueuedRequest] | None:
        """Return which of `candidates` to preempt for `entry`, or None if preemption can't make it fit.

        Selects no more than needed, in the order given. The reserve counts only requests of `running` (in order) ahead
        of `entry`, because those behind it can't preempt it.
        """
        ahead = list(takewhile(lambda other: other.key < entry.key, running))
        missing = self.shortfall(entry, matched, ahead)
        selected: list[QueuedRequest] = []
        released: Counter[int] = Counter()  # references that `selected` drop; the last one frees a page
        kept = {page for table in matched for page in table}
        for other in candidates:
            if missing <= 0 and (slot_free or selected):
                break
            selected.append(other)
            pages = other.request.held_pages()
            released.update(pages)
            missing -= sum(1 for page in pages if released[page] == self.pool.ref_count(page) and page not in kept)
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
        pages = self.groups.max_pages(max(prompt, total - 1))
        if pages > self.pool.capacity:
            raise PromptTooLong(
                f"{summary} need {pages} pages of {self.pool.page_size} tokens, the whole KV cache has "
                f"{self.pool.capacity}: shorten the prompt, lower max_tokens or raise num_pages",
                param=param,
            )
