"""Logging to a standard error that is not read, read late, or closed. The logging side is a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
SET_UP = """
    import logging, sys, warnings
    from engine.utils import stderr_handler
    from engine.utils.stderr_handler import StderrHandler, log_uncaught
    stderr_handler.FLUSH_SECONDS = 60  # the reader may have to wait for a processor
    handler = StderrHandler(max_bytes=10_000)
    handler.setFormatter(logging.Formatter("<%(levelname)s> %(message)s"))
    logging.basicConfig(handlers=[handler], level="INFO")
"""


def start(code: str) -> subprocess.Popen[str]:
    """Run the code after SET_UP in a process whose standard files are pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = textwrap.dedent(SET_UP) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, **pipes)


def test_lines_beyond_the_limit_are_dropped_and_counted_while_nobody_reads():
    code = """
        for number in range(5000):
            logging.info("line %d of this test", number)
        print("not blocked", flush=True)
        sys.stdin.readline()
        logging.warning("the last one")
    """
    with start(code) as process:
        assert process.stdout.readline() == "not blocked\n"  # before anything was read from standard error
        lines = [process.stderr.readline().rstrip("\n") for _ in range(10)]  # the pipe and then the handler have room
        time.sleep(0.2)
        process.stdin.write("\n")
        process.stdin.flush()
        lines += process.stderr.read().splitlines()
        assert process.wait(PATIENCE) == 0
    number = missing = 0
    for line in lines[:-1]:
        if found := re.fullmatch(r"<ERROR> (\d+) log lines are missing: standard error was not read", line):
            number += int(found[1])
            missing += int(found[1])
        else:
            assert line == f"<INFO> line {number} of this test"
            number += 1
    assert number == 5000 and missing > 1000 and lines[-1] == "<WARNING> the last one"


def test_a_closed_standard_error_drops_lines_and_stops_nothing():
    code = """
        sys.stdin.readline()
        for number in range(100):
            logging.info("line %d", number)
        handler.flush()
        print(handler.num_dropped, flush=True)
    """
    with start(code) as process:
        process.stderr.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.read() == "100\n"
        assert process.wait(PATIENCE) == 0


def test_warnings_uncaught_exceptions_and_broken_records_are_logged():
    code = """
        log_uncaught()
        logging.info("needs %d", "a number")
        warnings.warn("beware")
        raise RuntimeError("no way out")
    """
    with start(code) as process:
        shown = process.stderr.read()
        assert process.wait(PATIENCE) == 1
    assert "<ERROR> a record of root can't be formatted: Traceback" in shown and "%d format" in shown
    assert re.search(r"^<WARNING> .*UserWarning: beware", shown, re.MULTILINE)
    assert "<CRITICAL> uncaught exception\nTraceback" in shown and "RuntimeError: no way out" in shown
