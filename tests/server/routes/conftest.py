"""Models whose weights trainers exchange."""

from __future__ import annotations

import pytest

from tests.engine.lively import Reference, write_lively_model


@pytest.fixture(scope="package")
def folders(tiny_model, tmp_path_factory):
    """Two models of the same shape in which every token depends on the whole context."""
    made = {}
    for seed, name in enumerate("ab"):
        made[name] = tmp_path_factory.mktemp(f"lively-{name}")
        write_lively_model(tiny_model, made[name], seed)
    return made


@pytest.fixture(scope="package")
def references(folders):
    return {name: Reference(folder) for name, folder in folders.items()}
