"""What a step's tokens mean: each request goes on or ends, exactly once, and an event says so.

Owns the waiting events and the one way out of the engine. Knows no commands and no steps.
"""

from __future__ import annotations

from collections import Counter

from engine.errors import EngineError
from engine.protocol.request import EngineRequest, TokenEvent
from engine.scheduling.batch import Batch
from engine.scheduling.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler
from engine.worker.async_output import StepResult
from engine.worker.model_runner import ModelRunner

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity) at position {position} of this request, "
    "whose prompt has {prompt} tokens: check the weights"
)


class StepFinisher:
    """Takes what steps gave to the scheduler's books and to `events`, which the loop hands out."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner):
        self.scheduler = scheduler
        self.runner = runner
        self.events: list[TokenEvent] = []
        self.generated_tokens = 0  # tokens that were given to requests
        self.ended: Counter[str] = Counter()

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        """Append the sampled tokens, then decide who is done.

        Whoever ended or was sent back since the step was chosen gets nothing of it.
        """
        for chunk in batch.prefills:
            scores = result.prompt_logprobs.get(chunk.request.request_id)
            if scores and chunk.request.lease == chunk.lease and not chunk.request.first_event_sent:
                chunk.request.prompt_scores += scores
        sampled, tokens = batch.sampled, result.tokens
        self.scheduler.complete(
            batch,
            [
                token if token >= 0 and request.generates_tokens else None
                for (request, _), token in zip(sampled, tokens, strict=True)
            ],
        )
        bucket, decodes, logprobs = result.graph_bucket, len(batch.decodes), result.logprobs
        for row, ((request, lease), token) in enumerate(zip(sampled, tokens, strict=True)):
            if request.lease != lease:
                continue
            if row == decodes:
                bucket = None
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
                logprobs=[logprobs[row]] if row in logprobs else None,
            )
            if token in request.end_token_ids and self._can_stop(request):
                event.stop_reason = token if token in request.params.stop_token_ids else None
                self._finish(request, event, "stop")
            elif request.max_length <= len(request.token_ids):
                self._finish(request, event, "length")
            else:
                self._emit(request, event)

    def _can_stop(self, request: Request) -> bool:
        """Whether it has more than min_tokens, so that the token that came last may end it."""
        return request.output_len > request.params.min_tokens or not request.params.min_tokens

    def _fail_row(self, request: Request, bucket: int | None) -> None:
        """Fail a request whose logits were not finite, and clean the pages that it leaves.

        A next step of it may be enqueued already, and write NaN to those pages again: the cleaning is enqueued after.
        """
        pages = list(request.pages)
        error = NOT_FINITE.format(position=len(request.token_ids), prompt=request.prompt_len)
        self.end(
            request,
            RequestState.FAILED,
            TokenEvent(request_id=request.request_id, finish_reason="error", error=error, graph_bucket=bucket),
        )
        self.runner.zero_pages([page for page in pages if not self.scheduler.pool.ref_count(page)])

    def _finish(self, request: Request, event: TokenEvent, reason: str) -> None:
        event.finish_reason = reason
        self.end(request, RequestState.FINISHED, event)

    def reject(self, request: EngineRequest, error: EngineError, weight_version: str) -> None:
        """Answer a request that was never accepted."""
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

    def end(self, request: Request, state: RequestState, event: TokenEvent) -> None:
        """The one way out: sampling state, slot and pages come back, and the last event goes out."""
        self._emit(request, event)
        if request.slot is not None:
            self.runner.sampling.clear_slot(request.slot)
        self.scheduler.finish(request, state, event.finish_reason)
        self.ended[event.finish_reason] += 1

    def _emit(self, request: Request, event: TokenEvent) -> None:
        """Complete an event with what belongs to every event, or to the first one only."""
        event.weight_version = request.weight_version
        if not request.first_event_sent:
            request.first_event_sent = True
            event.cached_tokens = request.cached_tokens
            if request.first_scheduled_time is not None:
                event.queue_time = max(0.0, request.first_scheduled_time - request.arrival_time)
            if request.params.prompt_logprobs is not None:
                event.prompt_logprobs = [None, *request.prompt_scores]
                request.prompt_scores = []
        self.events.append(event)
