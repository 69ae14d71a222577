"""Estimate whether a model fits a machine's memory: its weights, one sequence's KV cache, and a step's activations.

Uses the sizes that the worker chooses at its start, so that a context that fits here is one that it accepts.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from engine.config import EngineConfig
from engine.loader.quantized import weight_methods
from engine.models.config import ModelConfig
from engine.models.registry import build_model
from engine.worker.sizing import (
    CPU_BATCHED_TOKENS,
    CPU_KV_BYTES,
    CPU_KV_SHARE,
    CPU_MAX_NUM_SEQS,
    CUDA_BATCHED_TOKENS,
    CUDA_MAX_NUM_SEQS,
    GRAPH_RESERVE_BYTES,
    page_bytes,
    pages_per_sequence,
    state_bytes,
    step_bytes,
)

USEFUL_CONTEXT = 4096
PROCESS_BYTES = 600 << 20  # PyTorch and the interpreter, beside the weights, on a CPU


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The memory that an engine would use: a GPU's, or the main memory."""

    device: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a model fits a machine.

    - weight_bytes: of the weights in memory. kv_bytes: of one sequence with `context` tokens.
    - context: the model's context length, or USEFUL_CONTEXT if that is less.
    - max_context: the longest context that one sequence can have; 0 if the weights don't fit.
    """

    weight_bytes: int
    kv_bytes: int
    context: int
    max_context: int
    model_context: int

    @property
    def fits(self) -> bool:
        return self.max_context >= self.context


def this_machine() -> Machine:
    """Return the first GPU, or the main memory as far as the container's limit allows."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Machine(device="cuda:0", name=found.name, memory_bytes=found.total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text("ascii"))
    except (OSError, ValueError):  # no control groups, or "max"
        limit = total
    return Machine(device="cpu", name="main memory", memory_bytes=min(total, limit))


def weight_bytes(model: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of parameters of a model, and the bytes of its weights in `dtype`. Allocates nothing."""
    built = build_model(model, dtype, "meta", 1, methods=weight_methods(model))
    if not isinstance(built, nn.Module):
        return 0, 0
    stored = sum(one.nbytes for one in built.parameters())
    if model.quantization is None:
        return sum(one.numel() for one in built.parameters()), stored
    slots = built.weight_slots().values()
    count = sum(getattr(slot, "num_parameters", math.prod(slot.shape)) for slot in slots)
    return count, stored + sum(one.nbytes for one in built.buffers())


def fit(model: ModelConfig, dtype: torch.dtype, weights: int, machine: Machine) -> Fit:
    """Return whether a model with `weights` bytes of weights and a KV cache of `dtype` fits the machine."""
    config = EngineConfig()
    on_gpu = machine.device != "cpu"
    seqs = CUDA_MAX_NUM_SEQS if on_gpu else CPU_MAX_NUM_SEQS
    batched = CUDA_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS
    step = step_bytes(model, seqs, batched, dtype)
    if on_gpu:
        budget = int(machine.memory_bytes * config.gpu_memory_utilization) - GRAPH_RESERVE_BYTES - step - weights
    else:
        share = min(CPU_KV_BYTES, int(machine.memory_bytes * CPU_KV_SHARE))
        budget = min(share, machine.memory_bytes - PROCESS_BYTES - step - weights)
    budget -= state_bytes(model, seqs, dtype)
    size = page_bytes(model, config.page_size, dtype)

    def needed(context: int) -> int:
        return size * (1 + pages_per_sequence(model, config.page_size, context, batched))

    low, high = 0, model.context_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= budget else (low, middle - 1)
    context = min(USEFUL_CONTEXT, model.context_length)
    return Fit(
        weight_bytes=weights,
        kv_bytes=needed(context),
        context=context,
        max_context=low if budget >= 0 else 0,
        model_context=model.context_length,
    )
