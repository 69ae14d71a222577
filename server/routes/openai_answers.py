"""Response bodies of the OpenAI routes: completions, chats, chunks, usage and logprobs.

They are plain dicts built from a job's choices. The tokenizer is used only for the text of single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from engine.protocol.outputs import CompletionOutput
from engine.protocol.request import TokenLogprob
from server.serving.jobs import Job
from server.serving.tokenization import Tokenization

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


def usage(jobs: Iterable[Job], with_details: bool = True, unsent: int = 0) -> dict[str, Any]:
    """Return the `usage` object of a request. Without details, `prompt_tokens_details` is null, as in vLLM.

    `unsent` generated tokens are not counted yet.
    """
    jobs = list(jobs)
    prompt = sum(job.prompt_tokens for job in jobs)
    completion = sum(len(choice.token_ids) for job in jobs for choice in job.choices) - unsent
    cached = sum(job.output.cached_tokens for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached} if with_details else None,
    }


def finite(logprob: float) -> float:
    """Return a logprob that JSON can represent: at least LEAST_LOGPROB."""
    return max(float(logprob), LEAST_LOGPROB)


class Spelling:
    """The text of single tokens in an answer; with `as_ids`, "token_id:5" as in vLLM."""

    def __init__(self, tokens: Tokenization, as_ids: bool | None = False):
        self._tokens, self._as_ids = tokens, as_ids

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokens.piece(token_id)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token, which may be part of a character.

        With `as_ids`, None in place of a part: ART, which reads token ids, decodes the bytes as UTF-8.
        """
        found = self._tokens.bytes_of(token_id)
        if self._as_ids:
            try:
                found.decode()
            except UnicodeDecodeError:
                return None
        return list(found)


class CompletionLogprobs:
    """Build the `logprobs` objects of one completion choice in pieces. Text offsets continue across pieces.

    `at` is the length of the text before the output. An offset is the number of characters before a token; a token that
    continues a character has the character's.
    """

    def __init__(self, tokens: Tokenization, spelling: Spelling, wanted: int, job: Job, at: int = 0):
        self._spelling, self._wanted, self._at = spelling, wanted, at
        self._places = tokens.places(job.output.prompt_token_ids, at, job.params.skip_special_tokens)

    def of(self, ids: Sequence[int], found: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return the object for the next tokens of the output."""
        offsets = [self._at if self._places is None else self._places.add(token_id) for token_id in ids]
        return completion_logprobs(self._spelling, ids, found, offsets, self._wanted)


def completion_logprobs(
    spelling: Spelling, ids: Sequence[int], found: Sequence[TokenLogprob | None], offsets: list[int], wanted: int
) -> dict[str, Any]:
    """Return the `logprobs` object of tokens. A token without a logprob (a prompt's first) is null."""
    texts, chosen, top = [], [], []
    for token_id, logprob in zip(ids, found, strict=True):
        text = spelling(token_id)
        texts.append(text)
        chosen.append(None if logprob is None else finite(logprob.logprob))
        top.append(None if logprob is None else _top_logprobs(spelling, text, logprob, wanted))
    return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def _top_logprobs(spelling: Spelling, text: str, logprob: TokenLogprob, wanted: int) -> dict[str, float]:
    """Return the logprobs of a token and its alternatives by text: the token first, then the most likely ones.

    Two tokens may have the same text, for example parts of characters: the first one counts.
    """
    found = {text: finite(logprob.logprob)}
    for token_id, value in logprob.named.items() or islice(logprob.top.items(), wanted if wanted >= 0 else None):
        found.setdefault(spelling(token_id), finite(value))
    return found


def echoed_text(tokens: Tokenization, job: Job) -> str:
    """Return the prompt's text."""
    return job.output.prompt if job.output.prompt is not None else tokens.decode(job.output.prompt_token_ids)


def echoed_logprobs(
    tokens: Tokenization, spelling: Spelling, wanted: int, job: Job, add_special_tokens: bool
) -> dict[str, Any] | None:
    """Return the `logprobs` object of the prompt; None if not requested. `add_special_tokens`: as it was tokenized."""
    ids, found = job.output.prompt_token_ids, job.output.prompt_logprobs
    if found is None:
        return None
    offsets = tokens.prompt_places(job.output.prompt, ids, add_special_tokens)
    return completion_logprobs(spelling, ids, found, offsets, wanted)


def prompt_logprobs(tokens: Tokenization, job: Job, wanted: int) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: per token, its own logprob and the logprobs of the `wanted` most likely, by id."""
    found: list[dict[str, Any] | None] = []
    for one in job.output.prompt_logprobs or ():
        if one is None:
            found.append(None)
            continue
        ranked = {
            token_id: (value, rank)
            for rank, (token_id, value) in enumerate(one.top.items(), 1)
            if rank <= wanted or wanted < 0
        }
        ranked.setdefault(one.token_id, (one.logprob, one.rank))
        found.append(
            {
                str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": tokens.piece(token_id)}
                for token_id, (value, rank) in ranked.items()
            }
        )
    return found


def chat_logprobs(spelling: Spelling, found: Iterable[TokenLogprob] | None) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""

    def spelled(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling(token_id), "logprob": finite(logprob), "bytes": spelling.bytes_of(token_id)}

    content = []
    for one in found or ():
        others = {one.token_id: one.logprob} | one.named if one.named else one.top
        top = [spelled(token_id, value) for token_id, value in others.items()]
        content.append({**spelled(one.token_id, one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def weight_versions(choice: CompletionOutput) -> list[dict[str, Any]]:
    """Return vLLM's `weight_versions`: which weights produced which of the choice's tokens."""
    return [span._asdict() for span in choice.weight_versions]


def last_hidden_state(choice: CompletionOutput) -> list[float | None]:
    """Return SGLang's `hidden_states` of an OpenAI choice: the vector of the last token that was computed."""
    rows = choice.hidden_states
    return [] if rows is None else [value if math.isfinite(value) else None for value in rows[-1].tolist()]


def mean_logprob(choice: CompletionOutput) -> float:
    """Return the mean logprob of a choice's tokens, by which best_of chooses."""
    found = choice.logprobs
    return sum(one.logprob for one in found) / len(found) if found else float("-inf")


def completion_choice(
    number: int, text: str, logprobs: dict[str, Any] | None, choice: CompletionOutput | None
) -> dict[str, Any]:
    """Return one entry of a completion's choices. `choice` is None in a stream until the choice has ended."""
    return {
        "index": number,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason if choice else None,
        "stop_reason": choice.stop_reason if choice else None,
    }


def chat_chunk_choice(number: int, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """Return one entry of a chat chunk's choices, while the choice has not ended."""
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
