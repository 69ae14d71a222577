"""The prefill of one prompt, with the model's windows and without them: ms to the first token, and tokens/s.

    python -m benchmarks step.prefill_step --shape mistral-7b --prompt 12000 --chunk 8192 --json FILE

Random bf16 weights. All chunks of the prompt and the logits after its last token are one CUDA graph, without the
engine's host side. The graphs with windows and without are replayed in turn; both use the same weights, and without
windows all layers have full attention. The floor is the operations of the linear layers, of the experts that a token
uses, and of attention within the windows, at the rate of a large product on the same GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import harness
from benchmarks.shapes import shape, write_shape
from benchmarks.timing import capture, matmul_rate, replay_ms
from engine.attention.cache_spec import group_layers, paged_layers
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import PrefillMetadata
from engine.layers.moe import MoE
from engine.models import config_from_folder
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.attention.triton import TritonBackend
    from engine.kernels.compile_ahead import compile_ahead

NEEDS = "1 GPU"
PAGE = 16


def build(config: ModelConfig, prompt: int, like: Decoder | None = None) -> Decoder:
    """Build a model for `prompt` tokens with random weights, or with the weights of `like`."""
    model = Decoder(config, torch.bfloat16, "cuda", max_len=(prompt // PAGE + 1) * PAGE)
    if like is not None:
        for parameter, same in zip(model.parameters(), like.parameters(), strict=True):
            parameter.data = same.data
        return model
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.02)
        if "norm" in name:
            parameter.data.add_(1)
    return model


def prefill(model: Decoder, prompt: int, chunk: int) -> Callable[[], None]:
    """Return a call that computes the chunks of a prompt and the logits after it."""
    config, device = model.config, torch.device("cuda", torch.cuda.current_device())
    specs, pages = config.cache_specs(), prompt // PAGE + 1
    groups = len(group_layers(specs))
    kv = KVCache(specs, groups * pages + 1, PAGE, torch.bfloat16, device)
    tables = torch.zeros(groups, 2, pages, dtype=torch.int64, device=device)
    tables[:, 1] = 1 + torch.randperm(groups * pages, device=device).view(groups, pages)
    fused, attention = model.fused(1, chunk), TritonBackend(kv, 1)
    tokens = torch.randint(config.vocab_size, (prompt,), device=device)
    logits = torch.empty(1, config.vocab_size, dtype=torch.bfloat16, device=device)

    def one(value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=device)

    parts = []
    for start in range(0, prompt, chunk):
        positions = torch.arange(start, min(start + chunk, prompt), device=device)
        rows = torch.ones_like(positions)
        parts.append(PrefillMetadata(tables, positions, rows, one(len(positions)), one(start), one(1)))

    def run() -> None:
        for ids, part in zip(tokens.split(chunk), parts, strict=True):
            hidden = fused.forward(ids, part.positions, attention.prefill(part), part.token_rows)
        fused.head(hidden[-1:], logits, after_layer=False)

    return run


def operations(model: Decoder, prompt: int) -> float:
    """Return the operations of a prompt: linear layers, of experts the ones that a token uses, and attention."""
    config, used = model.config, 0.0
    for layer in model.layers:
        used += sum(one.numel() for one in layer.parameters())
        for moe in (module for module in layer.modules() if isinstance(module, MoE)):
            unused = 1 - moe.router.top_k / moe.experts.count
            used -= unused * sum(one.numel() for one in moe.experts.parameters())
    keys = 0
    for spec in paged_layers(config.cache_specs()).values():
        window = min(spec.window or prompt, prompt)
        keys += window * (window + 1) // 2 + (prompt - window) * window
    head = config.vocab_size * config.hidden_size
    return 2.0 * (used * prompt + head) + 4.0 * keys * config.num_heads * config.head_dim


def measure(shape: str, prompt: int, chunk: int, repeats: int, rate: float) -> list[dict[str, Any]]:
    """Time the prefill of a shape with and without windows, in turn; `rate`: of a large product in TFLOP/s."""
    config = config_from_folder(write_shape(shape, tempfile.mkdtemp()))
    models = {"with": build(config, prompt)}
    if config.windows:
        models["without"] = build(replace(config, windows=()), prompt, models["with"])
    rows = []
    with torch.inference_mode():
        runs = {name: prefill(model, prompt, chunk) for name, model in models.items()}  # they hold what graphs read
        graphs = {}
        for name, run in runs.items():
            compile_ahead(run, torch.device("cuda", torch.cuda.current_device()))
            graphs[name] = capture(run)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(repeats):
            for name, graph in graphs.items():
                times[name] += replay_ms(graph, 1)
        for name, model in models.items():
            ms, needed = statistics.median(times[name]), operations(model, prompt)
            row = {"shape": shape, "prompt": prompt, "windows": name if config.windows else "none", "ms": round(ms, 2)}
            row |= {"tokens_per_s": round(prompt / ms * 1e3), "floor_ms": round(needed / rate / 1e9, 2)}
            rows.append(row | {"share_of_floor": round(needed / rate / 1e9 / ms, 3)})
    return rows


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="mistral-7b")
    parser.add_argument("--prompt", type=harness.count, default=12000, help="tokens")
    parser.add_argument("--chunk", type=harness.count, default=8192, help="tokens of a step")
    parser.add_argument("--repeats", type=harness.count, default=5)
    args: argparse.Namespace = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    rate = matmul_rate()
    for row in measure(args.shape, args.prompt, args.chunk, args.repeats, rate):
        report.add(row)
    report.finish(product_tflops=round(rate, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
