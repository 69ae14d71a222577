"""Compute the order of a pipeline stage's forwards and backwards with Megatron-Core's own schedule functions, and check
the settings for overlapping expert-parallel communication, which changes that order.

The installed Megatron version decides which microbatch runs when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    get_pp_rank_microbatches,
    get_schedule_table,
    set_current_microbatch,
)
from megatron.core.transformer.cuda_graphs import (
    _set_capture_end,
    _set_capture_start,
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
)
from torch import nn
from torch.torch_version import TorchVersion

from graph_cache.adapters.megatron.parts import layers_of
from graph_cache.adapters.transformer_engine.order import max_outstanding, parse_order
from graph_cache.errors import GraphConfigError
from graph_cache.training.attached import Part
from graph_cache.utils.validation import is_whole_number

__all__ = [
    "Stage",
    "check_expert_overlap",
    "expert_overlap_order",
    "order_of",
    "max_outstanding",
    "set_current_microbatch",
    "warmup_forwards",
    "delayed_wgrad_in_graphs",
]

OVERLAP_DISPATCHERS = ("alltoall", "flex")
MIN_TE_DELAYED_WGRAD = "2.10.0"  # for layers with captured parts
MIN_TE_DELAYED_WGRAD_IN_GRAPHS = "2.12.0"
MIN_TE_WITHOUT_WGRAD_FUSION = "2.7.0"
MIN_TORCH_OVERLAP = "2.6.0"


@dataclass(frozen=True)
class Stage:
    """A rank's position in the pipeline and its number of model chunks.

    Implements the only methods of Megatron's communicator that its schedule functions call.
    """

    pipeline_size: int = 1
    pipeline_rank: int = 0
    chunks: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("pipeline_size", 1), ("pipeline_rank", 0), ("chunks", 1)):
            _check_whole_number(name, getattr(self, name), minimum)
        if self.pipeline_rank >= self.pipeline_size:
            raise GraphConfigError(
                f"pipeline_rank is {self.pipeline_rank} with pipeline_size {self.pipeline_size}: ranks count from 0"
            )
        if self.chunks > 1 and self.pipeline_size == 1:
            raise GraphConfigError(f"{self.chunks} model chunks without a pipeline: give one, or pipeline_size > 1")

    @property
    def pp_group(self) -> Stage:
        return self

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        return self.chunks if self.chunks > 1 else None

    def size(self) -> int:
        return self.pipeline_size

    def rank(self) -> int:
        return self.pipeline_rank


def warmup_forwards(stage: Stage, microbatches: int, group_size: int | None = None) -> int:
    """Return the number of warm-up forwards, before the stage alternates one forward and one backward (1F1B)."""
    group_size = _group_size(stage, group_size)
    _check_whole_number("microbatches", microbatches, 1)
    return get_pp_rank_microbatches(microbatches, stage.chunks, group_size, forward_only=False, p2p_communicator=stage)[
        2
    ]


def order_of(stage: Stage, microbatches: int, group_size: int | None = None, warmup: int | None = None) -> list[int]:
    """Return the stage's order in Transformer Engine's notation: 1 is a forward of the first chunk, -1 its backward.

    `group_size`: consecutive microbatches per chunk (Megatron's microbatch_group_size_per_vp_stage; default: the
    pipeline size). `warmup` overrides Megatron's number of warm-up forwards. Without a pipeline one microbatch is
    outstanding at a time, and the order of one microbatch serves any number of them.
    """
    group_size = _group_size(stage, group_size)
    _check_whole_number("microbatches", microbatches, 1)
    if stage.pipeline_size == 1 and warmup is None:
        microbatches = 1
    return _order(stage, microbatches, group_size, warmup)


def expert_overlap_order(
    stage: Stage,
    microbatches: int,
    layers_per_chunk: Sequence[int],
    *,
    delayed_wgrad_in_graphs: bool,
    group_size: int | None = None,
) -> list[float]:
    """Return the order under overlap_moe_expert_parallel_comm, in which each layer is a chunk.

    Layers are numbered across the chunks from 1. With `delayed_wgrad_in_graphs` (delay_wgrad_compute, and captured
    parts with delayed weight gradients) -2.5 is the weight gradients of the second layer's last backward. Call
    `check_expert_overlap` first.
    """
    group_size = _group_size(stage, group_size)
    _check_whole_number("microbatches", microbatches, 1)
    if len(layers_per_chunk) != stage.chunks:
        raise GraphConfigError(
            f"layers_per_chunk has {len(layers_per_chunk)} entries for {stage.chunks} chunks: give one for each"
        )
    for count in layers_per_chunk:
        _check_whole_number("layers_per_chunk", count, 0)
    order = _order(stage, microbatches, group_size, None)
    return get_overlap_moe_expert_parallel_comm_order(order, list(layers_per_chunk), delayed_wgrad_in_graphs)[0]


@dataclass(frozen=True)
class StagePlan:
    """Input of a pipeline stage's capture by Transformer Engine: the parts with their chunks, the order of forwards and
    backwards, and for each part's name the layer on which Megatron sets the current microbatch.
    """

    parts: list[Part]
    order: list[float]
    holders: Mapping[str, nn.Module]
    caches_weights: bool


def stage_plan(
    parts: Sequence[Part],
    models: Sequence[nn.Module],
    config: Any,
    modules: Sequence[str],
    microbatches: int | None,
    te_version: str | None,
) -> StagePlan:
    """Return the plan for this process's pipeline stage. `models`: its model chunks; some may have no part.
    `microbatches`: number per step; may be None if one is outstanding at a time. Raises GraphConfigError.
    """
    stage = Stage(
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
        len(models),
    )
    group_size = getattr(config, "microbatch_group_size_per_vp_stage", None) if len(models) > 1 else None
    caches_weights, holders = bool(getattr(config, "fp8", None)), _holders(parts, models)
    overlaps = getattr(config, "overlap_moe_expert_parallel_comm", False)
    if overlaps:
        check_expert_overlap(config, modules, te_version)
    if microbatches is None:
        _check_one_outstanding(stage, overlaps)
        microbatches = 1
    if not overlaps:
        return StagePlan(list(parts), order_of(stage, microbatches, group_size), holders, caches_weights)
    chunk_of = {holders[part.name]: part.chunk for part in parts}
    numbers, counts = {layer: number for number, layer in enumerate(chunk_of)}, Counter(chunk_of.values())
    order = expert_overlap_order(
        stage,
        microbatches,
        [counts[chunk] for chunk in range(len(models))],
        delayed_wgrad_in_graphs=delayed_wgrad_in_graphs(config, modules),
        group_size=group_size,
    )
    return StagePlan(
        [part._replace(chunk=numbers[holders[part.name]]) for part in parts], order, holders, caches_weights
    )


def _holders(parts: Sequence[Part], models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Map each part's name to its own or enclosing layer, else the first layer inside it, else its module."""
    layer_of = {module: layer.module for layer in layers_of(models) for module in layer.module.modules()}
    return {
        part.name: next((layer_of[one] for one in part.module.modules() if one in layer_of), part.module)
        for part in parts
    }


def _check_one_outstanding(stage: Stage, overlaps: bool) -> None:
    if stage.pipeline_size > 1 or overlaps:
        found = "overlap_moe_expert_parallel_comm" if overlaps else f"a pipeline of {stage.pipeline_size} stages"
        raise GraphConfigError(
            "cuda_graph_impl='transformer_engine' was asked for without a number of microbatches; "
            f"found {found}, where several are outstanding at a time, in an order that must be known "
            "at capture: call attach(model, microbatches=…) with the number per step, or use "
            "cuda_graph_impl='local', which records the order itself"
        )


@contextmanager
def megatron_capture_flags() -> Iterator[None]:
    """Set Megatron's capture flags within the block, so that DDP hooks ignore gradients of the capture."""
    _set_capture_start()
    try:
        yield
    finally:
        _set_capture_end()


def delayed_wgrad_in_graphs(config: Any, modules: Sequence[str]) -> bool:
    """Return whether captured `modules` have delayed weight gradients, which graphs must then compute."""
    shared = getattr(config, "moe_shared_expert_intermediate_size", None) is not None and not getattr(
        config, "moe_shared_expert_overlap", False
    )
    return bool(getattr(config, "delay_wgrad_compute", False)) and (
        "attn" in modules or ("moe_router" in modules and shared)
    )


def check_expert_overlap(config: Any, modules: Sequence[str], te_version: str | None) -> None:
    """Raise GraphConfigError listing every setting that prevents overlapped expert communication with graphs.

    `config`: a TransformerConfig built without graphs, so that it has checked none of this. `modules`: captured modules
    of each layer. `te_version`: the Transformer Engine version, None if it is not installed.
    """
    found = [*_overlap_problems(config, modules), *_delay_problems(config, modules, te_version)]
    if found:
        raise GraphConfigError(
            "overlap_moe_expert_parallel_comm with cuda_graph_impl='transformer_engine' was asked "
            "for, but needs other settings: " + "; ".join(found)
        )


def _overlap_problems(config: Any, modules: Sequence[str]) -> list[str]:
    pipeline = getattr(config, "pipeline_model_parallel_size", 1)
    mtp = getattr(config, "mtp_num_layers", None)
    dispatcher = getattr(config, "moe_token_dispatcher_type", None)
    whole_modules = sorted({"moe", "mlp"} & set(modules))
    offloaded = getattr(config, "offload_modules", None) or ()
    checks = (
        (
            not getattr(config, "overlap_moe_expert_parallel_comm", False),
            "overlap_moe_expert_parallel_comm is off: turn it on",
        ),
        (
            TorchVersion(torch.__version__) < MIN_TORCH_OVERLAP,
            f"torch is {torch.__version__}: use {MIN_TORCH_OVERLAP} or later, the overlap hangs before it",
        ),
        (
            pipeline > 1 and getattr(config, "virtual_pipeline_model_parallel_size", None) is None,
            f"pipeline_model_parallel_size is {pipeline} without virtual_pipeline_model_parallel_size: set it",
        ),
        (
            getattr(config, "expert_model_parallel_size", 1) <= 1,
            "expert_model_parallel_size is 1: without expert parallelism there is nothing to overlap",
        ),
        (
            dispatcher not in OVERLAP_DISPATCHERS,
            f"moe_token_dispatcher_type is {dispatcher!r}: {' or '.join(OVERLAP_DISPATCHERS)}",
        ),
        (
            getattr(config, "recompute_granularity", None) == "full",
            "recompute_granularity is 'full': use 'selective' or none",
        ),
        (getattr(config, "recompute_method", None) is not None, "recompute_method is set: leave it out"),
        (getattr(config, "recompute_num_layers", None) is not None, "recompute_num_layers is set: leave it out"),
        ("moe" in (getattr(config, "recompute_modules", None) or ()), "recompute_modules has 'moe': take it out"),
        (
            not (getattr(config, "bf16", False) or getattr(config, "fp16", False)),
            "neither bf16 nor fp16 is on: turn one on",
        ),
        (getattr(config, "moe_shared_expert_overlap", False), "moe_shared_expert_overlap is on: turn it off"),
        (mtp not in (None, 0, 1), f"mtp_num_layers is {mtp}: at most 1"),
        (
            mtp == 1 and pipeline == 1 and not _mtp_overlaps_without_pipeline(config),
            "mtp_num_layers is 1 without a pipeline: set pipeline_model_parallel_size > 1",
        ),
        (
            getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False),
            "overlap_dispatch_backward_with_experts_wgrad is on: use one of the two",
        ),
        (
            dispatcher == "flex"
            and getattr(config, "moe_flex_dispatcher_backend", None) == "ncclep"
            and getattr(config, "fine_grained_activation_offloading", False)
            and "expert_fc1" in offloaded,
            "offload_modules has 'expert_fc1', whose input the ncclep dispatcher frees early: take it out",
        ),
        (
            bool(whole_modules),
            f"cuda_graph_modules has {', '.join(whole_modules)}: communication inside a graph can't be overlapped",
        ),
        (
            not modules,
            "cuda_graph_modules is empty (whole layers): name parts without communication (attn, moe_router, "
            "moe_preprocess)",
        ),
    )
    return [problem for is_problem, problem in checks if is_problem]


def _delay_problems(config: Any, modules: Sequence[str], te_version: str | None) -> list[str]:
    if not getattr(config, "delay_wgrad_compute", False):
        return []
    fused = getattr(config, "gradient_accumulation_fusion", False)
    in_graphs = delayed_wgrad_in_graphs(config, modules)
    needed = MIN_TE_DELAYED_WGRAD_IN_GRAPHS if in_graphs else MIN_TE_DELAYED_WGRAD
    biased = [name for name in ("add_bias_linear", "add_qkv_bias") if getattr(config, name, False)]
    checks = (
        (
            te_version is None or TorchVersion(te_version) < needed,
            f"delay_wgrad_compute needs Transformer Engine {needed} or later, found {te_version or 'none'}",
        ),
        (
            getattr(config, "moe_use_legacy_grouped_gemm", False),
            "moe_use_legacy_grouped_gemm can't delay weight gradients: turn it off",
        ),
        (
            in_graphs and not fused,
            "gradient_accumulation_fusion is off: weight gradients in a graph need main_grad's fixed address",
        ),
        (
            in_graphs and "attn" in modules and bool(biased),
            f"{' and '.join(biased)} is on: delayed weight gradients of a captured attention have no bias",
        ),
        (
            not in_graphs
            and not fused
            and te_version is not None
            and TorchVersion(te_version) < MIN_TE_WITHOUT_WGRAD_FUSION,
            "delay_wgrad_compute without gradient_accumulation_fusion needs Transformer Engine "
            f"{MIN_TE_WITHOUT_WGRAD_FUSION}",
        ),
    )
    return [problem for is_problem, problem in checks if is_problem]


def _mtp_overlaps_without_pipeline(config: Any) -> bool:
    """Return whether this Megatron version overlaps multi-token prediction without a pipeline: 0.19 does, 0.16 not."""
    return hasattr(config, "overlap_dispatch_backward_with_experts_wgrad")


def _order(stage: Stage, microbatches: int, group_size: int, warmup: int | None) -> list[int]:
    if warmup is None:
        warmup = warmup_forwards(stage, microbatches, group_size)
    _check_whole_number("warmup", warmup, 0)
    table = get_schedule_table(microbatches, stage.chunks, group_size)
    order = convert_schedule_table_to_order(min(warmup, len(table)), stage.chunks, table)
    parse_order(order)  # raises if the warm-up is so short that a backward would precede its forward
    return order


def _group_size(stage: Stage, group_size: int | None) -> int:
    if group_size is None:
        return stage.pipeline_size
    _check_whole_number("group_size", group_size, 1)
    return group_size


def _check_whole_number(name: str, value: Any, minimum: int) -> None:
    if not is_whole_number(value, minimum):
        raise GraphConfigError(f"{name} is {value!r}: give a whole number, {minimum} or more")
