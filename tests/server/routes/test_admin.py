"""Admin routes on a live engine: graphs, weights and profiles."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from server.observability.logs import FIELDS
from tests.engine.lively import SAMPLING_VARIANTS
from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of
from tests.support.waiting import PATIENCE

KEY = "admin"
BODY = {"prompt": "red bird", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("control")
    (folder / "admin").write_text(KEY)
    config = tiny_config(
        tiny_model, admin_key_file=str(folder / "admin"), profile_folder=str(folder / "profiles"), max_num_seqs=2
    )
    with running(config) as handle:
        handle.http.headers["Authorization"] = f"Bearer {KEY}"
        yield handle


GRAPHS = 2 * (1 + SAMPLING_VARIANTS)  # buckets 1 and 2: the decode step, and each variant of the sampling step


def captured(server):
    """Number of captured graphs."""
    return sum(row["state"] == "captured" for row in server.http.get("/graphs").json()["graphs"])


def text(server):
    return server.answer("/v1/completions", BODY)["choices"][0]["text"]


def generated(server):
    return server.answer("/generate", {"text": "red bird", "sampling_params": {"max_new_tokens": 12, "temperature": 0}})


def test_graphs_are_dropped_and_recaptured_without_a_request(server):
    expected = text(server)
    dropped = server.answer("/graphs/invalidate", None)["dropped"]
    assert dropped >= 1 and captured(server) == 0
    server.wait(lambda: 'reason="asked"' in server.http.get("/metrics").text, "the count")
    assert server.metric("encore_graph_invalidations_total", reason="asked") == dropped
    pending = server.answer("/graphs/warm", None)["pending"]
    assert pending == GRAPHS
    server.wait(lambda: captured(server) >= pending, "the captures")
    server.wait(lambda: server.http.get("/ready").json()["warm"]["pending"] == 0, "readiness to show it")
    assert server.answer("/graphs/warm", None) == {"pending": 0}
    answer = server.answer("/graphs/recapture", None)
    assert answer["dropped"] >= GRAPHS and answer["pending"] == GRAPHS
    server.wait(lambda: captured(server) == GRAPHS, "the captures")
    assert text(server) == expected


def test_weights_from_disk_change_the_answers_and_their_version(server, tiny_model, tmp_path):
    before = generated(server)
    weights = safetensors.torch.load_file(tiny_model / "model.safetensors")
    path = tmp_path / "changed.safetensors"
    noise = torch.Generator().manual_seed(0)
    changed = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) for name, tensor in weights.items()}
    safetensors.torch.save_file(changed, path)
    answer = server.answer("/weights/update", {"path": str(path), "version": "v2"})
    assert answer == {"updated": len(weights), "weight_version": "v2"}
    after = generated(server)
    assert after["meta_info"]["weight_version"] == "v2" and after["output_ids"] != before["output_ids"]
    assert server.answer("/weights/update", {"path": str(tiny_model), "version": "v3"})["weight_version"] == "v3"
    again = generated(server)
    assert again["output_ids"] == before["output_ids"]


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "several"])
def test_logits_that_are_not_finite_are_logged_with_request_and_position(server, tiny_model, tmp_path, caplog, options):
    prompt_tokens = server.answer("/v1/completions", BODY)["usage"]["prompt_tokens"]
    weights = safetensors.torch.load_file(tiny_model / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # products with it are infinite
    safetensors.torch.save_file(weights, tmp_path / "spoiled.safetensors")
    server.answer("/weights/update", {"path": str(tmp_path / "spoiled.safetensors"), "version": "spoiled"})
    failed = server.post("/v1/completions", BODY | options, headers={"X-Request-Id": "mine"})
    server.answer("/weights/update", {"path": str(tiny_model), "version": "good"})
    assert error_of(failed, 500)["code"] == "engine_error"
    [line] = [one for one in caplog.records if one.name == "encore.server" and one.levelno >= logging.WARNING]
    assert "logits are not finite" in line.getMessage() and f" at position {prompt_tokens} of" in line.getMessage()
    assert getattr(line, FIELDS) == {"request_id": "mine"} and not line.exc_info


@pytest.mark.parametrize("what", ["missing", "empty folder", "no tensors", "wrong shape"])
def test_weights_that_dont_fit_are_a_400_and_change_nothing(server, tiny_model, tmp_path, what):
    expected, path = text(server), tmp_path / "w"
    if what == "empty folder":
        path.mkdir()
    elif what == "no tensors":
        path.write_bytes(b"nothing")
    elif what == "wrong shape":
        weights = safetensors.torch.load_file(tiny_model / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1].contiguous()
        safetensors.torch.save_file(weights, path)
    refused = server.post("/weights/update", {"path": str(path), "version": "bad"})
    assert error_of(refused, 400)["code"] == "weight_update_refused"
    assert text(server) == expected


@pytest.mark.parametrize("body", [{}, {"path": "/x"}, {"path": "", "version": "v"}, {"path": 3, "version": "v"}])
def test_a_weight_update_needs_path_and_version(server, body):
    assert error_of(server.post("/weights/update", body), 400)["param"] in ("path", "version")


def test_a_profile_is_a_trace_with_the_steps_in_it(server):
    assert error_of(server.http.post("/profile/stop"), 400)
    assert server.answer("/profile/start", None) == {"profiling": True}
    assert "already" in error_of(server.http.post("/profile/start"), 400)["message"]
    text(server)
    answer = server.answer("/profile/stop", None)
    path = Path(answer["file"])
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def test_profiles_are_off_without_a_folder(start_server, tmp_path):
    (tmp_path / "admin").write_text(KEY)
    server = start_server(admin_key_file=str(tmp_path / "admin"))
    for path in ("/profile/start", "/profile/stop"):
        refused = server.http.post(path, headers={"Authorization": f"Bearer {KEY}"})
        assert error_of(refused, 403)["code"] == "profile_disabled"


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "weights.safetensors")
    return folder / "weights.safetensors"


def _link_to_fifo(folder: Path) -> Path:
    (folder / "link.safetensors").symlink_to(_fifo(folder))
    return folder / "link.safetensors"


def _folder_with_fifo(folder: Path) -> Path:
    return _fifo(folder).parent


def _fifo_as_index(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors.index.json")
    return folder


def _device(folder: Path) -> Path:
    return Path("/dev/zero")


@pytest.mark.parametrize("make", [_fifo, _link_to_fifo, _folder_with_fifo, _fifo_as_index, _device])
def test_a_fifo_or_a_device_as_weights_is_refused_and_blocks_nothing(server, tmp_path, make):
    expected, path = generated(server)["text"], make(tmp_path)
    refused = server.post("/weights/update", {"path": str(path), "version": "never"}, timeout=PATIENCE)
    error = error_of(refused, 400)
    assert error["code"] == "weight_update_refused"
    assert ("a character device" if make is _device else "a FIFO") in error["message"]
    assert generated(server)["text"] == expected
