"""A trainer in a separate process that sends the weights of a safetensors file over groups. Imports little."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import safetensors.torch

from engine.distributed.weight_group import WeightGroup
from tests.support.waiting import PATIENCE


def run(pipe: Any, file: Path, backend: str, device: str) -> None:
    """Obey commands until the pipe's end: join a group, send the weights, leave it. See Trainer.send."""
    tensors = [(name, one.to(device)) for name, one in safetensors.torch.load_file(file).items()]
    pipe.send("ready")
    while True:
        try:
            port, name, options, ends = pipe.recv()
        except EOFError:
            return
        where = {"backend": backend, "device": device, "timeout": PATIENCE}
        group = WeightGroup.join("127.0.0.1", port, rank=0, world_size=2, name=name, **where)
        if ends == "sends nothing":
            time.sleep(3600)  # until it is killed
        elif ends == "dies":
            group.send(tensors[: len(tensors) // 2])
            os._exit(1)
        else:
            group.send(tensors, **options)
        group.close()


class Trainer:
    """The process, which is started again after it died."""

    def __init__(self, file: Path, backend: str, device: str):
        self._arguments = (file, backend, device)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._is_ready = False

    def send(self, port: int, name: str, *, ends: str = "", **options: Any) -> None:
        """Join the group `name` at `port` and send all weights with these options of WeightGroup.send.

        `ends` "dies": the process ends after half of them; "sends nothing": it only joins.
        """
        if not self._process.is_alive():
            self._start()
        if not self._is_ready:
            assert self._pipe.poll(PATIENCE) and self._pipe.recv() == "ready"
            self._is_ready = True
        self._pipe.send((port, name, options, ends))
        if ends == "dies":
            self._is_ready = False

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        self._process.kill()
