"""Prompts of a load: random text, text with shared prefixes, or conversations of a ShareGPT file.

Text, and not token ids, so that every server and every route takes them. Lengths in tokens are reached by the tokens
per word that the server itself counts (Scale).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import ConfigError

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door health "
    "person art war history party result change morning reason research girl guy moment air teacher force education"
).split()
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048  # as vLLM's and SGLang's benchmarks


class Prompt(NamedTuple):
    """A prompt's text, its length and the length of its output, both in tokens; the prompt's is an estimate."""

    text: str
    tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Scale:
    """How a server counts tokens: `per_word` tokens for each of WORDS, and `fixed` for a prompt of no word."""

    per_word: float
    fixed: float

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> Scale:
        """Return the scale from the (words, tokens) of two prompts."""
        per_word = max((many[1] - few[1]) / (many[0] - few[0]), 0.01)
        return cls(per_word, max(0.0, few[1] - few[0] * per_word))

    def words(self, tokens: int) -> int:
        """Return the number of words with about this many tokens, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))

    def tokens_of(self, text: str) -> int:
        """Estimate the tokens of any text, by its length."""
        mean = sum(map(len, WORDS)) / len(WORDS) + 1
        return math.ceil(len(text) / mean * self.per_word)


def random_text(rng: random.Random, words: int) -> str:
    """Return text of random words, so that prompts share no prefix to cache."""
    return " ".join(rng.choices(WORDS, k=words))


def random_prompts(
    rng: random.Random, scale: Scale, count: int, input_tokens: int, output_tokens: int, range_ratio: float
) -> list[Prompt]:
    """Return prompts with lengths uniform in [1 - range_ratio, 1 + range_ratio] times the given ones."""

    def length(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - range_ratio))), math.ceil(mean * (1 + range_ratio)))

    lengths = [(length(input_tokens), length(output_tokens)) for _ in range(count)]
    return [Prompt(random_text(rng, scale.words(tokens)), tokens, outputs) for tokens, outputs in lengths]


def shared_prefix_prompts(
    rng: random.Random, scale: Scale, count: int, prefixes: int, prefix_tokens: int, input_tokens: int,
    output_tokens: int,
) -> list[Prompt]:  # fmt: skip
    """Return prompts that begin with one of `prefixes` texts, in random order, and go on with different texts."""
    texts = [random_text(rng, scale.words(prefix_tokens)) for _ in range(prefixes)]
    rest = max(1, round(input_tokens / scale.per_word))
    found = [
        Prompt(f"{texts[number % prefixes]} {random_text(rng, rest)}", prefix_tokens + input_tokens, output_tokens)
        for number in range(count)
    ]
    rng.shuffle(found)
    return found


def sharegpt_prompts(
    rng: random.Random, scale: Scale, count: int, turns: Iterable[tuple[str, str]], output_tokens: int | None
) -> list[Prompt]:
    """Return the first turns of conversations (read_sharegpt), in random order, repeated if there are too few.

    The output is as long as the second turn, unless `output_tokens` is given. Leaves out very short and very long ones.
    Raises ConfigError if that leaves none.
    """
    found = []
    for prompt, answer in turns:
        tokens, outputs = scale.tokens_of(prompt), output_tokens or scale.tokens_of(answer)
        is_short = min(tokens, outputs) < SHAREGPT_MIN_TOKENS and not (output_tokens and tokens >= SHAREGPT_MIN_TOKENS)
        if not is_short and tokens <= SHAREGPT_MAX_PROMPT and tokens + outputs <= SHAREGPT_MAX_TOTAL:
            found.append(Prompt(prompt, tokens, outputs))
    if not found:
        raise ConfigError("--dataset-path: no conversation has a prompt and an answer of usual length")
    rng.shuffle(found)
    return [found[number % len(found)] for number in range(count)]


def read_sharegpt(path: str) -> list[tuple[str, str]]:
    """Return the first two turns of each conversation of a ShareGPT file. Raises ConfigError for any other file."""
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            conversations = json.load(file)
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not valid JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"--dataset-path {path} must be a list of objects with 'conversations', as ShareGPT has")
    for one in conversations:
        turns: Any = one.get("conversations", one.get("conversation")) if isinstance(one, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ConfigError(f"--dataset-path {path} must be a list of objects with 'conversations', as ShareGPT has")
        texts = [turn.get("value") for turn in turns[:2]]
        if len(texts) == 2 and all(isinstance(text, str) for text in texts):
            found.append((texts[0], texts[1]))
    return found


def arrival_times(rng: random.Random, count: int, rate: float, burstiness: float) -> list[float]:
    """Return when each request is sent, in seconds: gamma-distributed intervals, scaled to `rate` per second in all.

    `burstiness` is the shape: 1 is a Poisson process, less is burstier, more is more even. An infinite rate sends all
    at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    intervals = [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]
    scale = (count / rate) / (sum(intervals) or 1)
    times, now = [], 0.0
    for interval in intervals:
        now += interval * scale
        times.append(now)
    return times
