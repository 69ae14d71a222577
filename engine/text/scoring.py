"""How well documents match a query: prompts of pairs, and scores from the engine's results.

A model scores a pair by its classification head, by the logits of two tokens that say no and yes, or, if it has
neither, by the cosine of two embeddings. Used in the caller's process: no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from engine.errors import ConfigError, PromptTooLong, RequestError
from engine.protocol.messages import ModelInfo
from engine.protocol.outputs import CompletionOutput
from engine.protocol.pooling import activate
from engine.protocol.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

MAX_TRUNCATIONS = 4  # attempts to shorten a document: its tokens may join others differently once it is cut


class Scoring:
    """Scores of one model. `kind`: "head", "tokens", "cosine", or "labels" for a head with several outputs.

    Raises ConfigError for score tokens that the model can't compute, and for a template that can't be parsed.
    """

    def __init__(self, tokenizer: Tokenizer | None, info: ModelInfo):
        self._tokenizer, self._info, self._config = tokenizer, info, info.pooling
        self.kind: Literal["head", "tokens", "cosine", "labels"] = "cosine"
        self._ids: tuple[int, int] | None = None
        if info.num_labels:
            self.kind = "head" if info.num_labels == 1 else "labels"
            if self._config.activation == "softmax":
                raise ConfigError("a softmax of one label is always 1: use the activation sigmoid or identity")
        elif self._config.score_tokens is not None:
            if not info.generates_text:
                raise ConfigError(f"score_tokens need an LM head, which {info.name} doesn't have: leave them out")
            self.kind, self._ids = "tokens", self._token_ids(self._config.score_tokens)
        if self._config.score_template and self.kind != "cosine":
            self._template.render(**self._variables("query", "document", None))

    def _token_ids(self, tokens: tuple[str | int, str | int]) -> tuple[int, int]:
        found = []
        for token in tokens:
            ids = [token] if isinstance(token, int) else self._encoded(token)
            if len(ids) != 1 or not 0 <= ids[0] < self._info.vocab_size:
                raise ConfigError(f"score_tokens: {token!r} is not one token of {self._info.name}; found {ids}")
            found.append(ids[0])
        return found[0], found[1]

    def _encoded(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ConfigError(f"score_tokens: {self._info.name} has no tokenizer to find {text!r}")
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _template(self) -> Any:
        from jinja2.exceptions import TemplateError  # here: a start without a template needs no jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        try:
            return environment.from_string(self._config.score_template)
        except TemplateError as error:
            raise ConfigError(f"score_template can't be parsed: {error}") from error

    def check(self, instruction: str | None) -> None:
        """Raise RequestError if this model can't score, or reads no instruction and one is given."""
        if self.kind == "labels":
            raise RequestError(
                f"{self._info.name} has {self._info.num_labels} labels, and a score needs one: use /pooling", "model"
            )
        if self.kind != "cosine" and self._tokenizer is None:
            raise RequestError(f"{self._info.name} has no tokenizer, so it can't score texts", param="model")
        reads = self._config.score_template if self.kind != "cosine" else ""
        if instruction is not None and "instruction" not in reads and "system" not in reads:
            raise RequestError(
                "instruction: this model's scores have no template that reads it; remove it", "instruction"
            )

    @property
    def params(self) -> SamplingParams:
        """The parameters of a pair's request."""
        if self._ids is None:
            return SamplingParams(max_tokens=0, temperature=0.0, pooling="classify")
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=self._ids)

    def pair_ids(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        limit: int | None = None,
        param: str = "document",
    ) -> list[int]:
        """Return the prompt of a pair. With `limit`, the end of the document is cut until it has that many tokens.

        Raises RequestError for texts that can't be encoded, PromptTooLong if the rest of the prompt exceeds `limit`.
        """
        assert self._tokenizer is not None
        ids = self._pair(query, document, instruction)
        if limit is None:
            return ids
        for _ in range(MAX_TRUNCATIONS):
            if len(ids) <= limit:
                return ids
            kept = len(self._tokenizer.encode(document, add_special_tokens=False)) - (len(ids) - limit)
            if kept < 1:
                break
            document = self._tokenizer.cut(document, kept)
            ids = self._pair(query, document, instruction)
        if len(ids) <= limit:
            return ids
        raise PromptTooLong(
            f"{param}: the query and the template leave no room for it in {limit} tokens: raise "
            "truncate_prompt_tokens, or shorten the query",
            param=param,
        )

    def _pair(self, query: str, document: str, instruction: str | None) -> list[int]:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if not self._config.score_template:
            for text in (query, document):
                tokenizer.encode(text)  # refuses lone surrogates
            return tokenizer.backend.encode(query, document, add_special_tokens=True).ids
        text = self._template.render(**self._variables(query, document, instruction))
        return tokenizer.encode(text, add_special_tokens=False)

    def _variables(self, query: str, document: str, instruction: str | None) -> dict[str, Any]:
        """Return the variables of a template: the texts, and as messages, which templates for vLLM read."""
        messages = [] if instruction is None else [{"role": "system", "content": instruction}]
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return {
            "messages": messages, "query": query, "document": document, "instruction": instruction,
            "add_generation_prompt": self._config.score_prompt,
        }  # fmt: skip

    def score(self, output: CompletionOutput, use_activation: bool = True) -> float:
        """Return the score of a pair whose request has ended. Without activation, a logit."""
        if self._ids is None:
            vector = output.hidden_states
            assert vector is not None
            return float(activate(vector[0], self._config.activation if use_activation else "identity")[0])
        assert output.logprobs is not None
        no, yes = (output.logprobs[0].named[index] for index in self._ids)
        logit = yes - no
        is_logit = not use_activation or self._config.activation == "identity"
        return logit if is_logit else 0.5 * (1.0 + math.tanh(0.5 * logit))


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of two vectors [h]; 0 if one of them is zero."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else 0.0


def pairs_of(queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]) -> list[tuple[int, int]]:
    """Return the pairs as indices: one query with every document, or as many of each. Raises RequestError."""
    for name, texts in zip(names, (queries, documents), strict=True):
        if not texts:
            raise RequestError(f"{name} is empty: give at least one text", param=name)
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}: give one, or as many of each",
            param=names[0],
        )
    return [(0 if len(queries) == 1 else index, index) for index in range(len(documents))]
