"""What `encore chat` and `encore run` share: their flags, sampling parameters, and the printing of an answer."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, NamedTuple, TextIO

from engine.errors import ConfigError, RequestError
from graph_cache.utils.validation import did_you_mean
from server.cli.chat_server import ChatServer, open_server
from server.cli.parser import Parser

API_KEY = "ENCORE_API_KEY"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# Control characters but tab and line feed: in a terminal, they could move the cursor or change settings.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# One request at a time needs graphs and memory for one sequence.
DEFAULTS = {"max_num_seqs": 1}


class Parameter(NamedTuple):
    """A sampling parameter of the commands."""

    parse: Any
    metavar: str
    help: str


SAMPLING: dict[str, Parameter] = {
    "temperature": Parameter(float, "X", "sampling temperature; 0 is greedy"),
    "top_p": Parameter(float, "X", "cumulative probability of the tokens to sample from"),
    "top_k": Parameter(int, "N", "number of top tokens to sample from; 0: all"),
    "min_p": Parameter(float, "X", "drop tokens less likely than this share of the most likely one"),
    "repetition_penalty": Parameter(float, "X", "divides the scores of tokens of prompt and output"),
    "frequency_penalty": Parameter(float, "X", "subtracted from a token's logit for each time it was generated"),
    "presence_penalty": Parameter(float, "X", "subtracted once from the logits of generated tokens"),
    "max_tokens": Parameter(int, "N", "maximum number of generated tokens"),
    "min_tokens": Parameter(int, "N", "nothing ends the answer before this many tokens"),
    "seed": Parameter(int, "N", "seed of the random numbers"),
    "stop": Parameter(str, "TEXT", "stop string"),
}


def add_arguments(parser: Parser, *, leave_out: frozenset[str] = frozenset()) -> None:
    """Add the flags of both commands. `leave_out`: engine settings that are no flags of the command."""
    from engine.config import EngineConfig
    from server.cli.flags import add_flags

    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--url", metavar="URL", help="use the server at this address instead of loading the model")
    parser.add_argument("--api-key", metavar="KEY", help=f"API key of that server (default: ${API_KEY})")
    group = parser.add_argument_group("sampling", "Default: the model's.")
    for name, parameter in SAMPLING.items():
        if name == "seed":  # also a setting of the engine
            continue
        flag, text = "--" + name.replace("_", "-"), parameter.help
        if name == "stop":
            group.add_argument(flag, action="append", metavar="TEXT", help=f"{text}; may be repeated")
        else:
            group.add_argument(flag, type=parameter.parse, metavar=parameter.metavar, help=text)
    add_flags(parser, EngineConfig, defaults=DEFAULTS, leave_out=leave_out)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given as flags. Raises RequestError."""
    found = {name: value for name in SAMPLING if (value := getattr(args, name, None)) is not None}
    check_sampling(found)
    return found


def check_sampling(given: Mapping[str, Any]) -> None:
    """Raise RequestError for a value out of range."""
    from engine.protocol.request import SamplingParams

    SamplingParams.from_dict(dict(given))


def parsed(name: str, text: str) -> Any:
    """Return the value of a sampling parameter as it was typed. Raises RequestError."""
    if name not in SAMPLING:
        raise RequestError(f"unknown parameter {name!r}{did_you_mean(name, SAMPLING)}; known: {', '.join(SAMPLING)}")
    try:
        value = json.loads(text) if name == "stop" and text.startswith(("[", '"')) else SAMPLING[name].parse(text)
    except ValueError as error:
        kind = {float: "a number", int: "a whole number"}.get(SAMPLING[name].parse, "a text, or a JSON list of texts")
        raise RequestError(f"{name} must be {kind}; found {text!r}") from error
    check_sampling({name: value})
    return value


def server_of(args: argparse.Namespace) -> ChatServer:
    """Return the server that a command's flags name. Raises ConfigError for flags that it would not follow."""
    from engine.config import EngineConfig
    from server.cli.flags import given

    settings = {name: value for name, value in given(args, EngineConfig).items() if value is not None}
    if args.url is None:
        if args.api_key is not None:
            raise ConfigError("--api-key has no effect without --url: remove it")
        return open_server(None, None, DEFAULTS | settings)
    for name in settings:
        if name not in ("model", "seed"):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect with --url: it is a setting of the server")
    return open_server(args.url, args.api_key or os.environ.get(API_KEY), {})


class Answer:
    """A streamed answer: what it says, and why it ended (None while it runs, or if it was stopped)."""

    def __init__(self) -> None:
        self.text, self.finish_reason = "", None


def print_answer(events: Generator[Mapping[str, Any]], answer: Answer) -> None:
    """Print an answer as it arrives, and add it to `answer`: text to standard output, reasoning to standard error.

    On a terminal, control characters are replaced. In other outputs the text is as the model wrote it.
    """
    reasoning = _Section(sys.stderr, dim=True)
    with closing(events):
        for event in events:
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {"content": choice.get("text")}
                if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                    reasoning.write(thought)
                if text := delta.get("content"):
                    reasoning.end()
                    answer.text += text
                    write(sys.stdout, text)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    reasoning.end()


def write(stream: TextIO, text: str) -> None:
    """Write a model's text at once; on a terminal, without control characters."""
    stream.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if stream.isatty() else text)
    stream.flush()


class _Section:
    """A part of the output that ends with a line break; dim on a terminal with colours."""

    def __init__(self, stream: TextIO, dim: bool):
        self._stream, self._is_open = stream, False
        self._dim = dim and stream.isatty() and "NO_COLOR" not in os.environ

    def write(self, text: str) -> None:
        if not self._is_open and self._dim:
            self._stream.write(DIM)
        self._is_open = True
        write(self._stream, text)

    def end(self) -> None:
        if self._is_open:
            self._stream.write(f"{PLAIN}\n" if self._dim else "\n")
            self._stream.flush()
        self._is_open = False
