"""Update request progress at dispatch and again when tokens are read, and add full pages to the prefix cache.

Between the two, a request's newest token exists only on the device: it is "in flight", and the next step may be
scheduled and enqueued meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.scheduling.admission import QueuedRequest, SchedulerInvariantError
from engine.scheduling.batch import Batch
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request


class RequestProgress:
    """Tracks the progress of the requests in `entries`, a mapping that the scheduler updates."""

    def __init__(self, page_size: int, prefix_cache: PrefixCache | None, entries: Mapping[str, QueuedRequest]):
        self._page_size = page_size
        self._prefix_cache = prefix_cache
        self._entries = entries

    def dispatch(self, batch: Batch) -> None:
        """See Scheduler.dispatch."""
        if batch.dispatched:
            raise SchedulerInvariantError("this batch was already dispatched: its tokens would count twice")
        batch.dispatched = True
        for request, position, lease in zip(batch.decodes, batch.positions, batch.leases, strict=True):
            if request.lease != lease:
                continue
            if request.num_computed != position:
                raise SchedulerInvariantError(f"{request!r} is not at position {position}, which this batch decodes")
            request.num_computed = position + 1
            request.length = position + 2
        for chunk in batch.prefills:
            request = chunk.request
            if request.lease != chunk.lease:
                continue
            if request.num_computed != chunk.start:
                raise SchedulerInvariantError(f"{request!r} is not at position {chunk.start}, where its chunk starts")
            request.num_computed = chunk.start + chunk.length
            request.length += chunk.is_last
        for row in batch.verifies:  # one token at least; `complete` knows how many
            request = row.request
            if request.lease != row.lease:
                continue
            if request.num_computed != row.start:
                raise SchedulerInvariantError(f"{request!r} is not at position {row.start}, where its drafts start")
            request.num_computed = row.start + 1
            request.length = row.start + 2

    def complete(self, batch: Batch, new_tokens: Sequence[int | None], verified: Sequence[Sequence[int]]) -> None:
        """See Scheduler.complete."""
        if batch.completed or not batch.dispatched:
            raise SchedulerInvariantError(
                "this batch was already completed: its tokens would count twice"
                if batch.completed
                else "this batch was not dispatched: call dispatch() before complete()"
            )
        num_sampled = len(batch.decodes) + sum(chunk.is_last for chunk in batch.prefills)
        if len(new_tokens) != num_sampled:
            raise SchedulerInvariantError(f"got {len(new_tokens)} tokens for a batch that samples {num_sampled}")
        if len(verified) != len(batch.verifies):
            raise SchedulerInvariantError(f"got {len(verified)} results for {len(batch.verifies)} rows with drafts")
        batch.completed = True
        tokens, page_size = iter(new_tokens), self._page_size
        for request, position, lease, token in zip(batch.decodes, batch.positions, batch.leases, tokens, strict=False):
            if request.lease == lease:
                if token is not None:
                    request.token_ids.append(token)
                else:
                    request.length -= 1
                if (position + 1) % page_size == 0:
                    self._register(request, position + 1)
        for chunk in batch.prefills:
            request = chunk.request
            token = next(tokens) if chunk.is_last else None
            if request.lease == chunk.lease:
                if token is not None:
                    request.token_ids.append(token)
                else:
                    request.length -= chunk.is_last
                self._register(request, chunk.start + chunk.length)

        for row, accepted in zip(batch.verifies, verified, strict=True):
            request = row.request
            if request.lease == row.lease:
                request.token_ids += accepted
                request.length = len(request.token_ids)
                request.num_computed = row.start + max(1, len(accepted))
                self._register(request, request.num_computed)

    def _register(self, request: Request, computed: int) -> None:
        """Add the pages filled by this batch to the prefix cache, which ignores those started before a reset.

        `computed` is taken from the batch, not from `num_computed`, which includes steps enqueued since: a page is
        cached only when all its tokens are known. Pages that left their windows before are not cached.
        """
        if self._prefix_cache is None:
            return
        entry = self._entries[request.request_id]
        full = computed // self._page_size
        if full > entry.registered:
            assert entry.chain is not None  # created at admission
            self._prefix_cache.insert(entry.chain, request.token_ids, request.page_tables, entry.registered, full)
            entry.registered = full
