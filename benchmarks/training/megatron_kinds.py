"""A training step of Megatron-Core models with experts or Mamba layers: eager, our graphs, Megatron's own.

    python -m benchmarks training.megatron_kinds --kind experts --batches 1,4 --json FILE

24 layers of width 1,024 in bf16, 512 tokens, AdamW, random tokens. Kinds:

- experts: 8 experts, top-2, a fixed capacity (drop-and-pad)
- dropless: 8 experts, top-2, grouped GEMM
- hybrid: Mamba-2, attention and MLP layers in the ratio 3 : 1 : 4; needs mamba-ssm and causal-conv1d

Each row has the largest difference of a loss to eager's over the first --loss-steps steps. The row "grouped" of
dropless is eager with the grouped GEMM of our graphs, whose losses equal its losses bit for bit. Losses of hybrid are
equal where the kernels are deterministic: MAMBA_DETERMINISTIC=1 and CAUSAL_CONV1D_DETERMINISTIC=1. On a CPU the models
are built from parts in plain torch, and Megatron's own ways are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

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
from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec
from graph_cache.adapters.megatron.dropless import DroplessExperts

NEEDS = "CPU or 1 GPU"
KINDS = ("experts", "dropless", "hybrid")
OURS = ("eager", "grouped", "local", "local_parts", "transformer_engine")
WAYS = (*OURS, "megatron_local", "megatron_transformer_engine")
ON_CPU = OURS[:-1]
VOCABULARY = 32000
HAVE_TE = importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()
EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_grouped_gemm": HAVE_TE,
}
FIXED_CAPACITY = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
# What each kind captures in parts, and in the ways that can't capture its whole layers.
PARTS = {
    "experts": ("attn", "moe_router", "moe_preprocess"),
    "dropless": ("attn", "moe_router"),
    "hybrid": ("mamba", "attn", "mlp"),
}


def config_of(kind: str, way: str, args: argparse.Namespace) -> TransformerConfig:
    """Return the model's settings, with Megatron's own graphs where the way says so."""
    own = {"megatron_local": "local", "megatron_transformer_engine": "transformer_engine"}.get(way, "none")
    options: dict[str, Any] = {
        "num_layers": args.layers,
        "hidden_size": args.width,
        "num_attention_heads": max(1, args.width // 64),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "pipeline_dtype": torch.bfloat16,
        "cuda_graph_impl": own,
        "bias_dropout_fusion": HAVE_TE,
        "apply_rope_fusion": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    if kind == "hybrid":
        options |= {"is_hybrid_model": True, "mamba_num_groups": min(8, max(1, args.width // 32))}
    else:
        options |= EXPERTS | {"moe_ffn_hidden_size": 4 * args.width} | (FIXED_CAPACITY if kind == "experts" else {})
    if kind == "dropless" and not torch.cuda.is_available():
        options["moe_token_dispatcher_type"] = "allgather"  # the other copies counts on a CUDA stream
    if own != "none" and kind == "dropless":
        known = {field.name for field in dataclasses.fields(TransformerConfig)}
        name = "cuda_graph_modules" if "cuda_graph_modules" in known else "cuda_graph_scope"  # before 0.19
        options[name] = list(PARTS[kind])
    return TransformerConfig(**options)


def pattern_of(layers: int) -> str:
    """Return the pattern of a hybrid model."""
    return ("M-M-M-*-" * layers)[:layers]


def build(kind: str, way: str, args: argparse.Namespace) -> nn.Module:
    """Return the same model each time."""
    config = config_of(kind, way, args)
    torch.manual_seed(0)
    if HAVE_TE:
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
    model = _hybrid(config, args) if kind == "hybrid" else _gpt(config, args)
    if not torch.cuda.is_available():
        keep_rotary_in_place(model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").bfloat16()


def _gpt(config: TransformerConfig, args: argparse.Namespace) -> nn.Module:
    options = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    spec = (
        get_gpt_layer_with_transformer_engine_spec(**options)
        if HAVE_TE
        else layer_spec(normalization="RMSNorm", **options)
    )
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=args.length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )


def _hybrid(config: TransformerConfig, args: argparse.Namespace) -> nn.Module:
    if torch.cuda.is_available():
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel  # from 0.19 on

        return HybridModel(
            config,
            hybrid_stack_spec,
            VOCABULARY,
            args.length,
            hybrid_layer_pattern=pattern_of(args.layers),
            position_embedding_type="rope",
        )
    from megatron.core.models.mamba import MambaModel

    from tests.support.megatron_mamba import hybrid_stack_spec

    return MambaModel(
        config,
        hybrid_stack_spec(),
        VOCABULARY,
        args.length,
        hybrid_override_pattern=pattern_of(args.layers),
        position_embedding_type="rope",
        post_process=False,  # the final norm needs Transformer Engine; the loss is that of hidden states
    )


def set_up(kind: str, way: str, batch: int, args: argparse.Namespace) -> tuple[Callable[[int], Tensor], list[Engine]]:
    """Return a function that runs step number n on that step's data, and what captures it."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    if not torch.cuda.is_available():
        _experts_on_cpu()
    model = build(kind, way, args)
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=device.type == "cuda")
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(VOCABULARY, (batch, args.length + 1), generator=generator).to(device) for _ in range(4)]
    positions = torch.arange(args.length, device=device).expand(batch, -1)
    engines, helper, steps = _capture(kind, way, model), None, itertools.count()
    if way == "megatron_transformer_engine":
        helper = cuda_graphs.TECudaGraphHelper([model], model.config, args.length, batch)

    def loss_of(tokens: Tensor) -> Tensor:
        if getattr(model, "module", model).post_process:
            return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
        return model(tokens[:, :-1], positions, None).float().square().mean()

    def step(number: int) -> Tensor:
        if helper is not None and next(steps) == model.config.cuda_graph_warmup_steps:
            helper.create_cudagraphs()
        if by_megatron:
            model.zero_grad_buffer()
        else:
            optimizer.zero_grad()
        unwrapped = getattr(model, "module", model)
        if hasattr(unwrapped, "set_is_first_microbatch"):
            unwrapped.set_is_first_microbatch()
        loss = loss_of(data[number % 4])
        loss.backward()
        if by_megatron:
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
        optimizer.step()
        if by_megatron:
            for parameter in model.parameters():
                parameter.grad = None  # DDP's hooks would add it to itself
        return loss.detach()

    return step, engines


def _capture(kind: str, way: str, model: nn.Module) -> list[Engine]:
    """Attach what captures this way."""
    if way == "grouped":
        DroplessExperts([model]).begin()
    if way not in OURS[2:]:
        return []
    in_parts = way == "local_parts" or (way == "transformer_engine" and kind == "dropless")
    engine = Engine(
        EngineConfig(
            mode="training",
            cuda_graph_impl="transformer_engine" if way == "transformer_engine" else "local",
            cuda_graph_modules=PARTS[kind] if in_parts else (),
            cuda_graph_moe_dropless=kind == "dropless" and way == "local",
        )
    )
    engine.attach(model)
    return [engine]


def _experts_on_cpu() -> None:
    """Replace what Megatron-Core's MoE layers ask of a GPU: a stream, a device number, Transformer Engine's GEMM."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    torch.cuda.current_device = lambda: torch.device("cpu")
    moe_utils.te_general_gemm = None


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    ways = WAYS if HAVE_TE else ON_CPU
    add_arguments(parser, ways, ())
    parser.add_argument("--kind", choices=KINDS, default="experts")
    parser.add_argument("--loss-steps", type=harness.count, default=100, help="steps whose losses are compared")
    args = parser.parse_args(argv)
    args.ways = args.ways or [way for way in ways if way != "grouped" or args.kind == "dropless"]
    if "grouped" in args.ways and args.kind != "dropless":
        parser.error("--ways grouped: needs --kind dropless")
    if args.one:
        step, engines = set_up(args.kind, args.ways[0], args.batches[0], args)
        losses = losses_of(step, args.loss_steps)
        print(json.dumps(timed(step, engines, args.warm, args.steps) | {"losses": losses}), flush=True)
        os._exit(0)  # Megatron's own graphs hold NCCL's buffers, and an orderly exit may hang on them
    report = harness.Report(__spec__.name, args, argv)
    flags = [f"--kind={args.kind}", f"--loss-steps={args.loss_steps}"]
    run_ways(__spec__.name, args.ways, args, flags, report, LossComparison())
    report.finish(LOSS_COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
