"""Engines of a test: made with settings, checked for leaks and closed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine import Engine, EngineConfig
from tests.engine.lively import SETTINGS, greedy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def engines(**defaults: Any) -> Iterator[Callable[..., Engine]]:
    """Give a function that makes engines of SETTINGS with `defaults` and the function's keywords."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(Engine(EngineConfig(**(SETTINGS | defaults | settings))))
        return made[-1]

    yield make
    for engine in made:
        engine.idle_check()
        engine.close()


def greedy_tokens(engine: Engine, prompts: Any, count: int) -> list[list[int]]:
    """Generate `count` tokens for each prompt, given as token ids."""
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=greedy(count))
    return [output.token_ids for output in outputs]
