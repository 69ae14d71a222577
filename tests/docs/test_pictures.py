"""The pictures in docs/pictures are what their source draws, and every picture is shown somewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"


def test_the_committed_files_are_drawn_by_their_source(tmp_path: Path) -> None:
    for source in PICTURES.glob("*.py"):
        shutil.copy(source, tmp_path)
    subprocess.run([sys.executable, tmp_path / "draw.py"], check=True)
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.glob("*.svg")}
    assert drawn and drawn == {path.name: path.read_text("utf-8") for path in PICTURES.glob("*.svg")}


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [path.name for path in PICTURES.glob("*.svg") if f"pictures/{path.name}" not in pages] == []
