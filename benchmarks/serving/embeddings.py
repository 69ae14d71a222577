"""Embeddings: tokens/s by batch size beside the floor of a prefill, and over HTTP with many clients.

    python -m benchmarks serving.embeddings --shape qwen3-0.6b --batches 1,8,32,128,256 --clients 64 --json FILE

Random weights; inputs are token ids, other ones in each call. tokens_per_s: of the median call of `Engine.embed`.
floor_ms: the longer of the time that the products and attention of the tokens take at the rate of a large product, and
that of reading the weights at the bandwidth of a copy, both measured first; share_of_floor is that over the call's
time. --clients adds rows of a server in another process: each client sends one input at a time over a connection
that it keeps, base64 vectors, for --seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks import harness
from benchmarks.shapes import shape, write_shape
from benchmarks.timing import copy_bandwidth, matmul_rate
from engine import Engine, EngineConfig
from engine.models import config_from_folder
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder

NEEDS = "CPU or 1 GPU"
COLUMNS = ("way", "batch", "call_ms", "tokens_per_s", "floor_ms", "share_of_floor", "request_ms.p50", "request_ms.p99")
NAME, START_SECONDS = "shape", 300.0


def floor_ms(config: ModelConfig, weights: int, inputs: int, length: int, rates: tuple[float, float]) -> float:
    """Return the least time of a prefill; `weights`: parameters of all layers, `rates`: TFLOP/s and GB/s."""
    tflops, bandwidth = rates
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2  # the causal half
    operations = inputs * (2 * weights * length + attention)
    return max(operations / tflops / 1e9, 2 * weights / bandwidth / 1e6)


def inputs_of(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def in_python(args: argparse.Namespace, folder: str, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Time calls of `Engine.embed` for each batch size."""
    settings = EngineConfig(
        model=folder, load_format="dummy", max_model_len=args.tokens + 1, progress=False, enable_prefix_caching=False
    )
    rates = (matmul_rate(), copy_bandwidth()) if torch.cuda.is_available() else None
    rng = random.Random(0)
    layers = Decoder(config, torch.bfloat16, "meta", max_len=16)
    weights = sum(one.numel() for name, one in layers.named_parameters() if "layers." in name)
    with Engine(settings) as engine:
        for batch in args.batches:
            times = []
            for number in range(args.repeats + 2):
                prompts = inputs_of(rng, batch, args.tokens, config.vocab_size)
                started = time.perf_counter()
                engine.embed(prompt_token_ids=prompts, use_tqdm=False)
                if number > 1:
                    times.append((time.perf_counter() - started) * 1e3)
            ms = statistics.median(times)
            row = {"way": "python", "batch": batch, "call_ms": round(ms, 2)}
            row["tokens_per_s"] = round(batch * args.tokens / ms * 1e3)
            if rates is not None:
                least = floor_ms(config, weights, batch, args.tokens, rates)
                row |= {"floor_ms": round(least, 2), "share_of_floor": round(least / ms, 3)}
            yield row


@contextlib.contextmanager
def served(folder: str, tokens: int) -> Iterator[int]:
    """Start a server of the folder and yield its port."""
    command = [sys.executable, "-m", "server.cli", "serve", "--model", folder, "--served-model-name", NAME, "--port=0",
               "--load-format", "dummy", "--max-model-len", str(tokens + 1), "--no-enable-prefix-caching"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "http://" in line:
                    port = int(line.partition("http://")[2].partition(":")[2].split()[0].split("/")[0])
                    break
            else:
                raise SystemExit("the server did not start")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            wait_ready(port)
            yield port
        finally:
            process.terminate()


def wait_ready(port: int) -> None:
    """Wait until the server has loaded its model and captured its graphs."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):  # it may not listen yet
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the server is not ready after {START_SECONDS:g} s")


def over_http(args: argparse.Namespace, folder: str, config: ModelConfig, clients: int) -> dict[str, Any]:
    """Return the rates and times of `clients` clients."""
    taken: list[float] = []
    with served(folder, args.tokens) as port:
        end = time.monotonic() + args.seconds

        def client(seed: int) -> None:
            rng = random.Random(seed)
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                while (started := time.monotonic()) < end:
                    [ids] = inputs_of(rng, 1, args.tokens, config.vocab_size)
                    body = json.dumps({"model": NAME, "input": ids, "encoding_format": "base64"})
                    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
                    answer = connection.getresponse()
                    data = answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"HTTP {answer.status}: {data[:300]!r}")
                    taken.append(time.monotonic() - started)

        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(client, seed) for seed in range(clients)]:
                done.result()
    return {
        "way": "http",
        "batch": clients,
        "tokens_per_s": round(len(taken) * args.tokens / args.seconds),
        "request_ms": {"p50": harness.quantile_ms(sorted(taken), 0.5), "p99": harness.quantile_ms(sorted(taken), 0.99)},
    }


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="qwen3-0.6b")
    parser.add_argument("--batches", type=harness.counts, default=[1, 8, 32, 128, 256])
    parser.add_argument("--tokens", type=harness.count, default=512, help="of each input")
    parser.add_argument("--clients", type=harness.counts_from_zero, default=[64], help="HTTP clients; 0: none")
    parser.add_argument("--repeats", type=harness.count, default=5)
    parser.add_argument("--seconds", type=harness.positive, default=10.0)
    args = parser.parse_args(argv)
    report = harness.Report(__spec__.name, args, argv)
    with tempfile.TemporaryDirectory() as root:
        folder = write_shape(args.shape, root)
        config = config_from_folder(folder)
        for row in in_python(args, folder, config):
            report.add({"shape": args.shape} | row)
        for clients in filter(None, args.clients):
            report.add({"shape": args.shape} | over_http(args, folder, config, clients))
    report.finish(("shape", *COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
