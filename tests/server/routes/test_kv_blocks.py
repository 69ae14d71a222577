"""The routes /kv_blocks: blocks of the KV cache leave one server and enter another, for admins only."""

from __future__ import annotations

import httpx
import pytest

from engine.errors import ConfigError
from engine.protocol.kv_blocks import hash_of
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from server.config import ServerConfig
from tests.server.conftest import running, tiny_config
from tests.support.waiting import PATIENCE

PAGE = 8
PROMPT = [(7 * place) % 290 + 5 for place in range(60)]
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
SETTINGS = {
    "page_size": PAGE, "max_model_len": 512, "kv_offloading_size": 0.01, "enable_kv_block_api": True,
    "admin_without_key": "loopback",
}  # fmt: skip
BYTES = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def servers(folders):
    """Two servers with the same model; only the first has computed the prompt."""
    with running(tiny_config(folders["a"], **SETTINGS)) as one, running(tiny_config(folders["a"], **SETTINGS)) as two:
        one.text = one.answer("/v1/completions", BODY)["choices"][0]["text"]
        yield one, two


def hashes(server) -> list[int]:
    chain = PrefixCache(PagePool(2, PAGE)).chain(server.service.client.stats().weight_version)
    return [hash_of(chain.digest(index, PROMPT, PAGE)) for index in range(len(PROMPT) // PAGE)]


def send(server, data: bytes, **headers: str) -> httpx.Response:
    return httpx.post(server.url + "/kv_blocks/import", content=data, headers=BYTES | headers, timeout=PATIENCE)


def error_of(response: httpx.Response) -> dict:
    assert response.status_code >= 400, response.text
    return response.json()["error"]


def test_a_prefix_moves_between_servers(servers):
    one, two = servers
    wanted = hashes(one)
    found = one.answer("/kv_blocks/lookup", {"block_hashes": [*wanted, 1]})["blocks"]
    assert [block["block_hash"] for block in found] == wanted and found[0]["mediums"] == ["GPU"]
    exported = one.post("/kv_blocks/export", {"block_hashes": wanted})
    assert exported.status_code == 200 and exported.headers["content-type"] == BYTES["Content-Type"]
    damaged = bytearray(exported.content)
    damaged[-1] ^= 1
    error = error_of(send(two, bytes(damaged)))
    assert error["param"] == "kv_blocks" and "checksum of block" in error["message"]
    assert httpx.get(two.url + "/kv_blocks").json()["num_blocks"] == {"GPU": 0, "CPU": 0, "DISK": 0}

    assert send(two, exported.content).json() == {"imported": 7, "present": 0}
    assert httpx.get(two.url + "/kv_blocks?limit=2").json()["num_blocks"]["CPU"] == 7
    assert len(httpx.get(two.url + "/kv_blocks?limit=2").json()["blocks"]) == 2
    answer = two.answer("/v1/completions", BODY)
    assert answer["choices"][0]["text"] == one.text
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 7 * PAGE


@pytest.mark.parametrize(
    "body, param",
    [({}, "block_hashes"), ({"block_hashes": []}, "block_hashes"), ({"block_hashes": [-1]}, "block_hashes"),
     ({"block_hashes": [2**64]}, "block_hashes"), ({"block_hashes": ["1"]}, "block_hashes"),
     ({"block_hashes": [1, 1]}, "block_hashes"), ({"block_hashes": [1], "medium": "GPU"}, "medium")],
)  # fmt: skip
def test_wrong_fields_are_named(servers, body, param):
    for path in ("/kv_blocks/lookup", "/kv_blocks/export"):
        response = servers[0].post(path, body)
        assert response.status_code == 400 and param in str(error_of(response))


def test_what_is_not_held_or_no_file_is_a_400(servers):
    one, _ = servers
    assert "1 are not held, such as 1:" in error_of(one.post("/kv_blocks/export", {"block_hashes": [1]}))["message"]
    for data in (b"", b"[]", b"x" * 1000):
        response = send(one, data)
        assert response.status_code == 400 and error_of(response)["param"] == "kv_blocks"
    assert send(one, b"{}", **{"Content-Type": "application/json"}).status_code == 415
    assert httpx.get(one.url + "/kv_blocks?limit=-1").status_code == 400
    plain = httpx.post(one.url + "/v1/completions", content=b"x", headers=BYTES)
    assert plain.status_code == 415  # bytes are for this route alone


def test_bodies_bound_exports_and_imports(folders, servers):
    with running(tiny_config(folders["a"], **SETTINGS, max_body_bytes=6000)) as small:
        small.answer("/v1/completions", BODY)
        error = error_of(small.post("/kv_blocks/export", {"block_hashes": hashes(small)}))
        assert "more than the limit of 6000: ask for at most" in error["message"]
        data = servers[0].post("/kv_blocks/export", {"block_hashes": hashes(small)}).content
        assert len(data) > 6000 and send(small, data).status_code == 413


def test_the_routes_are_off_and_guarded_by_default(folders):
    with running(tiny_config(folders["a"], admin_without_key="loopback")) as server:
        error = error_of(httpx.get(server.url + "/kv_blocks"))
        assert error["code"] == "kv_block_api_disabled" and "--enable-kv-block-api" in error["message"]
    settings = {name: value for name, value in SETTINGS.items() if name != "admin_without_key"}
    with running(tiny_config(folders["a"], **settings)) as server:
        assert error_of(httpx.get(server.url + "/kv_blocks"))["code"] == "admin_disabled"
        assert send(server, b"x").status_code == 403


@pytest.mark.parametrize(
    "settings, message",
    [({"enable_kv_block_api": True}, "enable_kv_block_api=True needs kv_offloading_size"),
     ({"enable_kv_block_api": True, "kv_offloading_size": 1, "tensor_parallel_size": 2}, "tensor_parallel_size=2")],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig.from_dict({"model": "x", **settings})
