"""The server that clients are tested with.

`scripts/check_clients` runs these tests in an environment of each client's own, against a running server that these
variables name. Without them, the test suite's tiny model is served; a client that is not installed is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

URL, MODEL, KEY = (f"CHECK_CLIENTS_{name}" for name in ("URL", "MODEL", "KEY"))


@dataclass(frozen=True)
class Endpoint:
    """A running server: its address without a path, a name of its model, and an API key."""

    url: str
    model: str
    key: str

    @property
    def openai(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "clients":
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # the libraries warn of each other


@pytest.fixture(scope="session")
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    if URL in os.environ:
        yield Endpoint(os.environ[URL], os.environ[MODEL], os.environ[KEY])
        return
    from tests.server.conftest import running, tiny_config

    path = tmp_path_factory.mktemp("clients") / "keys"
    path.write_text("sk-for-the-client")
    folder = request.getfixturevalue("tiny_model")
    with running(tiny_config(folder, api_key_file=str(path), max_model_len=4096)) as handle:
        yield Endpoint(handle.url, "tiny", "sk-for-the-client")
