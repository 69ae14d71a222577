"""Rollouts of a trainer on one GPU: output tokens per second with and without log-probabilities, and weight updates.

    python -m benchmarks serving.rollouts --shape qwen3-0.6b
    python -m benchmarks serving.rollouts --shape qwen3-0.6b --engine sglang       # alone, with SGLang on PYTHONPATH
    python -m benchmarks serving.rollouts --shape qwen3-8b --samples 0 --updates 5
    python -m benchmarks serving.rollouts --shape qwen3-8b --samples 0 --streams 1,8,32

Random weights, temperature 1. Each of 256 prompts of 512 tokens is sampled 8 times; the samples' lengths are lognormal
(median 256, sigma 0.8, at most 1,024; seed 3). All are given at once, the samples of a prompt one after the other, with
prefix caching. Rounds alternate between without and with log-probabilities, after a short warm-up.

update_ms: `Engine.update_weights` of all weights from tensors on the GPU, which steps wait for, until the copies have
ended; the floor is a copy of as many bytes from one tensor to another.

gap_ms: what a stream sees of an update. So many streams with 512-token prompts decode while a thread stages new weights
beside the old ones; then `Engine.update_weights` writes them between two steps, and the KV of the streams is computed
again. The longest time between two tokens of a stream: without an update (usual_ms, the median), while weights are
staged (staging_ms), and around the update (gap_ms), of which update_ms are in the call.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks import harness
from benchmarks.shapes import shape, write_shape

if TYPE_CHECKING:
    from torch import Tensor

    from engine import Engine

NEEDS = "1 GPU"
GROUP, PROMPT_TOKENS, LONGEST = 8, 512, 1024
WARM_TOKENS, USUAL_TOKENS, LATER_TOKENS, STAGING_SECONDS = 8, 48, 16, 0.3
Generate = Callable[[list[list[int]], list[int], bool], int]
"""(prompts, output tokens of each, whether with log-probabilities) -> tokens that came."""


def workload(samples: int) -> tuple[list[list[int]], list[int]]:
    """Return a prompt and a number of tokens for each sample."""
    generator = random.Random(3)
    prompts = [[generator.randrange(100, 30_000) for _ in range(PROMPT_TOKENS)] for _ in range(-(-samples // GROUP))]
    lengths = [min(LONGEST, max(1, round(generator.lognormvariate(5.545, 0.8)))) for _ in range(samples)]
    return [prompts[index // GROUP] for index in range(samples)], lengths


def measure(report: harness.Report, generate: Generate, samples: int, rounds: int, flush: Callable[[], object]) -> None:
    """Report the tokens per second of each round."""
    prompts, lengths = workload(samples)
    for with_logprobs in (False, True):  # captures what is missing
        generate([prompt[::-1] for prompt in prompts[:64]], [8] * len(prompts[:64]), with_logprobs)
    for number in range(rounds):
        for with_logprobs in (False, True):
            flush()
            started = time.perf_counter()
            tokens = generate(prompts, lengths, with_logprobs)
            seconds = time.perf_counter() - started
            report.add({
                "log-probabilities": str(with_logprobs), "round": number, "samples": len(prompts), "tokens": tokens,
                "seconds": round(seconds, 2), "tokens_per_s": round(tokens / seconds),
            })  # fmt: skip


def run_encore(options: argparse.Namespace, folder: str, report: harness.Report) -> None:
    """Measure Encore."""
    import torch

    from engine import Engine, EngineConfig, SamplingParams

    config = EngineConfig(
        model=folder, load_format="dummy", graph_manifest="none", progress=False, max_num_seqs=options.max_num_seqs,
        max_model_len=PROMPT_TOKENS + LONGEST, warmup="full" if options.samples else "lazy",
        **({"gpu_memory_utilization": 0.5} if options.streams else {}),  # room for staged weights
    )  # fmt: skip
    started = time.perf_counter()
    with Engine(config) as engine:
        print(f"Encore on {torch.cuda.get_device_name()}, started in {time.perf_counter() - started:.1f} s", flush=True)

        def generate(prompts: list[list[int]], lengths: list[int], with_logprobs: bool) -> int:
            params = [
                SamplingParams(
                    temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0 if with_logprobs else None
                )
                for length in lengths
            ]
            outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
            return sum(len(output.token_ids) for output in outputs)

        if options.samples:
            measure(report, generate, options.samples, options.rounds, engine.loop.reset_prefix_cache)
        if options.updates:
            measure_updates(report, engine, options.updates)
        for streams in options.streams:
            measure_gaps(report, engine, streams, options.rounds)


def measure_updates(report: harness.Report, engine: Engine, updates: int) -> None:
    """Report the time of updates from tensors on the GPU, and of plain copies of as many bytes, in turns."""
    import torch

    slots = engine.loop.executor.worker.runner.model.weight_slots()
    tensors = {name: slot.read().clone() for name, slot in slots.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    part = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(part)
    times: dict[str, list[float]] = {"update": [], "floor": []}
    for number in range(updates):
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.update_weights(tensors, version=f"update-{number}")
        torch.cuda.synchronize()
        between = time.perf_counter()
        for start in range(0, size, len(part)):
            count = min(len(part), size - start)
            other[:count].copy_(part[:count])
        torch.cuda.synchronize()
        times["update"].append(between - started)
        times["floor"].append(time.perf_counter() - between)
    report.add({
        "tensors": len(tensors), "GiB": round(size / 2**30, 2),
        "update_ms": round(1000 * statistics.median(times["update"]), 1),
        "longest_ms": round(1000 * max(times["update"]), 1),
        "floor_ms": round(1000 * statistics.median(times["floor"]), 1),
    })  # fmt: skip


class Streams:
    """Requests that decode together, and the longest times between two tokens of one of them."""

    def __init__(self, engine: Engine, count: int):
        from engine import SamplingParams
        from engine.protocol.request import EngineRequest

        self._engine, generator = engine, random.Random(3)
        self._tokens: dict[str, list[float]] = {}  # the time of each token
        params = SamplingParams(temperature=1.0, max_tokens=LONGEST, ignore_eos=True)
        for index in range(count):
            prompt = [generator.randrange(100, 30_000) % engine.info.vocab_size for _ in range(PROMPT_TOKENS)]
            self._tokens[f"stream-{index}"] = []
            engine.loop.add(
                EngineRequest(request_id=f"stream-{index}", prompt_token_ids=prompt, params=params, seed=index)
            )

    def run(self, is_enough: Callable[[], bool]) -> None:
        """Step until `is_enough()`. Raises SystemExit if the streams end before."""
        while not is_enough():
            if not self._engine.loop.has_work:
                raise SystemExit(f"the streams ended after {self.num_tokens()} tokens: the update came too late")
            events = self._engine.loop.step()
            now = time.perf_counter()
            for event in events:
                self._tokens[event.request_id] += [now] * len(event.token_ids)

    def num_tokens(self) -> int:
        """Return how many tokens each stream has at least."""
        return min(map(len, self._tokens.values()))

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the times between tokens, of which the second came between `start` and `end`."""
        return [
            after - before
            for times in self._tokens.values()
            for before, after in zip(times, times[1:], strict=False)
            if start <= after <= end
        ]

    def stop(self) -> None:
        self._engine.loop.abort(list(self._tokens))
        while self._engine.loop.has_work:
            self._engine.loop.step()


def measure_gaps(report: harness.Report, engine: Engine, count: int, rounds: int) -> None:
    """Report the longest gaps that `count` streams see; see the module's docstring."""
    update_once(engine, count, "warm-up")  # captures graphs
    found = [update_once(engine, count, f"update-{number}") for number in range(rounds)]
    report.add({
        "streams": count,
        **{name: round(1000 * statistics.median(one[name] for one in found), 1) for name in found[0]},
        "longest_gap_ms": round(1000 * max(one["gap_ms"] for one in found), 1),
    })  # fmt: skip


def update_once(engine: Engine, count: int, version: str) -> dict[str, float]:
    """Return the seconds of one update while `count` streams decode."""
    slots = engine.loop.executor.worker.runner.model.weight_slots()
    streams = Streams(engine, count)
    staged: list[tuple[str, Tensor]] = []

    def stage() -> None:
        for name, slot in slots.items():
            staged.append((name, slot.read().clone()))
            time.sleep(STAGING_SECONDS / len(slots))

    streams.run(lambda: streams.num_tokens() >= WARM_TOKENS)
    started = time.perf_counter()
    streams.run(lambda: streams.num_tokens() >= USUAL_TOKENS)
    staging = time.perf_counter()
    thread = threading.Thread(target=stage)
    thread.start()
    streams.run(lambda: not thread.is_alive())
    updating = time.perf_counter()
    engine.update_weights(staged, version=version)
    updated = time.perf_counter()
    enough = streams.num_tokens() + LATER_TOKENS
    streams.run(lambda: streams.num_tokens() >= enough)
    streams.stop()
    return {
        "usual_ms": statistics.median(streams.gaps(started, staging)),
        "staging_ms": max(streams.gaps(staging, updating)),
        "gap_ms": max(streams.gaps(updated, time.perf_counter())),
        "update_ms": updated - updating,
    }


def run_sglang(options: argparse.Namespace, folder: str, report: harness.Report) -> None:
    """Measure SGLang."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    graphs = "cuda_graph_max_bs_decode" if "cuda_graph_max_bs_decode" in known else "cuda_graph_max_bs"
    started = time.perf_counter()
    engine = sglang.Engine(
        model_path=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        context_length=PROMPT_TOKENS + LONGEST + 8, mem_fraction_static=0.85, random_seed=0,
        max_running_requests=options.max_num_seqs, attention_backend="fa3", **{graphs: options.max_num_seqs},
    )  # fmt: skip
    print(f"SGLang {sglang.__version__}, started in {time.perf_counter() - started:.1f} s", flush=True)

    def generate(prompts: list[list[int]], lengths: list[int], with_logprobs: bool) -> int:
        params = [{"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True} for length in lengths]
        outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=with_logprobs)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    try:
        measure(report, generate, options.samples, options.rounds, engine.flush_cache)
    finally:
        engine.shutdown()


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="qwen3-0.6b")
    parser.add_argument("--engine", choices=("encore", "sglang"), default="encore")
    parser.add_argument("--samples", type=int, default=2048, help="0: none (default: %(default)s)")
    parser.add_argument("--rounds", type=harness.count, default=1)
    parser.add_argument("--max-num-seqs", type=harness.count, default=512)
    parser.add_argument("--updates", type=int, default=0, help="weight updates to time (default: %(default)s)")
    parser.add_argument("--streams", type=harness.counts, default=[],
                        help="streams that decode during an update, such as 1,8,32")  # fmt: skip
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    with tempfile.TemporaryDirectory() as root:
        (run_encore if args.engine == "encore" else run_sglang)(args, write_shape(args.shape, root), report)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
