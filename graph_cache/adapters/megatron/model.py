"""A GPTModel of Megatron-Core from plain values, and the process groups that split one over several processes.

Owns which of Megatron's options such a model has: its local layer spec with a core attention of plain torch, no fused
kernels, and parameters without values. Knows no checkpoint and no engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports warn of what isn't installed, and of its own old names
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec


def split_tensors(ranks: int) -> dist.ProcessGroup:
    """Make all processes of the default group one tensor-parallel group, of this many; undone by `forget_groups`."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    return parallel_state.get_tensor_model_parallel_group()


def forget_groups() -> None:
    """Have Megatron-Core forget its groups; the groups themselves are torch's to destroy."""
    parallel_state.destroy_model_parallel()


def empty_gpt_model(
    values: Mapping[str, Any], arguments: Mapping[str, Any], *, ranks: int, dtype: torch.dtype, device: torch.device
) -> GPTModel:
    """This rank's part of a GPTModel to generate with, not to train, whose parameters hold nothing yet.

    values: of its TransformerConfig; arguments: its own, beside config and layer spec. device: the CPU, or the current
    CUDA device.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that the values leave alone
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
            module.allreduce_dgrad = False  # there are no gradients; it would warn of how it reduces them
    if device.type == "cpu":
        keep_rotary_in_place(model)
    return model.to(device=device, dtype=dtype).eval()  # its norms are made as float32 on the CPU
