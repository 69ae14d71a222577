"""A training step over packed sequences: eager, our graphs, and Megatron's own.

    python -m benchmarks training.packed_step --batches 1 --json FILE

A GPTModel of 24 layers of width 1,024 in bf16, AdamW. The number of documents per batch is lognormal with P50 = 12 and
P90 = 43; their lengths are uneven. `encore tune --packed`'s chooser sets the number to pad to, or --documents does.
The row "more" pads to twice as many: the difference is what a padding document costs, from which --eager-cost of the
chooser follows. Without Transformer Engine, or without a GPU, attention is PyTorch's and Megatron's ways are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks import harness
from benchmarks.training.megatron_ways import HAVE_TE, OWN_IMPLS, prepare, start_process
from benchmarks.training.packed_attention import PackedSdpa
from benchmarks.training.step_timing import LOSS_COLUMNS, LossComparison, add_arguments, losses_of, run_ways, timed
from engine import Engine, EngineConfig
from graph_cache import tune_packed
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec

NEEDS = "CPU or 1 GPU"
IMPLS = {"local": "local", "more": "local", "transformer_engine": "transformer_engine"}
OURS = ("eager", "local", "more")
WAYS = (*OURS, "transformer_engine", *OWN_IMPLS)
VOCABULARY = 32000
MEDIAN, P90 = 12, 43
BATCHES, OBSERVED = 64, 10_000  # batches that take turns, and those that the chooser sees
Batch = tuple[torch.Tensor, torch.Tensor, PackedSeqParams]


def documents_per_batch(count: int, length: int) -> list[int]:
    """Return lognormal numbers of documents, at least 1 and at most one per two tokens."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(2))
    numbers = (math.log(MEDIAN) + math.log(P90 / MEDIAN) / 1.2816 * normal).exp().round()
    return [max(1, min(length // 2, int(number))) for number in numbers]


def batches_of(length: int, device: torch.device) -> list[Batch]:
    """Return (tokens [1, length + 1], positions [1, length], packed) of the batches that take turns."""
    found = []
    for seed, documents in enumerate(documents_per_batch(BATCHES, length)):
        generator = torch.Generator().manual_seed(seed)
        cuts = torch.randperm(length - 1, generator=generator)[: documents - 1] + 1
        ends = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([length])]).int()
        starts = ends[:-1].repeat_interleave(ends.diff())
        longest = int(ends.diff().max())
        ends = ends.to(device)
        packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        tokens = torch.randint(VOCABULARY, (1, length + 1), generator=generator)
        found.append((tokens.to(device), (torch.arange(length) - starts)[None].to(device), packed))
    return found


def build(way: str, documents: int, args: argparse.Namespace) -> GPTModel:
    """Return the same model each time, captured by Megatron itself where the way says so."""
    known = {one.name for one in fields(TransformerConfig)}
    own: dict[str, Any] = {}
    if way in OWN_IMPLS:
        own = {"cuda_graph_impl": OWN_IMPLS[way]}
        packed = {"cuda_graph_packed_seq": True, "cuda_graph_max_packed_seqs": documents}
        own |= {name: value for name, value in packed.items() if name in known}
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
        bias_dropout_fusion=HAVE_TE,
        apply_rope_fusion=HAVE_TE,
        use_cpu_initialization=not torch.cuda.is_available(),
        **own,
    )
    torch.manual_seed(0)
    if HAVE_TE:
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = layer_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = PackedSdpa
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


def set_up(way: str, args: argparse.Namespace) -> tuple[Callable[[int], torch.Tensor], list[Engine], int]:
    """Return a function that runs step number n, what captures it, and the number of documents padded to."""
    documents = args.documents
    if documents is None:
        documents = tune_packed(documents_per_batch(OBSERVED, args.length)).max_packed_seqs
    documents *= 2 if way == "more" else 1
    settings = None
    if way in IMPLS:
        settings = EngineConfig(
            mode="training",
            cuda_graph_impl=IMPLS[way],
            cuda_graph_packed_seq=True,
            cuda_graph_max_packed_seqs=documents,
        )
    start_process()
    model = build(way, documents, args)
    data = batches_of(args.length, next(model.parameters()).device)

    def forward(chunk: torch.nn.Module, batch: Batch) -> torch.Tensor:
        tokens, positions, packed = batch
        return chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:], packed_seq_params=packed)

    step, engines = prepare(way, model, forward, data, settings, args, 1)
    return step, engines, documents


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    add_arguments(parser, WAYS if HAVE_TE else OURS, WAYS if HAVE_TE else OURS)
    parser.set_defaults(batches=[1], length=4096)
    parser.add_argument("--documents", type=harness.count, help="documents to pad to (default: the chooser's)")
    parser.add_argument("--loss-steps", type=harness.count, default=100, help="steps whose losses are compared")
    args = parser.parse_args(argv)
    if args.batches != [1]:
        parser.error("--batches: packed sequences are batches of 1; --length sets the tokens")
    if args.one:
        step, engines, documents = set_up(args.ways[0], args)
        losses = losses_of(step, args.loss_steps)
        found = timed(step, engines, args.warm, args.steps)
        print(json.dumps(found | {"losses": losses, "documents": documents}), flush=True)
        os._exit(0)  # Megatron's own graphs hold NCCL's buffers, and an orderly exit may hang on them
    report = harness.Report(__spec__.name, args, argv)
    flags = [f"--loss-steps={args.loss_steps}", *([f"--documents={args.documents}"] if args.documents else [])]
    run_ways(__spec__.name, args.ways, args, flags, report, LossComparison())
    ms = {row["way"]: (row["ms"], row["documents"]) for row in report.rows if "ms" in row}
    figures = {}
    if {"eager", "local", "more"} <= set(ms):
        (fewer_ms, fewer), (more_ms, more) = ms["local"], ms["more"]
        per_document = (more_ms - fewer_ms) / (more - fewer)
        figures = {"ms_per_padding_document": round(per_document, 6)}
        if per_document > 0:
            figures["eager_cost"] = round((ms["eager"][0] - fewer_ms) / per_document)
        print(json.dumps(figures))
    report.finish((*LOSS_COLUMNS[:2], "documents", *LOSS_COLUMNS[2:]), **figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
