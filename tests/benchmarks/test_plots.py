"""The plots of the recorded results."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.__main__ import ROOT, main
from benchmarks.plots.results import offline, read_runs, streams

RESULTS = ROOT / "results"


def test_offline_prefers_a_run_with_a_peer_and_adds_a_newer_one():
    series = offline(read_runs(RESULTS / "h200-offline.json"), "qwen3-0.6b", "decode_ms")
    assert [(one.label, one.run.commit) for one in series] == [
        ("Encore", "875ba3a"), ("SGLang 0.5.17", "875ba3a"), ("Encore, later run", "72f56d7"),
    ]  # fmt: skip
    assert series[2].values[1] == 0.6651


def test_streams_takes_the_median_of_a_servers_turns():
    series = streams(read_runs(RESULTS / "h200-http.json"), lambda row: row["tokens_per_second"])
    found = {one.label: one.values[256] for one in series}
    assert found == {"Encore": 37865.6, "vLLM 0.25.1": 22638, "Encore, later run": 37590.05}


def test_files_of_the_benchmarks_are_read_like_recorded_ones(tmp_path):
    row = {"engine": "encore", "shape": "qwen3-8b", "decode_ms": {"1": 4.0}}
    found = {"date": "2027-01-02T03:04:05+00:00", "commit": "0123456789", "gpu": "NVIDIA H200", "torch": "2.13.0",
             "rows": [row]}  # fmt: skip
    (tmp_path / "one.json").write_text(json.dumps(found))
    [series] = offline(read_runs(tmp_path / "one.json"), "qwen3-8b", "decode_ms")
    assert (series.label, series.values) == ("Encore", {1: 4.0})
    assert (series.run.machine, series.run.origin) == ("1 x NVIDIA H200, torch 2.13.0", "commit 0123456, 2027-01-02")


def test_every_plot_is_drawn_and_states_its_origin(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from benchmarks.plots.draw import PLOTS

    assert main(["plots", "--out", str(tmp_path)]) == 0
    assert "left out" not in capsys.readouterr().out
    for name in PLOTS:
        text = (tmp_path / f"{name}.svg").read_text()
        assert re.search(r"ommits? [0-9a-f]{7}", text) and "2026-11-2" in text, name
        assert "H200" in text or "Xeon" in text, name


def test_a_missing_file_leaves_its_plots_out(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "cpu-smollm2.json").write_text((RESULTS / "cpu-smollm2.json").read_text())
    assert main(["plots", "--results", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("*.svg")] == ["cpu.svg"]
    assert "two-gpus: left out" in capsys.readouterr().out
