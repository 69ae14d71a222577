"""A training step of Megatron-Core's GPTModel: eager, our graphs, and Megatron's own two kinds.

    python -m benchmarks training.megatron_step --batches 1,4 --json FILE [--fp8 delayed]

24 layers of width 1,024 in bf16, 512 tokens, AdamW, random tokens, Transformer Engine's layer spec. Without Transformer
Engine, or without a GPU, the local spec is used and Megatron's ways are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks import harness
from benchmarks.training.step_timing import COLUMNS, add_arguments, run_ways, timed
from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec

NEEDS = "CPU or 1 GPU"
OURS = ("eager", "layer", "attn_mlp", "iteration")
WAYS = (*OURS, "transformer_engine", "megatron_local", "megatron_transformer_engine")
VOCABULARY = 32000
HAVE_TE = importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()


def build(way: str, args: argparse.Namespace) -> GPTModel:
    """The same model each time, captured by Megatron itself where the way says so."""
    own = {"megatron_local": "local", "megatron_transformer_engine": "transformer_engine"}.get(way, "none")
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
    """A function that runs step number n on data of its own, and what captures it."""
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", rank=0, world_size=1, store=dist.HashStore()
    )
    parallel_state.initialize_model_parallel()
    model = build(way, args)
    device = next(model.parameters()).device
    by_megatron = way.startswith("megatron")
    if by_megatron:  # its graphs leave gradients in main_grad, and ask for DDP and its number of microbatches
        init_num_microbatches_calculator(
            rank=0, rampup_batch_size=None, global_batch_size=batch, micro_batch_size=batch, data_parallel_size=1
        )
        side = torch.cuda.Stream()  # as in Megatron's training loop: gradients may not be tied to the default stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        torch.cuda.current_stream().wait_stream(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda")
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(VOCABULARY, (batch, args.length + 1), generator=generator).to(device) for _ in range(4)]
    positions = torch.arange(args.length, device=device).expand(batch, -1)
    forward_backward, engines = _forward_backward(way, model, batch, args)

    def forward_step(iterator: Iterator[torch.Tensor], chunk: GPTModel) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens = next(iterator)
        losses = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda out: (out.float().mean(), {"loss": out.float().mean().detach()})

    def step(number: int) -> torch.Tensor:
        if by_megatron:
            model.zero_grad_buffer()
        else:
            optimizer.zero_grad(set_to_none=way != "iteration")
        getattr(model, "module", model).set_is_first_microbatch()
        (found,) = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter([data[number % 4]]),
            model=model,
            num_microbatches=1,
            seq_length=args.length,
            micro_batch_size=batch,
            forward_only=False,
        )
        if by_megatron:
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
        optimizer.step()
        if by_megatron:
            for parameter in model.parameters():
                parameter.grad = None  # DDP's hooks would add it to itself
        return found["loss"]

    return step, engines


def _forward_backward(
    way: str, model: GPTModel, batch: int, args: argparse.Namespace
) -> tuple[Callable[..., Any], list[Engine]]:
    """Megatron's function for one stage, or a graph of it; and what captures inside."""
    run = forward_backward_no_pipelining if torch.cuda.is_available() else _loop
    if way == "iteration":
        engine = Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration"))
        return engine.capture_forward_backward(run), [engine]
    if way in ("layer", "attn_mlp", "transformer_engine"):
        impl = "transformer_engine" if way == "transformer_engine" else "local"
        modules = ("attn", "mlp") if way == "attn_mlp" else ()
        engine = Engine(EngineConfig(mode="training", cuda_graph_impl=impl, cuda_graph_modules=modules))
        engine.attach(model)
        return run, [engine]
    if way == "megatron_transformer_engine":
        helper = cuda_graphs.TECudaGraphHelper([model], model.config, args.length, batch)
        steps = iter(range(10**9))

        def captured(**keywords: Any) -> Any:
            if next(steps) == model.config.cuda_graph_warmup_steps:
                helper.create_cudagraphs()
            return run(**keywords)

        return captured, []
    return run, []


def _loop(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any],
    model: GPTModel,
    num_microbatches: int,
    **_: Any,
) -> list[dict[str, torch.Tensor]]:
    """Megatron's schedules need a GPU; this is what one stage does of them."""
    found = []
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, model)
        loss, report = loss_func(output)
        loss.backward()
        found.append(report)
    return found


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
