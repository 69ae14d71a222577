"""Update the progress of requests when their step is enqueued, and again when its tokens are read.

Between the two, a request's newest token exists only on the device: it is "in flight", and the next step may be
scheduled and enqueued meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduling.admission import SchedulerInvariantError
from engine.scheduling.batch import Batch
from engine.scheduling.request import Request


def dispatch(batch: Batch) -> None:
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


def complete(
    batch: Batch, new_tokens: Sequence[int | None], verified: Sequence[Sequence[int]], page_size: int
) -> list[tuple[Request, int]]:
    """See Scheduler.complete. Returns the requests that may have filled a page, and how many tokens are computed.

    The number is taken from the batch, not from `num_computed`, which includes steps enqueued since.
    """
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
    tokens, computed = iter(new_tokens), []
    for request, position, lease, token in zip(batch.decodes, batch.positions, batch.leases, tokens, strict=False):
        if request.lease == lease:
            if token is not None:
                request.token_ids.append(token)
            else:
                request.length -= 1
            if (position + 1) % page_size == 0:
                computed.append((request, position + 1))
    for chunk in batch.prefills:
        request = chunk.request
        token = next(tokens) if chunk.is_last else None
        if request.lease == chunk.lease:
            if token is not None:
                request.token_ids.append(token)
            else:
                request.length -= chunk.is_last
            computed.append((request, chunk.start + chunk.length))

    for row, accepted in zip(batch.verifies, verified, strict=True):
        request = row.request
        if request.lease == row.lease:
            request.token_ids += accepted
            request.length = len(request.token_ids)
            request.num_computed = row.start + max(1, len(accepted))
            computed.append((request, request.num_computed))
    return computed
