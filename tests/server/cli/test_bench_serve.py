"""`encore bench serve`: the figures are those of the requests, on Encore's server and on others."""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from server.cli import main as cli
from server.cli.load.client import Measured
from server.cli.load.datasets import (
    Scale,
    arrival_times,
    random_prompts,
    read_sharegpt,
    shared_prefix_prompts,
    sharegpt_prompts,
)
from server.cli.load.report import percentile, summary
from tests.server.conftest import RunningServer

SMALL = ("--num-prompts", "6", "--input-tokens", "40", "--output-tokens", "8", "--ignore-eos")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = cli.main(["bench", "serve", *words])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("route", [(), ("--chat",)])
def test_a_load_on_our_server_is_counted_as_the_server_counts_it(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], route: tuple[str, ...]
) -> None:
    server.wait_idle()  # a request of another test may have been left
    before = {name: server.metric(f"encore_{name}_total") for name in ("prompt_tokens", "generation_tokens")}
    out, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    code, shown, _ = run(capsys, server.url + "/v1", *SMALL, *route, "--warm-up", "0", "--json", str(out),
                         "--plot", str(plot), "--max-concurrency", "3")  # fmt: skip
    report = json.loads(out.read_text())
    assert code == 0 and report["completed"] == 6 and report["failed"] == 0
    assert report["total_output_tokens"] == 48 and report["max_concurrent_requests"] <= 3
    assert 0.7 * 240 < report["total_input_tokens"] < 1.3 * 240
    # beside the load, two requests of one token each find the tokens per word
    assert server.metric("encore_generation_tokens_total") - before["generation_tokens"] == 48 + 2
    assert report["total_input_tokens"] < server.metric("encore_prompt_tokens_total") - before["prompt_tokens"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= report[f"median_{name}_ms"] <= report[f"p99_{name}_ms"]
        assert f"{report[f'median_{name}_ms']:,.2f}" in shown and f"({name.upper()})" in shown
    assert report["median_ttft_ms"] <= report["median_e2el_ms"]  # a busy client may get an answer in one piece
    assert report["backend"] == ("openai-chat" if route else "openai") and report["request_rate"] == "inf"
    assert plot.read_text().startswith("<?xml")


class _Paced(BaseHTTPRequestHandler):
    """Another server: streams 5 events, 20 ms apart, the first after 40 ms, without chunks or usage in the stream."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "paced"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((body, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if not body["stream"]:
            return self._answer(200, {"usage": {"prompt_tokens": 2 * len(body["prompt"].split()) + 1}})
        if "whole" in self.path:
            return self._answer(200, {"choices": [{"text": "red"}], "usage": {"completion_tokens": 1}})
        if "fail" in self.path:
            return self._answer(429, {"error": {"message": "too many"}})
        self.send_response(200)
        if "untyped" not in self.path:
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for number in range(5):
            time.sleep(0.02 if number else 0.04)
            self.wfile.write(b'data:{"choices": [{"index": 0, "text": "data: {\\"choices\\""}]}\r\n\r\n')
            self.wfile.flush()
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def _answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def paced() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Paced) as http:
        http.daemon_threads, http.seen = True, []  # type: ignore[attr-defined]
        http.url = f"http://127.0.0.1:{http.server_address[1]}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def test_latencies_of_another_server_are_those_that_it_has(
    paced: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    out = tmp_path / "report.json"
    code, _, err = run(capsys, paced.url, "--num-prompts", "8", "--request-rate", "40", "--input-tokens", "21",
                       "--warm-up", "0", "--json", str(out))  # fmt: skip
    report = json.loads(out.read_text())
    assert code == 0 and (report["completed"], report["total_output_tokens"]) == (8, 40)
    assert report["total_input_tokens"] == 8 * 21 and report["model_id"] == "paced"
    # A busy client reads several events at once: the longest gaps are the server's.
    assert 40 <= report["median_ttft_ms"] and 20 <= report["p99_itl_ms"] and 20 <= report["p99_tpot_ms"]
    assert 120 <= report["median_e2el_ms"] and "8 requests say little" in err
    assert report["duration"] >= 0.3  # 8 requests at 40 per second, and the last one's answer
    assert {key for _, key in paced.seen} == {"Bearer secret"} and "secret" not in out.read_text()
    assert len(paced.seen[-1][0]["prompt"].split()) == 10


def test_failed_requests_are_counted_named_and_leave_no_latency(
    paced: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    code, _, err = run(capsys, paced.url + "/fail", "--num-prompts", "3", "--warm-up", "0", "--json", str(out))
    report = json.loads(out.read_text())
    assert code == 1 and report["failed"] == 3 and report["median_ttft_ms"] is None
    assert "3 requests failed: status 429" in err and "too many" in err


def test_a_response_that_is_no_stream_is_a_failure(paced: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, paced.url + "/whole", "--num-prompts", "2", "--warm-up", "0")
    assert code == 1 and "2 requests failed: the response is no stream of events" in err
    code, out, _ = run(capsys, paced.url + "/untyped", "--num-prompts", "2")
    assert code == 0 and "Output tokens                                       10" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("http://127.0.0.1:1",), "Connection refused; is the server running?"),
        (("nowhere",), "'nowhere' is not a server's address"),
        (("URL", "--dataset", "sharegpt"), "needs --dataset-path"),
        (("URL", "--dataset", "sharegpt", "--dataset-path", "/no/such"), "--dataset-path /no/such can't be read"),
        (("URL", "--prefix-tokens", "5"), "--prefix-tokens applies to --dataset shared-prefix only"),
        (("URL", "--dataset", "shared-prefix", "--range-ratio", "0.5"), "--range-ratio applies to --dataset random"),
        (("URL", "--request-rate", "0"), "'0' is not a number above 0, or inf"),
        (("URL", "--burstiness", "inf"), "--burstiness"),
        (("URL", "--range-ratio", "1"), "--range-ratio"),
        (("URL", "--num-prompts", "0"), "--num-prompts"),
        (("URL", "--plot", "x.gif"), "--plot x.gif: must end in .svg"),
        (("URL", "--json", "/nowhere/x.json"), "--json /nowhere/x.json"),
        (("URL", "--model", "other"), "status 404"),
        (("URL", "--num-promps", "1"), "did you mean '--num-prompts'?"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(
    server: RunningServer, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    code, out, err = run(capsys, *(server.url if word == "URL" else word for word in words))
    assert code == 2 and out == "" and named in err and len(err.strip().splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused_before_the_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if "site-packages" not in one])
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = run(capsys, "http://127.0.0.1:1", "--plot", str(tmp_path / "x.svg"))
    assert code == 2 and "--plot needs matplotlib: pip install 'encore-serve[bench]'" in err


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    for burstiness in (0.2, 1.0, 5.0):
        times = arrival_times(random.Random(0), 4000, 50.0, burstiness)
        gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        assert times[-1] == pytest.approx(80) and times == sorted(times)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.15)
    assert arrival_times(random.Random(0), 3, float("inf"), 1.0) == [0.0] * 3


def test_lengths_follow_the_servers_own_count_of_tokens() -> None:
    scale = Scale.fit((8, 30), (72, 158))  # 2 tokens a word, and 14 of a template
    assert (scale.per_word, scale.fixed, scale.words(114)) == (2, 14, 50)
    prompts = random_prompts(random.Random(0), scale, 300, 200, 100, 0.5)
    assert min(one.tokens for one in prompts) < 110 and max(one.tokens for one in prompts) > 290
    assert all(100 <= one.tokens <= 300 and 50 <= one.output_tokens <= 150 for one in prompts)
    assert all(abs(2 * len(one.text.split()) + 14 - one.tokens) <= 1 for one in prompts)


def test_prompts_share_as_many_prefixes_as_asked_for() -> None:
    prompts = shared_prefix_prompts(random.Random(0), Scale(1, 0), 40, 4, 50, 20, 8)
    prefixes = {" ".join(one.text.split()[:50]) for one in prompts}
    assert len(prefixes) == 4 and len({one.text for one in prompts}) == 40
    assert all(len(one.text.split()) == 70 for one in prompts)


def test_conversations_of_a_sharegpt_file(tmp_path: Path) -> None:
    def turns(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    path = tmp_path / "sharegpt.json"
    usual = [f"a question of usual length {number}" for number in range(3)]
    path.write_text(json.dumps([
        *(turns(one, "an answer of usual length, or more") for one in usual), turns("only one"), turns("x", "short"),
        turns("long " * 2000, "an answer of usual length"), turns(),
    ]))  # fmt: skip
    found = sharegpt_prompts(random.Random(0), Scale(1.3, 0), 5, read_sharegpt(str(path)), None)
    assert {one.text for one in found} == set(usual) and len(found) == 5
    assert all(4 <= one.output_tokens <= 20 for one in found)
    assert {
        one.output_tokens for one in sharegpt_prompts(random.Random(0), Scale(1.3, 0), 3, read_sharegpt(str(path)), 77)
    } == {77}
    for text in ("{}", "[1]", "nothing", '[{"conversations": [{"value": "a"}, {"value": "b"}]}]'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--dataset-path"):
            sharegpt_prompts(random.Random(0), Scale(1.3, 0), 5, read_sharegpt(str(path)), None)


def test_figures_are_those_of_vllms_definitions() -> None:
    results = [
        Measured(sent=0.0, ended=1.0, arrivals=[0.2, 0.4, 1.0], prompt_tokens=10, output_tokens=5),
        Measured(sent=1.0, ended=1.5, arrivals=[1.5], prompt_tokens=None, output_tokens=1),
        Measured(sent=0.5, ended=2.0, error="status 500: no"),
    ]
    report = summary(results, [9, 7, 5], client_seconds=1.0)
    assert (report["completed"], report["failed"], report["duration"]) == (2, 1, 2.0)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (17, 6)
    assert (report["output_throughput"], report["total_token_throughput"]) == (3.0, 11.5)
    assert (report["mean_ttft_ms"], report["mean_e2el_ms"]) == (350.0, 750.0)
    assert (report["mean_tpot_ms"], report["mean_itl_ms"]) == (200.0, 400.0)
    assert report["max_concurrent_requests"] == 2 and report["errors"] == {"status 500: no": 1}
    assert [percentile([0.0, 1.0, 2.0, 3.0], one) for one in (0, 50, 90, 100)] == pytest.approx([0, 1.5, 2.7, 3])
