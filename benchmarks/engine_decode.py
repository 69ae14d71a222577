"""Decode time per step of the whole engine, offline: (T(160 tokens) - T(32)) / 128 with prompts of 512 tokens.

`python benchmarks/engine_decode.py --shape qwen3-0.6b --batches 1,8,32,128,256 --out results.json`. Random weights,
greedy. The way in which peers' offline engines are measured, so that figures stand side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.shapes import SHAPES, write_shape
from engine import Engine, EngineConfig, SamplingParams


def run(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for a batch of greedy continuations of `tokens` tokens each."""
    started = time.perf_counter()
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True))
    if any(len(output.token_ids) != tokens for output in outputs):
        raise SystemExit(f"a sequence ended early: {[output.outputs[0].error for output in outputs][:3]}")
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scope", default="block", choices=("block", "layer", "none"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(size) for size in args.batches.split(",")]
    folder = write_shape(args.shape, tempfile.mkdtemp())
    started = time.perf_counter()
    engine = Engine(EngineConfig(model=folder, load_format="dummy", max_num_seqs=max(batches), max_model_len=1024,
                                 warmup="full", graph_manifest="none", enable_prefix_caching=False,
                                 inference_cuda_graph_scope=args.scope))
    found = {"shape": args.shape, "scope": args.scope, "torch": torch.__version__, "start_seconds":
             round(time.perf_counter() - started, 2), "device": engine.info.device, "decode_ms_per_step": {}}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    rng = random.Random(0)
    vocab = SHAPES[args.shape]["vocab_size"]
    with engine:
        for batch in batches:
            prompts = lambda: [[rng.randrange(100, vocab) for _ in range(args.prompt_tokens)]  # noqa: E731
                               for _ in range(batch)]  # noqa: B023
            run(engine, prompts(), 4)
            steps = [(run(engine, prompts(), 160) - run(engine, prompts(), 32)) / 128 * 1e3
                     for _ in range(args.repeats)]
            found["decode_ms_per_step"][str(batch)] = round(statistics.median(steps), 4)
        engine.idle_check()
        found["fallbacks"] = [(list(labels), count) for labels, count in engine.stats().graphs["fallbacks"]]
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
