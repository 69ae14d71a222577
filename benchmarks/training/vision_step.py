"""A training step of a vision-language model: eager, our graphs of encoder and language model, and Megatron's own.

    python -m benchmarks training.vision_step --model transformers --json FILE
    python -m benchmarks training.vision_step --model megatron --json FILE

Qwen3-VL-like: 24 layers of width 2,048, and an encoder of 27 layers of width 1,152, in bf16, AdamW. A batch has from 1
to --batches images of 448 x 448 pixels (784 patches) in a text of --length tokens. Token budgets come from
`tune_token_budgets` for these batches, and hold all of them.

The row "padded" is eager with our padding. With --deterministic, which selects PyTorch's deterministic kernels, the
losses of our graphs equal its losses bit for bit: flash attention's backward adds up in any order otherwise. The row
"encoder" has graphs of the encoder alone. --model megatron adds our Transformer Engine adapter, and Megatron's own
graphs of the language model (its encoder stays eager), where Transformer Engine is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.training.step_timing import (
    LEARNING_RATE,
    LOSS_COLUMNS,
    LossComparison,
    add_arguments,
    losses_of,
    run_ways,
    timed,
)
from benchmarks.training.vision_models import MERGE, PATCH, Batch, TransformersModel, batch_of, megatron_model
from engine import Engine, EngineConfig
from graph_cache import tune_token_budgets

NEEDS = "CPU or 1 GPU"
IMPLS = {"local": "local", "encoder": "local", "transformer_engine": "transformer_engine"}
WAYS = ("eager", "padded", "encoder", "local", "transformer_engine", "megatron_local", "megatron_transformer_engine")
PLAIN = WAYS[:4]
BATCHES = 32  # batches that take turns
MAX_BUDGETS = 4


def images_per_batch(most: int) -> list[int]:
    """Return the number of images of each batch, from 1 to `most`."""
    return torch.randint(1, most + 1, (BATCHES,), generator=torch.Generator().manual_seed(1)).tolist()


def settings_of(way: str, args: argparse.Namespace, most: int) -> EngineConfig:
    """Return the settings of our graphs, and of our padding in the way "padded"."""
    patches = (args.side // PATCH) ** 2
    seen = Counter(images * patches for images in images_per_batch(most))
    lengths = 1 if way == "transformer_engine" else MAX_BUDGETS  # its graphs have one length
    budgets = tune_token_budgets(seen, max_budgets=lengths, multiple_of=MERGE**2, eager_share=10).budgets
    impl = IMPLS.get(way, "local")
    return EngineConfig(
        mode="training",
        cuda_graph_impl="none" if way == "encoder" else impl,
        vision_cuda_graph_impl=impl,
        vision_token_budgets=budgets,
    )


def set_up(way: str, most: int, args: argparse.Namespace) -> tuple[Callable[[int], torch.Tensor], list[Engine]]:
    """Return a function that runs step number n on that step's data, and what captures it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = [
        batch_of(seed, images, args.side, args.length, device) for seed, images in enumerate(images_per_batch(most))
    ]
    settings = settings_of(way, args, most)
    sizes = (args.layers, args.width, args.tower_layers, args.tower_width)
    if args.model == "megatron":
        return _megatron(way, data, settings, sizes, args)
    torch.manual_seed(0)
    model = TransformersModel(*sizes).to(device, torch.bfloat16)
    engines: list[Engine] = []
    if way in IMPLS:
        engines.append(Engine(settings))
        engines[0].attach(model)
    elif way == "padded":
        from engine.training.vision.padding import PaddedImages

        PaddedImages(model.tower, settings.vision_token_budgets or (), settings.vision_max_images).begin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=device.type == "cuda")

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data[number % BATCHES])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, engines


def _megatron(
    way: str, data: Sequence[Batch], settings: EngineConfig, sizes: tuple[int, int, int, int], args: argparse.Namespace
) -> tuple[Callable[[int], torch.Tensor], list[Engine]]:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.training.megatron_ways import HAVE_TE, OWN_IMPLS, prepare, start_process
    from graph_cache.adapters.megatron.vision_padding import padded_encoders

    start_process()
    torch.manual_seed(0)
    if HAVE_TE:
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
    model = megatron_model(*sizes, args.length, OWN_IMPLS.get(way, "none"), HAVE_TE)
    model = model.to(data[0].ids.device).bfloat16()
    if way == "padded":
        for padding in padded_encoders([model], settings.vision_settings(), lambda name, reason: None):
            padding.begin()

    def forward(chunk: torch.nn.Module, batch: Batch) -> Any:
        return chunk(batch)

    return prepare(way, model, forward, data, settings if way in IMPLS else None, args, 1)


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    add_arguments(parser, WAYS, PLAIN)
    parser.set_defaults(batches=[4], length=1024, width=2048)
    parser.add_argument("--model", choices=("transformers", "megatron"), default="transformers")
    parser.add_argument("--tower-layers", type=harness.count, default=27)
    parser.add_argument("--tower-width", type=harness.count, default=1152)
    parser.add_argument("--side", type=harness.count, default=448, help=f"pixels, a multiple of {PATCH * MERGE}")
    parser.add_argument("--loss-steps", type=harness.count, default=100, help="steps whose losses are compared")
    parser.add_argument("--deterministic", action="store_true", help="use PyTorch's deterministic kernels")
    args = parser.parse_args(argv)
    if args.side % (PATCH * MERGE):
        parser.error(f"--side is {args.side}: give a multiple of {PATCH * MERGE}")
    if args.model == "transformers" and set(args.ways) - set(PLAIN):
        parser.error(f"--model transformers has the ways {', '.join(PLAIN)}")
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS needs it, here and in the processes of the ways
        torch.use_deterministic_algorithms(True)
    if args.one:
        step, engines = set_up(args.ways[0], args.batches[0], args)
        losses = losses_of(step, args.loss_steps)
        print(json.dumps(timed(step, engines, args.warm, args.steps) | {"losses": losses}), flush=True)
        os._exit(0)  # Megatron's own graphs hold NCCL's buffers, and an orderly exit may hang on them
    ways = args.ways
    if args.model == "megatron" and ways == list(PLAIN):
        from benchmarks.training.megatron_ways import HAVE_TE

        ways = list(WAYS if HAVE_TE else PLAIN)
    report = harness.Report(__spec__.name, args, argv)
    names = ("model", "tower_layers", "tower_width", "side", "loss_steps")
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    flags += ["--deterministic"] if args.deterministic else []
    run_ways(__spec__.name, ways, args, flags, report, LossComparison())
    report.finish(LOSS_COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
