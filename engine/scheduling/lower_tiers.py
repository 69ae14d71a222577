"""The tiers below the prefix cache: which evicted blocks host memory and disk hold, and which of them rise.

A block is the content of one page of a cache group; its key is the page's in the prefix cache. A block that the device
evicts goes to a slot of host memory. With a disk tier it is also written to a file, in the background. A request whose
prefix continues in these tiers waits, without a slot, while a promotion copies the blocks to new pages; then it finds
them in the prefix cache. Blocks stay in the lower tiers when they rise. Each tier drops its least recently used ones.

Works on plain integers; the workers hold the memory. Not thread-safe: the engine loop's thread owns it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.protocol.kv_moves import Moved, Moves, PromotionOrder, RisingBlock
from engine.scheduling.kv_events import MEDIUM, KVEventRecorder
from engine.scheduling.prefix_cache import PrefixCache, PrefixChain

HOST, DISK = "host", "disk"
MEDIUMS = {HOST: "CPU", DISK: "DISK"}  # in events; the first one is vLLM's name
WRITING_SHARE = 4  # at most 1/4 of the slots are being written at a time, so that others can be reused


class Key(NamedTuple):
    """A block: its cache group and its digest there."""

    group: int
    digest: bytes

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.group}-{self.digest.hex()}"

    @classmethod
    def of_name(cls, name: str) -> Key:
        """Return the key of a file's name. Raises ValueError for another name."""
        group, _, digest = name.partition("-")
        return cls(int(group), bytes.fromhex(digest))


@dataclass(eq=False)
class Promotion:
    """Blocks on their way to the device, for the pages of one sequence.

    `tables`: per group, the new pages at their indices, else 0. `held`: the pages that are referenced until the end,
    the new ones and the pages of the prefix before them.
    """

    number: int
    chain: PrefixChain
    token_ids: Sequence[int]
    keys: list[Key]
    places: list[tuple[int, int]]  # (group, index) of each key
    order: PromotionOrder
    tables: list[list[int]]
    held: list[int]
    is_done: bool = False


@dataclass
class TierCounts:
    """Totals since the start.

    - hits: prompt tokens whose blocks rose, by the lowest tier that they came from.
    - dropped: blocks for which host memory had no room.
    - failed_reads: blocks whose files were missing, truncated or corrupted.
    """

    hits: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    failed_reads: int = 0


class LowerTiers:
    """The index of `num_slots` slots of host memory, of `block_bytes` each, and of files of `disk_bytes` together.

    `files`: sizes of the files that exist, by name, least recently used first. `disk_bytes` 0: there is no disk tier.
    The owner sends `take_moves()` to the workers before the next step, and their reports to `finish`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        num_slots: int,
        block_bytes: int,
        *,
        disk_bytes: int = 0,
        files: Mapping[str, int] | None = None,
        events: KVEventRecorder | None = None,
    ):
        self._cache, self._pool, self._events = cache, cache.pool, events
        self.num_slots, self.block_bytes, self._disk_bytes = num_slots, block_bytes, disk_bytes
        self._max_writing = max(1, num_slots // WRITING_SHARE)
        self._slot_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._owner: dict[int, Key] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._busy: Counter[int] = Counter()  # promotions and writes that use a slot
        self._writing: dict[int, Key | None] = {}  # by slot; None: the tiers were emptied since
        self._unwritten: dict[Key, None] = {}  # blocks in host memory to write when fewer are being written
        self._files: OrderedDict[Key, int] = OrderedDict()
        self._used_disk = 0
        self._rising: dict[Key, Promotion] = {}
        self._promotions: dict[int, Promotion] = {}
        self._moves = Moves()
        self._last_number = 0
        self.counts = TierCounts()
        for name, size in (files or {}).items():
            self._add_file(Key.of_name(name), size)
        cache.tiers = self

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a promotion or a write has not been reported yet."""
        return bool(self._promotions or self._writing)

    @property
    def has_disk(self) -> bool:
        """Whether blocks are written to files."""
        return self._disk_bytes > 0

    @property
    def max_files(self) -> int:
        """Number of blocks for which the disk tier has room."""
        return self._disk_bytes // self.block_bytes

    @property
    def num_rising(self) -> int:
        """Number of promotions on their way."""
        return len(self._promotions)

    @property
    def num_slots_free(self) -> int:
        """Number of slots without a block."""
        return len(self._free)

    def used_bytes(self) -> dict[str, int]:
        """Return the bytes of the blocks in each tier."""
        return {HOST: len(self._slot_of) * self.block_bytes, DISK: self._used_disk}

    def num_blocks(self) -> dict[str, int]:
        """Return the number of blocks in each tier."""
        return {HOST: len(self._slot_of), DISK: len(self._files)}

    def holds(self, group: int, digest: bytes) -> bool:
        """Whether a block is in one of the tiers."""
        key = Key(group, digest)
        return key in self._slot_of or key in self._files

    def has_file(self, group: int, digest: bytes) -> bool:
        """Whether a block is on disk, or on its way there."""
        key = Key(group, digest)
        return key in self._files or self._slot_of.get(key) in self._writing

    def held_pages(self) -> list[int]:
        """Return the pages that promotions reference, once for each reference."""
        return [page for promotion in self._promotions.values() for page in promotion.held]

    def problems(self) -> list[str]:
        """Describe every inconsistency; empty if there is none."""
        found = []
        if {slot: key for key, slot in self._slot_of.items()} != self._owner:
            found.append("the maps of host memory's slots disagree")
        free = set(self._free)
        if len(free) != len(self._free) or free & self._owner.keys() or any(self._busy[slot] for slot in free):
            found.append("a slot of host memory is free and in use")
        if sum(self._files.values()) != self._used_disk or self._used_disk > self._disk_bytes:
            found.append(f"the disk tier counts {self._used_disk} bytes of {self._disk_bytes}")
        return found

    # ---- down ------------------------------------------------------------------------------------------------------

    def evicted(self, group: int, digest: bytes, page: int) -> None:
        """Take the block of a page that the prefix cache gives up, if there is room for it."""
        if not self._copy_down(Key(group, digest), page):
            self.counts.dropped += 1

    def _copy_down(self, key: Key, page: int) -> bool:
        """Have a page copied to host memory, unless its block is there. Return whether there is room for it."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            return True
        slot = self._take_slot()
        if slot is None:
            return False
        self._moves.offloads[slot] = page
        self._take_in(key, slot)
        return True

    def _take_in(self, key: Key, slot: int) -> None:
        """Add a block in host memory, which will be written to disk if there is that tier."""
        self._own(key, slot)
        if self._disk_bytes:
            self._unwritten[key] = None
            self._write_more()

    def save_some(self, limit: int) -> int:
        """Have some blocks written that are in no file: cached pages, then blocks in host memory, newest first.

        Returns how many, at most `limit`. Needs a disk tier.
        """
        limit = min(limit, self._max_writing - len(self._writing))
        before = len(self._writing)
        for group, digest, page in reversed(list(self._cache.pages())):
            if len(self._writing) - before >= limit:
                break
            if not self.has_file(group, digest):
                self.evicted(group, digest, page)
                self._write_if_new(Key(group, digest))
        for key in reversed(self._slot_of):
            if len(self._writing) - before >= limit:
                break
            self._write_if_new(key)
        return len(self._writing) - before

    def _write_more(self) -> None:
        """Have blocks written that wait for it, in the order in which they came."""
        while self._unwritten and len(self._writing) < self._max_writing:
            key = next(iter(self._unwritten))
            del self._unwritten[key]
            self._write_if_new(key)

    def _write_if_new(self, key: Key) -> None:
        """Have a block in host memory written, unless it is in a file or too many wait to be written."""
        slot = self._slot_of.get(key)
        if slot is None or self.has_file(*key) or len(self._writing) >= self._max_writing:
            return
        self._writing[slot] = key
        self._busy[slot] += 1
        self._moves.writes[key.name] = slot

    def _own(self, key: Key, slot: int) -> None:
        self._slot_of[key] = slot
        self._owner[slot] = key
        self._stored(HOST, key)

    def _take_slot(self) -> int | None:
        """Return a slot for a new block: a free one, or that of the least recently used block that can be dropped."""
        if self._free:
            return self._free.pop()
        for key, slot in self._slot_of.items():
            if not self._busy[slot]:
                del self._slot_of[key]
                del self._owner[slot]
                self._unwritten.pop(key, None)
                self._removed(HOST, key)
                return slot
        return None

    def _release(self, slot: int) -> None:
        """Note that a promotion or a write has done with a slot."""
        self._busy[slot] -= 1
        if not self._busy[slot]:
            del self._busy[slot]
            if slot not in self._owner:
                self._free.append(slot)

    def _add_file(self, key: Key, size: int) -> None:
        """Add a file to the index, and drop the oldest ones that exceed the limit."""
        self._files[key] = size
        self._used_disk += size
        self._stored(DISK, key)
        while self._used_disk > self._disk_bytes:
            self._drop_file(next(iter(self._files)))

    def _drop_file(self, key: Key) -> None:
        self._used_disk -= self._files.pop(key)
        self._moves.deletions.append(key.name)
        self._removed(DISK, key)

    # ---- up --------------------------------------------------------------------------------------------------------

    def promote(self, chain: PrefixChain, token_ids: Sequence[int], found: int) -> Promotion | None:
        """Begin to bring up the blocks that make a prefix of `found` cached pages longer; return None if none do.

        Blocks that are already rising are waited for, with their promotion. Without free pages nothing rises.
        """
        length = self._cache.length_with(self.holds, chain, token_ids, found)
        if length <= found:
            return None
        needed = self._cache.entries(chain, token_ids, length)
        places = [(group, index) for group, index, page in needed if not page]
        keys = [Key(group, chain.digests[index]) for group, index in places]
        for key in keys:
            if key in self._rising:
                return self._rising[key]
        kept = [page for _, _, page in needed if page]
        num_idle = sum(1 for page in kept if self._pool.ref_count(page) == 0)
        if not keys or len(keys) > self._pool.num_free - num_idle:
            return None
        return self._begin(chain, token_ids, length, keys, places, kept)

    def _begin(
        self,
        chain: PrefixChain,
        token_ids: Sequence[int],
        length: int,
        keys: list[Key],
        places: list[tuple[int, int]],
        kept: list[int],
    ) -> Promotion | None:
        sources = self._pin(keys)
        if sources is None:
            return None
        self._pool.acquire(kept)  # before `allocate`, which could evict them
        pages = self._pool.allocate(len(keys))
        tables = [[0] * length for _ in self._cache.groups]
        for (group, index), page in zip(places, pages, strict=True):
            tables[group][index] = page
        self._last_number += 1
        blocks = [RisingBlock(slot, page, name) for (slot, name), page in zip(sources, pages, strict=True)]
        order = PromotionOrder(self._last_number, blocks)
        promotion = Promotion(self._last_number, chain, token_ids, keys, places, order, tables, [*kept, *pages])
        self._promotions[promotion.number] = promotion
        self._rising |= dict.fromkeys(keys, promotion)
        self._moves.promotions.append(order)
        return promotion

    def _pin(self, keys: Sequence[Key]) -> list[tuple[int, str]] | None:
        """Reserve a slot for each block and return it, with the name of the file to read into it, or "".

        Returns None, and reserves nothing, if host memory has no room for the blocks of files.
        """
        found: dict[Key, tuple[int, str]] = {}
        for key in keys:  # first, so that none of them makes room for a file
            if (slot := self._slot_of.get(key)) is not None:
                self._slot_of.move_to_end(key)
                self._busy[slot] += 1
                found[key] = slot, ""
        for key in keys:
            if key not in found:
                if (slot := self._take_slot()) is None:
                    for pinned, _ in found.values():
                        self._release(pinned)
                    return None
                self._files.move_to_end(key)
                self._busy[slot] += 1
                found[key] = slot, key.name
        return [found[key] for key in keys]

    def finish(self, moved: Moved) -> None:
        """Take a report: cache the pages that have arrived, and note the files that were written."""
        for number, failed in moved.promoted.items():
            self._arrived(self._promotions.pop(number), set(failed))
        for slot, size in moved.written.items():
            key = self._writing.pop(slot)
            self._release(slot)
            if key is not None and size:
                self._add_file(key, size)
        self._write_more()

    def _arrived(self, promotion: Promotion, failed: set[int]) -> None:
        is_current = self._cache.is_current(promotion.chain)
        sources: dict[int, str] = {}
        blocks = zip(promotion.keys, promotion.places, promotion.order.blocks, strict=True)
        for number, (key, (group, index), block) in enumerate(blocks):
            if self._rising.get(key) is promotion:
                del self._rising[key]
            if number in failed:
                self.counts.failed_reads += 1
                promotion.tables[group][index] = 0
                if is_current and key in self._files:
                    self._drop_file(key)
            elif is_current:
                sources[index] = DISK if block.name else sources.get(index, HOST)
                if block.name and key not in self._slot_of:
                    self._own(key, block.slot)
            self._release(block.slot)
        length = len(promotion.tables[0])
        self._cache.insert(promotion.chain, promotion.token_ids, promotion.tables, 0, length)
        self._pool.free(promotion.held)
        for source in sources.values():
            self.counts.hits[source] += self._pool.page_size
        promotion.is_done = True

    # ---- by key ----------------------------------------------------------------------------------------------------

    def places(self) -> dict[Key, list[str]]:
        """Return the media that hold each block, of the device and the tiers. The last used ones come last, by tier."""
        found: dict[Key, list[str]] = {}
        held = (
            (MEDIUMS[DISK], iter(self._files)),
            (MEDIUMS[HOST], iter(self._slot_of)),
            (MEDIUM, (Key(group, digest) for group, digest, _ in self._cache.pages())),
        )
        for medium, keys in held:
            for key in keys:
                found.setdefault(key, []).insert(0, medium)
        return found

    def begin_export(self, keys: Sequence[Key]) -> dict[Key, int | None] | None:
        """Reserve the slot of each block, and have those copied to one that only the device holds; None: in a file.

        Returns None, and reserves nothing, if host memory has no room. Send the moves before the slots are read, and
        call `end_export` after it.
        """
        slots: dict[Key, int | None] = {}
        for key in keys:
            if (slot := self._slot_of.get(key)) is not None:  # first, so that none of them makes room for others
                slots[key] = slot
                self._busy[slot] += 1
        for key in keys:
            if key in slots:
                continue
            page = self._cache.page(*key)
            if page and not self._copy_down(key, page):
                self.end_export(slots)
                return None
            slots[key] = slot = self._slot_of.get(key)
            if slot is not None:
                self._busy[slot] += 1
        return slots

    def end_export(self, slots: Mapping[Key, int | None]) -> None:
        """Release the slots of `begin_export`."""
        for slot in slots.values():
            if slot is not None:
                self._release(slot)

    def drop_unread(self, keys: Sequence[Key]) -> None:
        """Drop files that could not be read."""
        for key in keys:
            self.counts.failed_reads += 1
            if key in self._files:
                self._drop_file(key)

    def begin_import(self, keys: Sequence[Key]) -> dict[Key, int] | None:
        """Return a slot for each block that comes from elsewhere; None, without a change, if there are too few.

        The blocks count as held after `end_import`.
        """
        busy = sum(1 for slot in self._owner if self._busy[slot])
        if len(keys) > len(self._free) + len(self._owner) - busy:
            return None
        slots = {}
        for key in keys:
            slot = self._take_slot()
            assert slot is not None
            slots[key] = slot
        return slots

    def end_import(self, slots: Mapping[Key, int], is_written: bool) -> None:
        """Add the blocks of `begin_import`, or give their slots back."""
        for key, slot in slots.items():
            if is_written:
                self._take_in(key, slot)
            else:
                self._free.append(slot)

    # ---- all -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all blocks, and have their files deleted.

        Promotions and writes on their way still report their end, and change nothing then.
        """
        for slot in self._owner:
            if not self._busy[slot]:
                self._free.append(slot)
        self._slot_of.clear()
        self._owner.clear()
        self._unwritten.clear()
        self._files.clear()
        self._used_disk = 0
        self._rising.clear()
        self._writing = dict.fromkeys(self._writing)
        self._moves.deletions.clear()
        self._moves.clears = True

    def take_moves(self) -> Moves:
        """Return what to move now. Call it between scheduling a step and enqueuing that."""
        moves, self._moves = self._moves, Moves()
        return moves

    def _stored(self, tier: str, key: Key) -> None:
        if self._events is not None:
            self._events.tier_stored(MEDIUMS[tier], key.group, key.digest)

    def _removed(self, tier: str, key: Key) -> None:
        if self._events is not None:
            self._events.tier_removed(MEDIUMS[tier], key.group, key.digest)
