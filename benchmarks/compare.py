"""Compare two result files of one benchmark, figure by figure.

    python -m benchmarks compare OLD.json NEW.json --tolerance 0.05

Prints each figure with the ratio new / old. Exit status 1: a figure is worse by more than the tolerance, or NEW lacks
it. Exit status 2: the files cannot be compared. Whether more is better follows from the unit at the end of a figure's
name: times and memory (ms, us, seconds, bytes, mib) should fall; rates (per_second, per_s, tflops) should rise. Values
without a unit are not compared. Rows are matched by what they were measured for, such as batch size and engine.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import table

# Values that say what a row was measured for; rows are matched by them.
LABELS = (
    "name", "shape", "engine", "way", "case", "heads", "kv_heads", "chunks", "batch", "rows", "keys", "clients",
    "streams", "threads",
)  # fmt: skip
HIGHER = re.compile(r"(per_second|per_s|tflops|speedup|times_eager|hit_rate|share_of_\w+|fraction_of_floor)$")
LOWER = re.compile(r"(^|_)(ms|us|seconds|bytes|mib|over_eager)(_per_\w+)?$")
HARDWARE = ("benchmark", "gpu", "gpus", "cpu", "cpus", "threads")


class Comparison(NamedTuple):
    """A figure in both files. `ratio` is new / old; `worse` by how much it is worse, as a share (negative: better)."""

    figure: str
    old: float
    new: float | None
    ratio: float | None
    worse: float


def direction(path: Sequence[str]) -> int:
    """Return 1 where a higher value is better, -1 where a lower one is, 0 where the name has no unit."""
    for name in reversed(path):
        if HIGHER.search(name):
            return 1
        if LOWER.search(name):
            return -1
    return 0


def figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (path, value) of each number with a unit. A row of a list is named by its labels, else by its place."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if path or name != "settings":
                yield from figures(entry, (*path, name))
    elif isinstance(value, list):
        seen: dict[str, int] = {}
        for place, entry in enumerate(value):
            if not isinstance(entry, dict):
                continue  # single samples behind a median
            labels = [f"{name}={entry[name]}" for name in LABELS if isinstance(entry.get(name), str | int)]
            label = " ".join(labels) or f"#{place + 1}"
            seen[label] = seen.get(label, 0) + 1
            yield from figures(entry, (*path, label if seen[label] == 1 else f"{label} #{seen[label]}"))
    elif isinstance(value, int | float) and not isinstance(value, bool) and direction(path):
        yield path, float(value)


def compared(old: dict[str, Any], new: dict[str, Any], only: str = "") -> list[Comparison]:
    """Pair the figures of two results whose names match the regular expression `only`."""
    there = dict(figures(new))
    found = []
    for path, before in figures(old):
        name = ".".join(path)
        if not re.search(only, name):
            continue
        after = there.get(path)
        ratio = None if after is None else after / before if before else 1.0 if after == before else math.inf
        worse = math.inf if ratio is None else (ratio - 1) * -direction(path)
        found.append(Comparison(name, before, after, ratio, worse))
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for each difference of hardware or settings, which makes ratios meaningless."""
    found = [
        f"{name}: {old[name]} in OLD, {new[name]} in NEW"
        for name in HARDWARE
        if name in old and name in new and old[name] != new[name]
    ]
    before, after = old.get("settings", {}), new.get("settings", {})
    return found + [
        f"settings.{name}: {before.get(name)} in OLD, {after.get(name)} in NEW"
        for name in before | after
        if before.get(name) != after.get(name) and name != "seed"
    ]


def read(path: Path) -> dict[str, Any]:
    """Read a result file. Raises ValueError where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}; a result file holds an object")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--tolerance", type=_share, default=0.05, help="share by which a figure may be worse (0.05)")
    parser.add_argument("--only", type=_pattern, default="", metavar="REGEX", help="compare the figures that match")
    args = parser.parse_args(argv)
    try:
        old, new = read(args.old), read(args.new)
    except ValueError as error:
        parser.error(str(error))
    found = compared(old, new, args.only)
    if not found:
        parser.error(f"{args.old} has no figures" + (f" that match --only {args.only}" if args.only else ""))
    for line in differences(old, new):
        print(f"warning: {line}")
    rows = []
    for one in found:
        verdict = "missing" if one.new is None else "WORSE" if one.worse > args.tolerance else ""
        verdict = verdict or ("better" if one.worse < -args.tolerance else "")
        rows.append(one._asdict() | {"verdict": verdict})
    print(table(rows, ("figure", "old", "new", "ratio", "verdict")))
    worse, missing, better = ([row["verdict"] for row in rows].count(word) for word in ("WORSE", "missing", "better"))
    print(f"{len(rows)} figures, tolerance {args.tolerance:.0%}: {worse} worse, {missing} missing, {better} better")
    return 1 if worse or missing else 0


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 0.05")
    return found


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
