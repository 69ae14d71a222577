"""`encore batch`: every line has one result, also after a SIGKILL, and errors are those of their lines."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.cli import batch
from server.cli import main as cli
from tests.server.conftest import RunningServer
from tests.support.waiting import wait_for_end

CHAT = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 3}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run_one(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["batch", "in.jsonl", "out.jsonl", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_one


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or CHAT}


def write(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))


def results(path: Path) -> dict[str, Any]:
    """Return the results by custom_id; none may be doubled."""
    found = [json.loads(one) for one in path.read_bytes().splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found) and path.read_bytes().endswith(b"\n")
    return by_id


def test_every_route_answers_as_it_does_without_a_batch(run: Run, server: RunningServer, tmp_path: Path) -> None:
    messages = {"max_tokens": 3, "messages": CHAT["messages"]}
    write(tmp_path / "in.jsonl", [
        line("chat"),
        line("text", "/v1/completions", prompt="red", max_tokens=3, temperature=0),
        line("ids", "/v1/completions", prompt=[5, 6], max_tokens=3),
        line("response", "/v1/responses", input="red", max_output_tokens=3),
        line("message", "/v1/messages", model="tiny", **messages),
        "",
        line("größe €", "/v1/chat/completions", **CHAT, n=2),
    ])  # fmt: skip
    code, out, _ = run("--url", server.url)
    assert code == 0 and "6 lines: 6 succeeded, 0 with an error" in out
    found = results(tmp_path / "out.jsonl")
    assert set(found) == {"chat", "text", "ids", "response", "message", "größe €"}
    for one in found.values():
        assert one["response"]["status_code"] == 200 and one["error"] is None
        assert one["id"].startswith("batch_req_") and one["response"]["request_id"]
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(found["größe €"]["response"]["body"]["choices"]) == 2
    expected = server.answer("/v1/completions", {"prompt": "red", "max_tokens": 3, "temperature": 0})
    assert found["text"]["response"]["body"]["choices"] == expected["choices"]


def test_errors_are_those_of_their_lines(run: Run, server: RunningServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [
        line("good"),
        line("bad value", "/v1/completions", prompt="red", max_tokens=-1),
        line("bad model", model="other", **CHAT),
        line("bad route", "/v1/nothing"),
        line("other host", "http://example.com/v1/completions"),
        line("no body") | {"body": None},
        line("get") | {"method": "GET"},
        line("streams", stream=True, **CHAT),
        line("in the background", "/v1/responses", input="red", background=True),
        {"custom_id": "only an id"},
    ])  # fmt: skip
    code, out, _ = run("--url", server.url + "/v1/", "--concurrency", "3")
    assert code == 0 and "10 lines: 1 succeeded, 9 with an error" in out
    found = results(tmp_path / "out.jsonl")
    assert found["good"]["error"] is None
    assert {name: one["response"]["status_code"] for name, one in found.items() if one["response"]} == {
        "good": 200, "bad value": 400, "bad model": 404, "bad route": 404,
    }  # fmt: skip
    assert "max_tokens" in found["bad value"]["error"]["message"]
    for name, field in (
        ("other host", "url"), ("no body", "body"), ("get", "method"), ("streams", "body.stream"),
        ("in the background", "body.background"), ("only an id", "method"),
    ):  # fmt: skip
        assert found[name]["error"]["code"] == "invalid_request"
        assert found[name]["error"]["message"].startswith(field + ":")


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["{"], "in.jsonl line 1: not valid JSON"),
        ([line("a"), "[1]"], "line 2: found no custom_id"),
        ([line("a"), {"url": "/v1/completions"}], "line 2: found no custom_id"),
        ([line("a") | {"custom_id": 7}], "line 1: found custom_id=7"),
        ([line("a"), line("b"), line("a")], "line 3: line 1 has the custom_id 'a' too"),
    ],
)
def test_an_input_whose_results_could_not_be_told_apart_is_refused(
    run: Run, tmp_path: Path, lines: list[Any], named: str
) -> None:
    write(tmp_path / "in.jsonl", lines)
    code, _, err = run("--url", "http://127.0.0.1:1")
    assert code == 2 and named in err and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("text", ["notes\n", "notes", '{"custom_id": "other", "error": null}\n', "{}\n", "[]\n"])
def test_a_file_that_is_no_result_of_the_batch_is_left_alone(run: Run, tmp_path: Path, text: str) -> None:
    write(tmp_path / "in.jsonl", [line("a")])
    (tmp_path / "out.jsonl").write_text(text)
    code, _, err = run("--url", "http://127.0.0.1:1")
    assert code == 2 and "out.jsonl" in err and (tmp_path / "out.jsonl").read_text() == text


def test_wrong_arguments_are_named(run: Run, tmp_path: Path) -> None:
    assert "in.jsonl can't be read" in run("--url", "http://127.0.0.1:1")[2]
    write(tmp_path / "in.jsonl", [line("a")])
    assert "--url nowhere: must be a server's address" in run("--url", "nowhere")[2]
    assert "--max-num-seqs is for a server that the batch starts" in run("--url", "http://h", "--max-num-seqs", "2")[2]
    os.symlink("in.jsonl", tmp_path / "out.jsonl")
    assert "out.jsonl is the input" in run("--url", "http://127.0.0.1:1")[2]


def test_a_finished_batch_starts_no_server(run: Run, server: RunningServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a"), line("b", stream=True)])
    run("--url", server.url)
    before = (tmp_path / "out.jsonl").read_bytes()
    code, out, _ = run("--model", "/no/such/model")
    assert code == 0 and "2 lines: 1 succeeded, 1 with an error" in out
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("cut", [1, 5, 17, 18, 40, -1])
def test_a_torn_last_line_is_run_again(run: Run, server: RunningServer, tmp_path: Path, cut: int) -> None:
    write(tmp_path / "in.jsonl", [line("a"), line("b")])
    run("--url", server.url, "--concurrency", "1")
    first, last = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(first + last[:cut])
    assert run("--url", server.url)[0] == 0
    assert set(results(tmp_path / "out.jsonl")) == {"a", "b"}
    assert (tmp_path / "out.jsonl").read_bytes().startswith(first)


def test_killed_runs_lose_and_double_no_line(run: Run, server: RunningServer, tmp_path: Path) -> None:
    ids = [f"line {number}" for number in range(150)]
    write(tmp_path / "in.jsonl", [line(one, max_tokens=8, **{"messages": CHAT["messages"]}) for one in ids])
    out, rng, done = tmp_path / "out.jsonl", random.Random(0), 0
    for stop in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "batch", "in.jsonl", "out.jsonl", "--url", server.url],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wanted = done + rng.randint(5, 30)
        while count(out) < wanted and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(stop)
        shown = process.communicate()[1]
        if stop == signal.SIGINT:
            assert process.returncode == 130 and "run the same command to continue" in shown and "Trace" not in shown
        assert done < count(out)
        done = count(out)
    assert done < len(ids)  # else the last run would have nothing to do
    kept = out.read_bytes()[: out.read_bytes().rindex(b"\n") + 1]
    assert run("--url", server.url)[0] == 0
    assert set(results(out)) == set(ids) and out.read_bytes().startswith(kept)


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_batch_serves_its_model_itself_and_leaves_no_process_behind(
    run: Run, server: RunningServer, tiny_model: Path, tmp_path: Path
) -> None:
    ids = [str(number) for number in range(300)]
    write(tmp_path / "in.jsonl", [line(one, max_tokens=40, messages=CHAT["messages"]) for one in ids])
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "batch", "in.jsonl", "out.jsonl", "--model", str(tiny_model),
         "--num-threads", "1", "--warmup", "lazy", "--graph-manifest", "none"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while count(tmp_path / "out.jsonl") < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    assert children
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for_end(map(int, children))
    assert count(tmp_path / "out.jsonl") < len(ids)
    assert run("--url", server.url)[0] == 0
    assert set(results(tmp_path / "out.jsonl")) == set(ids)
    assert all(one["error"] is None for one in results(tmp_path / "out.jsonl").values())


def test_a_model_that_cannot_be_served_is_one_line_and_status_2(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a")])
    code, _, err = run("--model", "/no/such/model")
    assert code == 2 and "no such file or folder: /no/such/model" in err


class _Moody(BaseHTTPRequestHandler):
    """Refuses each line's first attempt: by a status, or by closing the connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen: set[str] = self.server.seen  # type: ignore[attr-defined]
        refusal = None if body["how"] in seen else body["how"]
        seen.add(body["how"])
        if refusal == "close":
            self.close_connection = True
            return
        status, text = (int(refusal), b"busy") if refusal else (200, b'{"id": "x"}')
        if body["how"] == "html":
            status, text = 200, b"<html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(text)


def test_a_busy_server_is_asked_again_and_a_server_that_is_gone_stops_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hows = ("429", "503", "close")
    write(tmp_path / "in.jsonl", [line(how, how=how) for how in hows])
    with ThreadingHTTPServer(("127.0.0.1", 0), _Moody) as moody:
        moody.daemon_threads, moody.seen = True, set()  # type: ignore[attr-defined]
        thread = threading.Thread(target=moody.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        url = f"http://127.0.0.1:{moody.server_address[1]}"
        assert run("--url", url)[0] == 0
        assert all(one["error"] is None for one in results(tmp_path / "out.jsonl").values())
        moody.shutdown()
        thread.join()
    write(tmp_path / "in.jsonl", [line(how, how=how) for how in (*hows, "later")])
    monkeypatch.setattr(batch, "GIVE_UP_SECONDS", 0.0)
    code, _, err = run("--url", url)
    assert code == 2 and "stopped after 3 of 4 lines" in err and "run the same command to continue" in err
    assert set(results(tmp_path / "out.jsonl")) == set(hows)


def test_two_runs_never_write_one_file(run: Run, server: RunningServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a")])
    held = batch.Results(str(tmp_path / "out.jsonl"))
    try:
        code, _, err = run("--url", server.url)
        assert code == 2 and "another process writes out.jsonl" in err
    finally:
        held.close()


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    ids = (f"a custom id of the usual length {number}" for number in range(100_000))
    with open(tmp_path / "in.jsonl", "w") as file:
        file.writelines(f'{{"custom_id": "{one}"}}\n' for one in ids)
    script = (
        "import resource, sys\nfrom server.cli.batch import Index, _read_index\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"assert _read_index({str(tmp_path / 'in.jsonl')!r}, Index()) == 100_000\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 6000  # KiB; a set of them takes 16,000
