"""docs/concepts.md points to files and names that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (?P<concept>[^|]+) \| (?P<names>[^|]+) \| (?P<files>`[^|]+`) \|$", re.MULTILINE)


def rows() -> list[tuple[str, list[str], list[str]]]:
    text = (ROOT / "docs/concepts.md").read_text("utf-8")
    return [
        (row["concept"], re.findall(r"`([^`]+)`", row["names"]), re.findall(r"`([^`]+)`", row["files"]))
        for row in ROW.finditer(text)
    ]


def top_level_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}


def test_the_table_is_read():
    assert len(rows()) > 60


@pytest.mark.parametrize(
    ("concept", "names", "files"), rows(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_files_and_names_exist(concept, names, files):
    missing = [file for file in files if not (ROOT / file).is_file()]
    assert missing == []
    defined = set().union(*(top_level_names(ROOT / file) for file in files))
    assert [name for name in names if name not in defined] == []
