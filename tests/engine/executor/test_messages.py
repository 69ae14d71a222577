"""Messages to worker processes: values, arrays and tensors arrive equal, and shared memory is freed."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.executor.messages import SHARED_BYTES, PackedMessage, SharedTensor, receive


def shared_files() -> int:
    found = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("encore-message" in path for path in found)


def round_trip(message: Any, receivers: int = 1) -> list[Any]:
    """Send a message to several pipes and return what each receives; the sender's memory is released before that."""
    pipes = [Pipe() for _ in range(receivers)]
    packed = PackedMessage(message)
    senders = [threading.Thread(target=packed.send, args=(end,)) for end, _ in pipes]
    for sender in senders:
        sender.start()
    received = [receive(end) for _, end in pipes]
    for sender in senders:
        sender.join()
    packed.close()
    return received


@pytest.mark.parametrize("count", [0, 1, 7, SHARED_BYTES // 8 - 1, SHARED_BYTES // 8, 10**6])
def test_arrays_arrive_equal_and_writable(count):
    arrays = np.arange(count), np.arange(count, dtype=np.int32)[::-1], np.zeros((2, 3), np.uint8)
    for received in round_trip(("name", arrays, None), receivers=2):
        assert received[0] == "name" and received[2] is None
        for array, other in zip(arrays, received[1], strict=True):
            assert array.dtype == other.dtype and np.array_equal(array, other)
            other[...] = 1
    assert np.array_equal(arrays[0], np.arange(count))


def test_more_arrays_than_one_system_call_writes_arrive_equal():
    arrays = [np.full(number % 50, number) for number in range(3000)]
    [received] = round_trip(arrays)
    assert all(np.array_equal(array, other) for array, other in zip(arrays, received, strict=True))


def test_many_bytes_without_arrays_arrive():
    [received] = round_trip({"text": "x" * 10**6, "ids": list(range(10**5))})
    assert len(received["text"]) == 10**6 and received["ids"][-1] == 10**5 - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 4), (5,), (300, 70), (2, 3, 4)])
def test_tensors_arrive_equal(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    parameter = torch.nn.Parameter(torch.randn(8, 9).to(dtype))
    views = [tensor, parameter, parameter.T, parameter[::2]]
    [received] = round_trip([SharedTensor.of(view) for view in views])
    for view, shared in zip(views, received, strict=True):
        opened = shared.open()
        assert opened.dtype == dtype and opened.shape == view.shape and torch.equal(opened, view)


def test_a_view_does_not_send_its_whole_storage():
    row = torch.zeros(1000, 1000)[3]
    sender, receiver = Pipe()
    with PackedMessage(SharedTensor.of(row)) as packed:
        packed.send(sender)
    assert len(receiver.recv_bytes()) < 2 * row.nbytes


def test_shared_memory_is_freed_when_the_message_and_its_arrays_are_dropped():
    assert shared_files() == 0
    [received] = round_trip(np.arange(10**6))
    assert "encore-message" in Path("/proc/self/maps").read_text()
    assert received.sum() == sum(range(10**6))
    del received
    assert shared_files() == 0 and "encore-message" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("sent", ["nothing", "no arrays"])
def test_a_sender_that_dies_ends_the_receiver(sent):
    sender, receiver = Pipe()
    if sent == "no arrays":
        first, second = Pipe()
        with PackedMessage(np.arange(10**6)) as packed:
            packed.send(first)
        sender.send_bytes(second.recv_bytes())
    sender.close()
    with pytest.raises(EOFError):
        receive(receiver)


def test_sending_to_a_closed_receiver_raises():
    sender, receiver = Pipe()
    receiver.close()
    with PackedMessage(np.arange(10**6)) as packed, pytest.raises(OSError):
        packed.send(sender)
    assert shared_files() == 0
