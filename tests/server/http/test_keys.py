"""API keys: which key each route requires, where keys come from, and that no key is ever shown."""

from __future__ import annotations

import logging
import os
import pickle

import httpx
import pytest

from engine.errors import ConfigError
from server import keys as server_keys
from server.app import create_app
from server.config import ServerConfig
from server.http.errors import WireError
from server.http.keys import ADMIN_PREFIXES, OPEN_PATHS, check_key
from server.keys import Keys
from tests.server.http.test_bodies import error_of
from tests.support.waiting import wait

ONE, OTHER, ADMIN = "sk-one-qzvxa", "sk-other-qzvxb", "admin-qzvxc"
COMPLETION = {"prompt": "red", "max_tokens": 1}
INFERENCE = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/generate", "/tokenize",
             "/detokenize", "/tokenizer_info", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
             "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items",
             "/v1/responses/{response_id}/cancel", "/v1/chat/completions/batch", "/invocations",
             "/inference/v1/generate", "/v1/embeddings", "/pooling", "/v1/score", "/score", "/v1/rerank", "/rerank",
             "/v2/rerank",
             *(f"/api/{name}" for name in (
                 "chat", "generate", "tags", "ps", "show", "version", "embed", "embeddings", "pull", "push", "create",
                 "copy", "delete", "blobs/{digest}",
             )),
             "/v1/nothing")  # fmt: skip
CONTROL = ("/kv_blocks", "/kv_blocks/lookup", "/kv_blocks/export", "/kv_blocks/import", "/graphs/warm",
           "/graphs/invalidate", "/graphs/recapture", "/weights/update", "/profile/start",
           "/profile/stop", "/server_info", "/get_server_info", *(f"/{name}" for name in """
           pause resume is_paused abort_requests reset_prefix_cache pause_generation continue_generation abort_request
           flush_cache start_weight_update update_weights finish_weight_update update_weight_version weight_info
           weight_checker update_weights_from_disk get_weights_by_name get_world_size get_model_info model_info
           init_weight_transfer_engine init_weights_update_group destroy_weights_update_group
           update_weights_from_distributed update_weights_from_tensor update_weights_from_ipc sleep wake_up is_sleeping
           release_memory_occupation resume_memory_occupation release_kv_cache_memory collective_rpc
           weight_version get_weight_version
           """.split()))  # fmt: skip


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def refusal(keys, path, presented=None):
    with pytest.raises(WireError) as caught:
        check_key(keys, path, presented)
    return caught.value


@pytest.fixture(scope="module")
def both():
    return Keys([ONE, OTHER], [ADMIN])


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    """A server with two API keys and an admin key."""
    from tests.server.conftest import running, tiny_config

    folder = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text(f"# of the tests\n\n{ONE}\n{OTHER}\n")
    (folder / "admin").write_text(ADMIN)
    config = tiny_config(tiny_model, api_key_file=str(folder / "api"), admin_key_file=str(folder / "admin"))
    with running(config) as handle:
        yield handle


def test_every_route_of_the_application_is_in_one_of_the_three_classes():
    app = create_app(object(), ServerConfig())
    paths = {route.path for route in _routes(app) if route.path != "/v1/models/{model:path}"}
    inference = {path for path in paths if path not in OPEN_PATHS and not path.startswith(ADMIN_PREFIXES)}
    assert inference == set(INFERENCE) - {"/v1/nothing", "/v1/models/tiny"}
    assert {path for path in paths if path.startswith(ADMIN_PREFIXES)} == set(CONTROL)


def _routes(app):
    from fastapi.routing import APIRoute

    flat = []
    for route in app.router.routes:
        flat += getattr(getattr(route, "original_router", None), "routes", [route])
    return [route for route in flat if isinstance(route, APIRoute)]


@pytest.mark.parametrize("path", INFERENCE)
def test_an_inference_route_takes_each_api_key_and_nothing_else(both, path):
    check_key(both, path, ONE)
    check_key(both, path, OTHER)
    for presented in (None, "", ONE[:-1], ONE + "x", ADMIN, "caf\xe9", f"{ONE} {OTHER}"):
        assert refusal(both, path, presented).status == 401


@pytest.mark.parametrize("path", CONTROL)
def test_an_admin_route_takes_the_admin_key_only_and_is_off_without_one(both, path):
    check_key(both, path, ADMIN)
    for presented in (None, ONE, ADMIN.upper()):
        assert refusal(both, path, presented).status == 401
    assert refusal(Keys([ONE]), path, ONE).code == "admin_disabled"
    assert refusal(Keys(), path).status == 403


def test_without_api_keys_inference_is_open_and_probes_always_are(both):
    for path in INFERENCE:
        check_key(Keys(admin=[ADMIN]), path, None)
    for path in OPEN_PATHS:
        check_key(both, path, None)


def test_keys_come_from_file_and_environment_together(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{ONE}\n")
    environ = {"ENCORE_API_KEYS": f" {OTHER} , third,", "ENCORE_ADMIN_KEYS": ADMIN}
    keys = Keys.load(ServerConfig(api_key_file=str(path)), environ)
    for key in (ONE, OTHER, "third"):
        check_key(keys, "/generate", key)
    check_key(keys, "/graphs/warm", ADMIN)
    assert str(keys) == "3 for inference, 1 for admin"


@pytest.mark.parametrize("content", ["", "\n# nothing\n", "two words", "caf\xe9", None])
def test_an_invalid_key_file_is_refused_without_showing_its_content(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="keys") as caught:
        Keys.load(ServerConfig(api_key_file=str(path)), {})
    assert not content or content.strip() == "" or content not in str(caught.value)


def test_routes_over_http_require_their_keys(guarded):
    http = guarded.http
    assert http.get("/v1/models", headers=bearer(OTHER)).status_code == 200
    assert http.post("/v1/completions", json=COMPLETION, headers={"authorization": f"bearer  {ONE}"}).status_code == 200
    refused = http.post("/v1/completions", json=COMPLETION)
    assert error_of(refused, 401)["code"] == "invalid_api_key" and refused.headers["www-authenticate"] == "Bearer"
    for header in ({"Authorization": ONE}, {"Authorization": f"Basic {ONE}"}, bearer(ADMIN), bearer("wrong")):
        error_of(http.post("/v1/completions", json=COMPLETION, headers=header), 401)
    error_of(http.post("/graphs/warm", headers=bearer(ONE)), 401)
    assert http.post("/graphs/warm", headers=bearer(ADMIN)).status_code == 200
    for path in OPEN_PATHS:
        assert http.get(path).status_code == 200, path


def test_a_refused_body_is_not_read(guarded):
    big = b'{"text": "' + b"a" * 20_000_000 + b'"}'
    try:
        response = guarded.http.post("/generate", content=big, headers={"Content-Type": "application/json"})
    except Exception as closed:  # the server may close the connection during an upload that it does not read
        assert "Error" in type(closed).__name__
    else:
        error_of(response, 401)


def test_no_key_is_shown_anywhere(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    shown = [repr(guarded.service.config)]
    for key in (ONE, ADMIN, "sk-wrong-qzvxd"):
        for path in ("/v1/completions", "/graphs/recapture", "/generate"):
            shown.append(guarded.http.post(path, json={"prompt": 3, "text": 3}, headers=bearer(key)).text)
    shown += [guarded.http.get(path).text for path in ("/metrics", "/openapi.json", "/graphs")]
    text = "\n".join([*shown, caplog.text, *(str(vars(record)) for record in caplog.records)])
    assert "/v1/completions" in text
    assert "qzvx" not in text


def test_a_key_may_be_sent_as_anthropics_clients_do(guarded):
    assert guarded.post("/v1/completions", COMPLETION, headers={"X-Api-Key": OTHER}).status_code == 200
    assert guarded.post("/v1/completions", COMPLETION, headers={"X-Api-Key": "sk-none"}).status_code == 401
    both = {"X-Api-Key": ONE, "Authorization": "Bearer sk-none"}
    assert guarded.post("/v1/completions", COMPLETION, headers=both).status_code == 401


# ---- keys that change while the server runs ------------------------------------------------------------------------


@pytest.fixture
def reloaded(tmp_path, monkeypatch):
    """Keys of two files, which are looked at on each use."""
    monkeypatch.setattr(server_keys, "CHECK_SECONDS", 0.0)
    for name, key in (("api", ONE), ("admin", ADMIN)):
        (tmp_path / name).write_text(f"{key}\n")
    config = ServerConfig(api_key_file=str(tmp_path / "api"), admin_key_file=str(tmp_path / "admin"))
    return tmp_path, Keys.load(config, {"ENCORE_API_KEYS": "from-variable"})


def replace(path, text):
    """Replace a file as editors and Kubernetes do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_keys_of_a_changed_file_are_accepted_and_removed_ones_are_not(reloaded):
    folder, keys = reloaded
    replica = pickle.loads(pickle.dumps(keys.with_admin("internal")))  # as a replica has them
    replace(folder / "api", f"{OTHER}\n")
    (folder / "admin").write_text("admin-two\n")  # in place
    for one in (keys, replica):
        assert [one.accepts(key) for key in (ONE, OTHER, "from-variable")] == [False, True, True]
        assert [one.is_admin(key) for key in (ADMIN, "admin-two", "internal")] == [False, True, one is replica]
        assert one.owner(OTHER) and one.guards_inference and one.guards_admin


@pytest.mark.parametrize("content", ["", "# none\n", "two words\n", None])
def test_a_file_without_valid_keys_changes_nothing_and_is_logged(reloaded, caplog, content):
    folder, keys = reloaded
    if content is None:
        (folder / "api").unlink()
    else:
        replace(folder / "api", content)
    for _ in range(3):
        assert keys.accepts(ONE) and not keys.accepts("two words") and keys.guards_inference
    assert len([record for record in caplog.records if "earlier 1 keys stay accepted" in record.message]) == 1
    assert "two words" not in caplog.text
    replace(folder / "api", f"{OTHER}\n")
    assert keys.accepts(OTHER) and not keys.accepts(ONE)


def test_all_api_workers_take_new_keys_without_a_restart(tiny_model, tmp_path):
    from tests.soak.serving import serving

    path = tmp_path / "api"
    path.write_text(f"{ONE}\n")
    flags = ("--api-key-file", str(path), "--http-workers", "2", "--warmup", "lazy")
    with serving(tiny_model, tmp_path / "log", *flags) as server:

        def statuses(key):  # new connections, so that both workers answer some
            urls = [server.url + "/v1/models"] * 8
            return {httpx.get(url, headers=bearer(key)).status_code for url in urls}

        assert statuses(ONE) == {200} and statuses(OTHER) == {401}
        replace(path, f"{OTHER}\n")
        wait(lambda: statuses(ONE) == {401} and statuses(OTHER) == {200}, "the new keys")
