"""The arguments of `generate`: prompts, sampling parameters and expected lengths. All raise RequestError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import RequestError
from engine.protocol.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from graph_cache.utils.validation import is_whole_number


def prompt_ids(
    tokenizer: Tokenizer | None, model: str, prompts: Any, prompt_token_ids: Any
) -> tuple[list[str | None], list[list[int]]]:
    """Return the texts and the token ids of prompts, which are given as either. `model` is its name for errors."""
    if (prompts is None) == (prompt_token_ids is None):
        raise RequestError("give either prompts (texts) or prompt_token_ids (lists of token ids)", param="prompts")
    if prompt_token_ids is not None:
        if not isinstance(prompt_token_ids, Sequence) or isinstance(prompt_token_ids, str):
            raise RequestError("prompt_token_ids: give a list of lists of token ids", param="prompt_token_ids")
        flat = bool(prompt_token_ids) and isinstance(prompt_token_ids[0], int)
        each = [prompt_token_ids] if flat else prompt_token_ids
        for one in each:
            if not isinstance(one, Iterable) or isinstance(one, str):
                raise RequestError(
                    f"prompt_token_ids holds {one!r}: give a list of lists of token ids",
                    param="prompt_token_ids",
                )
        return [None] * len(each), [list(one) for one in each]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts={prompts!r}: give a text or a list of texts", param="prompts")
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer: give prompt_token_ids", param="prompts")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"prompts holds {text!r}: give non-empty texts, or token ids as prompt_token_ids", param="prompts"
            )
    return list(texts), [tokenizer.encode(text) for text in texts]


def params_of_prompts(given: Any, count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, given as one object or mapping for all, or one per prompt."""
    if given is None or isinstance(given, (SamplingParams, Mapping)):
        return [_sampling_params(given or {})] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            f"found sampling_params of type {type(given).__name__}: give SamplingParams or a mapping of fields, "
            "one for all prompts or one per prompt",
            param="sampling_params",
        )
    if len(given) != count:
        raise RequestError(
            f"found {len(given)} sampling_params for {count} prompts: give one for all, or one per prompt",
            param="sampling_params",
        )
    return [_sampling_params(one) for one in given]


def expected_lengths(given: Any, count: int) -> list[int] | None:
    """Return how many tokens the samples of each prompt may take; None if that is not given."""
    if given is None:
        return None
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or len(given) != count or not all(is_whole_number(one, 0) for one in given):
        raise RequestError(
            f"expected_tokens={given!r:.200}: give a list of whole numbers, one for each of the {count} prompts",
            param="expected_tokens",
        )
    return list(given)


def _sampling_params(given: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    return given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given)
