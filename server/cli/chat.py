"""`encore chat`: a conversation in a terminal, with commands that begin with a slash."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import mimetypes
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import EngineError, RequestError
from graph_cache.utils.validation import did_you_mean
from server.cli.answers import SAMPLING, Answer, parsed, print_answer, sampling_of, server_of
from server.cli.answers import add_arguments as add_shared_arguments
from server.cli.chat_server import ChatServer, model_entry
from server.cli.parser import Parser

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
HELP = f"""\
/system [TEXT]     show or set the system message; /system off removes it
/set [NAME VALUE]  show or set a sampling parameter; VALUE default resets it
/image PATH        attach an image to the next message
/clear             forget the conversation, but not the system message and parameters
/save PATH         write the conversation to a file, as JSON
/load PATH         continue a saved conversation
/help              show this list
/exit              leave, as Ctrl-D does
Ctrl-C stops an answer. {QUOTES} begins and ends a message of several lines; a backslash at the end of a line continues
it. Put a space before a message that begins with a slash."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS,
        help="name, folder or .gguf file; with --url a name that it serves (default: the default model)",
    )  # fmt: skip
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends and return the exit status: 2 if an answer failed that no one saw fail."""
    sampling = sampling_of(args)
    server = server_of(args)
    try:
        entry = model_entry(server, getattr(args, "model", None) if args.url is not None else None)
        return Chat(server, entry, args.system, sampling).run()
    finally:
        server.close()


class Leave(Exception):
    """The user wants to leave."""


class Chat:
    """A conversation: its messages, its sampling parameters, and the commands that change them."""

    def __init__(
        self, server: ChatServer, entry: Mapping[str, Any], system: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self._server, self._entry, self._model = server, entry, entry["id"]
        self._system = system
        self._messages: list[dict[str, Any]] = []
        self._images: list[dict[str, Any]] = []  # of the next message
        self._sampling = dict(sampling or {})
        self._is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system, "/set": self._set, "/image": self._attach, "/clear": self._clear,
            "/save": self._save, "/load": self._load, "/help": self._help, "/exit": self._exit,
        }  # fmt: skip

    def run(self) -> int:
        """Read messages and commands until the input ends."""
        if self._is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # editing and history for input()
            _say(f"{self._model}: /help lists the commands, Ctrl-D leaves")
        status = 0
        while True:
            try:
                text = self._read()
                if text.strip():
                    self._take(text)
            except KeyboardInterrupt:
                _say("\nCtrl-D or /exit leaves")
            except (EOFError, Leave):
                if self._is_interactive:
                    _say("")
                return 0 if self._is_interactive else status
            except EngineError as error:
                status = 2
                _say(f"error: {' '.join(str(error).split())}")

    def _take(self, text: str) -> None:
        if not text.startswith("/"):
            self._ask(text)
            return
        name, _, rest = text.partition(" ")
        if name.strip() not in self._commands:
            raise RequestError(f"unknown command {name.strip()}{did_you_mean(name, self._commands)}; see /help")
        self._commands[name.strip()](rest.strip())

    def _read(self) -> str:
        """Return the next message or command. Raises EOFError at the end of the input."""
        text = self._line(PROMPT)
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES)
            while QUOTES not in text:
                text += "\n" + self._line(MORE)
            return text.partition(QUOTES)[0].strip("\n")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._line(MORE)
        return text

    def _line(self, prompt: str) -> str:
        if self._is_interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def _ask(self, text: str) -> None:
        """Send a message and print the answer. Without any answer, the message is forgotten."""
        content: Any = [*self._images, {"type": "text", "text": text}] if self._images else text
        asked = [*self._messages, {"role": "user", "content": content}]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        body = {"model": self._model, "messages": [*system, *asked], **self._sampling}
        answer = Answer()
        try:
            print_answer(self._server.stream("/v1/chat/completions", body), answer)
        except KeyboardInterrupt:
            _say("\n(stopped)" if answer.text else "(stopped)")
        else:
            print(flush=True)
            if answer.finish_reason == "length":
                _say("(cut: max_tokens, or the context is full; /clear begins anew)")
        finally:
            if answer.text or answer.finish_reason is not None:
                self._messages = [*asked, {"role": "assistant", "content": answer.text}]
                self._images = []

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "off" else text
        else:
            _say("no system message" if self._system is None else self._system)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if not name:
            defaults = self._entry.get("sampling_defaults") or {}
            for one, parameter in SAMPLING.items():
                found = self._sampling.get(one, f"{defaults[one]} (the model's)" if one in defaults else "default")
                _say(f"{one:<20} {found:<24} {parameter.help}")
            return
        if not value:
            raise RequestError(f"/set {name} needs a value: a number, or default")
        if value == "default" and name in SAMPLING:
            self._sampling.pop(name, None)
        else:
            self._sampling[name] = parsed(name, value)

    def _attach(self, text: str) -> None:
        takes = self._entry.get("input_modalities") or ["text"]
        if "image" not in takes:
            raise RequestError(f"{self._model} takes {', '.join(takes)} only, no images")
        path = Path(text).expanduser()
        kind = mimetypes.guess_type(path.name)[0] or ""
        if not kind.startswith("image/"):
            raise RequestError(f"{text or 'an empty path'} is not the name of an image file, such as photo.png")
        data = base64.b64encode(_read_bytes(path)).decode()
        self._images.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
        _say(f"{path.name} goes with the next message")

    def _clear(self, text: str) -> None:
        self._messages, self._images = [], []

    def _save(self, text: str) -> None:
        if not text:
            raise RequestError("/save needs the path of a file")
        found = {"model": self._model, "system": self._system, "sampling": self._sampling, "messages": self._messages}
        try:
            Path(text).expanduser().write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"can't write {text}: {error.strerror or error}") from error
        _say(f"{len(self._messages)} messages are in {text}")

    def _load(self, text: str) -> None:
        if not text:
            raise RequestError("/load needs the path of a file")
        try:
            found = json.loads(_read_bytes(Path(text).expanduser()))
            messages, sampling, system = found["messages"], found.get("sampling") or {}, found.get("system")
            roles = [(message["role"], message["content"]) for message in messages]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(f"{text} is not a conversation that /save wrote: {error}") from error
        self._sampling = {name: parsed(name, json.dumps(value)) for name, value in sampling.items()}
        self._messages = [{"role": role, "content": content} for role, content in roles]
        self._system = system
        _say(f"{len(self._messages)} messages")

    def _help(self, text: str) -> None:
        _say(HELP)

    def _exit(self, text: str) -> None:
        raise Leave


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"can't read {path}: {error.strerror or error}") from error


def _say(text: str) -> None:
    """Write a line about the conversation to standard error, which is no part of it."""
    print(text, file=sys.stderr, flush=True)
