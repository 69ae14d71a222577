"""`encore chat` in a pseudo-terminal and with piped input, and `encore run`: on a running server and on an engine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import main as cli
from tests.server.conftest import running, tiny_config
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
QUESTION = "the old king sleeps"
QUOTES = '"""'
BODY = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0.5, "seed": 3}
SAMPLING = ("--max-tokens", "8", "--temperature", "0.5", "--seed", "3")


def answer_of(server, **fields):
    return server.answer("/v1/chat/completions", BODY | fields)["choices"][0]["message"]["content"]


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *words: str):
        self._master, slave = pty.openpty()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "INPUTRC": os.devnull}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", *words], stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, seconds: float = PATIENCE) -> str:
        """Read until `text` is shown; return what was shown since the last call, without control sequences."""
        end = time.monotonic() + seconds
        while text not in self.plain:
            assert time.monotonic() < end, f"no {text!r} in {self.shown!r}"
            self._read(end - time.monotonic())
        before, _, rest = self.plain.partition(text)
        self.shown = rest
        return before + text

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\r", "", self.shown)

    def leave(self) -> int:
        """Return the exit status of the command, which ends by itself."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            self._read(0.1)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self, seconds: float) -> None:
        if select.select([self._master], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(OSError):  # the command has ended
                self.shown += os.read(self._master, 65536).decode(errors="replace")


@pytest.fixture
def terminal() -> Iterator[type[Terminal]]:
    with contextlib.ExitStack() as stack:
        yield lambda *words: stack.enter_context(contextlib.closing(Terminal(*words)))


@pytest.fixture
def command(capsys, monkeypatch):
    """Run a command with an input; return its exit status, standard output and standard error."""

    def run(*words, text=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_a_conversation_in_a_terminal(long_server, terminal):
    shell = terminal("chat", "--url", long_server.url, "--max-tokens", "6", "--temperature", "0")
    assert "tiny: /help lists the commands, Ctrl-D leaves" in shell.wait_for(">>> ")
    shell.send(QUESTION + "\n")
    shell.wait_for(">>> ")
    shell.send("/set\n")
    assert re.search(r"temperature +0.0 .*max_tokens +6", shell.wait_for(">>> "), re.DOTALL)
    shell.send("/sett x\n")
    assert "unknown command /sett; did you mean '/set'?; see /help" in shell.wait_for(">>> ")
    for name in ("max_tokens", "min_tokens"):  # so that the answer doesn't end by itself
        shell.send(f"/set {name} 3900\n")
        shell.wait_for(">>> ")
    shell.send("/set temperature 2\n")
    shell.wait_for(">>> ")
    shell.send(QUESTION + "\n")
    long_server.wait(lambda: long_server.service.admission.in_flight == 1, "the request")
    shell.send("\x03")
    assert "(stopped)" in shell.wait_for(">>> ")
    long_server.wait_idle()
    shell.send("\x03")
    assert "Ctrl-D or /exit leaves" in shell.wait_for(">>> ")
    shell.send("\x04")
    assert shell.leave() == 0


def test_an_own_engine_in_a_terminal(tiny_model, terminal):
    words = ("--max-tokens", "4", "--dtype", "float32", "--graph-manifest", "none")
    shell = terminal("chat", str(tiny_model), *words)  # imports torch, which takes seconds
    assert f"{tiny_model.name}: /help" in shell.wait_for(">>> ")
    shell.send('"""red\nbird"""\n')
    shell.wait_for(">>> ")
    shell.send("/exit\n")
    assert shell.leave() == 0


def test_piped_messages_are_a_conversation(server, command):
    first = answer_of(server)
    second = answer_of(
        server,
        messages=[*BODY["messages"], {"role": "assistant", "content": first}, {"role": "user", "content": "and?"}],
    )
    status, out, err = command("chat", "--url", server.url, *SAMPLING, text=f"{QUESTION}\nand?\n")
    assert (status, out) == (0, f"{first}\n{second}\n") and "cut: max_tokens" in err


def test_commands_change_what_is_sent(server, command, tmp_path):
    system = [{"role": "system", "content": "the red fox"}]
    expected = [
        answer_of(server, messages=system + BODY["messages"]),
        answer_of(server, temperature=0, stop=["e"]),
        answer_of(server, messages=[{"role": "user", "content": "red\nbird"}], temperature=0),
        answer_of(server, messages=[{"role": "user", "content": " /red\nbird"}], temperature=0),
    ]
    text = f"""/system the red fox
{QUESTION}
/clear
/system off
/set temperature 0
/set stop "e"
{QUESTION}
/set stop default
/clear
{QUOTES}
red
bird
{QUOTES}
/save {tmp_path}/saved.json
/clear
 /red\\
bird
"""
    status, out, _ = command("chat", "tiny", "--url", server.url, *SAMPLING, text=text)
    assert (status, out) == (0, "".join(f"{one}\n" for one in expected))
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert saved["sampling"] == {"max_tokens": 8, "temperature": 0.0, "seed": 3} and saved["model"] == "tiny"
    assert [message["content"] for message in saved["messages"]] == ["red\nbird", expected[2]]
    status, out, err = command("chat", "--url", server.url, text=f"/load {tmp_path}/saved.json\nand?\n")
    again = answer_of(server, messages=[*saved["messages"], {"role": "user", "content": "and?"}], temperature=0)
    assert (status, out) == (0, f"{again}\n") and "2 messages" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "temperature must be a number; found 'hot'"),
        ("/set temperature -1", "temperature must be a number from 0 to 100; found -1"),
        ("/set temprature 1", "unknown parameter 'temprature'; did you mean 'temperature'?"),
        ("/set temperature", "/set temperature needs a value"),
        ("/set stop [1", "stop must be a text, or a JSON list of texts"),
        ("/image photo.png", "tiny takes text only, no images"),
        ("/save", "/save needs the path of a file"),
        ("/save /no/such/folder/x", "can't write /no/such/folder/x: No such file or directory"),
        ("/load /no/such/file", "can't read /no/such/file"),
        ("/load {file}", "is not a conversation that /save wrote"),
        ("/quit", "unknown command /quit"),
        ("red bird " * 300, "context"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(server, command, tmp_path, line, message):
    (tmp_path / "list.json").write_text("[1]")
    text = f"{line.replace('{file}', str(tmp_path / 'list.json'))}\n{QUESTION}\n"
    status, out, err = command("chat", "--url", server.url, *SAMPLING, text=text)
    assert (status, out) == (2, f"{answer_of(server)}\n")
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_run_prints_the_answer_only(server, command):
    expected = answer_of(server)
    words = ("--url", server.url, *SAMPLING)
    for prompt, text in (((QUESTION,), ""), ((), QUESTION), (("-",), QUESTION)):
        status, out, err = command("run", "tiny", *prompt, *words, text=text)
        assert (status, out) == (0, f"{expected}\n")
        assert err == "encore run: the answer was cut at --max-tokens 8\n"
    both = answer_of(server, messages=[{"role": "user", "content": "red\nbird"}])
    assert command("run", "tiny", "red", "-", *words, text="bird")[1] == f"{both}\n"
    system = [{"role": "system", "content": "the red fox"}, *BODY["messages"]]
    assert (
        command("run", "tiny", QUESTION, "--system", "the red fox", *words)[1]
        == f"{answer_of(server, messages=system)}\n"
    )
    address = server.url.removeprefix("http://") + "/v1"  # as other clients take it
    assert command("run", "tiny", QUESTION, "--url", address, *SAMPLING)[1] == f"{expected}\n"


def test_run_continues_a_raw_prompt(server, command):
    body = {"prompt": QUESTION, "temperature": 0.5, "seed": 3}
    words = ("run", "tiny", QUESTION, "--raw", "--url", server.url, "--temperature", "0.5", "--seed", "3")
    room = 256 - server.answer("/tokenize", {"prompt": QUESTION})["count"]
    for more, limit in ((("--max-tokens", "8"), 8), ((), room)):
        expected = server.answer("/v1/completions", body | {"max_tokens": limit})["choices"][0]["text"]
        assert command(*words, *more)[1].removesuffix("\n") == expected.removesuffix("\n")


def test_run_continues_the_prompt_of_a_model_without_a_template(tiny_model, tmp_path, command):
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    with running(tiny_config(folder)) as server:
        expected = server.answer("/v1/completions", {"prompt": QUESTION, "max_tokens": 5, "temperature": 0})
        words = ("--url", server.url, "--max-tokens", "5", "--temperature", "0")
        status, out, err = command("run", "tiny", QUESTION, *words)
        assert (status, out.rstrip("\n")) == (0, expected["choices"][0]["text"].rstrip("\n"))
        assert "has no chat template: continuing the prompt as it is" in err
        assert command("run", "tiny", QUESTION, "--system", "be short", *words)[0] == 2


def test_run_loads_a_model_in_this_process(tiny_model, server, command):
    words = ("--dtype", "float32", "--graph-manifest", "none", "--num-threads", "1", *SAMPLING)
    status, out, err = command("run", str(tiny_model), QUESTION, *words)
    assert (status, out) == (0, f"{answer_of(server)}\n")
    status, out, err = command("run", str(tiny_model / "none"), QUESTION)
    assert status == 2 and out == "" and "no such file or folder" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (("run",), "", "MODEL"),
        (("run", "tiny", ""), "", "the prompt is empty"),
        (("run", "tiny"), " \n", "the prompt is empty"),
        (("run", "tiny", "-", "-"), "", "standard input (-) can be read only once"),
        (("run", "tiny", "red", "--raw", "--system", "a"), "", "--system has no effect with --raw"),
        (("run", "tiny", "red", "--temperature", "-1"), "", "temperature must be a number from 0"),
        (
            ("chat", "--dtype", "float32", "--url", "http://127.0.0.1:9"),
            "",
            "--dtype has no effect with --url: it is a setting of the server",
        ),
        (("run", "tiny", "red", "--api-key", "k"), "", "--api-key has no effect without --url"),
        (("run", "tiny", "red", "--url", "http://127.0.0.1:9"), "", "can't reach http://127.0.0.1:9/v1/models"),
        (("run", "other", "red", "--url", "{url}"), "", "'other' is not served; served models: tiny"),
        (("chat", "--url", "{url}", "--top-p", "2"), "", "--top-p must be"),
        (("chat", "other", "--url", "{url}"), "", "'other' is not served"),
        (("chat", "--modle", "x"), "", "unknown argument --modle; did you mean '--model'?"),
    ],
)
def test_bad_input_is_one_line_and_status_2(server, command, words, text, message):
    status, out, err = command(*(word.replace("{url}", server.url) for word in words), text=text)
    assert (status, out) == (2, "") and err.count("\n") == 1 and message in err


def test_a_server_with_keys(start_server, tmp_path, monkeypatch, command):
    (tmp_path / "keys").write_text("sk-1")
    url = start_server(api_key_file=str(tmp_path / "keys")).url
    status, _, err = command("run", "tiny", QUESTION, "--url", url)
    assert status == 2 and "this route requires a key" in err
    assert command("run", "tiny", QUESTION, "--url", url, "--api-key", "sk-1", *SAMPLING)[0] == 0
    monkeypatch.setenv("ENCORE_API_KEY", "sk-1")
    assert command("run", "tiny", QUESTION, "--url", url, *SAMPLING)[0] == 0


def test_reasoning_is_no_part_of_the_answer(start_server, command):
    server = start_server(reasoning_parser="deepseek_r1")  # without </think>, all text is reasoning
    status, out, err = command("run", "tiny", QUESTION, "--url", server.url, *SAMPLING)
    expected = server.answer("/v1/chat/completions", BODY)["choices"][0]["message"]["reasoning"]
    assert (status, out) == (0, "") and expected in err


def test_an_interrupt_ends_run_with_its_status(long_server):
    words = ("run", "tiny", QUESTION, "--url", long_server.url, "--max-tokens", "3900", "--min-tokens", "3900")
    with subprocess.Popen(
        [sys.executable, "-m", "server.cli", *words], env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    long_server.wait_idle()
