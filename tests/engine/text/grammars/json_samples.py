"""Random texts that a constraint allows, byte by byte, and whether it allows a given one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.checks import check

BYTES = LLTokenizer("byte")
_ENDS = frozenset(b'"]},:')


def matcher_of(schema: Any, **options: Any) -> LLMatcher:
    matcher, _, refusal = check(StructuredOutputs(json=schema, **options), BYTES)
    assert matcher is not None, refusal
    return matcher


def refusal_of(schema: Any, **options: Any) -> str:
    """Return why a schema is refused; "" if it isn't."""
    _, _, refusal = check(StructuredOutputs(json=schema, **options), BYTES)
    return refusal.reason if refusal is not None else ""


def allows(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def sample(matcher: LLMatcher, rng: random.Random, likely: str = "", max_bytes: int = 400) -> str | None:
    """Return a random text of the language, with `likely` characters more often; None if it became too long."""
    matcher, text = matcher.deep_copy(), bytearray()
    mask = allocate_token_bitmask(1, BYTES.vocab_size)
    weights = [1.0 + 30.0 * (one in likely.encode()) for one in range(256)]
    while len(text) < max_bytes:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5):
            return text.decode()
        fill_next_token_bitmask(matcher, mask)
        allowed = [one for one in range(256) if mask[0, one // 32] >> np.int32(one % 32) & 1]
        ends = [one for one in allowed if one in _ENDS]
        if ends and rng.random() < 0.3:
            chosen = rng.choice(ends)
        else:
            chosen = rng.choices(allowed, [weights[one] for one in allowed])[0]
        text.append(chosen)
        assert matcher.consume_token(chosen), matcher.get_error()
    return None
