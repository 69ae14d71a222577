"""The clients of two trainers drive a server: SkyRL's RemoteInferenceClient and verifiers' TrainClient.

Each test skips where its package is absent. docs/rl.md says how to install them for these tests.
"""

from __future__ import annotations

import asyncio
import typing
from types import SimpleNamespace

import pytest
import typing_extensions

from tests.server.conftest import running, tiny_config
from tests.server.routes.trainer.test_groups import place, specs, trainer, weights

__all__ = ["trainer", "weights"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SkyRL's use of aiohttp

IDS = [40, 41, 42, 43]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def local(folders):
    """A server that needs no key from this machine, as these clients send none."""
    config = tiny_config(folders["a"], admin_without_key="loopback", enable_sleep_mode=True, max_model_len=4096)
    with running(config) as handle:
        yield handle


# ---- SkyRL -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def skyrl(monkeypatch):
    """The module of SkyRL's client. Before Python 3.12, Pydantic refuses the TypedDicts that it uses."""
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    name = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
    return pytest.importorskip(name, reason="needs SkyRL's client", exc_type=ImportError)


def drive(skyrl, server, steps):
    """Run `steps(client)` with a client of the server."""

    async def run():
        options = {"data_parallel_size": 1, "model_name": "tiny"}
        async with skyrl.RemoteInferenceClient(server.url, [server.url], **options) as client:
            return await steps(client)

    return asyncio.run(run())


def batch(count=2):
    return {"prompt_token_ids": [IDS] * count, "sampling_params": GREEDY, "session_ids": list(range(count))}


def test_skyrl_generates_pauses_and_goes_on(skyrl, local, references):
    async def steps(client):
        outputs = [await client.generate(batch())]
        await client.pause()
        waiting = asyncio.ensure_future(client.generate(batch(1)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await client.resume()
        outputs.append(await waiting)
        await client.reset_prefix_cache()
        assert await client.get_world_size() == (1, 1)
        return outputs

    both, one = drive(skyrl, local, steps)
    expected = references["a"].greedy(IDS, 12)
    assert both["response_ids"] == [expected] * 2 and one["response_ids"] == [expected]
    assert both["stop_reasons"] == ["length"] * 2
    assert [len(found) for found in both["response_logprobs"]] == [12, 12]


def test_skyrl_sleeps_and_wakes_up(skyrl, local, references):
    async def steps(client):
        await client.pause()
        await client.sleep(level=1)
        assert local.http.get("/is_sleeping").json() == {"is_sleeping": True}
        await client.wake_up(tags=["weights"])
        await client.wake_up(tags=["kv_cache"])
        await client.resume()
        return await client.generate(batch(1))

    assert drive(skyrl, local, steps)["response_ids"] == [references["a"].greedy(IDS, 12)]


def test_skyrl_sends_weights_over_a_group(skyrl, local, trainer, weights, references):
    info = SimpleNamespace(to_api_payload=lambda: place(port))
    info.for_servers = lambda world_size, num_servers, dp_size: [info]
    port = trainer("vllm")

    async def steps(client):
        await client.init_weight_update_communicator(info)
        await client.update_named_weights(specs(weights))
        return await client.generate(batch(1))

    assert drive(skyrl, local, steps)["response_ids"] == [references["b"].greedy(IDS, 12)]


def test_skyrl_begins_and_ends_an_update_in_parts(skyrl, local):
    async def steps(client):
        await client.start_weight_update()
        return await client.finish_weight_update()

    [answer] = drive(skyrl, local, steps).values()
    assert answer["status"] == 200 and answer["body"] == {"results": [None]}


# ---- verifiers -------------------------------------------------------------------------------------------------------


def test_verifiers_trains_on_the_tokens_of_the_server(local, folders, references, monkeypatch):
    train = pytest.importorskip("verifiers.v1.clients.train", reason="needs verifiers", exc_type=ImportError)
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    monkeypatch.setenv("LOCAL_KEY", "none")
    config = TrainClientConfig(
        base_url=f"{local.url}/v1", api_key_var="LOCAL_KEY", renderer_model_name=str(folders["a"])
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}

    async def run():
        client = train.TrainClient(config)
        try:
            sampling = SamplingConfig(temperature=0.0, max_tokens=8)
            return await client.get_response(ChatDialect(), body, sampling)
        finally:
            await client.close()

    local.answer("/update_weights_from_disk", {"model_path": str(folders["a"]), "weight_version": "a"})
    found = asyncio.run(run()).tokens
    expected = references["a"].greedy(found.prompt_ids, 8)
    assert found.completion_ids == expected[: len(found.completion_ids)] and found.completion_ids
    assert len(found.completion_logprobs) == len(found.completion_ids)
