"""Processes that work together, as the ranks of a job: started at once, none left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def outputs_of(commands: Sequence[Sequence[str]], seconds: float, **options: Any) -> list[str]:
    """What each command wrote to its output, once all have ended well, within `seconds`; `options` are Popen's."""
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        for command in commands
    ]
    try:
        with ThreadPoolExecutor(len(ranks)) as pool:  # one that waits for another may write more than a pipe holds
            ended = list(pool.map(lambda rank: rank.communicate(timeout=seconds), ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(errors[-2000:] for _, errors in ended)
    return [output for output, _ in ended]
