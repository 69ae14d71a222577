"""A server that trainers drive."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import running, tiny_config

KEY = "admin"


@pytest.fixture(scope="package")
def shared(folders, tmp_path_factory):
    key = tmp_path_factory.mktemp("key") / "admin"
    key.write_text(KEY)
    config = tiny_config(folders["a"], admin_key_file=str(key), max_model_len=4096, max_num_seqs=4)
    with running(config) as handle:
        handle.http.headers["Authorization"] = f"Bearer {KEY}"
        yield handle


@pytest.fixture
def server(shared, folders):
    """The shared server with the weights a, not paused; it must be idle after the test."""
    yield shared
    shared.post("/resume", None)
    shared.answer("/update_weights_from_disk", {"model_path": str(folders["a"]), "weight_version": "a"})
    shared.wait_idle()
    shared.wait(lambda: shared.service.client.num_pending == 0, "the end of all requests")
    assert shared.service.client.stats().idle_check_failures == 0


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as pool:
        yield pool
