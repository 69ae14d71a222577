"""What HTTP costs: tokens per second of 64 streams through the server beside the engine's own at the same batch.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.http_overhead --json benchmarks/results/http-overhead.json

Offline engine, server and load are processes of their own and take turns, several rounds; the figures are of the best
round of each (the machine may be shared), and CPU time per token, which sharing does not change, stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.soak.serving import ENVIRONMENT, Serving, results, serving, start_load

TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, its own and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def engine_settings(model: Path, streams: int, tokens: int) -> dict[str, Any]:
    """The same for the engine alone and for the server's."""
    return {"model": str(model), "dtype": "float32", "max_num_seqs": streams, "max_model_len": tokens + 64,
            "max_num_batched_tokens": 2048, "warmup": "full", "num_threads": 1}  # fmt: skip


def offline(model: Path, streams: int, tokens: int) -> dict[str, float]:
    """Engine.generate in this process: greedy, prompts of 16 ids, after a run that is not counted."""
    import random

    from engine import Engine, EngineConfig, SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(16)] for _ in range(streams)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with Engine(EngineConfig(**engine_settings(model, streams, tokens), graph_manifest="none")) as engine:
        engine.generate(prompt_token_ids=prompts, sampling_params=params)
        began, cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    count = sum(len(output.token_ids) for output in outputs)
    return {"tokens_per_second": count / seconds, "cpu_us_per_token": 1e6 * cpu / count}


def over_http(server: Serving, streams: int, tokens: int) -> dict[str, Any]:
    """One load of `streams` streams that all run together, with the CPU time of each process per token."""
    pids = {"server": server.process.pid, "engine": server.engine_pid}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    [found] = results([start_load(server.url, requests=streams, streams=streams, tokens=tokens)])
    if found["finished"] != streams:
        raise RuntimeError(f"the load did not finish: {found}")
    used = {f"{name}_cpu_us_per_token": 1e6 * (cpu_seconds(pid) - before[name]) / found["tokens"]
            for name, pid in pids.items()}  # fmt: skip
    used["client_cpu_us_per_token"] = 1e6 * found["client_cpu_seconds"] / found["tokens"]
    return found | used


def compare(model: Path, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Both in turns; the best round of each, and their ratio."""
    settings = engine_settings(model, streams, tokens)
    flags = [part for name, value in settings.items() if name != "model"
             for part in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    alone, served = [], []
    with tempfile.TemporaryDirectory() as folder:
        with serving(model, Path(folder) / "server.log", *flags) as server:
            over_http(server, streams, tokens)
            for _ in range(rounds):
                command = [sys.executable, "-m", "benchmarks.http_overhead", "--offline", str(model),
                           "--streams", str(streams), "--tokens", str(tokens)]  # fmt: skip
                done = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True)
                alone.append(json.loads(done.stdout))
                served.append(over_http(server, streams, tokens))
    best = max(served, key=lambda one: one["tokens_per_second"])
    offline_best = max(alone, key=lambda one: one["tokens_per_second"])
    return {
        "streams": streams, "tokens": tokens, "rounds": rounds, "engine_offline": offline_best, "server": best,
        "ratio": round(best["tokens_per_second"] / offline_best["tokens_per_second"], 3),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def tiny_model(folder: Path, layers: int, hidden: int) -> Path:
    """A random Llama of a size; the tests' tiny tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.conftest import write_tiny_model

    write_tiny_model(folder)
    config = LlamaConfig.from_pretrained(
        folder, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden,
        num_attention_heads=hidden // 32, num_key_value_heads=max(1, hidden // 64), head_dim=32,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="2x64,4x128,8x256", help="layers x hidden, separated by commas")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--offline", type=Path, help="only the engine, on this model")
    found = parser.parse_args()
    if found.offline is not None:
        print(json.dumps(offline(found.offline, found.streams, found.tokens)))
        return 0
    runs = {}
    for shape in found.shapes.split(","):
        layers, hidden = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            runs[shape] = compare(tiny_model(Path(folder), layers, hidden), found.streams, found.tokens, found.rounds)
        print(shape, json.dumps(runs[shape]), flush=True)
    if found.json is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        found.json.write_text(json.dumps({
            "command": "python -m benchmarks.http_overhead", "commit": commit, "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(), "cpus": os.cpu_count(), "runs": runs,
        }, indent=1) + "\n")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
