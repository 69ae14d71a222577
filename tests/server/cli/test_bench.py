"""`encore bench`: the table and the JSON agree, and invalid values are rejected in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bench.measure import variation
from engine.bench.report import unsteady
from server.cli import main as cli
from tests.engine.lively import SAMPLING_VARIANTS


def test_a_run_prints_a_table_and_writes_the_same_json(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert cli.main([
        "bench", "--model", str(tiny_model), "--device", "cpu", "--num-threads", "1", "--batch-sizes", "3,1",
        "--prompt-tokens", "12", "--output-tokens", "8", "--repeats", "1", "--requests", "5", "--json", str(out),
    ]) == 0  # fmt: skip
    report, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert [row["batch"] for row in report["batches"]] == [3, 1]
    assert all(row["tokens_per_second"] > 0 and row["first_token_ms"] > 0 for row in report["batches"])
    # The decode step at buckets 1, 2 and 3, and each variant of the sampling step.
    captured = 3 + 3 * SAMPLING_VARIANTS
    assert report["graphs"]["captured"] == captured and report["graphs"]["pool_bytes"] > 0
    assert report["decode"]["hit_rate"] == 1.0
    assert report["mixed"]["requests"] == 5
    assert {"date", "commit", "cpu", "torch", "threads", "command", "model"} <= report.keys()
    assert report["command"].startswith("encore bench --model ") and report["threads"] == 1
    for row in report["batches"]:
        assert f"{row['replay_against_eager']['replay_ms']:.3f}" in shown
    assert f"{captured} captured" in shown and "mixed" in shown


def test_without_graphs_every_step_runs_eager(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    cli.main([
        "bench", "--model", str(tiny_model), "--device", "cpu", "--num-threads", "1", "--batch-sizes", "2",
        "--prompt-tokens", "4", "--output-tokens", "4", "--repeats", "1", "--requests", "0",
        "--cuda-graph-impl", "none", "--load-format", "dummy", "--json", str(out),
    ])  # fmt: skip
    report = json.loads(out.read_text())
    assert report["decode"]["hit_rate"] == 0.0 and report["graphs"]["captured"] == 0
    assert report["batches"][0]["replay_against_eager"]["speedup"] is None
    assert "mixed" not in report


def test_figures_that_vary_between_runs_are_warned_of() -> None:
    def row(batch: int, first: list[float], step: list[float]) -> dict[str, Any]:
        return {"batch": batch, "variation": {"first token": variation(first), "decode": variation(step)}}

    steady, single = row(1, [1.0, 1.02, 1.01], [0.5, 0.51, 0.5]), row(2, [1.0], [9.0])
    assert unsteady([steady, single]) == []
    [warning] = unsteady([steady, row(4, [1.0, 1.3, 1.1], [0.5, 1.0, 1.0])])
    assert "batch 4: decode differed by 50.0% between runs" in warning and "--repeats" in warning


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch-sizes", "0"], "--batch-sizes"),
        (["--batch-sizes", "1,x"], "--batch-sizes"),
        (["--batch-sizes", "8", "--max-num-seqs", "4"], "--max-num-seqs 4"),
        (["--prompt-tokens", "-5"], "--prompt-tokens"),
        (["--prompt-tokens", "100", "--max-model-len", "64"], "--max-model-len 64"),
        (["--prompt-tokens", "1000000"], "--max-model-len"),
        (["--output-tokens", "1"], "--output-tokens"),
        (["--repeats", "1e9"], "--repeats"),
        (["--requests", "999999999999"], "--requests"),
        (["--json", "/nowhere/at/all.json"], "--json"),
        (["--warmup", "hot"], "--warmup"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--batchsizes", "1"], "--batchsizes; did you mean '--batch-sizes'?"),
        (["--batch-sizes", "4", "--num-pages", "1"], "--num-pages=1"),
    ],
)
def test_an_invalid_value_prints_one_line_and_exits_with_status_2(
    arguments: list[str], expected: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["bench", "--model", str(tiny_model), "--device", "cpu", *arguments])
    except SystemExit as exit:
        status = exit.code
    stderr = capsys.readouterr().err
    assert status == 2
    assert expected in stderr and len(stderr.strip().splitlines()) == 1
