"""Install a Python package's entry point for a test, as pip would."""

from __future__ import annotations

from pathlib import Path

import pytest


def install_entry_point(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, value: str) -> None:
    """Put `folder`, with a package that has the entry point `name = value` in the group encore.models, on sys.path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[encore.models]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(folder))
