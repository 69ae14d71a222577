"""docs/models.md is what scripts/models writes."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from engine.models.registry import ENTRIES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_lists_every_family():
    loader = SourceFileLoader("models_page", str(ROOT / "scripts" / "models"))
    page = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(page)
    text = page.PAGE.read_text("utf-8")
    assert text == page.document(), "run: .venv/bin/python scripts/models"
    assert all(f"| `{entry.family.architecture}` | `{entry.family.model_type}` |" in text for entry in ENTRIES)
