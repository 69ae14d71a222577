"""Offline engines side by side on one GPU: decode time a step, prefill, first token, throughput, start.

`python -m benchmarks.offline --shape qwen3-0.6b --engines encore,sglang --rounds 2 --out results.json`. Random weights,
greedy, prompts as token ids. Each run is a process of its own; the engines take turns, so that a machine's mood meets
both. A peer must be importable: `--path sglang=/folder:/other` puts its folders on PYTHONPATH for its runs.

decode: (T(160 output tokens) - T(32)) / 128 with 512-token prompts. prefill: 32 prompts of 1,024, one token each.
first token: one prompt of 512. throughput: 1,024 requests, input and output lengths uniform in 128..1,024 (seed 42).
start: from importing the engine to its first token, and to all graphs captured.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, write_shape

PHASES = ("decode", "prefill", "first_token", "throughput")
CONTEXT = 4096
Run = Callable[[list[list[int]], list[int]], tuple[float, int]]
"""(prompts, output tokens of each) -> (seconds, tokens that came)."""


def encore(folder: str, args: argparse.Namespace, found: dict[str, Any]) -> Run:
    from engine import Engine, EngineConfig, SamplingParams

    context = min(CONTEXT, SHAPES[args.shape]["max_position_embeddings"])
    engine = Engine(
        EngineConfig(
            model=folder,
            load_format="dummy",
            max_model_len=context,
            warmup="full",
            graph_manifest="none",
            enable_prefix_caching=False,
            **json.loads(args.settings),
        )
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
        params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in lengths]
        started = time.perf_counter()
        outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
        return time.perf_counter() - started, sum(len(output.token_ids) for output in outputs)

    def report() -> None:
        graphs = engine.graphs()
        found["graphs"] = len(graphs)
        stats = engine.stats().graphs
        found["graph_pool_mib"] = round(stats["pool_bytes"] / 2**20, 1)
        found["fallbacks"] = [(list(labels), count) for labels, count in stats["fallbacks"]]
        engine.idle_check()

    run.report = report  # type: ignore[attr-defined]
    return run


def sglang(folder: str, args: argparse.Namespace, found: dict[str, Any]) -> Run:
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    import sglang

    found["version"] = sglang.__version__
    engine = sglang.Engine(
        **{
            "model_path": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "context_length": CONTEXT,
            "disable_radix_cache": True,
            "mem_fraction_static": 0.85,
            "random_seed": 0,
            "attention_backend": "fa3",
            "log_level": "warning",
        }
        | json.loads(args.settings)
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
        params = [{"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True} for length in lengths]
        started = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - started, sum(output["meta_info"]["completion_tokens"] for output in outputs)

    return run


def vllm(folder: str, args: argparse.Namespace, found: dict[str, Any]) -> Run:
    import vllm

    found["version"] = vllm.__version__
    engine = vllm.LLM(
        **{
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": CONTEXT,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.85,
            "seed": 0,
        }
        | json.loads(args.settings)
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
        params = [
            vllm.SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = engine.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - started, sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


ENGINES: dict[str, Callable[..., Run]] = {"encore": encore, "sglang": sglang, "vllm": vllm}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All phases of one engine, in this process."""
    folder = write_shape(args.shape, tempfile.mkdtemp())
    vocab, rng = SHAPES[args.shape]["vocab_size"], random.Random(0)
    prompts = lambda lengths: [[rng.randrange(100, vocab - 100) for _ in range(n)] for n in lengths]  # noqa: E731
    found: dict[str, Any] = {"engine": name, "shape": args.shape}
    started = time.perf_counter()
    run = ENGINES[name](folder, args, found)
    found["warm_seconds"] = round(time.perf_counter() - started, 2)
    run(prompts([512]), [1])
    found["first_answer_seconds"] = round(time.perf_counter() - started, 2)
    run(prompts([512] * 8), [16] * 8)
    phases = args.phases.split(",")
    if "decode" in phases:
        found["decode_ms"] = {}
        for batch in map(int, args.batches.split(",")):
            run(prompts([512] * batch), [4] * batch)
            steps = [
                (run(prompts([512] * batch), [160] * batch)[0] - run(prompts([512] * batch), [32] * batch)[0])
                / 128
                * 1e3
                for _ in range(args.repeats)
            ]
            found["decode_ms"][batch] = round(statistics.median(steps), 4)
    if "prefill" in phases:
        run(prompts([1024] * 32), [1] * 32)
        seconds = statistics.median(run(prompts([1024] * 32), [1] * 32)[0] for _ in range(3))
        found["prefill_tokens_per_s"] = round(32 * 1024 / seconds)
    if "first_token" in phases:
        run(prompts([512]), [1])
        found["first_token_ms"] = round(statistics.median(run(prompts([512]), [1])[0] for _ in range(9)) * 1e3, 3)
    if "throughput" in phases:
        lengths = random.Random(42)
        inputs, outputs = ([lengths.randint(128, 1024) for _ in range(args.requests)] for _ in range(2))
        seconds, tokens = run(prompts(inputs), outputs)
        if tokens != sum(outputs):
            raise SystemExit(f"{name}: {sum(outputs)} tokens were asked for, {tokens} came")
        found["output_tokens_per_s"] = round(tokens / seconds)
    getattr(run, "report", lambda: None)()
    return found


def child(name: str, args: argparse.Namespace, paths: dict[str, str]) -> dict[str, Any]:
    """One engine's run in a process of its own."""
    environment = dict(os.environ)
    if name in paths:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), paths[name])))
    settings = json.dumps(json.loads(args.settings).get(name, {}))
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [
            sys.executable,
            "-m",
            "benchmarks.offline",
            "--one",
            name,
            "--shape",
            args.shape,
            "--phases",
            args.phases,
            "--batches",
            args.batches,
            "--repeats",
            str(args.repeats),
            "--requests",
            str(args.requests),
            "--settings",
            settings,
            "--out",
            file.name,
        ]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        text = Path(file.name).read_text()
    if not text:
        return {"engine": name, "error": done.stdout.strip()[-1500:]}
    return json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--engines", default="encore")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--path", action="append", default=[], help="ENGINE=FOLDERS for its PYTHONPATH")
    parser.add_argument("--settings", default="{}", help='JSON of more settings by engine: {"sglang": {...}}')
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        args.out.write_text(json.dumps(measure(args.one, args)))
        os._exit(0)  # a peer's worker processes may outlive its engine otherwise
    paths = dict(entry.split("=", 1) for entry in args.path)
    runs = []
    for _ in range(args.rounds):
        for name in args.engines.split(","):
            runs.append(child(name, args, paths))
            print(json.dumps(runs[-1]), flush=True)
    if args.out:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        args.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
