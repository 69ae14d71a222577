"""Measure an engine: step times as differences of runs, replay against eager, and a run with mixed lengths.

The functions expect an idle Engine and leave it idle. They print nothing.
"""

from __future__ import annotations

import datetime
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.errors import EngineError
from engine.protocol.request import SamplingParams

FIRST_PROMPT_ID = 3  # lower ids are BOS, EOS and padding in most vocabularies


def random_prompts(rng: random.Random, vocab_size: int, lengths: list[int]) -> list[list[int]]:
    """Return prompts of the given lengths, of random token ids, so that they share no prefix to cache."""
    return [
        [rng.randrange(min(FIRST_PROMPT_ID, vocab_size - 1), vocab_size) for _ in range(length)] for length in lengths
    ]


def seconds_of(engine: Engine, prompts: list[list[int]], outputs: list[int]) -> float:
    """Return the seconds to generate `outputs` tokens per prompt, greedily and ignoring EOS.

    Raises EngineError if a sequence fails.
    """
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in outputs]
    started = time.perf_counter()
    answers = engine.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    seconds = time.perf_counter() - started
    for answer, count in zip(answers, outputs, strict=True):
        if len(answer.token_ids) != count:
            raise EngineError(
                f"a sequence gave {len(answer.token_ids)} of {count} tokens ({answer.finish_reason}): "
                f"{answer.outputs[0].error or engine.stats().last_error or 'no error was reported'}"
            )
    return seconds


def measure_batch(
    engine: Engine, batch: int, prompt_tokens: int, output_tokens: int, repeats: int, rng: random.Random
) -> dict[str, Any]:
    """Measure one batch size: medians over `repeats` runs after an untimed one.

    first_token_ms: time until every sequence of the batch has its first token. prefill_tokens_per_second: prompt tokens
    divided by that time. decode_ms_per_step: (T(n2) - T(n1)) / (n2 - n1), with n2 = output_tokens and n1 a quarter of
    it, so that prefill and start-up cancel; None if noise exceeds the difference. tokens_per_second: generated tokens
    of the n2 run divided by its total time. variation: (maximum - minimum) / median of each over the runs; None for
    a single one.
    """
    short = max(1, output_tokens // 4)

    def run(tokens: int) -> float:
        prompts = random_prompts(rng, engine.info.vocab_size, [prompt_tokens] * batch)
        return seconds_of(engine, prompts, [tokens] * batch)

    run(output_tokens)
    before = engine.stats()
    first, full, step = [], [], []
    for _ in range(repeats):
        first.append(run(1))
        short_seconds = run(short)
        full.append(run(output_tokens))
        step.append((full[-1] - short_seconds) / (output_tokens - short))
    first_s, full_s, step_s = (statistics.median(times) for times in (first, full, step))
    return {
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "first_token_ms": round(first_s * 1e3, 3),
        "prefill_tokens_per_second": round(batch * prompt_tokens / first_s, 1),
        "decode_ms_per_step": round(step_s * 1e3, 4) if step_s > 0 else None,
        "decode_tokens_per_second": round(batch / step_s, 1) if step_s > 0 else None,
        "tokens_per_second": round(batch * output_tokens / full_s, 1),
        "variation": {
            "first token": variation(first),
            "decode": variation(step) if step_s > 0 else None,
            "overall": variation(full),
        },
        "preemptions": engine.stats().num_preemptions - before.num_preemptions,
    }


def variation(values: Sequence[float]) -> float | None:
    """Return (maximum - minimum) / median; None for fewer than two values."""
    return round((max(values) - min(values)) / statistics.median(values), 4) if len(values) > 1 else None


def replay_against_eager(engine: Engine, batch: int, context: int, repeats: int = 20) -> dict[str, Any]:
    """Time a decode step as a graph replay and as an eager run of the same callable on the same static buffers, in ms.

    Replay and eager steps alternate; medians are returned. Rows are at position `context`, in separate pages as far as
    the cache has enough. Figures are None if the batch has no graph. KV pages are overwritten: the engine must be idle,
    and with prefix caching it must not be used afterwards.
    """
    runner = engine.loop.executor.worker.runner
    cache, site = runner.cache, runner.site
    position = min(context, engine.info.max_model_len - 1)
    width = next((width for width in runner.contexts if width > position), None)
    plan = cache.plan(site.name, batch, **({} if width is None else {"context": width}))
    found: dict[str, Any] = {"batch": batch, "bucket": plan.bucket, "context": width or position + 1}
    key = plan.key
    if key is None or not plan.is_graph:
        return found | {"replay_ms": None, "eager_ms": None, "speedup": None, "reason": plan.reason}
    state = runner.state
    table = torch.arange(state.page_tables.numel()).remainder(runner.kv.num_pages - 1).add(1)
    state.page_tables.copy_(table.view_as(state.page_tables))
    state.slots.copy_(torch.arange(1, len(state.slots) + 1))
    variants: dict[str, Callable[[], Any]] = {
        "replay": lambda: cache.run(plan),
        "eager": lambda: site.run_eager(key),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for iteration in range(repeats + 2):
        for name, run_step in variants.items():
            state.positions.fill_(position)  # each step increments them
            cache.pool.backend.synchronize()
            started = time.perf_counter()
            run_step()
            cache.pool.backend.synchronize()
            if iteration >= 2:  # the first two run with cold caches
                times[name].append((time.perf_counter() - started) * 1e3)
    runner.reset_after_failure()
    replay, eager = (statistics.median(times[name]) for name in ("replay", "eager"))
    return found | {"replay_ms": round(replay, 4), "eager_ms": round(eager, 4), "speedup": round(eager / replay, 3)}


def measure_mixed(engine: Engine, requests: int, prompt_tokens: int, output_tokens: int, seed: int) -> dict[str, Any]:
    """Measure requests of random lengths, submitted at once; lengths are uniform from 1/8 of the given ones to those.

    hit_rate: the share of decode steps that replayed a graph. padding: the share of padding rows in decode steps. The
    lengths depend only on `seed`.
    """
    rng = random.Random(seed)
    lengths = [rng.randint(max(1, prompt_tokens // 8), prompt_tokens) for _ in range(requests)]
    outputs = [rng.randint(max(1, output_tokens // 8), output_tokens) for _ in range(requests)]
    prompts = random_prompts(rng, engine.info.vocab_size, lengths)
    before = engine.stats()
    seconds = seconds_of(engine, prompts, outputs)
    after = engine.stats()
    return {
        "requests": requests,
        "seed": seed,
        "prompt_tokens": sum(lengths),
        "output_tokens": sum(outputs),
        "seconds": round(seconds, 4),
        "requests_per_second": round(requests / seconds, 3),
        "output_tokens_per_second": round(sum(outputs) / seconds, 1),
        "total_tokens_per_second": round((sum(lengths) + sum(outputs)) / seconds, 1),
        "steps": after.steps - before.steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
        **decode_shares(after.graphs, before.graphs),
    }


def decode_shares(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return decode steps, the share of them that replayed, and the share of padding between two counter snapshots."""

    def delta(counter: str, phase: int) -> int:
        new, old = (
            sum(count for labels, count in stats[counter] if labels[phase] == "decode") for stats in (after, before)
        )
        return new - old

    steps, eager = delta("batch_rows", 1), delta("fallbacks", 1)
    real, padded = delta("real_tokens", 0), delta("padded_tokens", 0)
    return {
        "decode_steps": steps,
        "hit_rate": round((steps - eager) / steps, 4) if steps else None,
        "padding": round(padded / (real + padded), 4) if real + padded else None,
    }


def graph_summary(engine: Engine) -> dict[str, Any]:
    """Return the number of graphs, the seconds spent on their capture, and the bytes of the pool."""
    rows = engine.graphs()
    captured = [row for row in rows if row["state"] == "captured"]
    return {
        "captured": sum(row["graphs"] for row in captured),
        "failed": sum(row["state"] == "failed" for row in rows),
        "capture_seconds": round(sum(row["capture_seconds"] for row in captured), 3),
        "pool_bytes": engine.stats().graphs["pool_bytes"],
        "engine": captured[0]["engine"] if captured else "",
    }


def circumstances(command: list[str]) -> dict[str, Any]:
    """Return the conditions of a measurement: date, commit, hardware, versions, threads and the command."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "getloadavg"):
        found["load_before"] = round(os.getloadavg()[0], 2)
    return found


def _commit() -> str | None:
    """Return the commit of this source tree, with "+" if tracked files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return result.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
        named = {key.strip(): value.strip() for key, value in fields.items()}
        model, flags = named.get("model name"), named.get("flags", "").split()
        extras = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
        if model:
            return f"{model} ({', '.join(extras)})" if extras else model
    return platform.processor() or platform.machine()
