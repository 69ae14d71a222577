"""The command `models`: list, pull, show and remove models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from server.cli.parser import Parser

NAME_HELP = "hub name (owner/name), or the default model's name"


def add_arguments(parser: Parser) -> None:
    """Add the actions, each with its arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str) -> Parser:
        return actions.add_parser(name, help=text, description=text)

    listed = add("list", "list the models on this machine, and recommended ones")
    listed.add_argument("--json", action="store_true", help="print JSON")
    add("pull", "download a model, or continue an interrupted download").add_argument("model", help=NAME_HELP)
    shown = add("show", "show a model's size, format, family and memory")
    shown.add_argument("model", help=f"{NAME_HELP}, folder or .gguf file")
    shown.add_argument("--json", action="store_true", help="print JSON")
    add("remove", "delete a downloaded model, from the hub's cache too").add_argument("model", help=NAME_HELP)


def run(args: argparse.Namespace) -> int:
    """Run the action. Raises ModelError for what the user can fix."""
    from engine.library import models
    from server.formatting import human_bytes

    if args.action == "pull":
        summary = models.pull(args.model)
        print(_details(summary))
        print(f"serve it with: encore serve --model {summary.name}")
    elif args.action == "remove":
        print(f"removed {args.model}: {human_bytes(models.remove(args.model))}")
    elif args.action == "show":
        summary = models.show(args.model)
        print(json.dumps(summary.as_json(), indent=1) if args.json else _details(summary))
    else:
        _list(as_json=args.json)
    return 0


def _list(*, as_json: bool) -> None:
    from engine.library import models
    from engine.library.memory import this_machine
    from engine.library.recommended import RECOMMENDED
    from server.formatting import human_bytes

    found, machine = models.pulled(), this_machine()
    if as_json:
        recommended = [one._asdict() for one in RECOMMENDED]
        report = {"machine": vars(machine), "models": [one.as_json() for one in found], "recommended": recommended}
        print(json.dumps(report, indent=1))
        return
    rows = [("name", "size", "format", "family", "fits here")]
    rows += [(one.name, human_bytes(one.size_bytes), one.format, one.family or "-", fits_text(one)) for one in found]
    print(_table(rows) if found else "no models on this machine")
    here = {one.name for one in found}
    rows = [("recommended", "parameters", "family", "fits here", "licence")]
    for one in RECOMMENDED:
        if one.name not in here:
            count = f"{one.parameters / 1e3:.1f}B" if one.parameters >= 1000 else f"{one.parameters}M"
            fits = "yes" if models.weights_fit(1_000_000 * one.parameters, machine) else "no"
            licence = f"{one.licence}, gated: needs HF_TOKEN" if one.gated else one.licence
            rows.append((one.name, count, one.family, fits, licence))
    print(f"\n{_table(rows)}\n\nencore models pull NAME downloads one; {machine.name}: "
          f"{human_bytes(machine.memory_bytes)}")  # fmt: skip


def fits_text(summary: Any) -> str:
    """Say whether a model fits this machine, and with which context."""
    if summary.state == "unsupported":
        return "not supported"
    if summary.state == "incomplete":
        return "incomplete: pull it again"
    fit = summary.fit
    if fit is None:
        return "-"
    if not fit.fits:
        return f"no: {fit.max_context} tokens" if fit.max_context else "no"
    return "yes" if fit.max_context >= fit.model_context else f"yes, --max-model-len {fit.max_context}"


def _details(summary: Any) -> str:
    from engine.library.memory import this_machine
    from server.formatting import human_bytes

    lines = [("name", summary.name)]
    if summary.path:
        lines.append(("files", summary.path))
    lines.append(("size", human_bytes(summary.size_bytes) + (", not on this machine" if not summary.path else "")))
    lines.append(("format", summary.format))
    if summary.family:
        lines.append(("family", summary.family))
    if summary.fit is not None:
        fit, machine = summary.fit, this_machine()
        lines += [
            ("parameters", f"{summary.parameters:,}"),
            ("context", f"{fit.model_context:,} tokens"),
            ("memory", f"{human_bytes(fit.weight_bytes)} of weights ({summary.weight_format}), "
             f"{human_bytes(fit.kv_bytes)} of KV cache for {fit.context:,} tokens"),
            ("fits here", f"{fits_text(summary)} ({machine.name}: {human_bytes(machine.memory_bytes)})"),
        ]  # fmt: skip
    if summary.problem:
        lines.append(("problem", " ".join(summary.problem.split())))
    return "\n".join(f"{name:<12}{text}" for name, text in lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
