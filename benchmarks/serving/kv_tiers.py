"""First token of a long prompt: computed, and from each tier of the prefix cache.

    python -m benchmarks serving.kv_tiers --shape qwen3-0.6b --tokens 12000 --rounds 3 --json FILE

Each round takes a new prompt: computed, then from the device, then from host memory after two other prompts. Then a
prompt comes from disk; its files are dropped from the page cache before, where the system allows it. The floor is the
time to copy the prompt's keys and values from pinned memory in one piece. Random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NEEDS = "1 GPU"
GIB = 2**30


class Bench:
    """An engine that holds two prompts on the device and 1.3 in host memory, and first tokens from each tier."""

    def __init__(self, shape: str, args: argparse.Namespace, folder: str):
        from benchmarks.shapes import shape_config, write_shape
        from engine import Engine, EngineConfig

        pages = -(-args.tokens // args.page_size)
        self.gib = pages * _page_gib(shape_config(shape), args.page_size)
        self._tokens, self._rng, self._folder = args.tokens, random.Random(1), Path(folder) / "blocks"
        self._engine = Engine(
            EngineConfig(
                model=write_shape(shape, folder), load_format="dummy", graph_manifest="none", dtype="bfloat16",
                device=args.device, page_size=args.page_size, max_model_len=args.tokens + 64, max_num_seqs=8,
                num_pages=2 * pages + 8, progress=False, kv_offloading_size=1.3 * self.gib,
                kv_offloading_disk_path=str(self._folder), kv_offloading_disk_size=12 * self.gib,
            )
        )  # fmt: skip
        self.times: dict[str, list[float]] = {"computed": [], "device": [], "host": [], "disk": []}

    def prompt(self) -> list[int]:
        return [self._rng.randrange(3, self._engine.info.vocab_size) for _ in range(self._tokens)]

    def first_token(self, ids: list[int]) -> tuple[float, str]:
        """Return the seconds, and the tier that most of the prompt came from; "" if it was computed or cached."""
        from engine import SamplingParams

        before = self._engine.stats().tier_hits
        begun = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._engine.generate(prompt_token_ids=[ids], sampling_params=params)
        seconds = time.perf_counter() - begun
        after = self._engine.stats().tier_hits
        found = [tier for tier in after if after[tier] - before.get(tier, 0) > 0.8 * self._tokens]
        return seconds, "".join(found)

    def evict(self, prompts: int) -> None:
        for _ in range(prompts):
            self.first_token(self.prompt())

    def settle(self) -> None:
        """Wait until all files are written."""
        while self._engine.loop.scheduler.tiers.is_busy:
            self._engine.loop.poll_tiers()
            time.sleep(0.001)

    def round(self, ids: list[int], kept: bool = True) -> None:
        """Time a new prompt, computed and from the device, and from host memory after two others."""
        for tier, expected in (("computed", ""), ("device", ""), ("host", "host")):
            if expected:
                self.evict(2)
            seconds, found = self.first_token(ids)
            if kept and found == expected:
                self.times[tier].append(seconds)

    def disk_round(self) -> None:
        """Time a prompt that is on disk only, out of the page cache."""
        self.evict(3)
        self.settle()
        others, ids = set(self._folder.rglob("*.kv")), self.prompt()
        self.first_token(ids)
        self.evict(2)
        self.settle()
        _drop_page_cache(set(self._folder.rglob("*.kv")) - others)
        self.evict(2)
        self.settle()
        seconds, found = self.first_token(ids)
        if found == "disk":
            self.times["disk"].append(seconds)

    def close(self) -> None:
        self._engine.loop.reset_prefix_cache()  # nothing to save
        self._engine.close()


def main(argv: Sequence[str]) -> int:
    from benchmarks import harness
    from benchmarks.shapes import shape

    parser = harness.parser("benchmarks.serving.kv_tiers", __doc__)
    parser.add_argument("--shape", type=shape, action="append", help="may be given several times")
    parser.add_argument("--tokens", type=harness.count, default=12_000)
    parser.add_argument("--rounds", type=harness.count, default=3)
    parser.add_argument("--disk-rounds", type=harness.count, default=1)
    parser.add_argument("--page-size", type=harness.count, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="for the files; default: a temporary one")
    args = parser.parse_args(argv)
    report, times = harness.Report("benchmarks.serving.kv_tiers", args, argv), {}
    for name in args.shape or ["qwen3-0.6b"]:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            bench = Bench(name, args, folder)
            for number in range(args.rounds + 1):  # the first one captures
                bench.round(bench.prompt(), kept=number > 0)
            for tier in ("computed", "device", "host"):
                _add(report, name, bench, tier)
            report.add({"shape": name, "from": "floor: one copy", "first_token_ms": _copy_ms(bench.gib, args.device)})
            for _ in range(args.disk_rounds):
                bench.disk_round()
            _add(report, name, bench, "disk")
            times[name] = bench.times
            bench.close()
    report.finish(times=times)
    return 0


def _add(report: Any, shape: str, bench: Bench, tier: str) -> None:
    if found := bench.times[tier]:
        middle = statistics.median(found)
        share = round(middle / statistics.median(bench.times["computed"]), 4)
        row = {"shape": shape, "from": tier, "first_token_ms": round(1e3 * middle, 2), "share_of_computed": share}
        report.add(row | {"rounds": len(found), "gib": round(bench.gib, 2)})


def _page_gib(config: dict[str, Any], page_size: int) -> float:
    """Return the size of a page of 16-bit keys and values in all layers."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * page_size / GIB


def _drop_page_cache(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy_ms(gib: float, device: str) -> float | None:
    import torch

    if not device.startswith("cuda"):
        return None
    source = torch.empty(int(gib * GIB), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begun))
    return round(min(found), 2)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
