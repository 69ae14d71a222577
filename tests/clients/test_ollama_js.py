"""Ollama's JavaScript client (npm), in Node: chats, streams, formats, tools, models and errors.

CHECK_CLIENTS_NODE_PATH names the node_modules folder with the package; default: the one in the working directory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.answers import MESSAGES, TOOLS, Weather

MODULES = Path(os.environ.get("CHECK_CLIENTS_NODE_PATH", "node_modules"))
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "ollama").exists(), reason="needs node and the npm package ollama"
)


@pytest.fixture(scope="module")
def found(endpoint):
    script = Path(__file__).with_name("ollama.cjs")
    arguments = [json.dumps(value) for value in (MESSAGES, TOOLS, Weather.model_json_schema())]
    done = subprocess.run(
        ["node", str(script), endpoint.url, endpoint.model, endpoint.key, *arguments],
        env=os.environ | {"NODE_PATH": str(MODULES.resolve())}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_models(found, endpoint):
    names = [one["model"] for one in found["models"]["models"]]
    assert f"{endpoint.model}:latest" in names and [one["name"] for one in found["loaded"]["models"]] == names
    assert "completion" in found["shown"]["capabilities"] and found["version"]["version"]


def test_a_chat_and_its_stream(found):
    answer, *chunks = found["chat"], *found["streamed"]
    assert "".join(one["message"]["content"] for one in chunks) == answer["message"]["content"]
    assert chunks[-1]["done"] and chunks[-1]["eval_count"] == answer["eval_count"] <= 12
    assert found["generated"]["response"] == answer["message"]["content"]


def test_a_format(found):
    Weather.model_validate_json(found["form"]["message"]["content"])


def test_tool_calls(found):
    streamed = [call for one in found["called_stream"] for call in one["message"].get("tool_calls", [])]
    for calls in (found["called"]["message"]["tool_calls"], streamed):
        assert calls and all(call["function"]["name"] in ("weather", "add") for call in calls)
        assert isinstance(calls[0]["function"]["arguments"], dict)


def test_a_stream_can_be_stopped(found):
    assert found["stopped"] is None or "abort" in found["stopped"]["message"].lower()


def test_errors(found):
    for name, status, message in (
        ("unknown", 404, "not served"), ("image", 400, "images"), ("refused", 400, "options.mirostat"),
        ("embedded", 501, "embeddings"), ("keyless", 401, "key"),
    ):  # fmt: skip
        assert found[name]["status"] == status and message in found[name]["message"], found[name]
