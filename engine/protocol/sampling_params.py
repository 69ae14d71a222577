"""Sampling parameters and stop conditions of a request, validated at construction."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.protocol.pooling import check_pooling
from engine.protocol.structured_outputs import StructuredOutputs
from graph_cache.utils.validation import NamesFields, did_you_mean

GREEDY_BELOW = 1e-5  # below it, logits / temperature can overflow, and sampling is greedy anyway
MAX_TOKENS = 2**31 - 1
ALL_TOKENS = -1  # as a number of log-probabilities: the whole vocabulary
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 4096
MAX_N = 128
MAX_ALLOWED_TOKENS = 2**18
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 256
MAX_SALT_CHARS = 1024
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

_CANONICAL_INT = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


class LogitBias(Mapping[int, float]):
    """An immutable, hashable, picklable mapping from token id to the number added to its logit."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, float]):
        self._items = dict(items)

    def __getitem__(self, token_id: int) -> float:
        return self._items[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(NamesFields):
    """Sampling and stop parameters of a request; frozen, hashable and validated at construction.

    Lists become tuples, top_k -1 becomes 0, and a temperature below 1e-5 becomes 0 (greedy). `for_vocab` checks
    token ids against a vocabulary. Raises RequestError for a wrong type, a NaN or a value out of range; its `param`
    is the field's name.
    """

    max_tokens: int | None = 16  # tokens to generate; None: up to the context length; 0: prompt logprobs only
    min_tokens: int = 0  # until then EOS, stop tokens and stop strings are ignored
    temperature: float = 1.0  # divides the logits; 0: greedy
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    top_k: int = 0  # sample from the k most likely tokens; 0 or -1: from all
    min_p: float = 0.0  # sample from tokens with at least this share of the highest probability
    repetition_penalty: float = 1.0  # over prompt and output, multiplicative
    frequency_penalty: float = 0.0  # over the output, per occurrence
    presence_penalty: float = 0.0  # over the output, once
    logit_bias: Mapping[int, float] | None = None  # numbers to add to logits, by token id
    stop: tuple[str, ...] = ()  # strings that end the text; they are removed from it
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the output
    ignore_eos: bool = False  # continue after an end-of-sequence token
    include_stop_str_in_output: bool = False  # keep the stop string in the text
    n: int = 1  # sequences to generate
    seed: int | None = None  # of the random numbers; None: derived from the engine's seed, random in a server
    logprobs: int | None = None  # the top k beside the sampled token; 0: the sampled token only; -1: all tokens
    logprob_token_ids: tuple[int, ...] = ()  # logprobs of these tokens too, for each token that gets logprobs
    return_kept_mass: bool = False  # with each token's logprob, the log of the probability that was not cut off
    return_sampling_mask: bool = False  # with each token's logprob, the ids that were not cut off; and the kept mass
    prompt_logprobs: int | None = None  # of each prompt token, and of the k most likely ones in its place; -1: of all
    return_hidden_states: bool = False  # the final hidden state of each prompt and output token but the last
    return_routed_experts: bool = False  # the experts of each prompt and output token but the last
    pooling: str | None = None  # one vector of the prompt instead of tokens; see engine/protocol/pooling.py
    skip_special_tokens: bool = True  # leave special tokens out of the text
    cache_salt: str = ""  # requests share cached prefixes only if theirs is equal
    show_markers: bool = False  # don't skip special tokens that mark tool calls or reasoning
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled
    bad_words: tuple[str, ...] = ()  # the last token of one is not sampled after its others
    structured_outputs: StructuredOutputs | None = None  # constrains the output; may be given as a mapping

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 0, MAX_TOKENS))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}: lower min_tokens or raise "
                "max_tokens",
                param="min_tokens",
            )
        temperature = _number("temperature", self.temperature, 0.0, 100.0)
        self._set("temperature", 0.0 if temperature < GREEDY_BELOW else temperature)
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, exclusive=True))
        self._set("top_k", max(0, _integer("top_k", self.top_k, -1, MAX_TOKENS)))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", checked_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "show_markers")
        for name in (
            *flags,
            "return_hidden_states",
            "return_routed_experts",
            "return_kept_mass",
            "return_sampling_mask",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "true or false")
        self._set("n", _integer("n", self.n, 1, MAX_N))
        if self.pooling is not None:
            check_pooling(self.pooling, self.max_tokens, self.n, self.return_hidden_states)
            if self.return_routed_experts:
                raise RequestError(
                    "pooling and return_routed_experts exclude each other: leave one out", param="return_routed_experts"
                )
        self._set("cache_salt", _salt(self.cache_salt))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, INT64_MIN, INT64_MAX))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), ALL_TOKENS, MAX_TOKENS))
        self._set("logprob_token_ids", _distinct("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS))
        if (self.logprob_token_ids or self.returns_support) and self.logprobs is None:
            self._set("logprobs", 0)
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _allowed(self.allowed_token_ids))
        self._set("bad_words", _bad_words(self.bad_words))
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            self._set("structured_outputs", StructuredOutputs.from_dict(self.structured_outputs))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logits depend on the tokens before it beyond the model."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def returns_support(self) -> bool:
        """Whether logprobs come with what top-k, top-p and min-p left of the distribution."""
        return self.return_kept_mass or self.return_sampling_mask

    @property
    def is_constrained(self) -> bool:
        """Whether each step needs a mask of the tokens that may be sampled."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt token must be computed, so that none may come from the prefix cache."""
        returns_rows = self.return_hidden_states or self.return_routed_experts
        return self.prompt_logprobs is not None or returns_rows or self.pooling == "mean"

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: the most likely token, no random numbers."""
        return self.temperature == 0.0

    def for_vocab(self, vocab_size: int) -> SamplingParams:
        """Return the parameters for a vocabulary: without stop tokens that it lacks, which can't occur, and with its
        size in place of -1 as a number of log-probabilities. Raises RequestError as check_vocab does."""
        changes: dict[str, Any] = {
            name: vocab_size for name in ("logprobs", "prompt_logprobs") if getattr(self, name) == ALL_TOKENS
        }
        if max(self.stop_token_ids, default=0) >= vocab_size:
            changes["stop_token_ids"] = tuple(index for index in self.stop_token_ids if index < vocab_size)
        found = dataclasses.replace(self, **changes) if changes else self
        found.check_vocab(vocab_size)
        return found

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError if a field contains a token id of vocab_size or more."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} names token id {token_id}, but the model's vocabulary ends at {vocab_size - 1}",
                        param=name,
                    )

    def check_hidden_states(self, size: int) -> None:
        """Raise RequestError if hidden states are asked for and `size` is 0: the engine keeps none."""
        if self.return_hidden_states and not size:
            raise RequestError(
                "return_hidden_states: this engine keeps no hidden states; start it with enable_return_hidden_states "
                "(--enable-return-hidden-states)",
                param="return_hidden_states",
            )

    def check_routed_experts(self, is_recorded: bool) -> None:
        """Raise RequestError if the experts of tokens are asked for, and the engine doesn't record them."""
        if self.return_routed_experts and not is_recorded:
            raise RequestError(
                "return_routed_experts: this engine doesn't record the experts of tokens; start it with "
                "enable_return_routed_experts (--enable-return-routed-experts), which needs a model with experts",
                param="return_routed_experts",
            )

    def check_support(self, logprobs_mode: str) -> None:
        """Raise RequestError if the kept mass or ids are asked for, and logprobs aren't of the sampled distribution."""
        if self.returns_support and logprobs_mode != "processed":
            name = "return_sampling_mask" if self.return_sampling_mask else "return_kept_mass"
            raise RequestError(
                f"{name}: logprobs of this engine are the model's own, before anything is cut off "
                f"(logprobs_mode={logprobs_mode!r}); remove it, or start the engine with logprobs_mode='processed' "
                "(--logprobs-mode)",
                param=name,
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from decoded JSON.

        A null counts as unset unless the field accepts None; for max_tokens, null means up to the context length.
        logit_bias keys may be strings of digits, as in JSON. Raises RequestError for an unknown key, naming the
        nearest known one.
        """
        if not isinstance(values, Mapping):
            raise _invalid("sampling_params", values, "an object of sampling parameters")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for name, value in values.items():
            if name not in fields:
                raise _unknown_key(name, list(fields))
            if value is None and fields[name].default is not None and name != "max_tokens":
                continue
            given[name] = _int_keys(value) if name == "logit_bias" and isinstance(value, Mapping) else value
        return cls(**given)


def _describe(value: Any) -> str:
    """Return a short description of a value for an error message; never fails on untrusted input."""
    try:
        return f"{reprlib.repr(value)} ({type(value).__name__})"
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"a huge {type(value).__name__}"


def _invalid(name: str, found: Any, allowed: str) -> RequestError:
    return RequestError(f"{name} must be {allowed}; found {_describe(found)}", param=name)


def _unknown_key(name: Any, known: list[str]) -> RequestError:
    hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
    return RequestError(f"unknown sampling parameter {_describe(name)}{hint}", param=str(name)[:64])


def _integer(name: str, value: Any, low: int, high: int) -> int:
    allowed = f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise _invalid(name, value, allowed)
    return int(value)


def _number(name: str, value: Any, low: float, high: float, *, exclusive: bool = False) -> float:
    """Return value as a finite float in [low, high], or in (low, high] with `exclusive`; else raise RequestError."""
    allowed = f"a number {'above' if exclusive else 'from'} {low:g} {'up ' if exclusive else ''}to {high:g}"
    if not _is_real(value):
        raise _invalid(name, value, allowed)
    # Compare before float(): a huge integer can be compared but not converted. Comparisons with NaN are false.
    if not low <= value <= high or (exclusive and not value > low) or not math.isfinite(value):
        raise _invalid(name, value, allowed)
    return float(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _stop_strings(value: Any) -> tuple[str, ...]:
    allowed = f"a string, or a list of at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_CHARS} characters"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or len(strings) > MAX_STOP_STRINGS:
        raise _invalid("stop", value, allowed)
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_CHARS:
            raise _invalid("stop", string, allowed)
        if any("\ud800" <= c <= "\udfff" for c in string):
            raise _invalid("stop", string, "text that UTF-8 can encode (a lone surrogate can never be generated)")
    return tuple(strings)


def _allowed(value: Any) -> tuple[int, ...]:
    ids = checked_token_ids("allowed_token_ids", value, MAX_ALLOWED_TOKENS)
    if not ids:
        raise RequestError("allowed_token_ids is empty: allow at least one token", param="allowed_token_ids")
    return ids


def _bad_words(value: Any) -> tuple[str, ...]:
    allowed = f"a list of at most {MAX_BAD_WORDS} strings, each of 1 to {MAX_BAD_WORD_CHARS} characters"
    if not isinstance(value, (list, tuple)) or len(value) > MAX_BAD_WORDS:
        raise _invalid("bad_words", value, allowed)
    for word in value:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARS or not word.strip():
            raise _invalid("bad_words", word, allowed + ", not only spaces")
        if any("\ud800" <= c <= "\udfff" for c in word):
            raise _invalid("bad_words", word, "text that UTF-8 can encode (a lone surrogate can never be generated)")
    return tuple(value)


def _salt(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_SALT_CHARS:
        raise _invalid("cache_salt", value, f"a string of at most {MAX_SALT_CHARS} characters")
    return value


def checked_token_ids(name: str, value: Any, max_length: int) -> tuple[int, ...]:
    """Return the list `value` as a tuple of ints in [0, 2**63). Raises RequestError(param=name)."""
    if not isinstance(value, (list, tuple)) or len(value) > max_length:
        raise _invalid(name, value, f"a list of at most {max_length} token ids")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= INT64_MAX:
        return tuple(value)  # fast path: prompts have thousands of ids, and the engine loop checks them too
    return tuple(_integer(name, token_id, 0, INT64_MAX) for token_id in value)


def _distinct(name: str, value: Any, max_length: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(checked_token_ids(name, value, max_length)))


def _logit_bias(value: Any) -> LogitBias | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED_TOKENS:
        raise _invalid("logit_bias", value, f"an object of at most {MAX_BIASED_TOKENS} token ids and numbers")
    for token_id in value:
        is_id = isinstance(token_id, numbers.Integral) and not isinstance(token_id, bool)
        if not is_id or not 0 <= int(token_id) <= INT64_MAX:
            raise RequestError(
                f"the keys of logit_bias must be token ids from 0 to {INT64_MAX}; found {_describe(token_id)}",
                param="logit_bias",
            )
    return LogitBias({int(token_id): _number("logit_bias", bias, -100.0, 100.0) for token_id, bias in value.items()})


def _int_keys(bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert string keys in plain decimal to ints; other keys are left for the field's own check to reject."""
    out = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and _CANONICAL_INT.fullmatch(key) else key
        if token_id in out:
            raise RequestError(f"logit_bias names token id {_describe(token_id)} twice", param="logit_bias")
        out[token_id] = value
    return out
