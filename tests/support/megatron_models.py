"""Small Megatron-Core GPTModels that run on a CPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec

VOCAB = 96
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
FIXED = EXPERTS | {
    "moe_expert_capacity_factor": 2.0,
    "moe_pad_expert_input_to_capacity": True,
    "normalization": "LayerNorm",
}
"""MoE layers with a fixed number of tokens per expert, for any routing. They use LayerNorm: torch's RMSNorm uses its
input twice, and captured by itself it accumulates gradients in a different order from eager.
"""


def loss_sums() -> dict[str, Any]:
    """Return Megatron's sums of auxiliary losses by name, which clearing removes; `sums_of` returns their tensors."""
    tracker = getattr(moe_utils, "get_moe_metrics_tracker", None)  # from 0.19 on
    return tracker().metrics if tracker is not None else moe_utils.get_moe_layer_wise_logging_tracker()


def sums_of(sums: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of `loss_sums`, [layers] each."""
    return [one["values"] if isinstance(one, dict) else one.values for one in sums.values()]


def config(**changes: Any) -> TransformerConfig:
    """Return a Llama-like config with two layers of width 32; `qk_layernorm=True` makes it Qwen3-like."""
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
    } | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of its own defaults
        return TransformerConfig(**values)


def gpt(
    seed: int = 0,
    *,
    tied: bool = False,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    rotary_base: int = 10000,
    **changes: Any,
) -> GPTModel:
    """Return a GPTModel in training mode with random weights from `seed`."""
    torch.manual_seed(seed)
    cfg = config(**changes)
    spec = layer_spec(
        normalization=cfg.normalization,
        qk_layernorm=cfg.qk_layernorm,
        num_experts=cfg.num_moe_experts,
        moe_grouped_gemm=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(
            cfg,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            pre_process=pre_process,
            post_process=post_process,
            rotary_base=rotary_base,
            vp_stage=vp_stage,
        )
    keep_rotary_in_place(model)
    return model


def tokens(seed: int, batch: int = 2, length: int = 12) -> tuple[Tensor, Tensor]:
    """Return random token ids and their positions, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
    return ids, torch.arange(length).expand(batch, -1)


def loss_of(model: GPTModel, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the mean next-token loss."""
    return model(ids, positions, None, labels=ids.roll(-1, 1)).mean()
