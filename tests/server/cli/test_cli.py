"""The command line: fast help, bad input as one line and status 2, and the commands generate, graphs and tune."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from graph_cache.core.buckets import Buckets
from graph_cache.core.manifest import Manifest
from server.cli import main as cli
from server.cli.commands import interpolated
from server.cli.flags import ENGINE_HELP, MOST_USED, SERVER_HELP, TOPICS, server_config
from server.cli.graph_table import graph_table
from server.cli.settings import NOT_OFFERED
from server.config import ServerConfig


def parse_serve(*words: str) -> ServerConfig:
    return server_config(cli.build_parser("serve").parse_args(["serve", *words]))


def status(capsys, *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command line."""
    try:
        code = cli.main(words)
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_nothing_heavy():
    check = (
        "import sys, server.cli.main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("serve", "generate", "graphs", "tune", "bench"))


def test_every_setting_is_a_flag_with_help_and_its_default(capsys):
    for kind, texts in ((ServerConfig, SERVER_HELP), (EngineConfig, ENGINE_HELP)):
        assert {field.name for field in dataclasses.fields(kind)} - NOT_OFFERED == set(texts)
    code, shown, _ = status(capsys, "serve", "--help=all")
    assert code == 0
    flat = " ".join(shown.split())
    for field in [*dataclasses.fields(ServerConfig), *dataclasses.fields(EngineConfig)]:
        assert field.name in NOT_OFFERED or f"--{field.name.replace('_', '-')}" in flat
    assert "(default: 8000)" in flat and "(default: background)" in flat


def test_every_flag_is_most_used_or_has_one_topic():
    placed = [*MOST_USED, *(name for names in TOPICS.values() for name in names)]
    assert len(MOST_USED) == 10 and len(placed) == len(set(placed))
    assert set(placed) == set(SERVER_HELP) | set(ENGINE_HELP), "give a new setting a topic in TOPICS"


def test_help_describes_the_most_used_flags_first_and_names_all_others(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = status(capsys, "serve", "--help")
    lines = shown.splitlines()
    assert code == 0 and len(lines) < 70 and max(map(len, lines)) <= 90
    described = [line.split()[0] for line in lines if line.startswith("  --")]
    assert [f"--{name.replace('_', '-')}" for name in MOST_USED] == described[:10]
    for name in {*SERVER_HELP, *ENGINE_HELP}:
        assert f"--{name.replace('_', '-')}" in shown.split()


@pytest.mark.parametrize(
    ("words", "wanted", "unwanted"),
    [
        (("serve", "--help=graphs"), "--graph-buckets", "--port"),
        (("serve", "--help", "limits"), "refused with 429", "--port"),
        (("serve", "-h", "--help=logging"), "--log-format", None),
        (("serve", "--help=max-num-seqs"), "sequences in the running batch", "--max-num-batched-tokens"),
        (("serve", "--help=max_num"), "--max-num-batched-tokens", "--port"),
        (("generate", "--help=model"), "--load-format", "--port"),
        (("bench", "--help"), "--batch-sizes", "--request-rate"),
        (("bench", "serve", "--help"), "--request-rate", "--batch-sizes"),
        (("models", "show", "--help"), "--json", "--port"),
        (("batch", "--help"), "--tool-call-parser", "--port"),
    ],
)
def test_help_of_a_topic_a_flag_or_a_command(capsys, words, wanted, unwanted):
    code, shown, _ = status(capsys, *words)
    assert code == 0 and wanted in " ".join(shown.split()) and (unwanted is None or unwanted not in shown)


def test_help_of_an_unknown_topic_names_the_nearest(capsys):
    code, _, err = status(capsys, "serve", "--help=grahps")
    assert code == 2 and "--help=grahps: no such topic or flag; did you mean 'graphs'?" in err
    code, _, err = status(capsys, "models", "show", "x", "--jsn")
    assert code == 2 and "unknown argument --jsn; did you mean '--json'?" in err


def test_flags_reach_their_settings():
    config = parse_serve(
        "--port", "9", "--served-model-name", "a,b", "--max-num-seqs", "4", "--graph-buckets", "1,2,4",
        "--no-enable-prefix-caching", "--in-process", "--drain-seconds", "1.5",
    )  # fmt: skip
    assert (config.port, config.served_model_name) == (9, ("a", "b"))
    assert (config.in_process, config.drain_seconds) == (True, 1.5)
    engine = config.engine
    assert (engine.max_num_seqs, engine.graph_buckets, engine.enable_prefix_caching) == (4, (1, 2, 4), False)


def test_serving_warms_in_the_background_by_default():
    assert parse_serve().engine.warmup == "background"
    assert parse_serve("--warmup", "full").engine.warmup == "full"
    assert EngineConfig().warmup != "background"


def test_running_without_graphs_needs_one_flag_only():
    assert parse_serve("--cuda-graph-impl", "none").engine.cuda_graph_impl == "none"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("serve", "--port", "many"), "--port"),
        (("serve", "--port", "70000"), "port"),
        (("serve", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("serve", "--max-num-seqs", "-3"), "--max-num-seqs"),
        (("serve", "--graph-buckets", "1,x"), "--graph-buckets"),
        (("serve", "--graph-buckets", "0"), "--graph-buckets=0"),
        (("serve", "--graph-buckets=-1,2"), "--graph-buckets=-1,2"),
        (("serve", "--graph-buckets", "2,2"), "--graph-buckets=2,2"),
        (("serve", "--graph-buckets", ","), "--graph-buckets="),
        (("serve", "--graph-buckets", "1,8", "--max-num-seqs", "4"), "raise --max-num-seqs to 8 or drop them"),
        (("serve", "--warmup", "warm"), "--warmup"),
        (("serve", "--max-body-bytes", "1"), "--max-body-bytes"),
        (("serve", "--drain-seconds", "nan"), "--drain-seconds"),
        (("serve", "--gpu-memory-utilization", "7"), "--gpu-memory-utilization"),
        (("serve", "--prot", "1"), "--prot"),
        (
            ("serve", "--cuda-graph-impl", "none", "--inference-cuda-graph-scope", "block"),
            "--inference-cuda-graph-scope",
        ),
        (("serve", "--cuda-graph-impl", "transformer_engine"), "use 'local', or 'none'"),
        (("serve", "--cuda-graph-impl", "full_iteration"), "use 'local', or 'none'"),
        (("generate",), "prompt"),
        (("generate", "red", "--temperature", "-1"), "temperature"),
        (("generate", "red", "--max-tokens", "-1"), "--max-tokens"),
        (("graphs", "--url", "http://127.0.0.1:1"), "127.0.0.1:1"),
        (("graphs", "--url", "nonsense"), "nonsense"),
        (("tune",), "--manifest"),
        (("tune", "--manifest", "/no/such/file"), "/no/such/file"),
        (("tune", "--metrics", "/no/such/file"), "/no/such/file"),
        (("frobnicate",), "frobnicate"),
        ((), "COMMAND"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_status_2(capsys, words, named):
    code, out, err = status(capsys, *words)
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 1 and named in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serv"], "unknown command 'serv'; did you mean 'serve'?"),
        (["serve", "--max-num-seqs", "lots"], "--max-num-seqs: must be an integer; found 'lots'"),
        (["serve", "--graph-buckets", "1,x"], "--graph-buckets: must be integers separated by commas; found '1,x'"),
    ],
)
def test_an_unusable_word_is_named_with_what_is_wanted(capsys, words, named):
    code, _, printed = status(capsys, *words)
    assert code == 2 and named in printed and printed.count("\n") == 1


def test_unknown_settings_name_the_nearest():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        ServerConfig.from_dict({"max_num_seq": 3})
    with pytest.raises(ConfigError, match="max_waiting"):
        ServerConfig.from_dict({"max_waitin": 3})


@pytest.mark.parametrize(
    "settings",
    [{"port": True}, {"port": "8000"}, {"host": ""}, {"served_model_name": ("",)}, {"drain_seconds": float("nan")}],
)
def test_invalid_server_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings)


def test_generate_prints_the_continuation(capsys, tiny_model):
    words = ("generate", "the quick brown fox", "--model", str(tiny_model), "--max-tokens", "6", "--dtype", "float32")
    code, out, _ = status(capsys, *words, "--graph-manifest", "none", "--num-threads", "1")
    assert code == 0
    from engine.text.tokenizer import Tokenizer

    assert len(Tokenizer.load(str(tiny_model)).encode(out.removesuffix("\n"))) >= 2


def test_generate_refuses_an_empty_prompt(capsys, tiny_model):
    code, _, err = status(capsys, "generate", "", "--model", str(tiny_model), "--graph-manifest", "none")
    assert code == 2 and "prompt" in err.splitlines()[-1]


def test_graphs_prints_a_running_servers_summary_and_table(capsys, server):
    server.answer("/generate", {"text": "red", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
    code, out, _ = status(capsys, "graphs", "--url", server.url)
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["model", "tiny"] and lines[1].startswith("captured")
    assert any(line.startswith("decode: scope") for line in lines) and "\x1b" not in out
    code, everything, _ = status(capsys, "graphs", "--url", server.url, "--all")
    assert code == 0 and "unused" not in everything and len(everything.splitlines()) >= len(lines)
    for url in (server.url + "/", server.url.removeprefix("http://")):
        code, out, _ = status(capsys, "graphs", "--url", url, "--json")
        assert code == 0 and json.loads(out)["model"] == "tiny"


GRAPH = {"site": "decode", "scope": "block", "phase": "decode", "bucket": 8, "state": "captured", "replays": 10,
         "statics": {"context": 256}, "padded_rows": 20, "bytes": 3 * 2**20, "capture_seconds": 0.25,
         "engine": "tape", "digest": "d1", "failure": None}  # fmt: skip
UNUSED = GRAPH | {"bucket": 512, "replays": 0, "padded_rows": 0, "digest": "d2"}
FAILED = UNUSED | {"bucket": 64, "state": "failed", "failure": "out of memory"}
GRAPHS = {"model": "tiny", "warm": {"mode": "background", "pending": 2}, "pool_bytes": 2**20}


def test_the_graph_table_begins_with_a_summary():
    summary, *sections = graph_table(GRAPHS | {"graphs": [GRAPH, UNUSED, FAILED, GRAPH | {"site": "sampling"}]}).split(
        "\n\n"
    )
    assert [line.split(maxsplit=1) for line in summary.replace("memory pool", "pool").splitlines()] == [
        ["model", "tiny"], ["captured", "3 of 4 graphs, warm-up: background, 2 to go"], ["replays", "20 of 2 graphs"],
        ["padding", "25.0% (40 of 160 rows)"], ["pool", "1.0 MiB"], ["failed", "1 graphs"],
    ]  # fmt: skip
    assert [section.split(":")[0] for section in sections] == ["decode", "sampling"]


def test_the_graph_table_folds_unused_graphs_and_aligns_its_columns():
    rows = [GRAPH, GRAPH | {"bucket": 1024}, UNUSED, FAILED]
    _, head, first, second, failed, why, folded = graph_table(GRAPHS | {"graphs": rows}).split("\n\n")[1].splitlines()
    assert "25.0%" in first and "3.0 MiB" in first and "0.250 s" in first and "context=256" in first
    assert first.index(" 8 ") + 2 == second.index("1,024") + 5 == head.index("bucket") + 6
    assert "failed" in failed and why.strip() == "out of memory" and folded.strip() == "1 unused: --all lists them"
    assert "d2" in graph_table(GRAPHS | {"graphs": rows}, show_all=True)


def test_the_graph_table_is_coloured_like_the_pages_and_names_an_eager_engine():
    coloured = graph_table(GRAPHS | {"graphs": [GRAPH, FAILED]}, coloured=True)
    assert "\x1b[32mcaptured\x1b[0m" in coloured and "\x1b[31mout of memory\x1b[0m" in coloured
    assert "\x1b[33m  25.0%\x1b[0m" in coloured
    assert graph_table(GRAPHS | {"graphs": []}) == "model   tiny\ngraphs  none: the engine runs eager"


@pytest.fixture
def manifest(tmp_path):
    kept = Manifest(tmp_path / "manifest.json", "model")
    for rows, steps in {1: 500, 3: 300, 5: 100, 6: 90, 33: 10}.items():
        kept.observe("decode", "decode", rows, count=steps)
    kept.observe("decode", "prefill", 77, count=5)
    kept.save()
    return kept.path


def test_tune_from_a_manifest_beats_the_default_ladder(capsys, manifest):
    code, out, _ = status(capsys, "tune", "--manifest", str(manifest), "--max-buckets", "3", "--json")
    report = json.loads(out)
    assert code == 0 and report["buckets"][-1] == 33 and report["observed_steps"] == 1000
    assert report["buckets"] == [1, 6, 33]
    # The 300 threes pad by 3 and the 100 fives by 1; [3, 6, 33] would pad the 500 ones by 2.
    assert report["expected_padding_rows"] == pytest.approx((300 * 3 + 100) / 1000)
    assert len(report["default_ladder"]["buckets"]) > 3
    code, out, _ = status(capsys, "tune", "--manifest", str(manifest))
    assert code == 0 and "--graph-buckets 1,3,5,6,33" in out
    assert "1000 steps, the largest batch 33" in out and "5 buckets up to 33" in out


@pytest.mark.parametrize(
    ("steps", "warning"),
    [
        ({1: 500, 3: 500}, None),
        ({1: 500, 3: 499}, "999 steps are few to choose by: tune after at least 1000 steps"),
        ({4: 58}, "all 58 steps have the same batch size"),
        ({1: 5000}, "all 5000 steps have the same batch size"),
    ],
)
def test_tune_says_when_its_sample_is_thin(capsys, tmp_path, steps, warning):
    kept = Manifest(tmp_path / "manifest.json", "model")
    for rows, count in steps.items():
        kept.observe("decode", "decode", rows, count=count)
    kept.save()
    words = ("tune", "--manifest", str(kept.path), "--max-size", "8")
    code, out, _ = status(capsys, *words)
    assert code == 0 and "--graph-buckets" in out, "a thin sample is tuned all the same"
    assert ("warning    " in out) == (warning is not None) and (warning or "") in out
    found = json.loads(status(capsys, *words, "--json")[1])["sample_warning"]
    assert found is None if warning is None else found.startswith(warning)


def test_tune_packed_says_when_its_sample_is_thin(capsys, tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([3, 9, 300] * 33))
    words = ("tune", "--packed", str(tmp_path / "list.json"))
    assert "warning    99 batches are few to choose by: count at least 100" in status(capsys, *words)[1]
    (tmp_path / "list.json").write_text(json.dumps([3, 9, 300] * 34))
    assert "warning" not in status(capsys, *words)[1]
    assert json.loads(status(capsys, *words, "--json")[1])["sample_warning"] is None


def test_tune_accepts_a_larger_maximum_and_refuses_a_smaller_one(capsys, manifest):
    code, out, _ = status(capsys, "tune", "--manifest", str(manifest), "--max-size", "64", "--json")
    assert code == 0 and json.loads(out)["buckets"][-1] == 64
    code, _, err = status(capsys, "tune", "--manifest", str(manifest), "--max-size", "8")
    assert code == 2 and "33" in err and len(err.splitlines()) == 1


def test_tune_packed_from_an_object_and_from_a_list(capsys, tmp_path):
    numbers = [3] * 50 + [9] * 45 + [300] * 5
    (tmp_path / "list.json").write_text(json.dumps(numbers))
    (tmp_path / "object.json").write_text('{"3": 50, "300": 5, "9": 45}')
    reports = []
    for name in ("list.json", "object.json"):
        code, out, err = status(
            capsys, "tune", "--packed", str(tmp_path / name), "--eager-cost", "100", "--json"
        )  # fmt: skip
        assert (code, err) == (0, "")
        reports.append(json.loads(out))
    assert reports[0] == reports[1]
    assert reports[0]["cuda_graph_max_packed_seqs"] == 9 and reports[0]["coverage"] == 0.95
    assert reports[0]["expected_cost"] == pytest.approx((50 * 6 + 5 * 100) / 100)
    assert reports[0]["alternatives"][-1]["max_packed_seqs"] == 300
    code, out, _ = status(capsys, "tune", "--packed", str(tmp_path / "list.json"), "--eager-cost", "100")
    assert code == 0 and "cuda_graph_max_packed_seqs=9" in out and "95.0% of batches" in out


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        ("{", (), "not valid JSON"),
        ("7", (), "a list with one number per batch"),
        ("[]", (), "no batches"),
        ("[3, 0]", (), "0 documents"),
        ("[3, [4]]", (), "[4] documents"),
        ("[3, true]", (), "True documents"),
        ('{"x": 2}', (), "'x'"),
        ('{"3": 2, "03": 2}', (), "'03' twice"),
        ('{"3": {"4": 1}}', (), "batches"),
        ('{"3": -2}', (), "-2 batches"),
        ("[3]", ("--eager-cost", "nan"), "--eager-cost"),
        ("[3]", ("--max-buckets", "2"), "--max-buckets"),
        ("[3]", ("--phase", "decode"), "--phase"),
    ],
)
def test_tune_packed_names_what_is_invalid(capsys, tmp_path, text, words, named):
    (tmp_path / "documents.json").write_text(text)
    code, out, err = status(capsys, "tune", "--packed", str(tmp_path / "documents.json"), *words)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and named in err


def test_eager_cost_is_refused_without_packed(capsys, manifest):
    code, _, err = status(capsys, "tune", "--manifest", str(manifest), "--eager-cost", "3")
    assert code == 2 and "--packed only" in err


def test_tune_from_a_live_server_within_a_budget_of_bytes(capsys, server):
    # One request with three sequences: they join the batch together. Three requests might arrive one by one.
    server.answer("/v1/completions", {"prompt": "red", "n": 3, "max_tokens": 8, "ignore_eos": True})
    server.wait_idle()
    for url in (server.url, server.url + "/", server.url + "/metrics", server.url.removeprefix("http://")):
        code, out, _ = status(capsys, "tune", "--metrics", url, "--max-bytes", str(2**40), "--json")
        report = json.loads(out)
        assert code == 0 and report["max_size"] == 8 and report["bytes"] > 0
    code, _, err = status(capsys, "tune", "--metrics", server.url + "/metrics", "--max-bytes", "1")
    assert code == 2 and "bytes" in err


@pytest.mark.parametrize("graphs", [1, 2, 3])
def test_tuned_buckets_are_exactly_those_a_server_captures(capsys, server, tmp_path, graphs):
    server.answer("/v1/completions", {"prompt": "red", "n": 3, "max_tokens": 8, "ignore_eos": True})
    server.wait_idle()
    (tmp_path / "metrics").write_text(server.http.get("/metrics").text)
    code, out, err = status(
        capsys, "tune", "--metrics", str(tmp_path / "metrics"), "--max-buckets", str(graphs), "--json"
    )
    report = json.loads(out)
    assert code == 0 and err == "" and len(report["buckets"]) <= graphs
    # The server's limit is 8, above any observed batch: encore serve would add a missing bucket of 8.
    assert Buckets.for_limit(8, report["buckets"]).sizes == tuple(report["buckets"])
    assert report["default_ladder"]["buckets"] == [1, 2, 4, 8]


def test_tune_from_a_manifest_uses_the_largest_graph_or_warns(capsys, manifest):
    code, out, err = status(capsys, "tune", "--manifest", str(manifest), "--json")
    assert code == 0 and json.loads(out)["max_size"] == 33 and "--max-size" in err and len(err.splitlines()) == 1
    kept = Manifest.read(manifest)
    for phase, size in (("decode", 64), ("decode", 8), ("prefill", 512)):
        kept.captured("decode", phase, size)
    kept.save()
    code, out, err = status(capsys, "tune", "--manifest", str(manifest), "--max-buckets", "2", "--json")
    assert (code, err) == (0, "") and json.loads(out)["buckets"] == [6, 64]


def test_tune_by_bytes_requires_graph_sizes(capsys, manifest):
    code, _, err = status(capsys, "tune", "--manifest", str(manifest), "--max-bytes", "1000")
    assert code == 2 and "--graphs" in err


def test_tune_by_bytes_adds_up_the_graphs_of_all_sites(capsys, manifest, tmp_path):
    """The second site has fewer sizes, between which its bytes are interpolated."""
    sizes = {"decode": {8: 100, 16: 200, 33: 300}, "decode_shared": {8: 50, 33: 150}}
    rows = [
        {"site": site, "phase": "decode", "state": "captured", "bucket": bucket, "bytes": count}
        for site, graphs in sizes.items()
        for bucket, count in graphs.items()
    ]
    (tmp_path / "graphs.json").write_text(json.dumps({"graphs": rows}))
    options = ("--graphs", str(tmp_path / "graphs.json"), "--max-bytes", "100000", "--max-buckets", "1", "--json")
    code, out, _ = status(capsys, "tune", "--manifest", str(manifest), *options)
    assert code == 0 and json.loads(out)["buckets"] == [33] and json.loads(out)["bytes"] == 450


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"fingerprint": 3}'])
def test_tune_refuses_an_invalid_manifest(capsys, tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    code, _, err = status(capsys, "tune", "--manifest", str(path))
    assert code == 2 and "other.json" in err
    assert path.read_text() == content


def test_bytes_between_known_sizes_are_interpolated():
    bytes_of = interpolated([(2, 100), (4, 300), (8, 250)])
    assert [bytes_of(size) for size in (1, 2, 3, 4, 6, 8, 16)] == [100, 100, 200, 300, 300, 300, 600]
