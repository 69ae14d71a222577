"""Run a campaign in several processes."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from typing import Any

import torch

from tests.contract.fuzz.campaign import Tally, run_campaign
from tests.contract.fuzz.mutations import mutated


def run_processes(arguments: argparse.Namespace) -> tuple[Tally, list[str]]:
    """Run a campaign in several processes. A process that dies is reported with the program that it ran."""
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    pipes, workers = [], []
    for number in range(arguments.processes):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(arguments, number, theirs), daemon=True)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    tally, crashes = Tally(), []
    for pipe, worker in zip(pipes, workers, strict=True):
        last: Any = None
        try:
            while not isinstance(last_message := pipe.recv(), Tally):
                last = last_message
            tally.merge(last_message)
        except EOFError:
            worker.join()
            crashes.append(f"a process ended with code {worker.exitcode}: --seed {arguments.seed} --only {last}")
        worker.join()
    return tally, crashes


def _work(arguments: argparse.Namespace, number: int, pipe: Any) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.ones(1, device=arguments.device)
    indices = range(number, arguments.programs, arguments.processes)
    # The start of a process counts too: the whole command must end in time.
    until = time.monotonic() + max(1.0, arguments.seconds - 20)
    with mutated(arguments.mutation):
        tally = run_campaign(
            indices,
            arguments.seed,
            torch.device(arguments.device),
            until,
            max_shrunk=4,
            announce=pipe.send,
            api=arguments.api,
        )
    pipe.send(tally)
