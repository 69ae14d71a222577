"""What a router knows of one server's prefix cache from the server's events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class View:
    """The blocks of each cache group: (group, hash) -> (the parent's hash, tokens, salt)."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], tuple[int | None, tuple[int, ...], str]] = {}

    def apply(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Apply events in order. Fails for a block that is stored twice, or removed without being stored."""
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                for number in event["block_hashes"]:
                    del self.blocks[event["group_idx"], number]
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.blocks.clear()

    def _store(self, event: Mapping[str, Any]) -> None:
        size, parent, hashes = event["block_size"], event["parent_block_hash"], event["block_hashes"]
        assert hashes and len(event["token_ids"]) == size * len(hashes)
        salts = event.get("extra_keys") or [None] * len(hashes)
        assert len(salts) == len(hashes)
        for place, number in enumerate(hashes):
            assert 0 <= number < 2**64
            assert (event["group_idx"], number) not in self.blocks, "stored twice"
            ids = tuple(event["token_ids"][place * size : (place + 1) * size])
            self.blocks[event["group_idx"], number] = (parent, ids, "".join(salts[place] or ()))
            parent = number

    def match(self, token_ids: Sequence[int], size: int, salt: str = "", group: int = 0, adapter: str = "") -> int:
        """Return how many leading blocks of a prompt are known. The block of the last token doesn't count."""
        found = {block: number for (owner, number), block in self.blocks.items() if owner == group}
        parent, length = None, 0
        while (length + 1) * size < len(token_ids):
            ids = tuple(token_ids[length * size : (length + 1) * size])
            parent = found.get((parent, ids, adapter + ("" if length else salt)))
            if parent is None:
                break
            length += 1
        return length
