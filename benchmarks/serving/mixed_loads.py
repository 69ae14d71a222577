"""Mixed loads of Encore or SGLang: requests of all lengths at once, and conversations whose turns share prefixes.

    python -m benchmarks serving.mixed_loads --shape qwen2.5-7b
    python -m benchmarks serving.mixed_loads --shape qwen2.5-7b --engine sglang    # alone, with SGLang on PYTHONPATH

Random weights, greedy, prompts as token ids, with prefix caching. Each figure is printed as it comes, after a short
warm-up; the rounds alternate.

mixed: 256 requests given at once, inputs uniform in 100..6,000 and outputs in 32..400 (seed 11)
conversations: 48 conversations of 4 turns; a turn adds 40..600 tokens of a user and is answered with 32..160 (seed 12).
The turns of all conversations are given together, and the next ones after the last answer.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from benchmarks import harness
from benchmarks.serving.offline import json_object
from benchmarks.shapes import shape, shape_config, write_shape

NEEDS = "CPU or 1 GPU"
Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, output tokens of each) -> output tokens."""
Flush = Callable[[], object]
"""Drops all cached prefixes."""


class Draw:
    """Random prompts and lengths."""

    def __init__(self, seed: int, vocab: int):
        self._random, self._vocab = random.Random(seed), vocab

    def lengths(self, count: int, least: int, most: int) -> list[int]:
        return [self._random.randint(least, most) for _ in range(count)]

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100, self._vocab - 100) for _ in range(count)]


def mixed(generate: Generate, options: argparse.Namespace) -> dict[str, int]:
    """Generate for requests of all lengths, given at once. Return the numbers of input and output tokens."""
    draw = Draw(11, options.vocab)
    inputs = draw.lengths(options.requests, 100, options.longest_input)
    outputs = draw.lengths(options.requests, 32, 400)
    answers = generate([draw.tokens(count) for count in inputs], outputs)
    return {"input_tokens": sum(inputs), "output_tokens": sum(map(len, answers))}


def conversations(generate: Generate, options: argparse.Namespace) -> dict[str, int]:
    """Generate the answers of conversations, turn by turn. Return the numbers of input and output tokens."""
    draw = Draw(12, options.vocab)
    histories: list[list[int]] = [[] for _ in range(options.conversations)]
    found = {"input_tokens": 0, "output_tokens": 0}
    for _ in range(options.turns):
        for history, count in zip(histories, draw.lengths(len(histories), 40, 600), strict=True):
            history += draw.tokens(count)
        found["input_tokens"] += sum(map(len, histories))
        answers = generate([list(history) for history in histories], draw.lengths(len(histories), 32, 160))
        for history, answer in zip(histories, answers, strict=True):
            history += answer
            found["output_tokens"] += len(answer)
    return found


LOADS = {"mixed": mixed, "conversations": conversations}


def measure(report: harness.Report, options: argparse.Namespace, generate: Generate, flush: Flush) -> None:
    """Report the seconds and the output tokens per second of each load and round."""
    draw = Draw(13, options.vocab)
    warm = draw.lengths(32, 100, options.longest_input)
    generate([draw.tokens(count) for count in warm], draw.lengths(len(warm), 4, 32))
    for number in range(options.rounds):
        for name in options.loads:
            flush()
            started = time.perf_counter()
            found = LOADS[name](generate, options)
            seconds = time.perf_counter() - started
            report.add({
                "load": name, "round": number, **found, "seconds": round(seconds, 3),
                "output_tokens_per_s": round(found["output_tokens"] / seconds),
            })  # fmt: skip


def run_encore(options: argparse.Namespace, folder: str, report: harness.Report) -> None:
    """Measure Encore."""
    from engine import Engine, EngineConfig, SamplingParams

    settings = {
        "model": folder, "load_format": "dummy", "graph_manifest": "none", "progress": False, "warmup": "full",
        "max_model_len": options.context,
    }  # fmt: skip
    started = time.perf_counter()
    with Engine(EngineConfig(**settings | options.settings)) as engine:
        print(f"Encore started in {time.perf_counter() - started:.1f} s", flush=True)

        def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
            params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in lengths]
            outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            return [list(output.token_ids) for output in outputs]

        measure(report, options, generate, engine.loop.reset_prefix_cache)


def run_sglang(options: argparse.Namespace, folder: str, report: harness.Report) -> None:
    """Measure SGLang."""
    import sglang

    settings = {
        "model_path": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "context_length": options.context, "mem_fraction_static": 0.85, "random_seed": 0, "attention_backend": "fa3",
    }  # fmt: skip
    started = time.perf_counter()
    engine = sglang.Engine(**settings | options.settings)
    print(f"SGLang {sglang.__version__}, started in {time.perf_counter() - started:.1f} s", flush=True)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [{"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True} for length in lengths]
        return [output["output_ids"] for output in engine.generate(input_ids=prompts, sampling_params=params)]

    try:
        measure(report, options, generate, engine.flush_cache)
    finally:
        engine.shutdown()


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="tiny")
    parser.add_argument("--engine", choices=("encore", "sglang"), default="encore")
    parser.add_argument("--loads", type=harness.names(LOADS), default=list(LOADS))
    parser.add_argument("--rounds", type=harness.count, default=1)
    parser.add_argument("--requests", type=harness.count, default=256, help="of the mixed load (default: %(default)s)")
    parser.add_argument("--longest-input", type=harness.count, default=6000, help="tokens (default: %(default)s)")
    parser.add_argument("--conversations", type=harness.count, default=48, help="(default: %(default)s)")
    parser.add_argument("--turns", type=harness.count, default=4, help="of a conversation (default: %(default)s)")
    parser.add_argument("--context", type=harness.count, default=8192, help="max_model_len (default: %(default)s)")
    parser.add_argument("--settings", type=json_object, default={}, metavar="JSON", help="more settings of the engine")
    args = parser.parse_args(argv)
    needed = max(args.longest_input + 400, args.turns * (600 + 160))
    if args.context < needed:
        parser.error(f"--context {args.context}: these loads need {needed} tokens")
    report = harness.Report(__spec__.name, args, argv)
    args.vocab = shape_config(args.shape)["vocab_size"]
    with tempfile.TemporaryDirectory() as root:
        (run_encore if args.engine == "encore" else run_sglang)(args, write_shape(args.shape, root), report)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
