"""docs/debugging-captures.md explains every reason of an eager call, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from engine.training.vision.image_batches import ARGUMENT_PER_IMAGE
from graph_cache.adapters.megatron.vision import ABOVE_LARGEST, TOO_MANY_IMAGES
from graph_cache.core import keys
from graph_cache.training.reasons import REASONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/debugging-captures.md").read_text("utf-8")
KEYS = {value for name, value in vars(keys).items() if name.isupper() and isinstance(value, str)}
TRAINING_ONLY = {keys.WARMING_UP, keys.OTHER_THREAD}
FUNCTIONS_ONLY = {keys.OTHER_MODES, keys.REPEATED, keys.UNCHECKED_ROWS}
FUNCTIONS = KEYS - TRAINING_ONLY - {keys.UNKNOWN_VARIANT}  # a function has no variants


def constant(path: str, name: str) -> str:
    """Return a module's string constant, without importing what the module needs."""
    for node in ast.parse((ROOT / path).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no {name}")


def explained(heading: str, table: str = "| reason |") -> list[str]:
    """Return the names in the first column of the tables of reasons in a section."""
    section = re.split(r"\n## ", PAGE.partition(f"\n## {heading}\n")[2])[0]
    found = []
    for block in section.split("\n\n"):
        if block.startswith(table):
            found += [name for row in block.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    return found


def test_reasons_of_serving() -> None:
    eager_phase = constant("engine/worker/model_runner.py", "PREFILL_EAGER")
    assert sorted(explained("Serving")) == sorted(KEYS - TRAINING_ONLY - FUNCTIONS_ONLY | {eager_phase})


def test_reasons_of_functions() -> None:
    assert sorted(explained("Functions of GraphCache")) == sorted(FUNCTIONS)


def test_reasons_of_training() -> None:
    padding = [
        ABOVE_LARGEST,
        TOO_MANY_IMAGES,
        ARGUMENT_PER_IMAGE,
        constant("graph_cache/adapters/megatron/vision_padding.py", "POSITION_TABLE"),
        constant("graph_cache/adapters/megatron/packed.py", "TOO_MANY_DOCUMENTS"),
    ]
    assert sorted(explained("Training")) == sorted([*REASONS, *padding])


def test_texts_of_failures_are_those_of_refusals() -> None:
    texts = re.findall(r"^\| `([^`]+)`", PAGE.partition("\n## Texts of failures\n")[2].partition("\n## ")[0], re.M)
    refusals = (ROOT / "docs/refusals.md").read_text("utf-8").partition("\n## Failed captures\n")[2]
    assert len(texts) > 4 and [text for text in texts if f"| `{text}` |" not in refusals] == []
