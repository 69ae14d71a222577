"""The regression check: `python -m benchmarks compare OLD.json NEW.json`."""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks.__main__ import ROOT, main

OLD = {
    "benchmark": "serving.offline",
    "gpu": "NVIDIA H200",
    "settings": {"repeats": 3, "step_ms": 4.0},
    "rows": [
        {
            "engine": "encore",
            "shape": "tiny",
            "decode_ms": {"1": 1.0, "8": 2.0},
            "output_tokens_per_s": 1000,
            "graphs": 5,
        },
        {"engine": "sglang", "shape": "tiny", "decode_ms": {"1": 3.0, "8": 4.0}, "rounds": [1, 2]},
    ],
}


@pytest.fixture
def run(tmp_path, capsys):
    """Compare OLD with a changed copy of it; returns the exit status and what was printed."""

    def compare(change, *options):
        new = copy.deepcopy(OLD)
        change(new)
        for name, found in (("old", OLD), ("new", new)):
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
        status = main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])
        return status, capsys.readouterr().out

    return compare


def verdicts(shown):
    return {line.split()[-1] for line in shown.splitlines() if line.startswith("rows.")} & {
        "WORSE",
        "better",
        "missing",
    }


def test_equal_files_pass_and_every_figure_is_listed(run):
    status, shown = run(lambda new: None)
    assert status == 0
    assert shown.count("rows.") == 5  # four times and a rate; graphs and rounds are no figures
    assert "5 figures, tolerance 5%: 0 worse, 0 missing, 0 better" in shown


def test_a_slower_step_beyond_the_tolerance_fails(run):
    def slower(new):
        new["rows"][0]["decode_ms"]["8"] = 2.2

    status, shown = run(slower)
    [line] = [line for line in shown.splitlines() if line.endswith("WORSE")]
    assert status == 1 and "engine=encore.decode_ms.8" in line and "1.1" in line.split()
    assert run(slower, "--tolerance", "0.11")[0] == 0


def test_rates_fail_when_they_fall_and_not_when_they_rise(run):
    assert run(lambda new: new["rows"][0].update(output_tokens_per_s=900))[0] == 1
    status, shown = run(lambda new: new["rows"][0].update(output_tokens_per_s=1100))
    assert status == 0 and verdicts(shown) == {"better"}


def test_rows_are_matched_by_their_labels_and_not_by_their_order(run):
    assert run(lambda new: new["rows"].reverse())[0] == 0


def test_a_missing_figure_fails(run):
    status, shown = run(lambda new: new["rows"].pop())
    assert status == 1 and verdicts(shown) == {"missing"} and "2 missing" in shown


def test_only_picks_figures(run):
    def slower(new):
        new["rows"][0]["decode_ms"]["8"] = 9.0

    assert run(slower, "--only", "tokens_per_s")[0] == 0


def test_other_hardware_and_settings_are_named(run):
    def elsewhere(new):
        new["gpu"] = "NVIDIA H100"
        new["settings"]["repeats"] = 1

    status, shown = run(elsewhere)
    assert status == 0
    assert "warning: gpu: NVIDIA H200 in OLD, NVIDIA H100 in NEW" in shown
    assert "warning: settings.repeats: 3 in OLD, 1 in NEW" in shown


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "is not JSON"), ("[1]", "holds a JSON list"), ('{"rows": []}', "has no figures")]
)
def test_files_that_cannot_be_compared_exit_with_2(text, problem, tmp_path, capsys):
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(SystemExit) as status:
        main(["compare", *[str(tmp_path / "one.json")] * 2])
    assert status.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu-smollm2", "h200-http", "h200-offline", "h200-training-step", "second-start"])
def test_recorded_files_can_be_compared(name, capsys):
    path = str(ROOT / "results" / f"{name}.json")
    assert main(["compare", path, path]) == 0
    assert "0 worse, 0 missing, 0 better" in capsys.readouterr().out
