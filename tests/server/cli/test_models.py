"""`encore models`: list, pull, show and remove, against a local stand-in for the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from engine.config import EngineConfig
from engine.engine import Engine
from engine.library.recommended import RECOMMENDED
from engine.models.registry import ENTRIES
from engine.protocol.request import SamplingParams
from server.cli import main as cli
from tests.engine.checkpoint.gguf_samples import write_gguf
from tests.hub_server import Hub


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ENCORE_CACHE", str(tmp_path / "encore"))

    def run_one(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["models", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_one


def test_a_pulled_model_is_listed_shown_served_and_removed(run, hub: Hub, tiny_model: Path) -> None:
    hub.add_folder("acme/tiny", tiny_model)
    assert "no models on this machine" in run("list")[1]
    code, out, _ = run("pull", "acme/tiny")
    assert code == 0 and "encore serve --model acme/tiny" in out
    code, out, _ = run("list")
    row = next(line.split() for line in out.splitlines() if line.startswith("acme/tiny"))
    assert row[-3:] == ["safetensors", "llama", "yes"]
    shown = json.loads(run("show", "acme/tiny", "--json")[1])
    assert (shown["family"], shown["state"], shown["parameters"]) == ("llama", "ready", 94528)
    assert shown["size_bytes"] == sum(path.stat().st_size for path in tiny_model.iterdir())
    assert shown["fit"]["fits"] and shown["fit"]["max_context"] == 4096
    hub.repositories.clear()
    with Engine(EngineConfig(model="acme/tiny", max_num_seqs=1, warmup="lazy", graph_manifest="none")) as engine:
        assert engine.generate("red", SamplingParams(max_tokens=2))[0].token_ids
    assert run("remove", "acme/tiny")[0] == 0
    assert "no models on this machine" in run("list")[1]
    code, _, err = run("remove", "acme/tiny")
    assert code == 2 and "'acme/tiny' is not in the hub's cache" in err


def test_a_model_is_shown_before_it_is_pulled(run, hub: Hub, tiny_model: Path) -> None:
    hub.add_folder("acme/tiny", tiny_model)
    code, out, _ = run("show", "acme/tiny")
    assert code == 0 and "not on this machine" in out and "fits here" in out
    assert hub.downloads() == ["config.json"]
    assert "no models on this machine" in run("list")[1]


def test_an_interrupted_pull_is_listed_as_incomplete_and_continued(run, hub: Hub, tiny_model: Path) -> None:
    weights = hub.add_folder("acme/tiny", tiny_model).pop("model.safetensors")
    assert run("pull", "acme/tiny")[0] == 2
    assert "incomplete: pull it again" in run("list")[1]
    hub.repositories["acme/tiny"]["model.safetensors"] = weights
    assert run("pull", "acme/tiny")[0] == 0 and "incomplete" not in run("list")[1]


def test_a_folder_is_shown_and_never_removed(run, hub: Hub, tiny_model: Path) -> None:
    assert f"{tiny_model}" in run("show", str(tiny_model))[1]
    code, _, err = run("remove", str(tiny_model))
    assert code == 2 and tiny_model.exists() and "not in the hub's cache" in err


def test_a_gguf_file_and_the_default_model_are_shown(run, hub: Hub, tmp_path: Path) -> None:
    write_gguf(tmp_path / "some.gguf", matrices=GGMLQuantizationType.Q4_1)
    shown = json.loads(run("show", str(tmp_path / "some.gguf"), "--json")[1])
    assert (shown["name"], shown["format"], shown["family"], shown["state"]) == ("some", "gguf", "llama", "ready")
    assert shown["size_bytes"] == (tmp_path / "some.gguf").stat().st_size and shown["fit"]["fits"]
    code, out, _ = run("show", "smollm2-135m-instruct")
    assert code == 0 and "93.8 MiB, not on this machine" in out and hub.downloads() == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("pull", "acme/bert"), "architecture BertModel is not supported"),
        (("pull", "acme/none"), "acme/none"),
        (("pull", "no hub name"), "not a hub name"),
        (("show", "acme/none"), "acme/none"),
        (("remove", "smollm2-135m-instruct"), "not on this machine"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(run, hub: Hub, words: tuple[str, ...], named: str) -> None:
    hub.repositories["acme/bert"] = {"config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": b"x"}
    code, _, err = run(*words)
    assert code == 2 and named in err and len(err.strip().splitlines()) == 1
    assert set(hub.downloads()) <= {"config.json"}


def test_recommended_models_are_of_families_that_are_served(run, hub: Hub) -> None:
    served = {entry.family.model_type for entry in ENTRIES}
    assert {one.family for one in RECOMMENDED} <= served and all(one.licence for one in RECOMMENDED)
    out = run("list")[1]
    assert all(one.name in out for one in RECOMMENDED)
