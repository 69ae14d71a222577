"""A training step of Megatron-Core's GPTModel: eager, our graphs, and Megatron's own two kinds.

    python -m benchmarks training.megatron_step --batches 1,4 --json FILE [--fp8 delayed]

24 layers of width 1,024 in bf16, 512 tokens, AdamW, random tokens, Transformer Engine's layer spec. Without Transformer
Engine, or without a GPU, the local spec is used and Megatron's ways are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks import harness
from benchmarks.training.megatron_ways import HAVE_TE, OWN_IMPLS, prepare, start_process
from benchmarks.training.step_timing import COLUMNS, add_arguments, run_ways, timed
from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec

NEEDS = "CPU or 1 GPU"
OURS = ("eager", "layer", "attn_mlp", "iteration")
WAYS = (*OURS, "transformer_engine", "megatron_local", "megatron_transformer_engine")
VOCABULARY = 32000


def build(way: str, args: argparse.Namespace) -> GPTModel:
    """The same model each time, captured by Megatron itself where the way says so."""
    own = OWN_IMPLS.get(way, "none")
    fp8 = {"fp8": "hybrid", "fp8_recipe": {"delayed": "delayed", "current": "tensorwise"}[args.fp8]} if args.fp8 else {}
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=max(1, args.width // 64),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        normalization="RMSNorm",
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        cuda_graph_impl=own,
        bias_dropout_fusion=HAVE_TE,
        apply_rope_fusion=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        **fp8,
    )
    torch.manual_seed(0)
    if HAVE_TE:
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
    spec = get_gpt_layer_with_transformer_engine_spec() if HAVE_TE else layer_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=args.length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    if not torch.cuda.is_available():
        keep_rotary_in_place(model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").bfloat16()


def set_up(way: str, batch: int, args: argparse.Namespace) -> tuple[Callable[[int], torch.Tensor], list[Engine]]:
    """A function that runs step number n on that step's data, and what captures it."""
    start_process()
    model = build(way, args)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(VOCABULARY, (batch, args.length + 1), generator=generator).to(device) for _ in range(4)]
    positions = torch.arange(args.length, device=device).expand(batch, -1)

    def forward(chunk: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])

    return prepare(way, model, forward, data, settings_of(way), args, batch)


def settings_of(way: str) -> EngineConfig | None:
    """Return the settings of our graphs; None for a way without them."""
    if way == "iteration":
        return EngineConfig(mode="training", cuda_graph_impl="full_iteration")
    if way not in ("layer", "attn_mlp", "transformer_engine"):
        return None
    impl = "transformer_engine" if way == "transformer_engine" else "local"
    return EngineConfig(
        mode="training", cuda_graph_impl=impl, cuda_graph_modules=("attn", "mlp") if way == "attn_mlp" else ()
    )


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    add_arguments(parser, WAYS if HAVE_TE else OURS, WAYS if HAVE_TE else OURS)
    parser.add_argument("--fp8", choices=("delayed", "current"))
    args = parser.parse_args(argv)
    if args.one:
        step, engines = set_up(args.ways[0], args.batches[0], args)
        print(json.dumps(timed(step, engines, args.warm, args.steps)), flush=True)
        os._exit(0)  # Megatron's own graphs hold NCCL's buffers, and an orderly exit may hang on them
    report = harness.Report(__spec__.name, args, argv)
    run_ways(__spec__.name, args.ways, args, [f"--fp8={args.fp8}"] if args.fp8 else [], report)
    report.finish(COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
