"""First token of a long prompt: computed, and from each tier of the prefix cache.

    python -m benchmarks serving.kv_tiers --shape qwen3-0.6b --tokens 12000 --rounds 3 --json FILE

Each round takes a new prompt: computed, then from the device, then from host memory and from disk, after other prompts
have evicted it. Files are dropped from the page cache before they are read, where the system allows it. The floor is
the time to copy the prompt's keys and values from pinned memory in one piece. Random weights, on one GPU.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEEDS = "1 GPU"
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    import torch

    from benchmarks import harness
    from benchmarks.shapes import shape, shape_config, write_shape
    from engine import Engine, EngineConfig, SamplingParams

    parser = harness.parser("benchmarks.serving.kv_tiers", __doc__)
    parser.add_argument("--shape", type=shape, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=harness.count, default=12_000)
    parser.add_argument("--rounds", type=harness.count, default=3)
    parser.add_argument("--page-size", type=harness.count, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="for the files; default: a temporary one")
    args = parser.parse_args(argv)
    report = harness.Report("benchmarks.serving.kv_tiers", args, argv)
    pages = -(-args.tokens // args.page_size)
    size = _page_gib(shape_config(args.shape), args.page_size)
    rng, params = random.Random(1), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        settings = {
            "model": write_shape(args.shape, folder), "load_format": "dummy", "graph_manifest": "none",
            "device": args.device, "page_size": args.page_size, "max_model_len": args.tokens + 64, "max_num_seqs": 8,
            "num_pages": 2 * pages + 8, "progress": False, "dtype": "bfloat16",
        }  # fmt: skip
        blocks = Path(folder) / "blocks"
        engine = Engine(
            EngineConfig(
                **settings,
                kv_offloading_size=1.3 * pages * size,
                kv_offloading_disk_path=str(blocks),
                kv_offloading_disk_size=8 * pages * size,
            )
        )
        vocab = engine.info.vocab_size

        def prompt() -> list[int]:
            return [rng.randrange(3, vocab) for _ in range(args.tokens)]

        def first_token(ids: list[int]) -> tuple[float, dict[str, int]]:
            before = engine.stats().tier_hits
            begun = time.perf_counter()
            engine.generate(prompt_token_ids=[ids], sampling_params=params)
            seconds = time.perf_counter() - begun
            return seconds, {tier: n - before.get(tier, 0) for tier, n in engine.stats().tier_hits.items()}

        def settle() -> None:
            while engine.loop.scheduler.tiers.is_busy:
                engine.loop.poll_tiers()
                time.sleep(0.001)

        for _ in range(2):
            first_token(prompt())  # captures
        runs: dict[str, list[float]] = {"computed": [], "device": [], "host": [], "disk": []}
        for _ in range(args.rounds):
            ids = prompt()
            runs["computed"].append(first_token(ids)[0])
            runs["device"].append(first_token(ids)[0])
            for tier, fillers in (("host", 2), ("disk", 4)):
                for _ in range(fillers):
                    first_token(prompt())
                    settle()
                _drop_page_cache(blocks)
                seconds, hits = first_token(ids)
                if hits.get(tier, 0) > 0.8 * args.tokens:
                    runs[tier].append(seconds)
        floor = _copy_seconds(int(pages * size * GIB), args.device, torch)
        computed = statistics.median(runs["computed"])
        for tier, found in runs.items():
            if found:
                middle = statistics.median(found)
                report.add({"from": tier, "first_token_ms": round(1e3 * middle, 2), "rounds": len(found),
                            "share_of_computed": round(middle / computed, 4)})  # fmt: skip
        report.add({"from": "floor: one copy", "first_token_ms": round(1e3 * floor, 2)})
        engine.close()
    report.finish(runs=runs, gib=round(pages * size, 3))
    return 0


def _page_gib(config: dict[str, Any], page_size: int) -> float:
    """Return the size of a page of 16-bit keys and values in all layers."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * page_size / GIB


def _drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy_seconds(size: int, device: str, torch) -> float:
    if not device.startswith("cuda"):
        return 0.0
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return min(found)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
