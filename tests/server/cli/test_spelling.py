"""Errors of commands name settings as the user gave them, wherever in the message they are."""

from __future__ import annotations

import argparse
import re

import pytest

from server.cli import main as cli
from server.cli.spelling import spell_settings


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["generate", "hi"]])
@pytest.mark.parametrize(
    ("flag", "value", "shown"),
    [
        ("--max-num-seqs", "0", "--max-num-seqs=0 must be a whole number"),
        ("--inference-cuda-graph-scope", "blok", "--inference-cuda-graph-scope is 'blok': .* did you mean 'block'?"),
        ("--cuda-graph-impl", "locl", "--cuda-graph-impl is 'locl': .* did you mean 'local'?"),
        ("--graph-buckets", "0,4", "--graph-buckets=.*: a bucket is 0"),
    ],
)
def test_flags_have_dashes_in_errors(capsys, command, flag, value, shown) -> None:
    assert re.search(f"^encore {command[0]}: error: {shown}", error_of(capsys, *command, flag, value))


def test_sampling_flags_have_dashes_in_errors(capsys, tiny_model) -> None:
    shown = error_of(capsys, "generate", "hi", "--model", str(tiny_model), "--top-p", "2")
    assert shown.startswith("encore generate: error: --top-p must be")


def test_errors_of_a_starting_engine_name_the_flag(capsys, tiny_model) -> None:
    words = ("generate", "hi", "--model", str(tiny_model), "--num-pages", "1")
    assert "error: --num-pages=1: page 0 is the scratch page" in error_of(capsys, *words)


def test_variables_and_keys_of_a_file_are_named_anywhere_in_a_message(tmp_path) -> None:
    path = tmp_path / "encore.yaml"
    path.write_text("num-pages: 1\nmax_num_seqs: 2\n")
    args = cli.build_parser("serve").parse_args(["serve", "--config", str(path), "--page-size", "16"])
    message = "page_size=16 and num_pages=1 need max_num_seqs and max_model_len; raise gpu_memory_utilization"
    shown = spell_settings(message, args, {"ENCORE_MAX_MODEL_LEN": "64"})
    assert shown == (
        f"--page-size=16 and {path}: num-pages=1 need {path}: max_num_seqs and ENCORE_MAX_MODEL_LEN; "
        "raise --gpu-memory-utilization"
    )
    assert spell_settings(shown, args, {"ENCORE_MAX_MODEL_LEN": "64"}) == shown


@pytest.mark.parametrize(
    "message",
    [
        "/models/max_num_seqs/a has no generation_config.json",
        "the model has the port of host and device",
        "--max-num-seqs=0 must be at least 1",
        "config.json: max_position_embeddings=4",
    ],
)
def test_other_words_stay(message) -> None:
    assert spell_settings(message, argparse.Namespace(command="serve", config=None), {}) == message


def test_a_file_or_variable_that_is_itself_the_error_is_reported(capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "list.yaml").write_text("- a\n")
    assert "must be a mapping of settings" in error_of(capsys, "serve", "--config", str(tmp_path / "list.yaml"))
    monkeypatch.setenv("ENCORE_MAX_NUM_SEQ", "1")
    assert "did you mean 'ENCORE_MAX_NUM_SEQS'" in error_of(capsys, "serve")
