"""HTTP overhead: tokens/s of 64 streams through the server beside the engine's own at the same batch.

    OMP_NUM_THREADS=1 python -m benchmarks serving.http_overhead --json FILE

Tiny models on a CPU. Offline engine, server and load are separate processes and take turns over several rounds.
Figures are of the best round of each, since the machine may be shared; CPU time per token stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from tests.soak.serving import ENVIRONMENT, Serving, results, serving, start_load

NEEDS = "CPU"
COLUMNS = ("shape", "streams", "engine_offline.tokens_per_second", "server.tokens_per_second", "share_of_engine",
           "server.server_cpu_us_per_token", "server.engine_cpu_us_per_token")  # fmt: skip
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
    return {"tokens_per_second": round(count / seconds, 1), "cpu_us_per_token": round(1e6 * cpu / count, 2)}


def over_http(server: Serving, streams: int, tokens: int) -> dict[str, Any]:
    """One load of `streams` streams that all run together, with the CPU time of each process per token."""
    pids = {"server": server.process.pid, "engine": server.engine_pid}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    [found] = results([start_load(server.url, requests=streams, streams=streams, tokens=tokens)])
    if found["finished"] != streams:
        raise RuntimeError(f"the load did not finish: {found}")
    used = {f"{name}_cpu_us_per_token": round(1e6 * (cpu_seconds(pid) - before[name]) / found["tokens"], 2)
            for name, pid in pids.items()}  # fmt: skip
    used["client_cpu_us_per_token"] = round(1e6 * found["client_cpu_seconds"] / found["tokens"], 2)
    return found | used


def compare(model: Path, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Both in turns; the best round of each, and their ratio."""
    settings = engine_settings(model, streams, tokens)
    flags = [part for name, value in settings.items() if name != "model"
             for part in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    command = [sys.executable, "-m", __spec__.name, "--offline", str(model), "--streams", str(streams),
               "--tokens", str(tokens)]  # fmt: skip

    def engine_alone() -> dict[str, Any]:
        return json.loads(subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout)

    with tempfile.TemporaryDirectory() as folder, serving(model, Path(folder) / "server.log", *flags) as server:
        over_http(server, streams, tokens)
        ways = {"engine": engine_alone, "server": lambda: over_http(server, streams, tokens)}
        taken = harness.alternate(ways, rounds)
    served, alone = taken["server"], taken["engine"]
    best = max(served, key=lambda one: one["tokens_per_second"])
    offline_best = max(alone, key=lambda one: one["tokens_per_second"])
    return {
        "streams": streams, "tokens": tokens, "rounds": rounds, "engine_offline": offline_best, "server": best,
        "share_of_engine": round(best["tokens_per_second"] / offline_best["tokens_per_second"], 3),
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


def sizes(text: str) -> list[str]:
    """Convert LAYERSxHIDDEN,… to its parts; hidden sizes are multiples of 32."""
    for part in text.split(","):
        layers, _, hidden = part.partition("x")
        if harness.count(layers) and harness.count(hidden) % 32:
            raise argparse.ArgumentTypeError(f"{part!r}: the hidden size must be a multiple of 32, as in 2x64")
    return text.split(",")


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--streams", type=harness.count, default=64)
    parser.add_argument("--tokens", type=harness.count, default=256)
    parser.add_argument("--rounds", type=harness.count, default=5)
    parser.add_argument("--shapes", type=sizes, default="2x64,4x128,8x256", help="layers x hidden size, by commas")
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)  # only the engine, on this model
    args = parser.parse_args(argv)
    if args.offline is not None:
        print(json.dumps(offline(args.offline, args.streams, args.tokens)))
        return 0
    report = harness.Report(__spec__.name, args, argv)
    for shape in args.shapes:
        layers, hidden = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(Path(folder), layers, hidden)
            report.add({"shape": shape} | compare(model, args.streams, args.tokens, args.rounds))
    report.finish(COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
