"""What a step writes beside its static buffers: slots of the KV cache and entries of recurrent states.

Shadow checks save, compare and restore these rows, and no more of memory that is shared by all requests.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.attention.recurrent_states import RecurrentStates
from graph_cache.shadow import Region, Rows


def written_slots(kv: KVCache, page_tables: Tensor, rows: Tensor, positions: Tensor) -> list[Region]:
    """Return the slots of T tokens in all layers.

    page_tables int64 [groups, entries, P]; rows and positions int64 [T]: each token's entry and its position.
    """
    found: list[Region] = []
    for number, group in enumerate(kv.groups):
        table = page_tables[number]
        columns = (positions // kv.page_size).clamp_(max=table.shape[1] - 1)
        slots = table[rows, columns] * kv.page_size + positions % kv.page_size
        for depth, layer in enumerate(group.layers):
            for name, pages in zip(("keys", "values"), kv.storage[depth], strict=False):
                found.append(Rows(f"{name} of layer {layer}", pages.flatten(0, 1), slots))
    return found


def written_states(states: RecurrentStates | None, entries: Tensor) -> list[Region]:
    """Return the states of these entries, int64 [n], in all layers."""
    if states is None:
        return []
    return [Rows(f"recurrent states {index}", whole, entries, dim=1) for index, whole in enumerate(states.storage)]
