"""Finish a step: append its tokens, end requests that reached a stop condition, and emit events.

Every request ends exactly once, in `StepFinisher.end`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.core.constraints import Constraints
from engine.errors import EngineError, RequestError
from engine.executor.interface import Executor
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.request import EngineRequest, FinishReason, TokenEvent
from engine.scheduling.batch import Batch
from engine.scheduling.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler
from engine.speculation.drafter import accepted as accepted_tokens
from engine.utils.histogram import Histogram
from engine.worker.async_output import StepResult

PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
VECTOR_NOT_FINITE = (
    "the model's hidden states are not finite (NaN or infinity) for this prompt of {prompt} tokens: check the weights"
)
NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity) at position {position} of this request, "
    "whose prompt has {prompt} tokens: check the weights"
)


class StepFinisher:
    """Applies step results to the scheduler and collects `events` for the loop to return."""

    def __init__(self, scheduler: Scheduler, executor: Executor, constraints: Constraints):
        self.scheduler = scheduler
        self.executor = executor
        self.constraints = constraints
        self.events: list[TokenEvent] = []
        self.generated_tokens = 0  # tokens appended to requests
        self.draft_tokens = self.accepted_tokens = 0  # drafts proposed, and those that sampling confirmed
        self.drafts = 0  # rows with drafts
        self.accepted_by_position: Counter[int] = Counter()  # the accepted draft tokens, by position in their draft
        self.preemptions = Histogram(PREEMPTION_BOUNDS)  # of the requests that ended
        self.ended: Counter[str] = Counter()

    def finish_step(self, batch: Batch, result: StepResult, masked_next: Batch | None = None) -> None:
        """Append the sampled tokens, then end the requests that reached a stop condition.

        A request that ended or was preempted since the step was scheduled has another lease; its result is dropped.
        `masked_next` is the next step, if it waits for masks, which depend on these tokens: their computation begins.
        """
        for chunk in batch.prefills:
            scores = result.prompt_logprobs.get(chunk.request.request_id)
            if scores and chunk.request.lease == chunk.lease and not chunk.request.first_event_sent:
                chunk.request.prompt_scores += scores
        sampled = batch.sampled
        self._add_token_rows(batch, result)
        tokens, verified = result.tokens[: len(sampled)], self._accept_drafts(batch, result.tokens[len(sampled) :])
        self.scheduler.complete(
            batch,
            [
                token if token >= 0 and request.generates_tokens else None
                for (request, _), token in zip(sampled, tokens, strict=True)
            ],
            verified,
        )
        complete = frozenset[str]()
        if self.constraints.has_grammars:
            following = None if masked_next is None else masked_next.masked_requests()
            complete = self._advance_grammars(sampled, tokens, following)
        decodes = len(batch.decodes)
        logprobs = result.logprobs[: len(sampled)] or [b""] * len(sampled)
        for row, ((request, lease), token, record) in enumerate(zip(sampled, tokens, logprobs, strict=True)):
            if request.lease != lease:
                continue
            bucket = result.graph_bucket if row < decodes else None
            if request.is_pooled:
                self._finish_pooled(request)
                continue
            if token < 0:
                self._fail_row(request, bucket)
                continue
            if not request.generates_tokens:
                self._finish(request, TokenEvent(request_id=request.request_id, graph_bucket=bucket), "length")
                continue
            self.generated_tokens += 1
            event = TokenEvent(
                request_id=request.request_id,
                token_ids=[token],
                graph_bucket=bucket,
                logprobs=TokenLogprobs([record]) if record else None,
            )
            self._emit_tokens(request, event, grammar_ended=request.request_id in complete)
        for draft_row, accepted in zip(batch.verifies, verified, strict=True):
            if draft_row.request.lease == draft_row.lease:
                self._finish_drafts(draft_row.request, accepted)

    def _add_token_rows(self, batch: Batch, result: StepResult) -> None:
        """Give hidden states and experts of the step to its requests, except those with another lease since."""
        if not result.hidden_states and not result.routed_experts:
            return
        chunks = [(chunk.request, chunk.lease) for chunk in batch.prefills]
        for request, lease in (*zip(batch.decodes, batch.leases, strict=True), *chunks):
            if request.lease != lease:
                continue
            if request.request_id in result.hidden_states:
                request.hidden_states.add(*result.hidden_states[request.request_id])
            if request.request_id in result.routed_experts:
                request.routed_experts.add(*result.routed_experts[request.request_id])

    def _advance_grammars(
        self, sampled: Sequence[tuple[Request, int]], tokens: Sequence[int], following: Sequence[Request] | None
    ) -> frozenset[str]:
        """Advance the grammars by the tokens of requests with the lease of the step. Return those then complete.

        Masks of the `following` requests are computed from then on.
        """
        pairs = [
            (request, token)
            for (request, lease), token in zip(sampled, tokens, strict=True)
            if request.lease == lease and token >= 0 and request.generates_tokens
        ]
        return self.constraints.advance(pairs, following)

    def _accept_drafts(self, batch: Batch, tokens: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each row with drafts, up to a stop token; none if the first is not finite."""
        verified, start = [], 0
        for row in batch.verifies:
            accepted: list[int] = []
            for token in accepted_tokens(row.drafts, tokens[start : start + row.length]):
                if token < 0:
                    break
                accepted.append(token)
                if token in row.request.end_token_ids:
                    break
            verified.append(accepted)
            start += row.length
            self.draft_tokens += len(row.drafts)
            self.accepted_tokens += max(0, len(accepted) - 1)
            self.drafts += 1
            self.accepted_by_position.update(range(len(accepted) - 1))
        return verified

    def _finish_drafts(self, request: Request, accepted: list[int]) -> None:
        """Emit the accepted tokens of a row with drafts, or fail its request if there is none."""
        if not accepted:
            self._fail_row(request, None)
            return
        self.generated_tokens += len(accepted)
        self._emit_tokens(request, TokenEvent(request_id=request.request_id, token_ids=accepted))

    def _emit_tokens(self, request: Request, event: TokenEvent, grammar_ended: bool = False) -> None:
        """Emit an event with tokens that were just appended, and end the request if the last of them does."""
        last = event.token_ids[-1]
        if last in request.end_token_ids and self._can_stop(request):
            event.stop_reason = last if last in request.params.stop_token_ids else None
            self._finish(request, event, "stop")
        elif grammar_ended:
            event.grammar_ended = True
            self._finish(request, event, "stop")
        elif request.max_length <= len(request.token_ids):
            self._finish(request, event, "length")
        else:
            self._emit(request, event)

    def _can_stop(self, request: Request) -> bool:
        """Whether the request has more than min_tokens tokens, so that its last token may end it."""
        return request.output_len > request.params.min_tokens or not request.params.min_tokens

    def end_constrained(self, request: Request, error: RequestError | None) -> None:
        """End a request whose grammar is complete, or with `error` one that no token may follow.

        No page is wrong then, so the state is not FAILED, which would drop the prefix cache.
        """
        event = TokenEvent(request_id=request.request_id, grammar_ended=True)
        if error is None:
            self._finish(request, event, "stop")
            return
        event.finish_reason, event.error, event.refusal = "error", str(error), error
        self.end(request, RequestState.ABORTED, event)

    def _finish_pooled(self, request: Request) -> None:
        """End a request with the vector of its prompt, or fail it if the vector is not finite."""
        if all(np.isfinite(rows).all() for rows in request.hidden_states.parts):
            self._finish(request, TokenEvent(request_id=request.request_id), "stop")
            return
        request.hidden_states.take()
        self._fail_row(request, None, VECTOR_NOT_FINITE)

    def _fail_row(self, request: Request, bucket: int | None, message: str = NOT_FINITE) -> None:
        """Fail a request whose logits, or vector, were not finite, and zero the pages that it frees.

        Its next step may already be enqueued and write NaN to those pages again, so zeroing is enqueued after it.
        """
        pages = request.held_pages()
        error = message.format(position=len(request.token_ids), prompt=request.prompt_len)
        self.end(
            request,
            RequestState.FAILED,
            TokenEvent(request_id=request.request_id, finish_reason="error", error=error, graph_bucket=bucket),
        )
        self.executor.call("zero_pages", [page for page in pages if not self.scheduler.pool.ref_count(page)])

    def _finish(self, request: Request, event: TokenEvent, reason: FinishReason) -> None:
        event.finish_reason = reason
        self.end(request, RequestState.FINISHED, event)

    def reject(self, request: EngineRequest, error: EngineError, weight_version: str) -> None:
        """Emit the error event of a request that was never queued."""
        self.ended["error"] += 1
        self.events.append(
            TokenEvent(
                request_id=request.request_id,
                finish_reason="error",
                error=str(error),
                refusal=error,
                weight_version=weight_version,
            )
        )

    def drop(self, request_id: str, weight_version: str) -> None:
        """Emit the last event of a request that was aborted before it was queued."""
        self.ended["abort"] += 1
        self.events.append(TokenEvent(request_id=request_id, finish_reason="abort", weight_version=weight_version))

    def end(self, request: Request, state: RequestState, event: TokenEvent) -> None:
        """End a live request: emit its final event and free its slot and pages."""
        self._emit(request, event)
        self.constraints.forget(request.request_id)
        reason = event.finish_reason or state.value
        self.scheduler.finish(request, state)
        self.ended[reason] += 1
        self.preemptions.observe(request.num_preemptions)

    def _emit(self, request: Request, event: TokenEvent) -> None:
        """Queue an event with the fields of every event and, for a request's first one, the first-event fields."""
        event.weight_version = request.weight_version
        event.hidden_states, event.routed_experts = request.hidden_states.take(), request.routed_experts.take()
        if not request.first_event_sent:
            request.first_event_sent = True
            event.cached_tokens = request.cached_tokens
            if request.first_scheduled_time is not None:
                event.queue_time = max(0.0, request.first_scheduled_time - request.arrival_time)
            if request.params.prompt_logprobs is not None:
                event.prompt_logprobs = TokenLogprobs([b"", *request.prompt_scores])
                request.prompt_scores = []
        self.events.append(event)
