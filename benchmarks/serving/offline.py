"""Offline engines side by side on one GPU: decode time, prefill, first token, throughput and start-up.

    python -m benchmarks serving.offline --shape qwen3-0.6b --engines encore,sglang --rounds 2 --json FILE

Random weights, greedy, prompts as token ids. Each run is a separate process; the engines take turns, so that a change
of the machine affects all. A peer must be importable: `--path sglang=/folder:/other` puts its folders on PYTHONPATH.

decode_ms: (T(160 output tokens) - T(32)) / 128 with 512-token prompts, by batch size
prefill_tokens_per_s: 32 prompts of 1,024, one output token each
first_token_ms: one prompt of 512
output_tokens_per_s: 1,024 requests, input and output lengths uniform in 128..1,024 (seed 42)
long_first_token_ms: one prompt of --long-prompt tokens
long_decode_ms: as decode_ms with 8,000-token prompts, for the batch sizes of at most 32
mixed_tokens_per_s: output of 384 requests, inputs uniform in 64..4,096 and outputs in 16..512 (seed 7)
warm_seconds, first_answer_seconds: from importing the engine to all graphs captured, and to the first token
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
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness
from benchmarks.shapes import shape, shape_config, write_shape

if TYPE_CHECKING:
    from engine import EngineConfig

NEEDS = "CPU or 1 GPU"
PHASES = ("decode", "prefill", "first_token", "throughput")
LONG_PHASES = ("long_first_token", "long_decode", "mixed")  # they need a larger --context
Run = Callable[[list[list[int]], list[int]], tuple[float, int]]
"""(prompts, output tokens of each) -> (seconds, tokens that came)."""


def encore_config(folder: str, args: argparse.Namespace) -> EngineConfig:
    """Return Encore's configuration with the settings of `args`."""
    from engine import EngineConfig

    return EngineConfig(
        **{
            "model": folder,
            "load_format": "dummy",
            "max_model_len": min(args.context, shape_config(args.shape)["max_position_embeddings"]),
            "warmup": "full",
            "graph_manifest": "none",
            "enable_prefix_caching": False,
        }
        | args.settings
    )


def encore(folder: str, args: argparse.Namespace, found: dict[str, Any]) -> Run:
    from engine import Engine, SamplingParams

    engine = Engine(encore_config(folder, args))

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


def sglang_engine(folder: str, args: argparse.Namespace, found: dict[str, Any]) -> Any:
    """Start SGLang with the settings of `args`."""
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    import sglang

    found["version"] = sglang.__version__
    return sglang.Engine(
        **{
            "model_path": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "context_length": args.context,
            "disable_radix_cache": True,
            "mem_fraction_static": 0.85,
            "random_seed": 0,
            "attention_backend": "fa3",
            "log_level": "warning",
        }
        | args.settings
    )


def sglang(folder: str, args: argparse.Namespace, found: dict[str, Any]) -> Run:
    engine = sglang_engine(folder, args, found)

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
            "max_model_len": args.context,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.85,
            "seed": 0,
        }
        | args.settings
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
    vocab, rng = shape_config(args.shape)["vocab_size"], random.Random(0)
    prompts = lambda lengths: [[rng.randrange(100, vocab - 100) for _ in range(n)] for n in lengths]  # noqa: E731
    found: dict[str, Any] = {"engine": name, "shape": args.shape}
    started = time.perf_counter()
    run = ENGINES[name](folder, args, found)
    found["warm_seconds"] = round(time.perf_counter() - started, 2)
    run(prompts([512]), [1])
    found["first_answer_seconds"] = round(time.perf_counter() - started, 2)
    run(prompts([512] * 8), [16] * 8)
    phases = args.phases

    def decode_ms(batch: int, prompt: int) -> float:
        run(prompts([prompt] * batch), [4] * batch)
        steps = [
            (run(prompts([prompt] * batch), [160] * batch)[0] - run(prompts([prompt] * batch), [32] * batch)[0])
            / 128
            * 1e3
            for _ in range(args.repeats)
        ]
        return round(statistics.median(steps), 4)

    if "decode" in phases:
        found["decode_ms"] = {batch: decode_ms(batch, 512) for batch in args.batches}
    if "long_decode" in phases:
        found["long_decode_ms"] = {batch: decode_ms(batch, 8000) for batch in args.batches if batch <= 32}
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
    if "long_first_token" in phases:
        run(prompts([args.long_prompt]), [1])
        times = [run(prompts([args.long_prompt]), [1])[0] for _ in range(5)]
        found["long_first_token_ms"] = round(statistics.median(times) * 1e3, 2)
    if "mixed" in phases:
        lengths = random.Random(7)
        inputs = [lengths.randint(64, 4096) for _ in range(384)]
        outputs = [lengths.randint(16, 512) for _ in range(384)]
        run(prompts(inputs[:32]), outputs[:32])
        seconds, tokens = run(prompts(inputs), outputs)
        found["mixed_tokens_per_s"] = round(tokens / seconds)
    getattr(run, "report", lambda: None)()
    return found


def child(
    module: str, name: str, options: dict[str, Any], settings: dict[str, Any], paths: dict[str, str]
) -> dict[str, Any]:
    """One engine's run of a benchmark module in a separate process, with the folders of `paths` to import from."""
    environment = dict(os.environ)
    if name in paths:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), paths[name])))
    options = options | {"one": name, "settings": json.dumps(settings.get(name, {}))}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, "-m", module, f"--json={file.name}"]
        command += [f"--{option}={value}" for option, value in options.items()]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        text = Path(file.name).read_text()
    if not text:
        return {"engine": name, "shape": options["shape"], "error": done.stdout.strip()[-1500:]}
    return json.loads(text)


def run_in_turns(module: str, report: harness.Report, options: dict[str, Any], args: argparse.Namespace) -> int:
    """Run the engines of a benchmark module in turns, and finish its report. Returns 1 if one of them failed."""

    def run(name: str) -> None:
        report.add(child(module, name, options, args.settings, dict(args.path)))

    harness.alternate({name: lambda name=name: run(name) for name in args.engines}, args.rounds)
    report.finish()
    return 1 if any("error" in row for row in report.rows) else 0


def folders(text: str) -> tuple[str, str]:
    """Convert ENGINE=FOLDER:FOLDER to both parts."""
    name, equals, found = text.partition("=")
    if not equals or name not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=FOLDERS with one of {', '.join(ENGINES)}")
    return name, found


def json_object(text: str) -> dict[str, Any]:
    """Convert a JSON object to a dictionary."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"sglang": {{}}}}')
    return found


def add_engine_arguments(parser: argparse.ArgumentParser, engines: Collection[str], context: int) -> None:
    """Add the arguments that choose the engines, which are among `engines`, and say how to start them."""
    parser.add_argument("--shape", type=shape, default="tiny")
    parser.add_argument("--engines", type=harness.names(engines), default=["encore"])
    parser.add_argument("--rounds", type=harness.count, default=1)
    parser.add_argument("--context", type=harness.count, default=context, help="max_model_len")
    parser.add_argument("--long-prompt", type=harness.count, default=16000, help="tokens of a long prompt")
    parser.add_argument("--path", type=folders, action="append", default=[], metavar="ENGINE=FOLDERS",
                        help="folders for its PYTHONPATH")  # fmt: skip
    parser.add_argument("--settings", type=json_object, default={}, metavar="JSON",
                        help='more settings by engine: {"sglang": {...}}')  # fmt: skip
    parser.add_argument("--one", choices=engines, help=argparse.SUPPRESS)  # in this process; with its settings alone


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    add_engine_arguments(parser, ENGINES, context=4096)
    parser.add_argument("--phases", type=harness.names(PHASES + LONG_PHASES), default=list(PHASES))
    parser.add_argument("--batches", type=harness.counts, default=[1, 8, 32, 128, 256])
    parser.add_argument("--repeats", type=harness.count, default=3)
    parser.add_argument("--requests", type=harness.count, default=1024)
    args = parser.parse_args(argv)
    if args.one:
        args.json.write_text(json.dumps(measure(args.one, args)))
        os._exit(0)  # a peer's worker processes may outlive its engine otherwise
    report = harness.Report(__spec__.name, args, argv)
    options = {
        "shape": args.shape,
        "phases": ",".join(args.phases),
        "batches": ",".join(map(str, args.batches)),
        "repeats": args.repeats,
        "requests": args.requests,
        "context": args.context,
        "long-prompt": args.long_prompt,
    }
    return run_in_turns(__spec__.name, report, options, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
