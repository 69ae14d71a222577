"""Records which pages enter and leave the prefix cache, as events in vLLM's format.

Works on plain integers. Not thread-safe: the engine loop's thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.scheduling.cache_groups import Windows

Event = dict[str, Any]
MEDIUM = "GPU"  # vLLM's name for the memory that the model reads, on a CPU as well
HASH_BYTES = 8  # of a digest; routers read hashes as unsigned 64-bit integers


class KVEventRecorder:
    """The events of one prefix cache since the last `take`.

    An event is a mapping of plain values with the keys of vLLM's `BlockStored`, `BlockRemoved` or `AllBlocksCleared`
    (vllm/distributed/kv_events.py) and its name under "type". A subscriber that applies them in order knows the cached
    pages: a removal is recorded only for a page whose storing was.
    """

    def __init__(self, page_size: int, groups: Windows):
        self._page_size = page_size
        self._kinds: list[Event] = [
            {"kv_cache_spec_kind": "full_attention"}
            if window is None
            else {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}
            for window in groups
        ]
        self._events: list[Event] = []
        self._stored: list[set[bytes]] = [set() for _ in groups]
        self._in_tiers: set[tuple[str, int, bytes]] = set()

    def stored(
        self,
        group: int,
        digests: Sequence[bytes],
        indices: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str = "",
        adapter: str = "",
    ) -> None:
        """Record that pages `indices` of a sequence were cached, ascending. `digests` are of all its pages so far.

        Each run of neighbouring pages is one event. As in vLLM, the adapter of a request is an extra key of each page,
        its salt one of the first page. Dynamo reads the salt from a key of the event.
        """
        salt = cache_salt.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        first = 0
        for end in range(1, len(indices) + 1):
            if end < len(indices) and indices[end] == indices[end - 1] + 1:
                continue
            start, stop = indices[first], indices[end - 1] + 1
            event: Event = {
                "type": "BlockStored",
                "block_hashes": [_number(digest) for digest in digests[start:stop]],
                "parent_block_hash": _number(digests[start - 1]) if start else None,
                "token_ids": list(token_ids[start * self._page_size : stop * self._page_size]),
                "block_size": self._page_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": adapter or None,
                "group_idx": group,
                **self._kinds[group],
            }
            if cache_salt:
                event["cache_salt"] = salt
            if adapter or (cache_salt and not start):
                shared = [adapter] if adapter else []
                first_keys = [*shared, salt] if cache_salt and not start else shared
                event["extra_keys"] = [first_keys, *[shared or None] * (stop - start - 1)]
            self._events.append(event)
            self._stored[group].update(digests[start:stop])
            first = end

    def removed(self, group: int, digest: bytes) -> None:
        """Record that a page was evicted. Successive removals from one group are one event."""
        if digest not in self._stored[group]:
            return
        self._stored[group].remove(digest)
        self._remove(MEDIUM, group, digest)

    def tier_stored(self, medium: str, group: int, digest: bytes) -> None:
        """Record that a tier below the prefix cache holds a block. As vLLM's, the event has neither tokens nor parent.

        Successive blocks of one tier and group are one event.
        """
        self._in_tiers.add((medium, group, digest))
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and (last["medium"], last["group_idx"]) == (medium, group):
            last["block_hashes"].append(_number(digest))
            return
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [_number(digest)],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": self._page_size,
                "lora_id": None,
                "medium": medium,
                "lora_name": None,
                "group_idx": group,
                **self._kinds[group],
            }
        )

    def tier_removed(self, medium: str, group: int, digest: bytes) -> None:
        """Record that a tier dropped a block."""
        if (medium, group, digest) in self._in_tiers:
            self._in_tiers.remove((medium, group, digest))
            self._remove(medium, group, digest)

    def _remove(self, medium: str, group: int, digest: bytes) -> None:
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockRemoved" and (last["medium"], last["group_idx"]) == (medium, group):
            last["block_hashes"].append(_number(digest))
        else:
            hashes = [_number(digest)]
            self._events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group})

    def cleared(self) -> None:
        """Record that the cache was emptied. Replaces the events that were not taken yet."""
        self._events = [{"type": "AllBlocksCleared"}]
        for stored in self._stored:
            stored.clear()
        self._in_tiers.clear()

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:HASH_BYTES], "big")
