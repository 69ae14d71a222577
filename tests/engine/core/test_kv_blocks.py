"""Blocks of the KV cache go from one engine to another by their hashes, and only with right contents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from engine import Engine
from engine.errors import RequestError
from engine.protocol.kv_blocks import hash_of
from tests.support.engines import DEVICES, engines, greedy_tokens
from tests.support.families import WINDOW, tiny_folder

PAGE = 8
GIB = 2**30
SMALL: dict[str, Any] = {
    "page_size": PAGE, "num_pages": 1 + 16, "max_num_seqs": 4, "graph_buckets": (4,), "max_model_len": 120,
    "enable_prefix_caching": True, "kv_offloading_size": 0.01,
}  # fmt: skip
PROMPT = [(7 * place) % 290 + 5 for place in range(60)]
OTHERS = [[(7 * one + 11 * place) % 290 + 5 for place in range(60)] for one in range(1, 4)]
Make = Callable[..., Engine]


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, lively_model: Path) -> Iterator[Make]:
    with engines(model=str(lively_model), device=request.param, **SMALL) as make:
        yield make


def hashes(engine: Engine, tokens: list[int] = PROMPT, salt: str | None = None) -> list[int]:
    """The hashes of a prompt's full pages."""
    cache, pages = engine.loop.prefix_cache, len(tokens) // PAGE
    chain = cache.chain(engine.weight_version if salt is None else salt)
    return [hash_of(chain.digest(index, tokens, PAGE)) for index in range(pages)]


def hits(engine: Engine) -> dict[str, int]:
    return engine.stats().tier_hits


def settle(engine: Engine) -> None:
    while engine.loop.scheduler.tiers.is_busy:
        engine.loop.poll_tiers()


@pytest.mark.parametrize("source", ["GPU", "CPU", "DISK"])
def test_a_prefix_moves_to_another_engine_from_each_tier(make, reference, tmp_path, source):
    disk = {"kv_offloading_disk_path": str(tmp_path / "blocks"), "kv_offloading_disk_size": 0.01}
    first, second = make(**disk), make()
    greedy_tokens(first, [PROMPT], 8)
    for prompt in OTHERS if source != "GPU" else ():
        greedy_tokens(first, [prompt], 8)
    if source == "DISK":
        settle(first)
        first.close()
        first = make(**disk)
    wanted = hashes(first)
    found = first.lookup_kv_blocks(wanted)["blocks"]
    assert [one["block_hash"] for one in found] == wanted
    assert all(source in one["mediums"] for one in found) and found[0]["mediums"][0] == source

    data = first.export_kv_blocks(wanted)
    assert second.import_kv_blocks(data) == {"imported": 7, "present": 0}
    assert [one["mediums"] for one in second.lookup_kv_blocks(wanted)["blocks"]] == [["CPU"]] * 7
    assert greedy_tokens(second, [PROMPT], 8) == [reference.greedy(PROMPT, 8)]
    assert hits(second) == {"host": 7 * PAGE}
    assert second.import_kv_blocks(data) == {"imported": 0, "present": 7}
    for engine in (first, second):
        engine.idle_check()
        engine.loop.scheduler.check()


def test_an_import_goes_to_disk_too_and_outlives_the_engine(make, reference, tmp_path):
    disk = {"kv_offloading_disk_path": str(tmp_path / "blocks"), "kv_offloading_disk_size": 0.01}
    first, second = make(), make(**disk)
    greedy_tokens(first, [PROMPT], 8)
    second.import_kv_blocks(first.export_kv_blocks(hashes(first)))
    settle(second)
    second.close()
    third = make(**disk)
    assert greedy_tokens(third, [PROMPT], 8) == [reference.greedy(PROMPT, 8)]
    assert hits(third) == {"disk": 7 * PAGE}


def test_windows_and_groups_move(tiny_model, tmp_path):
    folder = tiny_folder("gemma2", tmp_path / "model", tiny_model)
    prompt = [5 + (7 * place) % 290 for place in range(5 * WINDOW)]
    settings = {"page_size": 4, "max_num_batched_tokens": 8, "device": "cpu", "kv_offloading_size": 0.01}
    with engines(model=str(folder), **settings) as make:
        first, second = make(), make()
        wanted = greedy_tokens(first, [prompt], 10)
        listed = first.list_kv_blocks(10_000)["blocks"]
        assert {one["group_idx"] for one in listed} == {0, 1}
        numbers = list(dict.fromkeys(one["block_hash"] for one in listed))
        second.import_kv_blocks(first.export_kv_blocks(numbers))
        assert greedy_tokens(second, [prompt], 10) == wanted
        assert hits(second)["host"] >= 4 * WINDOW


def test_the_list_counts_and_names_what_is_held(make):
    engine = make()
    assert engine.list_kv_blocks()["blocks"] == []
    for prompt in [PROMPT, *OTHERS]:
        greedy_tokens(engine, [prompt], 8)
    found = engine.list_kv_blocks(10_000)
    tiers = engine.loop.scheduler.tiers
    assert found["num_blocks"] == {"GPU": len(engine.loop.prefix_cache), "CPU": tiers.num_blocks()["host"], "DISK": 0}
    for medium, count in found["num_blocks"].items():
        assert sum(medium in one["mediums"] for one in found["blocks"]) == count
    assert found["block_size"] == PAGE and found["block_bytes"] == engine.loop.executor.capabilities.block_bytes
    assert found["blocks"][0]["mediums"] == ["GPU"]  # the last used come first
    assert engine.list_kv_blocks(3)["blocks"] == found["blocks"][:3]


def test_blocks_that_are_not_held_are_named(make):
    engine = make()
    greedy_tokens(engine, [PROMPT], 8)
    assert engine.lookup_kv_blocks([1])["blocks"] == []
    with pytest.raises(RequestError, match="block_hashes: 1 are not held, such as 1:"):
        engine.export_kv_blocks([*hashes(engine), 1])


def test_a_damaged_file_is_not_exported(make, tmp_path):
    disk = {"kv_offloading_disk_path": str(tmp_path / "blocks"), "kv_offloading_disk_size": 0.01}
    first = make(**disk)
    greedy_tokens(first, [PROMPT], 8)
    first.close()
    second = make(**disk)
    for path in (tmp_path / "blocks").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    wanted = hashes(second)
    with pytest.raises(RequestError, match=f"7 are not held, such as {wanted[0]}"):
        second.export_kv_blocks(wanted)
    assert second.stats().tier_failed_reads == 7 and second.lookup_kv_blocks(wanted)["blocks"] == []


def test_host_memory_bounds_both_ways(make):
    block = make().loop.executor.capabilities.block_bytes
    first, small = make(), make(kv_offloading_size=4.5 * block / GIB)
    for engine in (first, small):
        greedy_tokens(engine, [PROMPT], 8)
    with pytest.raises(RequestError, match=r"7 KV blocks have no room: host memory holds 4 \(kv_offloading_size\)"):
        small.export_kv_blocks(hashes(small))
    other = make(kv_offloading_size=4.5 * block / GIB)
    data = first.export_kv_blocks(hashes(first))
    with pytest.raises(RequestError, match="7 KV blocks have no room"):
        other.import_kv_blocks(data)
    assert other.list_kv_blocks()["blocks"] == []
    assert other.import_kv_blocks(first.export_kv_blocks(hashes(first)[:4])) == {"imported": 4, "present": 0}
    for engine in (small, other):
        engine.idle_check()
        engine.loop.scheduler.check()


# ---- hostile and foreign files -------------------------------------------------------------------------------------


def edited(data: bytes, edit: Callable[[dict[str, Any], bytearray], None]) -> bytes:
    """The file with another header and other blocks."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    edit(header, body)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


def _flip(header: dict[str, Any], body: bytearray) -> None:
    body[len(body) // 2] ^= 1


def _swap(header: dict[str, Any], body: bytearray) -> None:
    first, second = list(header)[1:3]
    header[first], header[second] = header[second], header[first]


def _renamed(name: str) -> Callable[[dict[str, Any], bytearray], None]:
    def rename(header: dict[str, Any], body: bytearray) -> None:
        old = list(header)[1]
        header[name] = header.pop(old)
        header["__metadata__"][name] = header["__metadata__"][old]

    return rename


def _set(key: str, value: str) -> Callable[[dict[str, Any], bytearray], None]:
    return lambda header, body: header["__metadata__"].update({key: value})


def _no_metadata(header: dict[str, Any], body: bytearray) -> None:
    del header["__metadata__"]


def _float(header: dict[str, Any], body: bytearray) -> None:
    entry = header[list(header)[1]]
    entry["dtype"], entry["shape"] = "F32", [entry["shape"][0] // 4]


@pytest.mark.parametrize(
    "edit, message",
    [
        (_flip, "the checksum of block '0-[0-9a-f]{64}' differs"),
        (_swap, "the checksum of block .* differs"),
        (_renamed("0-" + "0" * 64), "the checksum of block .* differs"),
        (_renamed("../../etc/passwd"), "tensor '../../etc/passwd' is not named by a cache group and a digest"),
        (_float, r"is float32 \[\d+\], expected uint8"),
        (_set("format", "other"), "format='other', expected 'encore-kv-blocks-1'"),
        (_set("fingerprint", "0" * 32), "fingerprint='0{32}', this engine has"),
        (_set("weight_version", "step-9"), "weight_version='step-9', this engine has"),
        (_no_metadata, "format='None'"),
    ],
)
def test_changed_files_are_refused_and_nothing_is_taken(lively_model, edit, message):
    with engines(model=str(lively_model), device="cpu", **SMALL) as make:
        first, second = make(), make()
        greedy_tokens(first, [PROMPT], 8)
        data = edited(first.export_kv_blocks(hashes(first)), edit)
        with pytest.raises(RequestError, match=message) as refused:
            second.import_kv_blocks(data)
        assert refused.value.param == "kv_blocks"
        assert second.list_kv_blocks()["blocks"] == [] and second.stats().tier_bytes["host"] == 0


@pytest.mark.parametrize("data", [b"", b"x" * 100, (2**63).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]"])
def test_other_bytes_are_refused(make, data):
    with pytest.raises(RequestError, match="kv_blocks can't be imported: not a safetensors file|format='None'"):
        make().import_kv_blocks(data)


def test_truncated_files_are_refused(make):
    engine = make()
    greedy_tokens(engine, [PROMPT], 8)
    data = engine.export_kv_blocks(hashes(engine))
    assert len(load(data)) == 7  # any reader of safetensors can read it
    for size in (len(data) - 1, len(data) // 2, 20):
        with pytest.raises(RequestError, match="not a safetensors file"):
            engine.import_kv_blocks(data[:size])


def test_blocks_of_other_weights_page_sizes_and_old_versions_are_refused(make, other_model, weights):
    first = make()
    greedy_tokens(first, [PROMPT], 8)
    data = first.export_kv_blocks(hashes(first))
    for options in ({"model": str(other_model)}, {"page_size": 16}, {"dtype": "bfloat16"}, {"max_model_len": 64}):
        with pytest.raises(RequestError, match="fingerprint=.*export from an engine with the same model"):
            make(**options).import_kv_blocks(data)
    first.update_weights(weights["b"], version="b")
    with pytest.raises(RequestError, match="weight_version=.* has 'b'"):
        first.import_kv_blocks(data)
    first.update_weights(weights["b"], version=first.info.weight_version)  # the old name for other weights
    with pytest.raises(RequestError, match="fingerprint="):
        first.import_kv_blocks(data)


@pytest.mark.parametrize(
    "given, message",
    [([], "0 hashes"), ([-1], "-1 is no unsigned"), ([2**64], "is no unsigned"), (["1"], "'1' is no unsigned"),
     ([True], "True is no unsigned"), ([1, 1], "a hash twice"), ([0.5], "0.5 is no")],
)  # fmt: skip
def test_wrong_hashes_are_refused_by_name(lively_model, given, message):
    with engines(model=str(lively_model), device="cpu", **SMALL) as make:
        engine = make()
        for call in (engine.lookup_kv_blocks, engine.export_kv_blocks):
            with pytest.raises(RequestError, match=f"block_hashes.*{message}"):
                call(given)


def test_engines_without_host_memory_or_asleep_say_so(make):
    with pytest.raises(RequestError, match="start the engine with kv_offloading_size"):
        make(kv_offloading_size=None).list_kv_blocks()
    engine = make(enable_sleep_mode=True)
    engine.sleep()
    with pytest.raises(RequestError, match="KV blocks can't be copied now"):
        engine.lookup_kv_blocks([1])


def test_two_ranks_refuse(lively_model):
    settings = SMALL | {"tensor_parallel_size": 2}
    with engines(model=str(lively_model), device="cpu", **settings) as make:
        with pytest.raises(RequestError, match="tensor_parallel_size=2"):
            make().export_kv_blocks([1])
