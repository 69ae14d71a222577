"""What one step runs, as the scheduler chose it and the runner reads it.

Owns no state of its own and knows no tensors: requests, ranges of tokens, and what changed hands for this step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute token_ids[start : start + length] of a request; pages for all of it are allocated.

    `is_last`: the chunk reaches the end of token_ids, so its last logits give the next token. `lease` is the
    request's when this was chosen: where it is another by now, the chunk is nobody's.
    """

    request: Request
    start: int
    length: int
    is_last: bool
    lease: int


@dataclass(slots=True)
class Batch:
    """One step's work: a request is in `decodes`, in one chunk of `prefills`, or in neither.

    Each of `decodes` computes exactly its last token, whose page is allocated. That includes a prompt of which one
    token was left to compute (the rest was cached or came in earlier chunks): its first output comes from a decode.
    `positions` and `leases` go with them: the place of that token in its sequence, and the request's lease.
    `admitted`: requests that took a slot for this step; the slot's former contents are another request's.
    `preempted`: requests that lost slot and pages; they are recomputed later, outputs included. None is in both.
    """

    decodes: list[Request] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    dispatched: bool = False  # set by Scheduler.dispatch and complete, which refuse to count a step twice
    completed: bool = False

    def __bool__(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.decodes or self.prefills)

    @property
    def sampled(self) -> list[tuple[Request, int]]:
        """The requests whose next token this step gives, each with its lease: decodes first, then prompts' ends."""
        ends = [(chunk.request, chunk.lease) for chunk in self.prefills if chunk.is_last]
        return [*zip(self.decodes, self.leases, strict=True), *ends]
