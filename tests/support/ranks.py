"""Run the ranks of a job as concurrent processes, and kill those that remain."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def outputs_of(commands: Sequence[Sequence[str]], seconds: float, **options: Any) -> list[str]:
    """Run commands concurrently and return their standard outputs; `options` are passed to Popen.

    Fails if a command takes longer than `seconds` or exits with an error.
    """
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        for command in commands
    ]
    try:
        with ThreadPoolExecutor(len(ranks)) as pool:  # drain all pipes: a full pipe would block its rank
            ended = list(pool.map(lambda rank: rank.communicate(timeout=seconds), ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(errors[-2000:] for _, errors in ended)
    return [output for output, _ in ended]
