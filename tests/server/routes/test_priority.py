"""`priority` in a body: only with an admin key, unless the server allows it to every client."""

from __future__ import annotations

import pytest

from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of

BODIES = {
    "/generate": {"text": "red", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "red", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "red"}], "max_tokens": 1},
}
API, ADMIN = {"Authorization": "Bearer api"}, {"Authorization": "Bearer admin"}
BOTH = API | {"X-Admin-Key": "admin"}


@pytest.fixture(scope="module", params=[True, False], ids=["api keys", "open inference"])
def guarded(tiny_model, tmp_path_factory, request):
    """A server with an admin key, and the headers that a client needs for inference."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text("api")
    (folder / "admin").write_text("admin")
    keys = {"api_key_file": str(folder / "api")} if request.param else {}
    with running(tiny_config(tiny_model, admin_key_file=str(folder / "admin"), **keys)) as handle:
        yield handle, API if request.param else {}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_priority_requires_an_admin_key(guarded, path, stream):
    server, headers = guarded
    for priority in (-(2**31), -1, 1, 2**31 - 1):
        body = BODIES[path] | {"priority": priority, "stream": stream}
        for wrong in ({}, {"X-Admin-Key": "api"}, {"X-Admin-Key": ""}):
            error = error_of(server.post(path, body, headers=headers | wrong), 403)
            assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
        assert server.post(path, body, headers=BOTH).status_code == 200
        if not headers:
            assert server.post(path, body, headers=ADMIN).status_code == 200
    assert server.post(path, BODIES[path] | {"priority": 0, "stream": stream}, headers=headers).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_server_may_allow_priorities_to_all(open_server, path):
    assert open_server.post(path, BODIES[path] | {"priority": 7}).status_code == 200


@pytest.fixture(scope="module")
def open_server(tiny_model):
    with running(tiny_config(tiny_model, allow_priority=True)) as handle:
        yield handle
