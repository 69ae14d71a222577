"""The launcher: `python -m benchmarks` lists all benchmarks, `python -m benchmarks NAME ARGUMENTS` runs one."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
COMMANDS = {
    "compare": "Compare two result files; exit status 1 where the second is worse.",
    "plots": "Draw the recorded results as SVG files.",
}


class Benchmark(NamedTuple):
    """A module of a group: its name such as "kernels.sampling", what it measures, and the hardware it needs."""

    name: str
    summary: str
    needs: str


def catalog() -> list[Benchmark]:
    """Return all modules that define NEEDS, by name, read from their source.

    Importing them would take seconds and fail where Triton or Megatron-Core is not installed.
    """
    found = []
    for path in sorted(ROOT.glob("*/*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node in module.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NEEDS":
                summary = (ast.get_docstring(module) or "").partition("\n")[0]
                found.append(Benchmark(f"{path.parent.name}.{path.stem}", summary, ast.literal_eval(node.value)))
    return found


def listing() -> str:
    """Format the catalog, one line per benchmark."""
    rows = [(one.name, one.needs, one.summary) for one in catalog()]
    rows += [(name, "-", summary) for name, summary in COMMANDS.items()]
    name_width, needs_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:{name_width}}  {needs:{needs_width}}  {summary}" for name, needs, summary in rows]
    return "\n".join(
        [
            "usage: python -m benchmarks NAME [ARGUMENTS]   (python -m benchmarks NAME --help)",
            "",
            f"{'name':{name_width}}  {'needs':{needs_width}}  measures",
            *lines,
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Run the benchmark or the command that `argv` names; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, rest = argv[0], list(argv[1:])
    known = [one.name for one in catalog()] + list(COMMANDS)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        print(f"error: no benchmark is named {name!r}{hint} `python -m benchmarks` lists all", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.{name}" if name != "plots" else "benchmarks.plots.draw")
    return module.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
