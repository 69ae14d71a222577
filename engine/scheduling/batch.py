"""One step's work: the requests and token ranges that the scheduler chose for the model runner.

A row's phase is the list that holds it (see Phase): `decodes`, `prefills` or `verifies`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prefill token_ids[start : start + length] of a request. Its pages are allocated.

    `is_last`: the chunk reaches the end of token_ids, so its last logits give the next token. `lease` is the request's
    lease at scheduling: if the request's lease has changed since, the chunk is stale and its result is dropped.
    """

    request: Request
    start: int
    length: int
    is_last: bool
    lease: int


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Compute a request's newest token, at position `start`, and the draft tokens after it.

    The pages of start + 1 + len(drafts) tokens are allocated. `lease`: see PrefillChunk.
    """

    request: Request
    start: int
    drafts: tuple[int, ...]
    lease: int

    @property
    def length(self) -> int:
        """Number of tokens computed, and sampled."""
        return 1 + len(self.drafts)


@dataclass(slots=True)
class Batch:
    """One step's work. A request has at most one row in it.

    - decodes: requests that compute exactly their last token; its page is allocated. A prompt with one token left to
      compute (the others were cached or in earlier chunks) is also a decode.
    - positions, leases: per decode, the position of that token in its sequence and the request's lease.
    - prefills: prefill chunks.
    - verifies: requests with draft tokens to verify.
    - admitted: requests that got a slot in this step; the slot still holds the previous request's state.
    - preempted: requests that lost slot and pages; all their tokens, outputs included, are recomputed later. Never
      also in `admitted`.
    - constrained: the requests of `sampled` whose next token a grammar constrains. The engine core sets it.
    """

    decodes: list[Request] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    verifies: list[VerifyRow] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    constrained: list[Request] = field(default_factory=list)
    dispatched: bool = False  # set by Scheduler.dispatch and complete, which raise if called twice for a batch
    completed: bool = False

    def masked_requests(self) -> list[Request]:
        """Return the constrained requests that have not ended or been preempted since this step was scheduled."""
        leases = dict(self.sampled)
        return [request for request in self.constrained if request.lease == leases[request]]

    def __bool__(self) -> bool:
        """Whether the batch computes any token."""
        return bool(self.decodes or self.prefills or self.verifies)

    @property
    def requests(self) -> list[Request]:
        """The requests that have a row."""
        chunks, drafts = (chunk.request for chunk in self.prefills), (row.request for row in self.verifies)
        return [*self.decodes, *chunks, *drafts]

    @property
    def sampled(self) -> list[tuple[Request, int]]:
        """The requests that this step samples one token for, with their leases: decodes, then last prefill chunks."""
        ends = [(chunk.request, chunk.lease) for chunk in self.prefills if chunk.is_last]
        return [*zip(self.decodes, self.leases, strict=True), *ends]
