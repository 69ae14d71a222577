"""Reading of result files for the plots: recorded files of several runs, and files that --json writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ENGINES = {"encore": "Encore", "sglang": "SGLang", "vllm": "vLLM"}


class Run(NamedTuple):
    """What one run found (`found`) and where: machine with versions, commit and date."""

    machine: str
    commit: str
    date: str
    found: dict[str, Any]

    @property
    def origin(self) -> str:
        """The commit and the date, for captions."""
        return f"commit {self.commit}, {self.date}"


class Series(NamedTuple):
    """A line or a group of bars: its label, its values by x, and the run that they come from."""

    label: str
    values: dict[Any, float]
    run: Run


def read_runs(path: Path) -> list[Run]:
    """Return the runs of a file, newest first, as the recorded files list them."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    runs = whole.get("sets") or [whole]
    if any(isinstance(one.get("rows"), list) for one in whole.get("runs", []) if isinstance(one, dict)):
        runs = whole["runs"]
    return [
        Run(_machine(one), str(one.get("commit", "unknown"))[:7], str(one.get("date", "undated"))[:10], one)
        for one in runs
    ]


def _machine(found: dict[str, Any]) -> str:
    if "machine" in found:
        return found["machine"]
    if found.get("gpu") or found.get("device"):
        parts = [f"{found.get('gpus', 1)} x {found.get('gpu') or found['device']}"]
    else:
        parts = [f"{found.get('cpus', '?')} cores of {found.get('cpu', 'a CPU')}"]
    parts += [f"torch {found['torch']}"] if "torch" in found else []
    parts += [f"Python {found['python']}"] if "python" in found else []
    return ", ".join(parts)


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows of a run; old files call them "runs"."""
    return run.found.get("rows") or run.found.get("runs") or []


def offline(runs: list[Run], shape: str, figure: str) -> list[Series]:
    """Return each engine's figure for a shape: from the newest run with a peer, then a newer one of Encore, if any.

    The values of "decode_ms" are by batch size; any other figure is a single value under its name.
    """

    def series(run: Run) -> list[Series]:
        found = {row["engine"]: row for row in rows_of(run) if row.get("shape") == shape and figure in row}
        return [
            Series(
                " ".join(filter(None, (ENGINES[name], found[name].get("version")))),
                {int(x): y for x, y in found[name][figure].items()}
                if isinstance(found[name][figure], dict)
                else {figure: found[name][figure]},
                run,
            )
            for name in ENGINES
            if name in found
        ]

    return _with_newest(runs, series)


def streams(runs: list[Run], figure: Callable[[dict[str, Any]], float]) -> list[Series]:
    """Return each server's figure by number of clients, the median of its turns; chosen as `offline` does."""

    def series(run: Run) -> list[Series]:
        turns: dict[str, list[dict[str, Any]]] = {}
        for name, rows in run.found.items():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "clients" in rows[0]:
                name = "encore" if name in ("runs", "rows") else name.removesuffix(" again")
                turns.setdefault(name, []).extend(rows)
        found = []
        for name, rows in turns.items():
            engine, _, version = name.partition(" ")
            values = {
                clients: statistics.median(figure(row) for row in rows if row["clients"] == clients)
                for clients in sorted({row["clients"] for row in rows})
            }
            found.append(Series(f"{ENGINES[engine]} {version}".strip(), values, run))
        return found

    return _with_newest(runs, series)


def _with_newest(runs: list[Run], series: Callable[[Run], list[Series]]) -> list[Series]:
    found = [one for one in map(series, runs) if one]
    beside = next((one for one in found if len(one) > 1), found[0])
    newest = found[0][0]
    if newest.run is not beside[0].run:
        beside.append(newest._replace(label=f"{newest.label}, later run"))
    return beside
