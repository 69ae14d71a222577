"""Progress: a bar on a terminal, whole lines elsewhere, nothing when it is off."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from engine import Engine, EngineConfig
from engine.errors import ConfigError, RequestError
from engine.utils import progress
from engine.utils.progress import Progress
from tests.support.waiting import PATIENCE

END = "\0"  # follows what was drawn


@pytest.fixture
def unlogged(monkeypatch) -> None:
    """A program that has set up no log."""
    monkeypatch.setattr(progress, "logger", logging.Logger("without handlers"))


@contextlib.contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Make standard error a terminal; yield a function that reads what was drawn there."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    with open(slave, "w") as stream, contextlib.redirect_stderr(stream):

        def drawn() -> str:
            stream.write(END)
            stream.flush()
            text = ""
            while not text.endswith(END):  # what was written arrives in order, but not at once
                text += os.read(master, 1 << 16).decode()
            return text.removesuffix(END)

        yield drawn
    os.close(master)


def test_lines_are_whole_and_say_what_takes_time(unlogged, monkeypatch, capfd):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress("loading tiny", "tensors") as shown:
        for done in range(3):
            shown(done, 2, "fast")
    out, err = capfd.readouterr()
    assert out == "" and "\r" not in err
    *lines, last = err.splitlines()
    assert lines == ["loading tiny: 0 of 2 tensors, fast", "loading tiny: 1 of 2 tensors, fast"]
    assert last.startswith("loading tiny: 2 of 2 tensors, fast in 0.")


def test_lines_are_rare(unlogged, capfd):
    with Progress("capturing", "graphs") as shown:
        for done in range(1001):
            shown(done, 1000)
    assert len(capfd.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("options", [{"enabled": False}, {"delay": 60.0}])
def test_nothing_is_shown_if_it_is_off_or_fast(unlogged, capfd, options):
    with Progress("generating", "sequences", **options) as shown:
        shown(0, 2)
        shown(2, 2)
    with Progress("capturing", "graphs") as shown:
        shown(0, 0)
    assert capfd.readouterr() == ("", "")


def test_a_failure_reports_no_success(unlogged, capfd):
    with pytest.raises(ValueError), Progress("loading tiny", "tensors") as shown:
        shown(0, 2)
        raise ValueError
    assert capfd.readouterr().err == "loading tiny: 0 of 2 tensors\n"


def test_lines_go_to_the_log_of_a_program_that_has_one(caplog, capfd):
    caplog.set_level(logging.INFO, progress.__name__)
    with Progress("loading tiny", "tensors") as shown:
        shown(2, 2)
    assert [record.getMessage()[:30] for record in caplog.records] == ["loading tiny: 2 of 2 tensors i"]
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def eager(monkeypatch) -> None:
    """Draw a bar at once and at every call."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)


def test_a_terminal_gets_a_bar(eager):
    with terminal() as drawn:
        with Progress("capturing", "graphs") as shown:
            for done in range(4):
                shown(done, 3, f"b={done}")
        text = drawn()
    assert text.count("\r") >= 4 and "capturing: 100%" in text and "3/3" in text and "b=3" in text
    assert text.endswith("\r\n")


def test_a_bar_shows_the_whole_time_of_a_task(eager):
    with terminal() as drawn:
        shown = Progress("capturing", "graphs")
        time.sleep(1.1)
        with shown:
            shown(1, 2)
        assert max(map(int, re.findall(r"00:(\d\d)<", drawn()))) >= 1


@pytest.mark.parametrize("options", [{}, {"enabled": False}])
def test_a_fast_task_draws_no_bar(monkeypatch, options):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "BAR_DELAY", PATIENCE)  # a busy machine makes any task slow
    with terminal() as drawn:
        with Progress("loading tiny", "tensors", **options) as shown:
            shown(1, 1)
        assert drawn() == ""


def test_a_dumb_terminal_gets_lines(unlogged, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as drawn:
        with Progress("loading tiny", "tensors") as shown:
            shown(1, 1)
        text = drawn().replace("\r\n", "\n")
    assert text.startswith("loading tiny: 1 of 1 tensors in ") and "\r" not in text


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_missing_or_closed_standard_error_is_no_error(unlogged, monkeypatch, stream):
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("loading tiny", "tensors") as shown:
        shown(1, 1)


# A program of its own, as an embedder's: pytest sets up a log. It imports torch, which takes some seconds.
PROGRAM = """
import sys
from engine import Engine, EngineConfig
with Engine(EngineConfig(model=sys.argv[1], warmup="full", max_num_seqs=2, max_model_len=64, dtype="float32",
                         progress=sys.argv[2] == "on")) as engine:
    engine.generate(prompt_token_ids=[[1, 2]], sampling_params={"max_tokens": 2}, use_tqdm=sys.argv[2] == "on")
"""


def test_a_program_sees_loading_captures_and_generation(tiny_model):
    done = subprocess.run([sys.executable, "-c", PROGRAM, tiny_model, "on"], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    for title in (f"loading {tiny_model.name}: ", "capturing: ", "generating: 1 of 1 sequences, "):
        assert title in done.stderr
    assert "\r" not in done.stderr


def test_generate_follows_use_tqdm_and_else_the_setting(unlogged, tiny_model, capfd):
    config = {"model": str(tiny_model), "max_num_seqs": 2, "max_model_len": 64, "progress": False}
    with Engine(EngineConfig(**config)) as engine:
        assert capfd.readouterr() == ("", "")
        for wanted, lines in ((None, 0), (False, 0), (True, 2)):
            engine.generate(prompt_token_ids=[[1, 2]], sampling_params={"max_tokens": 2}, use_tqdm=wanted)
            assert len(capfd.readouterr().err.splitlines()) == lines
        with pytest.raises(RequestError, match="use_tqdm=1: give True, False or None"):
            engine.generate(prompt_token_ids=[[1, 2]], use_tqdm=1)
    with pytest.raises(ConfigError, match="progress='off' must be True or False"):
        EngineConfig(progress="off")
