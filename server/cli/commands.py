"""The commands `generate`, `graphs` and `tune`.

Each takes parsed arguments and returns the exit status. User errors are raised as ConfigError.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.cli.json_object import json_object

TIMEOUT_SECONDS = 30.0  # an engine answers between two steps or captures
MIN_STEPS = 1000  # fewer come from a handful of requests: one request of 200 tokens is 200 steps of similar batches
ADDRESS = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]+):\d+(/.*)?")  # HOST:PORT without http://, as curl takes it


def generate(args: argparse.Namespace) -> int:
    """Load the model in this process, generate from one prompt, and print the output as it streams."""
    from engine.config import EngineConfig
    from engine.protocol.request import SamplingParams
    from server.cli.flags import given

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=tuple(args.stop),
        seed=getattr(args, "seed", None),
    )
    config = EngineConfig.from_dict(given(args, EngineConfig))
    asyncio.run(_print_continuation(config, prompt, args.chat, params))
    return 0


async def _print_continuation(config: Any, prompt: str, chat: bool, params: Any) -> None:
    from engine.client.async_client import make_client
    from engine.text.conversation import Conversation
    from server.serving.tokenization import Tokenization

    client = make_client(config, in_process=True)
    await client.start()
    try:
        info = client.info()
        tokens = Tokenization(client.tokenizer, info.max_model_len, info.vocab_size)
        if chat:
            ids = (await tokens.chat(Conversation(messages=[{"role": "user", "content": prompt}]))).ids
        else:
            ids = await tokens.encode(prompt, "prompt")
        async for delta in client.generate("generate", prompt=None, prompt_token_ids=ids, params=params):
            print(delta.text_delta, end="", flush=True)
            if delta.finish_reason == "error":
                raise ConfigError(f"the engine failed: {delta.error}")
        print()
    finally:
        await client.close()


def graphs(args: argparse.Namespace) -> int:
    """Print a running server's graphs: a summary, then a table per site."""
    from server.cli.graph_table import graph_table

    url = _source(args.url).rstrip("/")
    body = json_object(_read(url + "/graphs"), url)
    if args.json:
        print(json.dumps(body, indent=1))
        return 0
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(graph_table(body, show_all=args.all, coloured=coloured))
    return 0


def tune(args: argparse.Namespace) -> int:
    """Print the buckets with the least padding for observed batch sizes, and the padding of the default ladder.

    With `--packed`, print the maximum number of packed sequences.
    """
    from graph_cache.core.buckets import default_ladder
    from graph_cache.tuning.tuner import expected_padding
    from graph_cache.tuning.tuner import tune as best_buckets
    from server.cli.tune_packed import tune_packed

    if args.packed is not None:
        return tune_packed(args, _read(args.packed))
    if args.eager_cost is not None:
        raise ConfigError("--eager-cost applies to --packed only: leave it out")
    args.phase = args.phase or "decode"
    histogram, largest = _observed(args)
    if not histogram:
        raise ConfigError("the source has no observed batch sizes yet: use a server that has served requests")
    max_size = args.max_size if args.max_size is not None else max(largest, *histogram)
    if args.max_size is None and not largest:
        print(
            f"the largest observed batch is {max_size}; if the server's --max-num-seqs is larger, pass it as "
            "--max-size, since it is always one of the buckets",
            file=sys.stderr,
        )
    bytes_of = _bytes_of(args) if args.max_bytes is not None else None
    found = best_buckets(
        histogram, max_size=max_size, max_buckets=args.max_buckets, max_bytes=args.max_bytes, bytes_of=bytes_of
    )
    ladder = default_ladder(max_size)
    rows = sum(size * count for size, count in histogram.items()) / sum(histogram.values())
    default = expected_padding(ladder, histogram)
    report = {
        "buckets": list(found.sizes),
        "expected_padding_rows": found.expected_padding_rows,
        "padding_fraction": found.padding_fraction,
        "bytes": found.bytes,
        "default_ladder": {
            "buckets": list(ladder),
            "expected_padding_rows": default,
            "padding_fraction": default / (default + rows),
        },
        "observed_steps": sum(histogram.values()),
        "largest_batch": max(histogram),
        "max_size": max_size,
        "sample_warning": _sample_warning(histogram),
    }
    print(json.dumps(report, indent=1) if args.json else _tune_text(report))
    return 0


def _sample_warning(histogram: Mapping[int, int]) -> str | None:
    """Return why observed batch sizes are too few to choose by, and what to do; None if they aren't."""
    steps = sum(histogram.values())
    if len(histogram) == 1:
        return f"all {steps} steps have the same batch size: tune after requests that overlap as in real traffic"
    if steps < MIN_STEPS:
        return f"{steps} steps are few to choose by: tune after at least {MIN_STEPS} steps of real traffic"
    return None


def _tune_text(report: Mapping[str, Any]) -> str:
    default = report["default_ladder"]

    def padding(one: Mapping[str, Any]) -> str:
        return (
            f"{one['expected_padding_rows']:.2f} rows per step, {100 * one['padding_fraction']:.1f}% of computed rows"
        )

    lines = [
        f"observed   {report['observed_steps']} steps, the largest batch {report['largest_batch']}",
        *([f"warning    {report['sample_warning']}"] if report["sample_warning"] else []),
        f"best       {len(report['buckets'])} buckets up to {report['max_size']}, padding {padding(report)}",
        f"default    {len(default['buckets'])} buckets, padding {padding(default)}",
    ]
    if report["bytes"] is not None:
        lines.append(f"bytes      {report['bytes']}")
    lines.append(f"use it     --graph-buckets {','.join(map(str, report['buckets']))}")
    return "\n".join(lines)


def _observed(args: argparse.Namespace) -> tuple[dict[int, int], int]:
    """Return rows -> number of steps, and the server's largest bucket (0 if unknown)."""
    from graph_cache.core.manifest import Manifest, histogram_from_metrics

    if args.metrics is not None:
        args.metrics = _source(args.metrics)
        args.metrics = _metrics_url(args.metrics) if _is_url(args.metrics) else args.metrics
        text = _read(args.metrics)
        return histogram_from_metrics(text, site=args.site, phase=args.phase), _max_num_seqs(text, args.phase)
    fingerprint = json_object(_read(args.manifest), args.manifest).get("fingerprint")
    if not isinstance(fingerprint, str):
        raise ConfigError(f"{args.manifest} is not a manifest: it has no fingerprint")
    manifest = Manifest.load(args.manifest, fingerprint)
    # The largest bucket is captured first, so it is included if anything was captured.
    captured = manifest.captured_sizes(site=args.site, phase=args.phase)
    return manifest.histogram(site=args.site, phase=args.phase), max(captured, default=0)


def _max_num_seqs(metrics: str, phase: str) -> int:
    """Return max_num_seqs from a /metrics page, which is always the largest decode bucket; 0 if absent."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    known = (int(sample.value) for sample in samples if sample.name == "encore_max_num_seqs" and phase == "decode")
    return max(known, default=0)


def _bytes_of(args: argparse.Namespace) -> Callable[[int], int]:
    """Return a function size -> bytes of a graph, interpolated between the sizes that a server has captured."""
    source = None if args.graphs is None else _source(args.graphs)
    if source is None and args.metrics is not None and _is_url(args.metrics):
        source = args.metrics.removesuffix("/").removesuffix("/metrics") + "/graphs"
    if source is None:
        raise ConfigError(
            "--max-bytes needs the bytes of each graph: pass --graphs, a saved /graphs response or its URL"
        )
    rows = json_object(_read(source), source).get("graphs", ())
    known: dict[str, dict[int, int]] = {}  # by site
    for row in rows:
        if row.get("state") == "captured" and row.get("phase") == args.phase and args.site in (None, row.get("site")):
            sizes = known.setdefault(row.get("site", ""), {})
            sizes[row["bucket"]] = sizes.get(row["bucket"], 0) + row["bytes"]
    if not known:
        raise ConfigError(f"{source} has no captured {args.phase} graph, so bytes per graph are unknown")
    of_sites = [interpolated(sorted(sizes.items())) for sizes in known.values()]
    return lambda size: sum(of_site(size) for of_site in of_sites)


def interpolated(points: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """Return a function through (size, bytes) points: linear, non-decreasing, and proportional beyond the last."""
    sizes = [size for size, _ in points]
    values = [max(value for _, value in points[: index + 1]) for index in range(len(points))]

    def bytes_of(size: int) -> int:
        if size <= sizes[0]:
            return values[0]
        for (left, low), (right, high) in zip(
            zip(sizes, values, strict=True), zip(sizes[1:], values[1:], strict=True), strict=False
        ):
            if size <= right:
                return low + math.ceil((high - low) * (size - left) / (right - left))
        return math.ceil(values[-1] * size / sizes[-1])

    return bytes_of


def _metrics_url(url: str) -> str:
    """Return the URL of /metrics where only a server is named."""
    return url.rstrip("/") + "/metrics" if urllib.parse.urlsplit(url).path in ("", "/") else url


def _source(text: str) -> str:
    """Return a file's path or a URL as it is, and HOST:PORT as a URL."""
    return "http://" + text if ADDRESS.fullmatch(text) and not Path(text).exists() else text


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _read(source: str) -> str:
    """Return the text of a file or URL. Raises ConfigError that names the source and the reason."""
    try:
        if _is_url(source):
            request = urllib.request.Request(source, headers={"Accept": "application/json, text/plain"})
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read().decode()
        return Path(source).read_text(encoding="utf-8")
    except urllib.error.HTTPError as exc:
        with exc:
            raise ConfigError(f"{source} returned {exc.code}: {exc.read(300).decode(errors='replace')}") from exc
    except urllib.error.URLError as exc:
        raise ConfigError(f"can't reach {source} ({exc.reason}): is the server running?") from exc
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise ConfigError(f"can't read {source}: {exc}") from exc
