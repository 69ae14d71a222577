"""What a step writes beside its static buffers and the state of slots: slots of the KV cache, routed experts.

Shadow checks save, compare and restore these rows, and no more of memory that is shared by all requests.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.worker.routed_experts import RoutedExperts
from graph_cache.core.shadow import Rows, Whole, WrittenMemory


def written_slots(kv: KVCache, page_tables: Tensor, rows: Tensor, positions: Tensor) -> list[WrittenMemory]:
    """Return the slots of T tokens in all layers.

    page_tables int64 [groups, entries, P]; rows and positions int64 [T]: each token's entry and its position.
    """
    found: list[WrittenMemory] = []
    for number, group in enumerate(kv.groups):
        table = page_tables[number]
        columns = (positions // kv.page_size).clamp_(max=table.shape[1] - 1)
        slots = table[rows, columns] * kv.page_size + positions % kv.page_size
        for depth, layer in enumerate(group.layers):
            for name, pages in zip(("keys", "values"), kv.storage[depth], strict=False):
                found.append(Rows(f"{name} of layer {layer}", pages.flatten(0, 1), slots))
    return found


def written_experts(experts: RoutedExperts | None, rows: int) -> list[WrittenMemory]:
    """Return the experts of the first rows."""
    return [] if experts is None else [Whole("routed experts", experts.buffer[:rows])]
