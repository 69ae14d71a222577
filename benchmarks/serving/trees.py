"""Two source trees of Encore on one machine, in turns: decode, sampled decode, prefill, first token.

    python -m benchmarks serving.trees --tree old=/path/to/old --tree new=. --shape qwen3-0.6b --rounds 3 --json FILE

Shows what a change costs: each run is a process whose working directory is one tree, random weights, prompts as token
ids. decode: (T(160 output tokens) - T(32)) / 128 with 512-token prompts, greedy. sampled: the same with temperature
0.8, top-p 0.95 and top-k 50. prefill: 32 prompts of 1,024. The table shows medians and the ratio of the last tree to
the first. Uses only the public API, so that trees may differ inside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEEDS = "CPU or 1 GPU"
WORKER = "--worker"


def tree(text: str) -> tuple[str, Path]:
    """Convert NAME=FOLDER to both parts."""
    name, equals, folder = text.partition("=")
    path = Path(folder).resolve()
    if not name or not equals or not (path / "engine").is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER with a source tree of Encore")
    return name, path


def run(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure one tree in a separate process. Raises SystemExit with the process's output if it fails."""
    options = {"shape": args.shape, "batches": args.batches, "repeats": args.repeats, "settings": args.settings}
    command = [sys.executable, str(Path(__file__).resolve()), WORKER, json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the tree in the current directory, in ms or tokens per second."""
    from benchmarks.shapes import write_shape
    from engine import Engine, EngineConfig, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            **{
                "model": write_shape(options["shape"], folder),
                "load_format": "dummy",
                "warmup": "full",
                "graph_manifest": "none",
                "enable_prefix_caching": False,
                "max_model_len": 2048,
            }
            | options["settings"]
        )
        started = time.perf_counter()
        engine = Engine(config)
    found = {"start_s": time.perf_counter() - started}
    rng, vocab = random.Random(1), engine.info.vocab_size
    drawn = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1}

    def seconds(batch: int, length: int, outputs: int, **sampling: Any) -> float:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": outputs, "ignore_eos": True} | sampling)
        prompts = [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(batch)]
        begun = time.perf_counter()
        engine.generate(prompt_token_ids=prompts, sampling_params=params)
        return time.perf_counter() - begun

    def step_ms(batch: int, **sampling: Any) -> float:
        seconds(batch, 512, 8, **sampling)
        steps = (seconds(batch, 512, 160, **sampling) - seconds(batch, 512, 32, **sampling) for _ in range(repeats))
        return statistics.median(steps) / 128 * 1e3

    repeats = options["repeats"]
    for batch in options["batches"]:
        found[f"decode_ms.{batch}"] = step_ms(batch)
    for batch in options["batches"]:
        found[f"sampled_ms.{batch}"] = step_ms(batch, **drawn)
    seconds(32, 1024, 1)
    found["prefill_tokens_per_s"] = 32 * 1024 / statistics.median(seconds(32, 1024, 1) for _ in range(repeats))
    seconds(1, 512, 1)
    found["first_token_ms"] = 1e3 * statistics.median(seconds(1, 512, 1) for _ in range(3 * repeats))
    found["eager_steps"] = sum(dict(engine.stats().graphs["fallbacks"]).values())  # a step that should have replayed
    return {name: round(value, 4) for name, value in found.items()}


def main(argv: Sequence[str]) -> int:
    from benchmarks import harness
    from benchmarks.shapes import shape

    parser = harness.parser("benchmarks.serving.trees", __doc__)
    parser.add_argument("--tree", type=tree, action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--shape", type=shape, default="qwen3-0.6b")
    parser.add_argument("--batches", type=harness.counts, default=[1, 8, 32, 128, 256])
    parser.add_argument("--repeats", type=harness.count, default=3)
    parser.add_argument("--rounds", type=harness.count, default=2)
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="settings of EngineConfig")
    args = parser.parse_args(argv)
    trees = dict(args.tree)
    if len(trees) < 2:
        parser.error("--tree is needed at least twice, with different names")
    args.tree = list(trees)  # the file names the trees, not this machine's folders
    report = harness.Report("benchmarks.serving.trees", args, argv)
    runs = harness.alternate(
        {name: lambda folder=folder: run(folder, args) for name, folder in trees.items()}, args.rounds
    )
    first, last = runs[next(iter(trees))], runs[list(trees)[-1]]
    for figure in first[0]:
        medians = {name: statistics.median(one[figure] for one in found) for name, found in runs.items()}
        before, after = (statistics.median(one[figure] for one in found) for found in (first, last))
        report.add({"figure": figure} | medians | {"ratio": round(after / before, 4) if before else None})
    report.finish(runs=runs)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
