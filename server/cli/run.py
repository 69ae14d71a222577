"""`encore run MODEL PROMPT`: answer one prompt. Only the answer goes to standard output."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from engine.errors import ConfigError
from server.cli.answers import Answer, print_answer, sampling_of, server_of
from server.cli.answers import add_arguments as add_shared_arguments
from server.cli.chat_server import AnswerError, ChatServer, model_entry
from server.cli.parser import Parser

NO_TEMPLATE = "has no chat template"  # in the refusal of a chat


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="name, folder or .gguf file; with --url a name that it serves")
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT",
        help="prompt text; several are joined by line breaks; - stands for standard input, also the default",
    )  # fmt: skip
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add_shared_arguments(parser, leave_out=frozenset({"model"}))


def run(args: argparse.Namespace) -> int:
    """Print the answer and return the exit status. Raises EngineError."""
    prompt = _prompt(args.prompt)
    if args.raw and args.system is not None:
        raise ConfigError("--system has no effect with --raw: write it into the prompt")
    sampling = sampling_of(args)
    server = server_of(args)
    try:
        name = model_entry(server, args.model if args.url is not None else None)["id"]
        answer = _answer(server, name, prompt, args, sampling)
    finally:
        server.close()
    if answer.finish_reason == "length":
        own = "the end of the context, or the model's default length"
        limit = f"--max-tokens {args.max_tokens}" if args.max_tokens is not None else own
        print(f"encore run: the answer was cut at {limit}", file=sys.stderr)
    return 0


def _prompt(words: list[str]) -> str:
    if not words and sys.stdin.isatty():
        raise ConfigError("give a prompt, or pipe one into the command; `encore chat` opens a conversation")
    if words.count("-") > 1:
        raise ConfigError("standard input (-) can be read only once: give - once")
    prompt = "\n".join(sys.stdin.read() if word == "-" else word for word in words or ["-"])
    if not prompt.strip():
        raise ConfigError("the prompt is empty: give a text")
    return prompt


def _answer(server: ChatServer, model: str, prompt: str, args: argparse.Namespace, sampling: dict[str, Any]) -> Answer:
    answer = Answer()
    try:
        if args.raw:
            _complete(server, model, prompt, sampling, answer)
            return answer
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        messages = [*system, {"role": "user", "content": prompt}]
        try:
            body = {"model": model, "messages": messages, **sampling}
            print_answer(server.stream("/v1/chat/completions", body), answer)
        except AnswerError as error:
            if NO_TEMPLATE not in str(error) or system:
                raise
            print(f"encore run: {model} {NO_TEMPLATE}: continuing the prompt as it is", file=sys.stderr)
            _complete(server, model, prompt, sampling, answer)
        return answer
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)


def _complete(server: ChatServer, model: str, prompt: str, sampling: dict[str, Any], answer: Answer) -> None:
    limit = {}
    if "max_tokens" not in sampling:  # the route's own default is 16 tokens
        tokens = server.post("/tokenize", {"model": model, "prompt": prompt})
        limit["max_tokens"] = max(1, tokens["max_model_len"] - tokens["count"])
    print_answer(server.stream("/v1/completions", {"model": model, "prompt": prompt, **sampling, **limit}), answer)
