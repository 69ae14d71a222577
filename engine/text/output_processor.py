"""Convert token events to output deltas with text: detokenization and stop strings, per running sequence.

Runs in the caller's process. Without a tokenizer, deltas have token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import RequestError
from engine.protocol.logprobs import TokenLogprob, TokenLogprobs
from engine.protocol.outputs import OutputDelta
from engine.protocol.request import SamplingParams, TokenEvent
from engine.text.detokenizer import AnyDetokenizer, Decoder, Detokenizers, StopStrings


@dataclass(slots=True)
class _Sequence:
    request_id: str
    index: int
    params: SamplingParams
    detokenizer: AnyDetokenizer | None
    stops: StopStrings | None  # None: no stop strings
    num_tokens: int = 0


class OutputProcessor:
    """Converts the events of running sequences to deltas with text. Not thread-safe."""

    def __init__(self, tokenizer: Decoder | None):
        self._detokenizers = None if tokenizer is None else Detokenizers(tokenizer)
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(
        self,
        child_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        index: int = 0,
    ) -> None:
        """Register the engine's request `child_id`, which is sequence `index` of the caller's `request_id`.

        Raises RequestError if the id is in use, or if there are stop strings but no tokenizer.
        """
        if child_id in self._sequences:
            raise RequestError(f"request id {child_id!r} is in use by a running request: choose another", "request_id")
        if self._detokenizers is None and params.stop:
            raise RequestError(
                f"stop has {len(params.stop)} stop strings, but the model has no tokenizer: use stop_token_ids",
                param="stop",
            )
        detokenizer = stops = None
        if self._detokenizers is not None:
            detokenizer = self._detokenizers.make(
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                show_markers=params.show_markers,
            )
        if params.stop:
            stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self._sequences[child_id] = _Sequence(request_id or child_id, index, params, detokenizer, stops)

    def remove(self, child_id: str) -> bool:
        """Drop a sequence; its later events are ignored. Returns whether it was registered."""
        return self._sequences.pop(child_id, None) is not None

    def one(
        self,
        child_id: str,
        token_id: int,
        weight_version: str,
        graph_bucket: int | None,
        logprobs: TokenLogprobs[TokenLogprob] | None = None,
    ) -> OutputDelta | None:
        """Fast path of `process` for the most frequent event: one token, and nothing else but log-probabilities."""
        sequence = self._sequences.get(child_id)
        if sequence is None:
            return None
        if sequence.stops is not None:
            return self.process(
                TokenEvent(
                    request_id=child_id,
                    token_ids=[token_id],
                    logprobs=logprobs,
                    weight_version=weight_version,
                    graph_bucket=graph_bucket,
                )
            )
        detokenizer = sequence.detokenizer
        return OutputDelta(
            request_id=sequence.request_id,
            child_id=child_id,
            index=sequence.index,
            text_delta="" if detokenizer is None else detokenizer.add_one(token_id),
            token_ids=[token_id],
            logprobs=logprobs,
            weight_version=weight_version,
            graph_bucket=graph_bucket,
        )

    def process(self, event: TokenEvent) -> OutputDelta | None:
        """Return the delta of an event; None for a sequence that has ended, was removed or was never added.

        A stop string ends the sequence with the token that completes it: later tokens of the event are dropped,
        finish_reason is "stop", stop_reason is the string, and `abort` is True if the engine still runs the request.
        The text of a stop token or EOS is left out, unless include_stop_str_in_output.
        """
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            return None
        text, count, stop = _text_of(sequence, event)
        finish_reason = event.finish_reason if stop is None else "stop"
        if finish_reason is not None:
            del self._sequences[event.request_id]
        return OutputDelta(
            request_id=sequence.request_id,
            child_id=event.request_id,
            index=sequence.index,
            text_delta=text,
            token_ids=event.token_ids[:count],
            logprobs=event.logprobs if event.logprobs is None or stop is None else event.logprobs[:count],
            prompt_logprobs=event.prompt_logprobs,
            hidden_state_parts=[] if event.hidden_states is None else [event.hidden_states],
            routed_expert_parts=[] if event.routed_experts is None else [event.routed_experts],
            finish_reason=finish_reason,
            stop_reason=event.stop_reason if stop is None else stop,
            error=event.error if stop is None else None,
            abort=stop is not None and event.finish_reason is None,
            weight_version=event.weight_version,
            cached_tokens=event.cached_tokens,
            queue_time=event.queue_time,
            graph_bucket=event.graph_bucket,
        )


def _text_of(sequence: _Sequence, event: TokenEvent) -> tuple[str, int, str | None]:
    """Return the event's text, the number of its tokens that belong to the output, and the stop string found."""
    total = len(event.token_ids)
    detokenizer, stops = sequence.detokenizer, sequence.stops
    if detokenizer is None:
        sequence.num_tokens += total
        return "", total, None
    has_stop_token = event.finish_reason == "stop" and not event.grammar_ended
    hide_last = has_stop_token and not sequence.params.include_stop_str_in_output
    pieces = []
    for count, token_id in enumerate(event.token_ids, start=1):
        sequence.num_tokens += 1
        if hide_last and count == total:
            break
        text, stop = _visible(sequence, detokenizer.add_one(token_id))
        pieces.append(text)
        if stop is not None:
            return "".join(pieces), count, stop
    if event.finish_reason is None:
        return "".join(pieces), total, None
    text, stop = _visible(sequence, detokenizer.finish())
    pieces.append(text)
    if stop is None and stops is not None:
        pieces.append(stops.finish())
    return "".join(pieces), total, stop


def _visible(sequence: _Sequence, text: str) -> tuple[str, str | None]:
    """Return the part of new text that can be shown, and the stop string found in it."""
    if sequence.stops is None:
        return text, None
    return sequence.stops.add(text, armed=sequence.num_tokens >= sequence.params.min_tokens)
