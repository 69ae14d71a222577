"""Run a function as tensor-parallel ranks: processes of one gloo group on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from engine.distributed.process_group import join_ranks, leave_ranks

CPU = torch.device("cpu")


def run_ranks(function: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2) -> list[Any]:
    """Call function(parallel, *arguments) in `ranks` processes and return their results in order of rank.

    `function` must be defined at the top of a module. Results travel through files in `folder`.
    """
    torch.multiprocessing.spawn(_rank, (function, str(folder), ranks, arguments), nprocs=ranks)
    return [torch.load(folder / f"result.{rank}") for rank in range(ranks)]


def _rank(rank: int, function: Callable[..., Any], folder: str, ranks: int, arguments: tuple) -> None:
    torch.set_num_threads(1)
    parallel = join_ranks(f"{folder}/rendezvous", rank, ranks, CPU)
    torch.save(function(parallel, *arguments), f"{folder}/result.{rank}")
    leave_ranks(CPU)
