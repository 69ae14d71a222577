"""What the workers of an engine can do, for the core that schedules their steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import ResolvedConfig
from engine.protocol.messages import ModelInfo
from graph_cache.utils.cpu_threads import ThreadTuner


@dataclass(frozen=True)
class Capabilities:
    """Sizes and limits that are equal on all ranks and never change, and what tunes the threads of a single rank.

    - windows: of each KV cache group, in tokens; None for full attention.
    - max_prefill_chunks: prompt chunks in one step.
    - prefill_buckets: token counts of the graphs of prompt chunks; empty if these run eager, without padding.
    - max_mixed_decodes: decodes that share a graph with prompt chunks.
    - max_verify_tokens: tokens in the rows of one step that verify drafts; 0 without speculative decoding.
    - adapters: the names that a request may give as its adapter.
    - device: of the worker in this process, where the core prepares token masks.
    - host_blocks: blocks of the KV cache that fit into host memory; 0: it keeps none.
    - block_bytes: of a page, in all layers of its cache group and on all ranks.
    - threads: what changes the number of threads of steps on a CPU; None if it stays.
    """

    config: ResolvedConfig
    info: ModelInfo
    windows: tuple[int | None, ...]
    max_prefill_chunks: int
    prefill_buckets: tuple[int, ...]
    max_mixed_decodes: int
    max_verify_tokens: int
    adapters: tuple[str, ...]
    device: torch.device
    threads: ThreadTuner | None = None
    host_blocks: int = 0
    block_bytes: int = 0
