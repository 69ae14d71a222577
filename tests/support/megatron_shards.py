"""Shards of Megatron-Core GPTModels built from plain values, and Megatron's tensor-parallel process group.

The model uses Megatron's local layer spec with a core attention in plain torch, no fused kernels, and uninitialized
parameters. Checkpoints are loaded elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # imports warn about missing packages and deprecated names
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec


def split_tensors(ranks: int) -> dist.ProcessGroup:
    """Make the default group's `ranks` processes one tensor-parallel group. Undo with `forget_groups`."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    return parallel_state.get_tensor_model_parallel_group()


def forget_groups() -> None:
    """Clear Megatron-Core's parallel state. Destroying the process groups is left to torch.distributed."""
    parallel_state.destroy_model_parallel()


def empty_gpt_model(
    values: Mapping[str, Any], arguments: Mapping[str, Any], *, ranks: int, dtype: torch.dtype, device: torch.device
) -> GPTModel:
    """Build this rank's shard of a GPTModel for inference, with uninitialized parameters.

    values: fields of the TransformerConfig. arguments: further arguments of GPTModel. device: the CPU, or the current
    CUDA device.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerConfig warns about its own defaults
        config = TransformerConfig(
            **values,
            tensor_model_parallel_size=ranks,
            params_dtype=dtype,
            use_cpu_initialization=device.type == "cpu",
            perform_initialization=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        )
        spec = layer_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
        model = GPTModel(config, spec, **arguments)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.allreduce_dgrad = False  # avoids a warning; there are no gradients to reduce
    if device.type == "cpu":
        keep_rotary_in_place(model)
    return model.to(device=device, dtype=dtype).eval()  # norms are created as float32 on the CPU
