"""The KV block store: find blocks of the prefix cache and its tiers by hash, copy them out, and take others in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import RequestError
from engine.protocol.kv_blocks import BODY, KVBlocks, check_hashes, file_bytes, hash_of
from engine.scheduling.kv_events import MEDIUM
from engine.scheduling.lower_tiers import MEDIUMS, Key, LowerTiers

if TYPE_CHECKING:
    from engine.core.loop import EngineLoop


class KVBlockStore:
    """Commands to a loop about single blocks. Each runs between two steps and takes the time of its copies.

    A hash is what KV events publish: the first 8 bytes of a digest. Needs `kv_offloading_size`, and one rank.
    """

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self._fingerprint: tuple[int, str] | None = None  # with the generation of the prefix cache

    def list_(self, limit: int = 1000) -> dict[str, Any]:
        """Return the form of the blocks, how many each medium holds, and up to `limit` blocks, the last used first."""
        tiers = self._tiers()
        if not limit >= 0:
            raise RequestError(f"limit={limit} is negative", param="limit")
        config, counts = self._loop.config, tiers.num_blocks()
        places = tiers.places()
        return {
            "block_size": config.page_size,
            "block_bytes": tiers.block_bytes,
            "weight_version": self._loop.weight_version,
            "num_blocks": {MEDIUM: len(self._cache())} | {MEDIUMS[tier]: count for tier, count in counts.items()},
            "blocks": [_entry(key, places[key]) for key in list(reversed(places))[:limit]],
        }

    def lookup(self, block_hashes: list[int]) -> dict[str, Any]:
        """Return the blocks with these hashes, in the order of the hashes; none for a hash that nothing holds."""
        found = self._find(block_hashes)
        return {"blocks": [_entry(key, media) for group in found.values() for key, media in group.items()]}

    def export(self, block_hashes: list[int], max_bytes: int | None = None) -> KVBlocks:
        """Copy blocks out. Raises RequestError if one is not held, or if the file would exceed `max_bytes`."""
        tiers = self._tiers()
        found = self._find(block_hashes)
        missing = [number for number, group in found.items() if not group]
        if missing:
            raise _missing(missing)
        keys = [key for group in found.values() for key in group]
        size = file_bytes(len(keys), tiers.block_bytes)
        if max_bytes is not None and size > max_bytes:
            most = max_bytes // file_bytes(1, tiers.block_bytes)
            raise RequestError(
                f"block_hashes: {len(keys)} blocks take {size} bytes, more than the limit of {max_bytes}: ask for at "
                f"most {most} at a time",
                param="block_hashes",
            )
        slots = tiers.begin_export(keys)
        if slots is None:
            raise _no_room(len(keys), tiers)
        try:
            self._loop.send_moves()  # blocks that only the device held go to their slots
            read = self._loop.executor.call("read_blocks", {key.name: slots[key] for key in keys})
        finally:
            tiers.end_export(slots)
        failed = [key for key in keys if read[key.name] is None]
        if failed:
            tiers.drop_unread(failed)
            self._loop.send_moves()
            raise _missing([hash_of(key.digest) for key in failed])
        return KVBlocks(self._model(), self._loop.weight_version, read)

    def import_(self, given: KVBlocks) -> dict[str, int]:
        """Take blocks into host memory, and to disk if there is a tier. Return how many are new, and were held already.

        Raises RequestError, and takes none, if they are of other weights or of another form, or don't fit.
        """
        tiers = self._tiers()
        for name, wanted, found in (
            ("weight_version", self._loop.weight_version, given.weight_version),
            ("fingerprint", self._model(), given.fingerprint),
        ):
            if wanted != found:
                raise _refusal(
                    f"its metadata have {name}={found[:64]!r}, this engine has {wanted!r}: export from an engine with "
                    "the same model, weights and settings of the KV cache"
                )
        keys = [Key.of_name(name) for name in given.blocks]
        for key, block in zip(keys, given.blocks.values(), strict=True):
            if key.group >= len(self._cache().groups):
                raise _refusal(f"block {key.name!r} is of group {key.group}, of {len(self._cache().groups)}")
            if len(block) != tiers.block_bytes:
                raise _refusal(f"block {key.name!r} has {len(block)} bytes, expected {tiers.block_bytes}")
        new = [key for key in keys if not tiers.holds(*key) and not self._cache().page(*key)]
        slots = tiers.begin_import(new)
        if slots is None:
            raise _no_room(len(new), tiers)
        self._loop.send_moves()  # copies on their way to the slots end before
        try:
            self._loop.executor.call("write_blocks", {slot: given.blocks[key.name] for key, slot in slots.items()})
        except BaseException:
            tiers.end_import(slots, is_written=False)
            raise
        tiers.end_import(slots, is_written=True)
        self._loop.send_moves()
        return {"imported": len(new), "present": len(keys) - len(new)}

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _tiers(self) -> LowerTiers:
        """Return the tiers. Raises RequestError where blocks can't be copied now, or never."""
        config, tiers = self._loop.config, self._loop.scheduler.tiers
        if tiers is None:
            raise RequestError("KV blocks go through host memory: start the engine with kv_offloading_size")
        if config.tensor_parallel_size > 1:
            raise RequestError(
                f"KV blocks can't be copied with tensor_parallel_size={config.tensor_parallel_size}: each rank has a "
                "part of a block; use one GPU"
            )
        if self._loop.obstacle:
            raise RequestError(f"KV blocks can't be copied now: {self._loop.obstacle}")
        return tiers

    def _cache(self) -> Any:
        assert self._loop.prefix_cache is not None
        return self._loop.prefix_cache

    def _model(self) -> str:
        """Return the fingerprint of weights, model and form of the pages; computed once for each set of weights."""
        generation = self._cache().generation
        if self._fingerprint is None or self._fingerprint[0] != generation:
            self._fingerprint = generation, self._loop.executor.call("kv_fingerprint")
        return self._fingerprint[1]

    def _find(self, block_hashes: list[int]) -> dict[int, dict[Key, list[str]]]:
        """Return the blocks of each hash, with the media that hold them."""
        found: dict[int, dict[Key, list[str]]] = {one: {} for one in check_hashes(block_hashes)}
        for key, media in self._tiers().places().items():
            if (number := hash_of(key.digest)) in found:
                found[number][key] = media
        return found


def _entry(key: Key, media: list[str]) -> dict[str, Any]:
    return {"block_hash": hash_of(key.digest), "group_idx": key.group, "mediums": media}


def _missing(hashes: list[int]) -> RequestError:
    shown = ", ".join(map(str, hashes[:8])) + (", …" if len(hashes) > 8 else "")
    return RequestError(
        f"block_hashes: {len(hashes)} are not held, such as {shown}: look them up, and leave them out",
        param="block_hashes",
    )


def _no_room(count: int, tiers: LowerTiers) -> RequestError:
    return RequestError(
        f"{count} KV blocks have no room: host memory holds {tiers.num_slots} (kv_offloading_size), some of which may "
        "be in use; copy fewer at a time, or raise it"
    )


def _refusal(message: str) -> RequestError:
    return RequestError(f"{BODY} can't be imported: {message}", param=BODY)
