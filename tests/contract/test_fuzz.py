"""Random programs are equal eager and captured, bit for bit, and the fuzzer finds checks that are broken on purpose."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.fuzz import blocks
from tests.contract.fuzz.campaign import EQUAL, check, program_of, run_campaign
from tests.contract.fuzz.grammar import APIS, Block, Program, Step, draw_program, parse, short
from tests.contract.fuzz.mutations import mutated
from tests.contract.fuzz.open_findings import is_open

SEED = 16
PROGRAMS = 150


@pytest.fixture(autouse=True)
def quiet():
    """Keep refusals out of the log: there are hundreds."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class DrawnSource:
    """Choices that hypothesis makes, so that it can shrink a program."""

    def __init__(self, draw):
        self._draw = draw

    def choice(self, options):
        return options[self._draw(st.integers(0, len(options) - 1))]

    def chance(self, percent):
        return self._draw(st.integers(0, 99)) >= 100 - percent


@st.composite
def programs(draw):
    return draw_program(DrawnSource(draw))


def test_programs_are_equal_or_refused_and_enough_of_them_replay(device):
    tally = run_campaign(range(PROGRAMS), SEED, device, time.monotonic() + 1800, max_shrunk=2)
    assert tally.differing == 0, tally.report()
    assert tally.lacking() == [], tally.report()
    assert all(tally.programs[api] for api in APIS) and tally.reasons


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(programs())
def test_programs_of_hypothesis_are_equal_or_refused(program):
    if not is_open(program):
        verdict = check(program, torch.device("cpu"))
        assert verdict.kind == EQUAL, f"{verdict.difference}\n{short(program)}"


# The others need more programs: `python -m tests.contract.fuzz --mutation NAME`.
@pytest.mark.parametrize(
    ("mutation", "concerned"),
    [
        ("addresses", lambda step: any(change.kind == "move_parameter" for change in step.changes)),
        ("autocast", lambda step: "autocast" in step.contexts),
    ],
)
def test_a_broken_check_is_found(mutation, concerned):
    programs = (program_of(SEED, index, None) for index in range(10_000))
    selected = (program for program in programs if any(map(concerned, program.steps)))
    with mutated(mutation):
        for program in itertools.islice(selected, 200):
            if check(program, torch.device("cpu")).kind == "differs":
                break
        else:
            pytest.fail(f"no program differs without {mutation}")
    assert check(program, torch.device("cpu")).kind == EQUAL  # with the check


def test_the_command_stops_in_time_and_a_printed_program_runs_again():
    command = [sys.executable, "-m", "tests.contract.fuzz", "--seed", str(SEED)]
    done = subprocess.run(
        [*command, "--programs", "12", "--processes", "2", "--seconds", "600"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 programs" in done.stdout
    one = subprocess.run([*command, "--only", "3"], capture_output=True, text=True)
    text = one.stdout.splitlines()[0]
    assert short(parse(text)) == text


def test_a_capture_refused_within_a_repr_leaves_autocast_as_it_was():
    """PyTorch's repr holds a guard that restores the autocast state whenever the exception's frames are freed."""
    block = Block(kind="host_read", value=list(blocks.READS).index("repr"))
    program = Program(
        api="iteration", blocks=(block,), steps=(Step(),) * 4, registers=True, quirks=("autocast_inside",)
    )
    try:
        assert check(program, torch.device("cpu")).reasons["capture_failed"]
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_a_refused_capture_around_compiled_code_leaves_no_trace_in_python_state():
    """Compiled code is not observed, so the state that it may change is found by the names in its source."""
    program = Program(api="attach", blocks=(Block(kind="elsewhere"), Block(kind="compiled")), steps=(Step(), Step()))
    verdict = check(program, torch.device("cpu"))
    assert verdict.kind == EQUAL and verdict.reasons["capture_failed"], verdict.difference
