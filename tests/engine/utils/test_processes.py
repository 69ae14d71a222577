"""Child processes: how they start, end and fail, and that none outlives its parent. All are real processes."""

from __future__ import annotations

import io
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest

from engine.utils.processes.child import ChildProcess, anonymous_file, running_children
from engine.utils.processes.group import ProcessGroup
from engine.utils.processes.log import log_format
from tests.engine.utils import children
from tests.support.waiting import PATIENCE, is_alive, wait_for_end

ROOT = Path(__file__).resolve().parents[3]
SECONDS = PATIENCE


@pytest.fixture(scope="module")
def others() -> set[ChildProcess]:
    """The children that other tests of the run keep."""
    return set(running_children())


@pytest.fixture
def start(others: set[ChildProcess]) -> Iterator[Callable[..., ChildProcess]]:
    """Start children that are killed after the test."""
    started: list[ChildProcess] = []

    def make(function: Callable[..., None] | str, *args: object) -> ChildProcess:
        started.append(ChildProcess("the child", function, *args))
        return started[-1]

    yield make
    for child in started:
        child.kill()
        child.wait()
        child.pipe.close()
    assert set(running_children()) == others


def receive(child: ChildProcess) -> object:
    assert child.pipe.poll(SECONDS), f"{child.name} sends nothing"
    return child.pipe.recv()


# ---- one child -----------------------------------------------------------------------------------------------------


def test_a_child_gets_its_arguments_and_returns_0(start, others):
    child = start(children.echo, "a", {"b": 1})
    assert receive(child) == ("a", {"b": 1}) and child.exit_code is None
    assert set(running_children()) == {*others, child}
    child.pipe.send("again")
    assert receive(child) == "again"
    child.pipe.send(None)
    assert child.wait(SECONDS) == 0 and set(running_children()) == others


def test_a_function_may_be_named_without_importing_its_module(start):
    assert receive(start("tests.engine.utils.children:echo", 5)) == (5,)


def test_a_closed_pipe_reaches_the_child_and_its_exit_code_the_parent(start):
    child = start(children.echo)
    receive(child)
    child.pipe.close()
    assert child.wait(SECONDS) == 3


def test_a_killed_child_is_noticed_at_its_pipe_with_the_signal_as_reason(start):
    child = start(children.echo)
    receive(child)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EOFError):
        receive(child)
    assert child.exit_reason() == "the child ended with exit code -9"
    child.kill()  # does nothing


def test_an_exception_is_printed_and_makes_the_exit_code_1(start, capfd):
    child = start(children.fail, "no such device")
    assert child.wait(SECONDS) == 1
    assert "RuntimeError: no such device" in capfd.readouterr().err


def test_a_child_that_ignores_the_request_to_stop_is_killed_after_the_grace_period(start, caplog):
    child = start(children.hang)
    receive(child)
    child.pipe.send(None)
    os.kill(child.pid, signal.SIGTERM)  # ignored, like SIGINT
    began = time.monotonic()
    child.stop(0.5)
    assert time.monotonic() - began >= 0.5 and child.exit_code == -9
    assert "the child did not end within 0.5 s; it is killed" in caplog.text


def test_a_child_that_stops_in_time_is_not_killed(start, caplog):
    child = start(children.echo)
    receive(child)
    child.pipe.send(None)
    child.stop(SECONDS)
    assert child.exit_code == 0 and "killed" not in caplog.text


def test_stop_signals_are_ignored_from_the_start_and_unblocked(start):
    child, numbers = start(children.signals), [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    for number in numbers:
        os.kill(child.pid, number)  # while Python is still starting
    assert receive(child) == ([], numbers)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(numbers) == set()


def test_connections_sockets_and_files_are_inherited_but_not_by_grandchildren(start):
    ours, theirs = Pipe()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener, anonymous_file("test", 8) as file:
        child = start(children.use_files, theirs, listener, file)
        assert receive(child) == []
        assert ours.recv() == listener.getsockname()
        assert file.read() == b"child\0\0\0"
        assert isinstance(file, io.FileIO)


def test_a_child_logs_in_the_parents_format_with_its_prefix(start, capfd):
    root, engine = logging.getLogger(), logging.getLogger("engine")
    handler, level = logging.StreamHandler(), engine.level
    handler.setFormatter(logging.Formatter("<%(levelname)s> %(message)s"))
    root.addHandler(handler)
    engine.setLevel("INFO")
    try:
        start(children.log, *log_format()).wait(SECONDS)
    finally:
        root.removeHandler(handler)
        engine.setLevel(level)
    assert capfd.readouterr().err == "<INFO> rank 1: an info of 1\n"


def test_a_formatter_that_can_not_be_pickled_is_replaced_by_the_default():
    class LocalFormatter(logging.Formatter):
        pass

    handler = logging.StreamHandler()
    handler.setFormatter(LocalFormatter())
    before = logging.getLogger().handlers[:]
    logging.getLogger().handlers[:] = [handler]
    try:
        formatter, _ = log_format()
    finally:
        logging.getLogger().handlers[:] = before
    assert pickle.loads(formatter) is None


# ---- failures at the start -----------------------------------------------------------------------------------------


def test_arguments_that_can_not_be_pickled_raise_and_start_nothing(others):
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        ChildProcess("the child", lambda pipe: None)
    assert set(running_children()) == others and len(os.listdir("/proc/self/fd")) == files


def test_a_function_of_the_main_file_is_refused_with_advice():
    code = (
        "from engine.utils.processes.child import ChildProcess\n"
        "def run(pipe): pass\n"
        "ChildProcess('the engine process', run)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "the engine process can't import" in done.stderr
    assert "define it in a module" in done.stderr


def test_too_few_file_descriptors_raise_an_os_error_and_the_next_start_succeeds(start):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    receive(start(children.echo))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError):
            start(children.echo)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    receive(start(children.echo))


# ---- the parent's end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["hang", "busy"])
def test_a_child_ends_when_its_parent_is_killed_whatever_it_does(start, what):
    parent = start(children.parent_of, what)
    pid, _ = receive(parent)
    assert is_alive(pid)
    parent.kill()
    wait_for_end([pid])


def test_a_child_that_starts_while_its_parent_dies_ends_too():
    """The kernel signals only what asked for it before the parent's end: the child compares its parent afterwards."""
    code = (
        "import os, signal, sys\nfrom engine.utils.processes.child import ChildProcess\n"
        "child = ChildProcess('the child', 'tests.engine.utils.children:idle')\n"
        "print(child.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert parent.wait(SECONDS) == -9
    wait_for_end([pid])


def test_a_child_outlives_the_thread_that_asked_for_it(start):
    assert receive(start(children.parent_in_thread)) == "alive"


def test_children_are_killed_when_their_parent_returns(start):
    parent = start(children.leave_child_behind)
    pid = receive(parent)
    assert parent.wait(SECONDS) == 0
    wait_for_end([pid])


# ---- groups --------------------------------------------------------------------------------------------------------


def group_of(*functions: Callable[..., None]) -> ProcessGroup:
    return ProcessGroup([lambda n=n, one=one: ChildProcess(f"child {n}", one) for n, one in enumerate(functions, 1)])


def test_the_first_failure_of_a_group_is_kept_and_reported_once():
    group, calls = group_of(children.echo, children.hang), []
    try:
        for child in group.children:
            receive(child)
        group.watch(lambda: calls.append("failed"))
        os.kill(group.pids[0], signal.SIGKILL)
        assert group.pending_failure() == "child 1 ended with exit code -9"
        assert group.fail("a later reason") == "child 1 ended with exit code -9"
    finally:
        group.kill()
    assert calls == ["failed"] and [child.exit_code for child in group.children] == [-9, -9]


def test_a_group_that_was_asked_to_stop_has_not_failed_and_a_hung_member_is_killed():
    group, calls = group_of(children.echo, children.hang), []
    for child in group.children:
        receive(child)
    group.watch(lambda: calls.append("failed"))
    group.begin_stop()
    for child in group.children:
        child.pipe.send(None)
    assert group.children[0].wait(SECONDS) == 0
    group.stop(0.5)
    assert [child.exit_code for child in group.children] == [0, -9]
    assert group.failure is None and calls == [] and all(child.pipe.closed for child in group.children)
    group.kill()  # does nothing


def test_a_group_that_can_not_start_completely_ends_what_it_has_started(others):
    def refuse() -> ChildProcess:
        raise OSError("no more processes")

    with pytest.raises(OSError, match="no more processes"):
        ProcessGroup([lambda: ChildProcess("child 1", children.hang), refuse])
    assert set(running_children()) == others


def test_messages_of_a_group_are_received_as_they_come():
    group = group_of(children.echo, children.echo)
    try:
        waiting = set(group.children)
        while waiting:
            for child in group.readable(waiting):
                assert child.pipe.recv() == ()
                waiting.remove(child)
    finally:
        group.kill()
