"""Hub models are downloaded with their config first, file by file, and continue after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from engine.checkpoint.hub import download, text_files, weight_files
from engine.checkpoint.source import resolve_model
from engine.client.async_client import make_client
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.registry import config_from_folder
from tests.hub_server import Hub
from tests.support.waiting import PATIENCE

BERT = b'{"architectures": ["BertModel"], "model_type": "bert"}'


def test_only_the_files_that_are_read_are_downloaded_config_first(hub: Hub, tiny_model: Path) -> None:
    files = hub.add_folder("acme/tiny", tiny_model)
    files |= {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "README.md": b"x", "original/a.safetensors": b"x"}
    folder = Path(download("acme/tiny"))
    downloads = hub.downloads()
    assert downloads[0] == "config.json" and downloads[-1] == "model.safetensors"
    assert sorted(downloads) == sorted(path.name for path in tiny_model.iterdir())
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_model_is_downloaded_once_and_then_found_without_the_hub(
    hub: Hub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_folder("acme/tiny", tiny_model)
    folder = download("acme/tiny")
    hub.log.clear()
    assert download("acme/tiny") == folder and hub.downloads() == []
    hub.repositories.clear()
    assert resolve_model("acme/tiny").path == folder
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    assert resolve_model("acme/tiny").path == folder
    (Path(folder) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="could not be downloaded"):
        resolve_model("acme/tiny")


def test_an_index_names_the_weight_files(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    files = hub.add_folder("acme/shards", tiny_model)
    del files["model.safetensors"]
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        save_file({name.replace(".", "_"): torch.ones(2)}, tmp_path / name)
        files[name] = (tmp_path / name).read_bytes()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    download("acme/shards")
    assert hub.downloads()[-2:] == ["model-1.safetensors", "model-2.safetensors"]
    assert "consolidated.safetensors" not in hub.downloads()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"config.json": BERT, "model.safetensors": b"x"}, "hub model acme/odd, config.json: architecture BertModel"),
        ({"config.json": b"{", "model.safetensors": b"x"}, "config.json"),
        ({"README.md": b"x", "model.Q4.gguf": b"x"}, "no config.json.*gguf file and give the path"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights(hub: Hub, files: dict[str, bytes], named: str) -> None:
    hub.repositories["acme/odd"] = files
    with pytest.raises(ModelError, match=named):
        resolve_model("acme/odd", config_from_folder)
    assert set(hub.downloads()) <= {"config.json"}


async def test_a_server_refuses_an_unsupported_model_before_its_weights(hub: Hub) -> None:
    hub.repositories["acme/bert"] = {"config.json": BERT, "model.safetensors": b"x"}
    client = make_client(EngineConfig(model="acme/bert"), in_process=True)
    with pytest.raises(ModelError, match="BertModel is not supported"):
        await client.start()
    await client.close()
    assert hub.downloads() == ["config.json"]


def test_a_repository_without_safetensors_is_refused(hub: Hub, tiny_model: Path) -> None:
    files = hub.add_folder("acme/bin", tiny_model)
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    with pytest.raises(ModelError, match=r"no \*.safetensors, but pytorch_model.bin"):
        download("acme/bin")
    assert "pytorch_model.bin" not in hub.downloads()


def test_an_unknown_name_is_one_clear_error(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"'acme/none'.*Repository Not Found.*check the name"):
        download("acme/none")


def test_a_killed_download_goes_on_where_it_stopped(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    weights = hub.add_folder("acme/tiny", tiny_model)["model.safetensors"] = os.urandom(25_000_000)
    hub.stall["model.safetensors"] = 21_000_000
    script = "from engine.checkpoint.hub import download; download('acme/tiny')"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL)
    partial = tmp_path / "hf/hub/models--acme--tiny/blobs"
    assert hub.stalled.wait(PATIENCE)
    while not any(one.stat().st_size >= 20_000_000 for one in partial.glob("*.partial")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.log.clear()
    folder = download("acme/tiny")
    assert [one.split(" from ")[0] for one in hub.downloads()] == ["model.safetensors"]
    assert int(hub.downloads()[0].split(" from ")[1]) >= 20_000_000
    assert Path(folder, "model.safetensors").read_bytes() == weights
    assert list(partial.glob("*.partial")) == []


def test_a_damaged_partial_file_is_found_and_downloaded_again(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    import hashlib

    weights = hub.add_folder("acme/tiny", tiny_model)["model.safetensors"]
    blobs = tmp_path / "hf/hub/models--acme--tiny/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(weights).hexdigest()}.partial").write_bytes(b"\0" * 1000)
    with pytest.raises(ModelError, match="SHA-256"):
        download("acme/tiny")
    assert Path(download("acme/tiny"), "model.safetensors").read_bytes() == weights


def test_a_lost_connection_is_retried(hub: Hub, tiny_model: Path) -> None:
    weights = hub.add_folder("acme/tiny", tiny_model)["model.safetensors"]
    hub.cut["model.safetensors"] = 1000
    assert Path(download("acme/tiny"), "model.safetensors").read_bytes() == weights


def test_files_are_chosen_by_name() -> None:
    names = [
        "1_Pooling/config.json",
        "a.json",
        "x/a.json",
        "x/config.json",
        "chat_templates/t.jinja",
        "tokenizer.model",
        "vocab.txt",
        "w.bin",
        "b.safetensors",
    ]
    assert text_files(names) == [
        "1_Pooling/config.json",
        "a.json",
        "chat_templates/t.jinja",
        "tokenizer.model",
        "vocab.txt",
    ]
    assert weight_files("m", names, "") == ["b.safetensors"]
    assert weight_files("m", [*names, "model.safetensors"], "") == ["model.safetensors"]
