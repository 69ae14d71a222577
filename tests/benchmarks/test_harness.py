"""The code that all benchmarks share: arguments, alternating runs, tables and result files."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import harness
from benchmarks.timing import wall_ms


def test_alternate_reverses_every_second_round():
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in ("a", "b", "c")}
    found = harness.alternate(ways, 3)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_table_aligns_flattens_and_leaves_empty_columns_out():
    rows = [{"way": "eager", "batch": 1, "ms": {"median": 31.4159}}, {"way": "x", "batch": 1024, "ms": {}, "list": [1]}]
    assert harness.table(rows, ("way", "batch", "ms.median", "absent")).splitlines() == [
        "way    batch  ms.median",
        "eager      1      31.42",
        "x      1,024          -",
    ]
    assert harness.table(rows).splitlines()[0].split() == ["way", "batch", "ms.median"]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "1,", "a"])
def test_counts_rejects_what_is_no_positive_integer(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a positive integer"):
        harness.counts(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "", "a"])
def test_positive_rejects_what_is_no_number_above_0(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0"):
        harness.positive(text)
    assert harness.positive("0.5") == 0.5


def test_counts_and_names_split_at_commas():
    assert harness.counts("1,8,32") == [1, 8, 32]
    assert harness.names({"decode": 0, "prefill": 1})("prefill,decode") == ["prefill", "decode"]
    with pytest.raises(argparse.ArgumentTypeError, match="'decoed' is unknown; choose from decode, prefill"):
        harness.names(["decode", "prefill"])("decode,decoed")


def test_json_file_must_lie_in_an_existing_folder(tmp_path, capsys):
    parser = harness.parser("benchmarks.step.example", "An example.")
    assert parser.parse_args(["--json", str(tmp_path / "new.json")]).json == tmp_path / "new.json"
    for wrong in (tmp_path, tmp_path / "absent" / "new.json"):
        with pytest.raises(SystemExit) as status:
            parser.parse_args(["--json", str(wrong)])
        assert status.value.code == 2
        assert f"argument --json: '{wrong}'" in capsys.readouterr().err


def test_require_gpus_exits_with_a_usage_error(capsys):
    needed = torch.cuda.device_count() + 1
    with pytest.raises(SystemExit) as status:
        harness.require_gpus(harness.parser("benchmarks.step.example", "An example."), needed)
    assert status.value.code == 2
    assert f"needs {needed} CUDA device" in capsys.readouterr().err


def test_wall_ms_times_calls_after_the_warm_ones():
    calls: list[None] = []
    assert 0 <= wall_ms(lambda: calls.append(None), repeats=4, warm=2) < 1000
    assert len(calls) == 6


def test_a_benchmark_writes_the_envelope_and_ends_with_its_table(tmp_path):
    """One real run of the benchmark that needs neither a model nor a GPU."""
    file = tmp_path / "streams.json"
    command = [sys.executable, "-m", "benchmarks", "serving.http_streams", "--ceiling", "--clients", "1,2",
               "--requests-per-client", "1", "--warm-up", "0", "--processes", "1", "--json", str(file)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["benchmark"] == "serving.http_streams"
    assert found["command"].startswith("python -m benchmarks.serving.http_streams --ceiling --clients 1,2")
    assert found["settings"]["clients"] == [1, 2]
    assert {"date", "commit", "cpu", "cpus", "gpu", "torch", "python", "threads", "load_before"} <= set(found)
    assert [(row["clients"], row["tokens"]) for row in found["rows"]] == [(1, 256), (2, 512)]
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == ["clients", "1", "2"]
