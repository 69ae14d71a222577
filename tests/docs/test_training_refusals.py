"""The tables of refusals in docs/refusals.md are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from graph_cache.training.reasons import REASONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/refusals.md").read_text("utf-8")
SOURCES = [
    *(ROOT / "graph_cache/training").glob("*.py"),
    *(ROOT / "graph_cache/backends").glob("*.py"),
    ROOT / "graph_cache/guards/audit.py",
    ROOT / "graph_cache/guards/torch_settings.py",
    ROOT / "graph_cache/guards/refusals.py",
    ROOT / "graph_cache/guards/quantizers.py",
]
NAMING = {  # functions that return texts
    "host_read_refusal",
    "_describe_changes",
    "_refused_host_memory",
    "higher_order_refusal",
    "gradients_read",
    "unknown_closures",
    "unwatched_reads",
    "optimizers_on_host",
}
COLLECTED = {"reasons", "refusals", "DOUBLE_BACKWARD", "REFUSAL"}  # reasons that are raised elsewhere
RAISING = {"CaptureRefused", "error_type"}
JOINED = ("A replay would not repeat this",)  # what is said around collected reasons


def first_cells(heading: str) -> list[str]:
    """Return what stands in backquotes in the first cells of the table after a heading."""
    table = PAGE.partition(heading)[2].partition("|\n\n")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_every_reason_is_explained_and_no_other() -> None:
    cells = first_cells("\n## Reasons\n")
    assert sorted(cells) == sorted(REASONS)


def literal(node: ast.AST) -> str:
    """Return the constant text of a string expression."""
    return "".join(
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def refusals() -> Iterator[str]:
    """Yield the texts of all refusals in the code."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in NAMING:
                yield from (literal(inner.value) for inner in ast.walk(node) if isinstance(inner, ast.Return))
            elif isinstance(node, ast.Call) and name_of(node.func) in RAISING:
                yield from [literal(argument) for argument in node.args if not isinstance(argument, ast.Call)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                if name_of(node.func.value) in COLLECTED:
                    yield from map(literal, node.args)
            elif isinstance(node, (ast.Assign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if COLLECTED & set(map(name_of, targets)):
                    yield literal(node.value)


def test_every_refused_capture_is_explained_and_no_other() -> None:
    phrases = first_cells("\n## Failed captures\n")
    texts = [text for text in refusals() if text.strip(" ;.,") and not text.strip(" ;.").startswith(JOINED)]
    assert len(texts) > 20 and len(phrases) > 20
    unexplained = [text for text in texts if not any(phrase in text for phrase in phrases)]
    assert not unexplained
    assert [phrase for phrase in phrases if not any(phrase in text for text in texts)] == []
