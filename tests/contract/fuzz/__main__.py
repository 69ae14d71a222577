"""Command line of the fuzzer: `python -m tests.contract.fuzz --programs 1000 --device cpu --seed 0`."""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch

from tests.contract.fuzz.campaign import check, program_of, run_campaign, shrink
from tests.contract.fuzz.grammar import APIS, parse, short
from tests.contract.fuzz.mutations import MUTATIONS, mutated
from tests.contract.fuzz.processes import run_processes


def main() -> int:
    """Run a campaign, or one program. Returns 1 for a difference, or if too few programs replayed."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="programs to run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="selects the programs")
    parser.add_argument("--seconds", type=float, default=86400.0, help="stop after this time")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the programs")
    parser.add_argument("--api", choices=APIS, help="only programs for this API")
    parser.add_argument("--only", type=int, help="check and shrink the program with this index")
    parser.add_argument("--program", help="check this program, as printed")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="break this check of the core")
    parser.add_argument("--verbose", action="store_true", help="show the log of graph_cache")
    arguments = parser.parse_args()
    if not arguments.verbose:
        logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    if arguments.only is not None or arguments.program:
        return _run_one(arguments, device)
    until = time.monotonic() + arguments.seconds
    started = time.monotonic()
    if arguments.processes > 1:
        tally, crashes = run_processes(arguments)
    else:
        with mutated(arguments.mutation):
            tally = run_campaign(range(arguments.programs), arguments.seed, device, until, api=arguments.api)
        crashes = []
    tally.seconds = time.monotonic() - started
    print(tally.report())
    print(*crashes, sep="\n")
    return int(bool(tally.differing or crashes or tally.lacking()))


def _run_one(arguments: argparse.Namespace, device: torch.device) -> int:
    program = (
        parse(arguments.program) if arguments.program else program_of(arguments.seed, arguments.only, arguments.api)
    )
    with mutated(arguments.mutation):
        verdict = check(program, device)
        print(short(program))
        print(verdict)
        if verdict.kind == "differs":
            program, difference = shrink(program, device, time.monotonic() + arguments.seconds)
            print(f"{difference}\n  {short(program)}")
    return int(verdict.kind == "differs")


if __name__ == "__main__":
    sys.exit(main())
