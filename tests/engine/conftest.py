"""Fixtures: engines on the lively tiny model, checked for leaked pages, slots and requests after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from tests.engine.lively import SETTINGS, Reference, write_lively_model
from tests.support.engines import engines


@pytest.fixture(scope="session")
def lively_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lively")
    write_lively_model(tiny_model, folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape as `lively_model` with other weights."""
    folder = tmp_path_factory.mktemp("other")
    write_lively_model(tiny_model, folder, seed=1)
    return folder


@pytest.fixture
def config(lively_model: Path) -> Callable[..., EngineConfig]:
    """Make the tests' configuration (float32, one thread, one bucket of 8, context 256, no manifest) with changes."""

    def make(**settings: Any) -> EngineConfig:
        return EngineConfig(**({"model": str(lively_model)} | SETTINGS | settings))

    return make


@pytest.fixture
def make_engine(lively_model: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines with settings; each is checked for leaks and closed after the test."""
    with engines(model=str(lively_model)) as make:
        yield make


@pytest.fixture(scope="session")
def reference(lively_model: Path) -> Reference:
    return Reference(lively_model)


@pytest.fixture(scope="session")
def other_reference(other_model: Path) -> Reference:
    return Reference(other_model)
