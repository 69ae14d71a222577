"""Run programs eager and captured, compare, and count.

`check` compares one program. `Tally` sums over programs, also over those of several processes.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tests.contract.fuzz.compare import Log, first_difference
from tests.contract.fuzz.grammar import APIS, DEFAULT_STEP, Program, RandomSource, Step, draw_program, short
from tests.contract.fuzz.inference import run_inference
from tests.contract.fuzz.open_findings import is_open
from tests.contract.fuzz.training import Outcome, run_training

EQUAL, DIFFERS, UNSTABLE = "equal", "differs", "unstable"
# Programs of each API that must replay at least once: a run in which almost nothing replays proves nothing.
MINIMAL_SHARE = {"attach": 0.4, "iteration": 0.3, "cache": 0.3}
SHRINK_SECONDS = 20.0


@dataclass
class Verdict:
    """The outcome of one program; `difference` says what differs, if anything."""

    kind: str
    difference: str = ""
    replays: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@functools.cache
def _prepare(device: torch.device) -> None:
    """Let PyTorch make the state of dropout in cuDNN's layers, which draws from the generator once in a process."""
    if device.type == "cuda":
        nn.LSTM(4, 4, 2, dropout=0.5).to(device)(torch.zeros(1, 1, 4, device=device))


def check(program: Program, device: torch.device) -> Verdict:
    """Run a program eager and captured, and compare the two bit for bit."""
    _prepare(device)
    found = _run(program, device, True)
    wanted = _run(program, device, False, found.decisions)
    difference = _compare(wanted, found)
    refused = any(reason.startswith("raised") for reason in found.reasons)
    if not refused and difference is None and any(bucket is not None for bucket in found.decisions):
        difference = _padding_difference(_run(program, device, False), wanted, program)
    kind = EQUAL
    if difference is not None:
        again = _run(program, device, False, found.decisions)
        kind = DIFFERS if first_difference(wanted.log, again.log) is None else UNSTABLE
    return Verdict(kind, difference or "", found.replays, found.reasons)


def _run(program: Program, device: torch.device, captured: bool, decisions: Any = None) -> Outcome:
    if program.api == "cache":
        return run_inference(program, device, captured, decisions)
    return run_training(program, device, captured)


def _compare(wanted: Outcome, found: Outcome) -> str | None:
    """Return the first difference. A run that raised a GraphError was refused: what came before must be equal."""
    if any(reason.startswith("raised") for reason in found.reasons):
        end = next(index for index, (label, _) in enumerate(found.log.entries) if label == "refused")
        begin, log = Log(), Log()
        begin.entries, log.entries = wanted.log.entries[:end], found.log.entries[:end]
        return first_difference(begin, log)
    return first_difference(wanted.log, found.log)


def _padding_difference(alone: Outcome, padded: Outcome, program: Program) -> str | None:
    """Return what padding changes by more than rounding, unless random numbers explain it."""
    names = {block.kind for block in program.blocks} | {name for block in program.blocks for name in block.around}
    if names & {"noise", "dropout", "alpha_dropout", "encoder_layer", "multihead", "attention"}:
        return None
    is_expanded = any(step.inputs == "expanded" for step in program.steps)
    for (label, value), (other_label, other) in zip(alone.log.entries, padded.log.entries, strict=False):
        if is_expanded and label == "raised" != other_label:
            return None  # an expanded input can't be written to in place, and its copy in a buffer can
        if not _close(value, other):
            return f"{label}: padding changes it"
    return None


def _close(value: Any, other: Any) -> bool:
    if isinstance(value, tuple) and value and value[0] == "tensor" and isinstance(other, tuple):
        if value[:3] != other[:3] or not value[3]:
            return value == other
        dtype = getattr(torch, value[1].removeprefix("torch."))
        one, two = (torch.frombuffer(bytearray(data[3]), dtype=dtype) for data in (value, other))
        if not dtype.is_floating_point:
            return torch.equal(one, two)
        return torch.allclose(one.double(), two.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other):
        return all(map(_close, value, other))
    return value == other


# ---- shrinking -------------------------------------------------------------------------------------------------------


def shrink(program: Program, device: torch.device, until: float) -> tuple[Program, str]:
    """Return a smaller program that still differs from eager, and what differs, tried until `until` (monotonic)."""
    difference = check(program, device).difference
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            if time.monotonic() > until:
                return program, difference
            verdict = check(smaller, device)
            if verdict.kind == DIFFERS:
                program, difference, progress = smaller, verdict.difference, True
                break
    return program, difference


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing less, the largest things first."""
    for index in range(len(program.blocks)):
        if len(program.blocks) > 1:
            yield replace(program, blocks=program.blocks[:index] + program.blocks[index + 1 :])
    for index in reversed(range(len(program.steps))):
        if len(program.steps) > 1:
            yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    for index in range(len(program.quirks)):
        yield replace(program, quirks=program.quirks[:index] + program.quirks[index + 1 :])
    for index, block in enumerate(program.blocks):
        for number in range(len(block.around)):
            fewer = replace(block, around=block.around[:number] + block.around[number + 1 :])
            yield replace(program, blocks=(*program.blocks[:index], fewer, *program.blocks[index + 1 :]))
        if block.kind != "linear":
            plain = replace(block, kind="linear", value=0)
            yield replace(program, blocks=(*program.blocks[:index], plain, *program.blocks[index + 1 :]))
    for name in ("parts", "result", "optimizer", "warmup", "registers"):
        default = Program.__dataclass_fields__[name].default
        if getattr(program, name) != default:
            yield replace(program, **{name: default})
    yield from _smaller_steps(program)


def _smaller_steps(program: Program) -> Iterator[Program]:
    for name in ("calls", "backward", "clears", "inputs", "extra", "contexts", "rows"):
        default = getattr(DEFAULT_STEP, name)
        if any(getattr(step, name) != default for step in program.steps):
            yield replace(program, steps=tuple(replace(step, **{name: default}) for step in program.steps))
    for index, step in enumerate(program.steps):
        for changed in _smaller_step(step):
            yield replace(program, steps=(*program.steps[:index], changed, *program.steps[index + 1 :]))


def _smaller_step(step: Step) -> Iterator[Step]:
    for number in range(len(step.changes)):
        yield replace(step, changes=step.changes[:number] + step.changes[number + 1 :])
    for name in ("calls", "backward", "clears", "inputs", "extra", "contexts", "rows"):
        default = getattr(DEFAULT_STEP, name)
        if getattr(step, name) != default:
            yield replace(step, **{name: default})


# ---- counting --------------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """A program that differs from eager."""

    seed: int
    index: int
    program: Program
    difference: str


@dataclass
class Tally:
    """Sums over programs."""

    programs: Counter[str] = field(default_factory=Counter)  # by API
    replayed: Counter[str] = field(default_factory=Counter)  # programs that replayed at least once, by API
    replays: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)  # programs by API and reason of eager calls
    unstable: int = 0  # differ from eager, but two eager runs differ too
    differing: int = 0
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, program: Program, verdict: Verdict) -> None:
        self.programs[program.api] += 1
        self.replayed[program.api] += verdict.replays > 0
        self.replays[program.api] += verdict.replays
        for reason in verdict.reasons:
            self.reasons[program.api, reason] += 1
        self.unstable += verdict.kind == UNSTABLE
        self.differing += verdict.kind == DIFFERS

    def merge(self, other: Tally) -> None:
        for name in ("programs", "replayed", "replays", "reasons"):
            getattr(self, name).update(getattr(other, name))
        self.unstable += other.unstable
        self.differing += other.differing
        self.findings += other.findings

    def share(self, api: str) -> float:
        """Return the share of programs of an API that replayed at least once."""
        return self.replayed[api] / self.programs[api] if self.programs[api] else math.nan

    def lacking(self) -> list[str]:
        """Return the APIs of which too few programs replayed to prove anything."""
        return [api for api in APIS if self.programs[api] >= 20 and self.share(api) < MINIMAL_SHARE[api]]

    def report(self) -> str:
        """Return the table that the command prints."""
        lines = [f"{sum(self.programs.values())} programs in {self.seconds:.0f} s", ""]
        lines += ["| API | programs | replayed at least once | replays |", "|---|---|---|---|"]
        lines += [
            f"| {api} | {self.programs[api]} | {self.share(api):.0%} | {self.replays[api]} |"
            for api in APIS
            if self.programs[api]
        ]
        lines += ["", "| API | reason for eager calls | programs |", "|---|---|---|"]
        lines += [
            f"| {api} | {reason} | {count} |"
            for (api, reason), count in sorted(self.reasons.items(), key=lambda item: (item[0][0], -item[1]))
        ]
        lines += ["", f"nondeterministic in eager: {self.unstable}", f"differences: {self.differing}"]
        for finding in self.findings:
            lines += [
                "",
                f"--seed {finding.seed} --only {finding.index}: {finding.difference}",
                f"  {short(finding.program)}",
            ]
        for api in self.lacking():
            lines.append(f"too few programs replay through {api}: {self.share(api):.0%} < {MINIMAL_SHARE[api]:.0%}")
        return "\n".join(lines)


def program_of(seed: int, index: int, api: str | None = None) -> Program:
    """Return a program of a campaign: the first one drawn without an open finding."""
    for attempt in itertools.count():
        program = draw_program(RandomSource(f"{seed}:{index}:{attempt}"), api or APIS[index % len(APIS)])
        if not is_open(program):
            return program
    raise AssertionError


def run_campaign(
    indices: Iterable[int],
    seed: int,
    device: torch.device,
    until: float,
    *,
    max_shrunk: int = 20,
    announce: Callable[[int], None] = lambda index: None,
    api: str | None = None,
) -> Tally:
    """Check the programs of these indices until `until` (monotonic), and shrink those that differ."""
    tally, started = Tally(), time.monotonic()
    for index in indices:
        if time.monotonic() > until:
            break
        announce(index)
        program = program_of(seed, index, api)
        verdict = check(program, device)
        tally.add(program, verdict)
        if verdict.kind == DIFFERS:
            difference = verdict.difference
            if len(tally.findings) < max_shrunk:
                program, difference = shrink(program, device, min(until, time.monotonic() + SHRINK_SECONDS))
            tally.findings.append(Finding(seed, index, program, difference))
    tally.seconds = time.monotonic() - started
    return tally
