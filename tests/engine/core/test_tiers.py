"""Tiers below the prefix cache: evicted prefixes come back from host memory and disk, and change no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from engine.errors import ConfigError
from engine.protocol.kv_moves import Moved
from tests.engine.lively import drain, greedy, request, tokens
from tests.support.engines import DEVICES, engines, greedy_tokens
from tests.support.families import WINDOW, tiny_folder
from tests.support.installed import install_entry_point
from tests.support.toy_models import write_toy

PAGE = 8
GIB = 2**30
SMALL: dict[str, Any] = {
    "page_size": PAGE, "num_pages": 1 + 16, "max_num_seqs": 4, "graph_buckets": (4,), "max_model_len": 120,
    "enable_prefix_caching": True,
}  # fmt: skip
PROMPTS = [[(7 * one + 11 * place) % 290 + 5 for place in range(60)] for one in range(6)]  # each takes 8 of 16 pages

Make = Callable[..., Engine]


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, lively_model: Path) -> Iterator[Make]:
    with engines(model=str(lively_model), device=request.param, **SMALL) as make:
        yield make


@pytest.fixture
def on_disk(tmp_path: Path) -> dict[str, Any]:
    return {"kv_offloading_disk_path": str(tmp_path / "blocks"), "kv_offloading_disk_size": 0.01}


def hits(engine: Engine) -> dict[str, int]:
    return engine.stats().tier_hits


def settle(engine: Engine) -> None:
    """Wait until all files are written."""
    tiers = engine.loop.scheduler.tiers
    while tiers is not None and tiers.is_busy:
        engine.loop.poll_tiers()


def files(settings: dict[str, Any]) -> list[Path]:
    return sorted(Path(settings["kv_offloading_disk_path"]).rglob("*.kv"))


# ---- equal tokens --------------------------------------------------------------------------------------------------


def test_evicted_prefixes_come_back_from_host_memory(make, reference):
    engine = make(kv_offloading_size=0.01)
    for turn in range(3):
        for prompt in PROMPTS:
            assert greedy_tokens(engine, [prompt], 8) == [reference.greedy(prompt, 8)], turn
    # The device holds two prompts, so all later turns read 7 pages each: the last token is computed.
    assert hits(engine) == {"host": 2 * 6 * 7 * PAGE}
    stats = engine.stats()
    assert stats.prefix_cache_hits == 2 * 6 * 7 * PAGE and stats.tier_dropped == 0
    assert stats.tier_bytes["host"] > 0 and stats.tier_bytes["disk"] == 0


def test_host_memory_keeps_what_was_used_last(make, reference):
    block = make().loop.executor.capabilities.block_bytes
    engine = make(kv_offloading_size=16.5 * block / GIB)
    for prompt in PROMPTS:
        greedy_tokens(engine, [prompt], 8)
    assert engine.stats().tier_bytes["host"] == 16 * block
    for prompt in (PROMPTS[0], PROMPTS[3]):
        assert greedy_tokens(engine, [prompt], 8) == [reference.greedy(prompt, 8)]
    assert hits(engine) == {"host": 7 * PAGE}  # PROMPTS[0] has gone


@pytest.mark.parametrize("seed, async_scheduling", [(0, False), (1, True)])
def test_random_traffic_has_the_tokens_of_an_engine_without_tiers(make, on_disk, seed, async_scheduling):
    """Prompts that begin alike, aborts, preemptions, and tiers so small that blocks are dropped everywhere."""
    block = make().loop.executor.capabilities.block_bytes
    plain = make(async_scheduling=async_scheduling)
    tiered = make(
        async_scheduling=async_scheduling,
        kv_offloading_size=24 * block / GIB,
        **(on_disk | {"kv_offloading_disk_size": 40 * (block + 64) / GIB}),
    )
    chance = random.Random(seed)
    count = 0
    for turn in range(12):
        begun = {}
        for _ in range(5):
            prompt = chance.choice(PROMPTS)[: chance.randint(20, 60)] + [turn + 3] * chance.randint(0, 9)
            params = greedy(chance.randint(1, 30), cache_salt=chance.choice(("", "tenant")))
            begun[f"{count}"] = prompt, params
            count += 1
        aborts = {chance.randint(0, 6): [f"{count - 1}"]} if turn % 3 == 2 else {}
        found = []
        for engine in (plain, tiered):
            for name, (prompt, params) in begun.items():
                engine.loop.add(request(name, prompt, params))
            events = drain(engine.loop, aborts)
            found.append({name: tokens(events[name]) for name in begun if not any(name in a for a in aborts.values())})
            engine.loop.scheduler.check()
        assert found[0] == found[1], turn
        if turn == 7:
            for engine in (plain, tiered):
                engine.loop.reset_prefix_cache()
    settle(tiered)
    assert hits(tiered).get("host", 0) + hits(tiered).get("disk", 0) > 0
    assert tiered.stats().tier_failed_reads == 0


@pytest.mark.parametrize("name", ["mistral", "gemma2", "smollm3-windows"])
def test_windows_come_back(name, tiny_model, tmp_path, on_disk):
    """Of a layer with a window, only the pages of the last window are kept and needed."""
    folder = tiny_folder(name, tmp_path / "model", tiny_model)
    settings = {"page_size": 4, "num_pages": 1 + 60, "max_num_batched_tokens": 8, "device": "cpu"}
    prompts = [[5 + (7 * place + 31 * one) % 290 for place in range(5 * WINDOW)] for one in range(5)]
    with engines(model=str(folder), **settings) as make:
        plain, tiered = make(), make(kv_offloading_size=0.01, **on_disk)
        for _ in range(2):
            for prompt in prompts:
                assert greedy_tokens(tiered, [prompt], 10) == greedy_tokens(plain, [prompt], 10)
        assert hits(tiered)["host"] >= WINDOW


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16"}])
def test_other_forms_of_pages_come_back(make, options):
    plain, tiered = make(**options), make(kv_offloading_size=0.01, **options)
    for _ in range(2):
        for prompt in PROMPTS:
            assert greedy_tokens(tiered, [prompt], 8) == greedy_tokens(plain, [prompt], 8)
    assert hits(tiered)["host"] == 6 * 7 * PAGE


def test_latent_vectors_come_back(tmp_path, monkeypatch):
    install_entry_point(monkeypatch, tmp_path / "site", "toy-mixer", "tests.support.toy_models:ENTRY")
    folder = tmp_path / "latent"
    write_toy(folder, ("latent", "latent"))
    prompts = [[place % 90 + one for place in range(60)] for one in range(1, 6)]
    with engines(model=str(folder), device="cpu", **SMALL) as make:
        plain, tiered = make(), make(kv_offloading_size=0.01)
        for _ in range(2):
            for prompt in prompts:
                assert greedy_tokens(tiered, [prompt], 8) == greedy_tokens(plain, [prompt], 8)
        assert hits(tiered)["host"] > 0


def test_two_ranks_keep_their_parts(lively_model, reference):
    with engines(model=str(lively_model), device="cpu", tensor_parallel_size=2, **SMALL) as make:
        engine = make(kv_offloading_size=0.01)
        for _ in range(2):
            for prompt in PROMPTS[:4]:
                assert greedy_tokens(engine, [prompt], 8) == [reference.greedy(prompt, 8)]
        assert hits(engine) == {"host": 4 * 7 * PAGE}


def test_other_requests_run_while_a_prefix_rises(make, on_disk):
    """A slow disk delays only the request that waits for it."""
    engine = make(kv_offloading_size=0.01, **on_disk)
    loop = engine.loop
    greedy_tokens(engine, PROMPTS, 8)
    greedy_tokens(engine, [[9] * 100], 8)
    polls, poll = [], loop.executor.worker.poll_blocks

    def late():
        polls.append(0)
        return poll() if len(polls) > 20 else Moved()

    loop.executor.worker.poll_blocks = late
    loop.add(request("runs", [3, 4, 5], greedy(30)))
    loop.add(request("waits", PROMPTS[0], greedy(4)))
    order: list[str] = []
    while loop.has_work:
        order += [event.request_id for event in loop.step() for _ in event.token_ids]
    assert order.index("waits") > 10 and order.count("runs") == 30 and order.count("waits") == 4


# ---- disk ----------------------------------------------------------------------------------------------------------


def test_prefixes_outlive_the_engine_on_disk(make, on_disk, reference):
    first = make(kv_offloading_size=0.01, **on_disk)
    for prompt in PROMPTS:
        greedy_tokens(first, [prompt], 8)
    first.close()
    assert len(files(on_disk)) == 6 * 8  # also what the device held: 67 computed tokens are 8 pages

    second = make(kv_offloading_size=0.01, **on_disk)
    for prompt in PROMPTS:
        assert greedy_tokens(second, [prompt], 8) == [reference.greedy(prompt, 8)]
    assert hits(second) == {"disk": 6 * 7 * PAGE}
    assert second.stats().tier_failed_reads == 0


@pytest.mark.parametrize("damage", ["truncated", "one bit", "renamed", "empty", "deleted", "longer"])
def test_damaged_files_are_computed_again(make, on_disk, reference, damage):
    first = make(kv_offloading_size=0.01, **on_disk)
    for prompt in PROMPTS[:3]:
        greedy_tokens(first, [prompt], 8)
    first.close()
    found = files(on_disk)
    for path in found:
        data = bytearray(path.read_bytes())
        if damage == "truncated":
            data = data[:-1]
        elif damage == "one bit":
            data[len(data) // 2] ^= 1
        elif damage == "empty":
            data = bytearray()
        elif damage == "longer":
            data += b"\0"
        path.write_bytes(data)
    if damage == "renamed":
        contents = [path.read_bytes() for path in found]
        for path, data in zip(found, contents[1:] + contents[:1], strict=True):
            path.write_bytes(data)
    second = make(kv_offloading_size=0.01, **on_disk)
    if damage == "deleted":
        for path in found:
            path.unlink()
    for prompt in PROMPTS[:3]:
        assert greedy_tokens(second, [prompt], 8) == [reference.greedy(prompt, 8)]
    assert hits(second) == {} and second.stats().tier_failed_reads == 3 * 7


def test_blocks_of_other_weights_are_not_read(make, other_model, on_disk, other_reference):
    first = make(kv_offloading_size=0.01, **on_disk)
    greedy_tokens(first, PROMPTS[:2], 8)
    first.close()
    assert files(on_disk)
    other = make(model=str(other_model), kv_offloading_size=0.01, **on_disk)
    assert greedy_tokens(other, PROMPTS[:1], 8) == [other_reference.greedy(PROMPTS[0], 8)]
    assert hits(other) == {} and other.stats().tier_failed_reads == 0


def test_the_folder_stays_within_its_limit(make, on_disk):
    block = make().loop.executor.capabilities.block_bytes
    limit = 10 * (block + 64)
    engine = make(kv_offloading_size=0.01, **(on_disk | {"kv_offloading_disk_size": limit / GIB}))
    for prompt in PROMPTS:
        greedy_tokens(engine, [prompt], 8)
        settle(engine)
    engine.close()
    assert 8 <= len(files(on_disk)) <= 10
    assert sum(path.stat().st_size for path in files(on_disk)) <= limit


def test_a_full_disk_costs_hits_only(make, on_disk, reference, monkeypatch):
    from engine.worker.block_files import BlockFiles

    engine = make(kv_offloading_size=0.01, **on_disk)
    folder = Path(on_disk["kv_offloading_disk_path"])
    monkeypatch.setattr(BlockFiles, "write", lambda self, name, block: self._writer.submit(
        self._write, folder / "missing", name, block
    ))  # fmt: skip
    for _ in range(2):
        for prompt in PROMPTS[:4]:
            assert greedy_tokens(engine, [prompt], 8) == [reference.greedy(prompt, 8)]
            settle(engine)
    assert not files(on_disk) and hits(engine) == {"host": 4 * 7 * PAGE}


# ---- what empties the tiers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["update", "rename", "reset", "sleep"])
def test_changes_empty_all_tiers(make, on_disk, reference, other_reference, weights, change):
    engine = make(kv_offloading_size=0.01, enable_sleep_mode=change == "sleep", **on_disk)
    for prompt in PROMPTS[:4]:
        greedy_tokens(engine, [prompt], 8)
    settle(engine)
    assert len(files(on_disk)) > 8
    if change == "update":
        engine.update_weights(weights["b"], version="b")
    elif change == "rename":
        engine.loop.rename_weights("b")
    elif change == "reset":
        engine.loop.reset_prefix_cache()
    else:
        engine.sleep(level=1)
        engine.wake_up()
    model = other_reference if change == "update" else reference
    assert engine.stats().tier_bytes == {"host": 0, "disk": 0}
    for prompt in PROMPTS[:4]:
        assert greedy_tokens(engine, [prompt], 8) == [model.greedy(prompt, 8)]
    assert hits(engine) == {}
    for prompt in PROMPTS[:4]:
        assert greedy_tokens(engine, [prompt], 8) == [model.greedy(prompt, 8)]
    assert hits(engine)["host"] == 4 * 7 * PAGE

    engine.close()
    again = make(kv_offloading_size=0.01, **on_disk)  # on the weights of the start
    for prompt in PROMPTS[:2]:
        assert greedy_tokens(again, [prompt], 8) == [reference.greedy(prompt, 8)]
    assert ("disk" in hits(again)) == (change in ("reset", "sleep"))


def test_an_update_while_a_prefix_rises_drops_it(make, on_disk, weights, other_reference):
    engine = make(kv_offloading_size=0.01, **on_disk)
    loop = engine.loop
    greedy_tokens(engine, PROMPTS[:4], 8)
    worker = loop.executor.worker
    poll, held = worker.poll_blocks, [True]
    worker.poll_blocks = lambda: Moved() if held[0] else poll()
    loop.add(request("a", PROMPTS[0], greedy(8)))
    loop.step()
    assert loop.scheduler.tiers.num_rising == 1
    engine.update_weights(weights["b"], version="b")
    held[0] = False
    assert tokens(drain(loop)["a"]) == other_reference.greedy(PROMPTS[0], 8)
    assert hits(engine) == {}


def test_an_aborted_request_leaves_its_prefix_on_the_device(make):
    engine = make(kv_offloading_size=0.01)
    greedy_tokens(engine, PROMPTS[:4], 8)
    engine.loop.add(request("a", PROMPTS[0], greedy(8)))
    engine.loop.step()
    engine.loop.abort(["a"])
    engine.idle_check()
    assert engine.stats().kv_cache_usage == 0


# ---- events and settings -------------------------------------------------------------------------------------------


def test_events_carry_the_medium(make, on_disk, tmp_path):
    pytest.importorskip("zmq")
    engine = make(
        kv_offloading_size=0.01, kv_events_config={"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/kv"},
        **on_disk,
    )  # fmt: skip
    taken, recorder = [], engine.loop.prefix_cache.events
    take = recorder.take
    recorder.take = lambda: taken.append(take()) or taken[-1]
    for prompt in [*PROMPTS, PROMPTS[0]]:
        greedy_tokens(engine, [prompt], 8)
        settle(engine)
    engine.loop.take_events()
    held: dict[str, set[tuple[int, int]]] = {"GPU": set(), "CPU": set(), "DISK": set()}
    for event in (event for events in taken for event in events):
        blocks = {(event["group_idx"], number) for number in event["block_hashes"]}
        if event["type"] == "BlockStored":
            assert not blocks & held[event["medium"]], "stored twice"
            held[event["medium"]] |= blocks
        else:
            assert blocks <= held[event["medium"]]
            held[event["medium"]] -= blocks
    tiers = engine.loop.scheduler.tiers
    assert {medium: len(blocks) for medium, blocks in held.items()} == {
        "GPU": len(engine.loop.prefix_cache), "CPU": tiers.num_blocks()["host"], "DISK": tiers.num_blocks()["disk"],
    }  # fmt: skip
    assert all(held.values())


def test_a_folder_has_one_engine(make, on_disk):
    make(kv_offloading_size=0.01, **on_disk)
    with pytest.raises(ConfigError, match="kv_offloading_disk_path=.*in use by another engine"):
        make(kv_offloading_size=0.01, **on_disk)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kv_offloading_size": 0}, "kv_offloading_size=0 must be a number of GiB above 0"),
        ({"kv_offloading_size": 1e-9}, "kv_offloading_size=1e-09 holds no page"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "found enable_prefix_caching=False"),
        ({"kv_offloading_disk_path": "/x", "kv_offloading_disk_size": 1}, "needs kv_offloading_size"),
        ({"kv_offloading_size": 1, "kv_offloading_disk_path": "/x"}, "kv_offloading_disk_size=None need each other"),
        ({"kv_offloading_size": 1, "kv_offloading_disk_size": 1}, "kv_offloading_disk_path=None"),
        (
            {
                "kv_offloading_size": 1, "kv_offloading_disk_path": "/x", "kv_offloading_disk_size": 1,
                "tensor_parallel_size": 2,
            },
            "can't be combined with tensor_parallel_size=2",
        ),
        (
            {"kv_offloading_size": 0.01, "kv_offloading_disk_path": "/proc/x", "kv_offloading_disk_size": 1},
            "kv_offloading_disk_path='/proc/x' can't be used",
        ),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_by_name(lively_model, settings, message):
    with engines(model=str(lively_model), **SMALL) as make, pytest.raises(ConfigError, match=message):
        make(**settings)


def test_models_with_recurrent_state_are_refused(tmp_path, monkeypatch):
    install_entry_point(monkeypatch, tmp_path / "site", "toy-mixer", "tests.support.toy_models:ENTRY")
    folder = tmp_path / "hybrid"
    write_toy(folder, ("recurrent", "attention"))
    settings = SMALL | {"enable_prefix_caching": None}
    with (
        engines(model=str(folder), device="cpu", **settings) as make,
        pytest.raises(ConfigError, match="kv_offloading_size=0.01 doesn't work with ToyMixerForCausalLM"),
    ):
        make(kv_offloading_size=0.01)
