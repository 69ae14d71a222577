"""Choose the sizes that depend on model and machine: context, batch size, token budget, pages, context buckets.

`resolve` fills in every size that the configuration leaves open. No other module chooses default sizes.
"""

from __future__ import annotations

import logging
import math
import os

import torch

from engine.attention.cache_spec import group_layers, paged_layers, recurrent_layers
from engine.attention.kv_cache import FP8_DTYPES
from engine.config import EngineConfig, ResolvedConfig
from engine.errors import ConfigError
from engine.kernels.launch import fits
from engine.layers.formats.scaled_weight import TILE_ELEMENTS
from engine.models.config import ModelConfig

CPU_MAX_NUM_SEQS, CUDA_MAX_NUM_SEQS, LARGE_CUDA_MAX_NUM_SEQS = 16, 256, 1024
LARGE_CUDA_BYTES = 70 << 30  # GPUs with at least this much memory run more sequences (H100: 80 GB, H200: 141 GB)
CPU_BATCHED_TOKENS, CUDA_BATCHED_TOKENS = 256, 8192
CPU_KV_BYTES = 1 << 30
CPU_KV_SHARE = 0.25  # of the machine's memory, if that is less than CPU_KV_BYTES
GRAPH_RESERVE_BYTES = 1 << 30  # for graphs and activations beside the KV cache on a GPU
FIRST_CONTEXT_BUCKET = 256
WARM_CONTEXT = 1024

logger = logging.getLogger(__name__)


def resolve(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> ResolvedConfig:
    """Return a copy of `config` with every size filled in. Raises ConfigError for sizes that contradict the model."""
    on_gpu = device.type == "cuda"
    context = config.max_model_len or model.context_length
    if context > model.context_length:
        raise ConfigError(f"max_model_len={context} exceeds the model's context of {model.context_length} tokens")
    default_seqs = _default_max_num_seqs(device)
    scaling = model.rope_scaling
    if scaling is not None and scaling.is_long(context):
        logger.info(
            "longrope: all contexts use long_factor, since max_model_len is %d; up to %d would select short_factor",
            context,
            scaling.original_max_position_embeddings,
        )
    seqs = config.max_num_seqs or min(default_seqs, config.max_num_batched_tokens or default_seqs)
    batched = config.max_num_batched_tokens or max(seqs, CUDA_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS)
    if batched < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={batched} is below max_num_seqs={seqs}: every running sequence "
            "needs a token of each step's budget"
        )
    pages = config.num_pages or _affordable_pages(config, model, device, dtype, seqs, batched, context)
    if pages < 2:
        raise ConfigError(f"num_pages={pages}: page 0 is the scratch page, so at least 2 are needed")
    speculates = config.num_speculative_tokens > 0
    if speculates and config.async_scheduling:
        raise ConfigError(
            f"num_speculative_tokens={config.num_speculative_tokens} can't be combined with async_scheduling=True: "
            "drafts follow the last token, which must have been read; leave one of them out"
        )
    if speculates and (recurrent := recurrent_layers(model.cache_specs())):
        raise ConfigError(
            f"num_speculative_tokens={config.num_speculative_tokens} doesn't work with {model.architecture}: "
            f"{len(recurrent)} of its layers have recurrent state, which can't go back to before a rejected draft; "
            "leave it out"
        )
    sizes = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": context,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": batched,
        "num_pages": pages,
        "enable_prefix_caching": _prefix_caching(config, model),
        "async_scheduling": on_gpu and not speculates if config.async_scheduling is None else config.async_scheduling,
    }
    return ResolvedConfig(**(vars(config) | sizes))


def _default_max_num_seqs(device: torch.device) -> int:
    """Return the default batch size. It is large, as a step's GEMMs cost about as much for many rows as for few."""
    if device.type != "cuda":
        return CPU_MAX_NUM_SEQS
    _, total = torch.cuda.mem_get_info(device)
    return LARGE_CUDA_MAX_NUM_SEQS if total >= LARGE_CUDA_BYTES else CUDA_MAX_NUM_SEQS


def _prefix_caching(config: EngineConfig, model: ModelConfig) -> bool:
    """Return whether to cache prefixes. A page holds no recurrent state, so a model with such layers can't reuse any.

    Raises ConfigError if such a model's configuration asks for it.
    """
    recurrent = recurrent_layers(model.cache_specs())
    if not recurrent:
        return config.enable_prefix_caching is not False
    if config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching=True doesn't work with {model.architecture}: {len(recurrent)} of its layers have "
            "recurrent state, which cached pages don't hold; leave it out"
        )
    if config.kv_offloading_size is not None:
        raise ConfigError(
            f"kv_offloading_size={config.kv_offloading_size} doesn't work with {model.architecture}: {len(recurrent)} "
            "of its layers have recurrent state, so it has no prefix cache whose pages could be kept; leave it out"
        )
    if config.enable_prefix_caching is None:
        logger.info("prefix caching is off: %s has layers with recurrent state", model.architecture)
    return False


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page: what all layers of a cache group store per token; 0 without paged layers."""
    specs = model.cache_specs()
    shapes = next((spec.token_shapes for spec in paged_layers(specs).values()), ())
    depth = max((len(group.layers) for group in group_layers(specs)), default=0)
    return depth * page_size * sum(map(math.prod, shapes)) * dtype.itemsize


def state_bytes(model: ModelConfig, seqs: int, dtype: torch.dtype) -> int:
    """Return the bytes of the recurrent states of `seqs` sequences and of padding rows."""
    layers = recurrent_layers(model.cache_specs()).values()
    return (seqs + 1) * sum(
        math.prod(shape) * (spec.dtype or dtype).itemsize for spec in layers for shape in spec.shapes
    )


def pages_per_sequence(model: ModelConfig, page_size: int, context: int, batched: int) -> int:
    """Return the pages of a sequence of `context` tokens in all cache groups.

    A sliding window needs the pages of the window and of the `batched` tokens that one step may add.
    """
    windows = [group.window for group in group_layers(model.cache_specs())]
    return sum(
        min(-(-context // page_size), -(-((window or context) + batched) // page_size) + 1) for window in windows
    )


def step_bytes(model: ModelConfig, seqs: int, batched: int, dtype: torch.dtype, has_kernels: bool = False) -> int:
    """Estimate the bytes of a step's activations, for `batched` tokens and `seqs` rows of logits.

    `has_kernels`: whether the device has kernels for quantised weights.
    """
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    split = 4096 * max(model.hidden_size, 2 * model.intermediate_size)  # split-K GEMMs: 4 float32 sums of 256 rows
    logits = 3 * 4 * seqs * model.vocab_size  # float32: the step's, and two copies while sampling
    dequantized = 0
    if model.quantization is not None:
        experts = model.num_experts * model.hidden_size * model.moe_intermediate_size
        if not has_kernels:  # float32 values beside values in the dtype: of a tile, or of all experts of a layer
            dequantized = (8 + dtype.itemsize) * max(TILE_ELEMENTS, 2 * experts) + dtype.itemsize * experts
        elif any(scheme.act_order for _, scheme in model.quantization.schemes):  # no kernel reads such experts
            dequantized = dtype.itemsize * max(TILE_ELEMENTS, 3 * experts)
        else:
            dequantized = dtype.itemsize * TILE_ELEMENTS
    activations = dtype.itemsize * batched * (4 * model.hidden_size + heads + model.mlp_activations)
    return split + logits + dequantized + activations


def _affordable_pages(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    seqs: int,
    batched: int,
    context: int,
) -> int:
    size, states = (
        page_bytes(model, config.page_size, FP8_DTYPES.get(config.kv_cache_dtype, dtype)),
        state_bytes(model, seqs, dtype),
    )
    if not size:
        return 2  # the fewest that a page pool has; no layer uses them
    needed = pages_per_sequence(model, config.page_size, context, batched)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.gpu_memory_utilization) - (total - free) - GRAPH_RESERVE_BYTES
        has_kernels = model.quantization is not None and dtype != torch.float32 and fits(device)
        budget -= step_bytes(model, seqs, batched, dtype, has_kernels)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = min(CPU_KV_BYTES, int(memory * CPU_KV_SHARE))
    budget -= states
    pages = min(1 + seqs * needed, budget // size)
    if pages <= needed:
        beside = f" beside {states >> 20} MiB of recurrent states for max_num_seqs={seqs}" if states else ""
        raise ConfigError(
            f"the KV cache has room for {max(0, pages - 1) * config.page_size} tokens ({max(0, budget) >> 20} MiB"
            f"{beside}), but one sequence can have {context}: lower max_model_len"
            f"{' or max_num_seqs' if states else ''}, or give num_pages"
        )
    return pages


def context_buckets(max_model_len: int, page_size: int) -> tuple[int, ...]:
    """Return the KV widths, in tokens, for attention without a paged kernel: doubling up to the context length."""
    max_width, width = -(-max_model_len // page_size) * page_size, FIRST_CONTEXT_BUCKET
    widths = {max_width}  # a set, because with large pages several widths round up to the same number of whole pages
    while width < max_width:
        widths.add(-(-width // page_size) * page_size)
        width *= 2
    return tuple(sorted(widths))
