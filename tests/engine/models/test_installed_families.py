"""Model families that other packages register through entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models.registry import Entry, find_entry, supported_architectures
from tests.support.installed import install_entry_point

MODULE = """
from engine.models.config import Family
from engine.models.registry import Entry
ENTRY = Entry(Family(architecture={architecture!r}, model_type={model_type!r}))
"""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Install a package with a family of its own; its module is named like the package."""
    installed: list[str] = []

    def install(name: str, architecture: str, model_type: str, source: str = MODULE, attribute: str = "ENTRY") -> None:
        folder = tmp_path / name
        install_entry_point(monkeypatch, folder, name, f"{name}:{attribute}")
        (folder / f"{name}.py").write_text(source.format(architecture=architecture, model_type=model_type))
        installed.append(name)

    yield install
    for name in installed:
        sys.modules.pop(name, None)


def test_an_installed_family_is_found_by_both_names(install):
    before = supported_architectures()
    install("family_found", "NewForCausalLM", "new")
    assert supported_architectures() == (*before, "NewForCausalLM")
    for values in ({"architectures": ["NewForCausalLM"]}, {"model_type": "new"}):
        entry = find_entry(values, "config.json")
        assert isinstance(entry, Entry) and entry.family.architecture == "NewForCausalLM"


def test_nothing_stays_after_a_package_is_gone(install):
    with pytest.raises(ModelError, match="architecture NewForCausalLM is not supported; supported are Llama"):
        find_entry({"architectures": ["NewForCausalLM"]}, "config.json")


@pytest.mark.parametrize(
    ("architecture", "model_type", "taken"),
    [("LlamaForCausalLM", "other", "'LlamaForCausalLM'"), ("OtherForCausalLM", "qwen3", "'qwen3'")],
)
def test_a_name_of_the_engine_is_refused(install, architecture, model_type, taken):
    install("family_shadow", architecture, model_type)
    with pytest.raises(ModelError, match=f"family_shadow = .*registers {taken}, which the engine has already"):
        supported_architectures()


def test_a_name_of_another_package_is_refused(install):
    install("family_one", "NewForCausalLM", "one")
    install("family_two", "NewForCausalLM", "two")
    with pytest.raises(ModelError, match="family_two = .*registers 'NewForCausalLM', which entry point family_one"):
        find_entry({"model_type": "one"}, "config.json")


def test_an_entry_point_that_fails_is_named(install):
    install("family_broken", "A", "b", source="import a_module_that_is_missing")
    with pytest.raises(ModelError, match="family_broken.*ModuleNotFoundError: No module named 'a_module_that_is_miss"):
        find_entry({"model_type": "b"}, "config.json")


def test_an_entry_point_to_something_else_is_refused(install):
    install("family_other", "A", "b", attribute="Family")
    with pytest.raises(ModelError, match="family_other = .*is a type: name an engine.models.registry.Entry"):
        find_entry({"model_type": "b"}, "config.json")
