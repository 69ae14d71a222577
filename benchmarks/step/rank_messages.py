"""The message of a step to another rank: from the call that sends it until the other process has it.

    python -m benchmarks step.rank_messages --json FILE

No model runs while it is timed. `decode` is a steady step of --rows rows, `prefill` a step of --tokens prompt tokens in
prompts of 1,024. array_bytes: arrays of the step; pickle_bytes: the rest. send_us: on rank 0, for all ranks.
receive_us: from the start of sending until the last rank has unpickled the step. Medians of --repeats steps, 2 ms
apart. `pipe`: arrays of every size are sent through the pipe instead of shared memory.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import harness
from benchmarks.shapes import write_shape
from engine.config import EngineConfig
from engine.core.builder import build_loop
from engine.executor import messages
from engine.executor.messages import Call, PackedMessage, RankState, receive
from engine.protocol.request import EngineRequest, SamplingParams
from engine.worker.async_output import AsyncStepOutput
from engine.worker.step_input import StepInput

NEEDS = "CPU"
PROMPT = 1024


def make_steps(rows: int, tokens: int) -> dict[str, StepInput]:
    """Return a prefill step of `tokens` tokens and a steady decode step of `rows` rows, as a scheduler makes them."""
    found: list[StepInput] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = build_loop(
            EngineConfig(
                model=write_shape("tiny", folder),
                load_format="dummy",
                max_num_seqs=max(rows, tokens // PROMPT),
                max_num_batched_tokens=tokens,
                inference_cuda_graph_scope="none",
                graph_manifest="none",
            )
        )
        execute = loop.executor.worker.runner.execute

        def record(step: StepInput) -> AsyncStepOutput:
            found.append(step)
            return execute(step)

        loop.executor.worker.runner.execute = record  # type: ignore[method-assign]
        for count, length in ((tokens // PROMPT, PROMPT), (rows, 16)):
            for number in range(count):
                params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
                prompt = [3 + (number + place) % 1000 for place in range(length)]
                loop.add(EngineRequest(request_id=f"{length}-{number}", prompt_token_ids=prompt, params=params))
            while loop.has_work:
                loop.step()
        loop.close()
    [prefill] = [step for step in found if step.prefill and sum(one.length for one in step.prefill.chunks) == tokens]
    decode = [step for step in found if step.decode and len(step.decode.slots) == rows][-1]
    return {"decode": decode, "prefill": prefill}


def answer(pipe: Connection) -> None:
    """Receive steps until None, and answer each with the time at which it was there."""
    while receive(pipe) is not None:
        pipe.send(time.monotonic_ns())


def measure(step: StepInput, pipes: Sequence[Connection], repeats: int) -> dict[str, Any]:
    sent, received = [], []
    for number in range(repeats):
        time.sleep(0.002)
        began = time.monotonic_ns()
        with PackedMessage(Call(number, RankState(0, 0, (0, 0, 0, 0)), "execute", (step,))) as packed:
            for pipe in pipes:
                packed.send(pipe)
        sent.append(time.monotonic_ns() - began)
        received.append(max(pipe.recv() for pipe in pipes) - began)
    return {
        "send_us": round(statistics.median(sent) / 1e3, 1),
        "receive_us": round(statistics.median(received) / 1e3, 1),
        "receive_p90_us": round(sorted(received)[len(received) * 9 // 10] / 1e3, 1),
    }


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--rows", type=harness.count, default=64)
    parser.add_argument("--tokens", type=harness.count, default=8192)
    parser.add_argument("--ranks", type=harness.counts, default=[2], help="with rank 0")
    parser.add_argument("--repeats", type=harness.count, default=500)
    args = parser.parse_args(argv)
    report = harness.Report(__spec__.name, args, argv)
    steps, context, shared_bytes = make_steps(args.rows, args.tokens), get_context("spawn"), messages.SHARED_BYTES
    for ranks in args.ranks:
        ends = [Pipe() for _ in range(ranks - 1)]
        pipes = [end for end, _ in ends]
        processes = [context.Process(target=answer, args=(end,)) for _, end in ends]
        for process in processes:
            process.start()
        for name, step in steps.items():
            buffers: list[pickle.PickleBuffer] = []
            size = len(pickle.dumps(step, 5, buffer_callback=buffers.append))
            sizes = {"array_bytes": sum(buffer.raw().nbytes for buffer in buffers), "pickle_bytes": size}
            for way, least in (("shared memory", shared_bytes), ("pipe", sys.maxsize)):
                messages.SHARED_BYTES = least
                report.add({"step": name, "ranks": ranks, "way": way} | sizes | measure(step, pipes, args.repeats))
        for pipe, process in zip(pipes, processes, strict=True):
            with PackedMessage(None) as packed:
                packed.send(pipe)
            process.join()
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
