"""State of the process that tests leave behind, and whether it changes Megatron's training tests.

Runs test files in one process in the given order, and prints before each file what differs from the start: settings of
PyTorch, environment variables, compiled code and its limits, the attention backend that Transformer Engine remembers,
and the allocator's pools. Needs megatron-core and Transformer Engine.

`--reset` restores some of it before the last file. An order that fails without it and passes with one names the cause.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks import harness
from graph_cache.guards.torch_settings import SETTINGS, settings

NEEDS = "1 GPU"
ADAPTERS = "tests/graph_cache/adapters"
ORDER = (
    f"{ADAPTERS}/transformer_engine/test_transformer_engine_gpu.py",
    "tests/graph_cache/backends/test_cuda.py",
    f"{ADAPTERS}/megatron/test_training_gpu.py",
)
RESETS = ("none", "compiler", "environment", "settings", "memory", "attention")
VARIABLES = ("NVTE_", "NCCL_", "CUBLAS", "CUDA_", "TORCH")


def state() -> dict[str, Any]:
    """Return the state of the process that may select kernels, as plain values."""
    found: dict[str, Any] = {setting.name: str(value) for setting, value in zip(SETTINGS, settings(), strict=False)}
    found |= {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    if dynamo := sys.modules.get("torch._dynamo"):
        found["recompile_limit"] = dynamo.config.recompile_limit
        counters = dynamo.utils.counters
        found["compiled frames"] = counters["stats"]["unique_graphs"]
        found["recompile limits hit"] = sum(
            count for reason, count in counters["unimplemented"].items() if "limit" in str(reason)
        ) + sum(counters["recompile_limit"].values())
    backends = _attention_backends()
    found |= {f"Transformer Engine: {name}": str(value) for name, value in backends.items()}
    if torch.cuda.is_available():
        pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}
        found["allocator pools"] = len(pools)
        found["reserved MiB"] = torch.cuda.memory_reserved() >> 20
    return found


def _attention_backends() -> dict[str, Any]:
    """Return what Transformer Engine remembers of the last choice of an attention backend."""
    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    return getattr(sys.modules.get(name), "_attention_backends", {})


def reset(what: str, start: dict[str, str]) -> None:
    """Restore one kind of state. `start` is the environment at the start."""
    if what == "compiler" and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    elif what == "environment":
        os.environ.clear()
        os.environ.update(start)
    elif what == "settings":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.use_deterministic_algorithms(False)
    elif what == "memory":
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
    elif what == "attention":
        backends = _attention_backends()
        if backends:
            backends["attention_params"] = None


class _Reporter:
    """A pytest plugin: print before each file what changed, and reset before the last one."""

    def __init__(self, files: Sequence[str], what: str):
        self._last, self._what = files[-1], what
        self._start, self._environment = state(), dict(os.environ)
        self._file = ""
        self.changed: dict[str, dict[str, str]] = {}  # by file: what differs from the start before it

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = item.nodeid.partition("::")[0]
        if file == self._file:
            return
        self._file = file
        if file == self._last:
            reset(self._what, self._environment)
        now = state()
        changed = {name: value for name, value in now.items() if self._start.get(name) != value}
        self.changed[file] = {name: str(value) for name, value in changed.items()}
        print(f"\nbefore {file}:")
        for name, value in changed.items():
            print(f"  {name}: {self._start.get(name)} -> {value}")


def main(argv: Sequence[str]) -> int:
    """Run the files in order, and return pytest's exit status."""
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--files", nargs="+", default=list(ORDER), help="test files, in order")
    parser.add_argument("--reset", choices=RESETS, default="none", help="what to restore before the last file")
    arguments = parser.parse_args(argv)
    reporter = _Reporter(arguments.files, arguments.reset)
    options = ["-q", "-s", "-m", "gpu", "-p", "no:randomly", "-p", "no:cacheprovider"]
    status = int(pytest.main([*options, *arguments.files], plugins=[reporter]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"status": status, "changed": reporter.changed}, indent=2), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
