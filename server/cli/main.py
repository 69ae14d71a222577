"""The `encore` command line. Bad input prints one line and exits with status 2.

Each subcommand imports its own dependencies, and only the flags of the chosen one are built, so that `encore --help`
is fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from engine.utils.onednn import limit_onednn_caches
from engine.utils.openmp import limit_openmp_spinning
from engine.utils.processes.signals import hold_stop_signals
from engine.utils.processes.standard_files import open_standard_files
from graph_cache.utils.validation import did_you_mean
from server.cli.parser import Parser

PROG = "encore"
EPILOG = f"""\
examples:
  {PROG} serve --model ./my-model --port 9000
  {PROG} chat
  {PROG} run ./my-model "Say hello in French."
  {PROG} generate "Once upon a time" --max-tokens 32

{PROG} COMMAND --help lists the flags of a command."""


class Command(NamedTuple):
    """A subcommand. `add_arguments` adds its flags to a parser; `run` executes it and returns the exit status."""

    help: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    open_standard_files()
    limit_openmp_spinning()
    limit_onednn_caches()
    given = list(sys.argv[1:] if argv is None else argv)
    words = [" ".join(given[:2]), *given[2:]] if " ".join(given[:2]) in COMMANDS else given  # a command of two words
    chosen = next((word for word in words if word in COMMANDS), None)
    if chosen == "serve" and argv is None:  # called as a program
        hold_stop_signals()  # until the server handles them: its imports take a second
    parser = build_parser(chosen)
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        parser.error(f"unknown command {words[0]!r}{did_you_mean(words[0], COMMANDS)}")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(args.command, unknown[0])
    args.words = given
    return _guarded(args, COMMANDS[args.command].run)


def build_parser(chosen: str | None) -> Parser:
    """Return the command line's parser; only the subcommand `chosen` has its arguments."""
    parser = Parser(
        prog=PROG,
        description="An LLM inference server that answers by replaying captured graphs.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action=_ShowVersion, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            command.add_arguments(sub)
    return parser


def command_parser(*words: str) -> Parser:
    """Return the parser of a command, such as `bench serve` or `models pull`, with all its arguments."""
    for count in range(len(words), 0, -1):
        if (name := " ".join(words[:count])) in COMMANDS:
            parser = Parser(prog=f"{PROG} {name}", description=COMMANDS[name].help)
            COMMANDS[name].add_arguments(parser)
            for word in words[count:]:
                parser = parser.subcommands()[word]
            return parser
    raise KeyError(words)


def _refuse(command: str, word: str) -> NoReturn:
    """Print that an argument is unknown, with the nearest flag of the command, and exit with status 2."""
    parser = command_parser(command)
    near = did_you_mean(word.partition("=")[0], parser.flags()) if word[0] == "-" else ""
    parser.error(f"unknown argument {word}{near}")


def _guarded(args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Run a command. An error that the user can fix prints one line and returns status 2."""
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # stdout was closed, for example by `| head`
        sys.stderr.close()
        return 141
    except Exception as exc:
        if not _is_user_error(exc):
            raise
        from server.cli.spelling import spell_settings

        message = spell_settings(" ".join(str(exc).split()), args, only_flags=args.command not in SERVING_COMMANDS)
        print(f"{PROG} {args.command}: error: {message}", file=sys.stderr)
        return 2


def _is_user_error(exc: Exception) -> bool:
    from engine.errors import EngineError
    from graph_cache.errors import GraphError

    return isinstance(exc, (EngineError, GraphError))


class _ShowVersion(argparse.Action):
    def __init__(self, *args: Any, **kwargs: Any):
        kwargs["nargs"] = 0
        super().__init__(*args, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from server.version import version

        print(f"{PROG} {version()}")
        parser.exit()


def _serve_arguments(parser: Parser) -> None:
    from server.cli.flags import add_serving_flags

    add_serving_flags(parser)


def _serve(args: argparse.Namespace) -> int:
    from server.cli.flags import server_config
    from server.launch import run

    run(server_config(args))
    return 0


def _generate_arguments(parser: Parser) -> None:
    from engine.config import EngineConfig
    from server.cli.flags import add_flags

    parser.add_argument("prompt", help="prompt text; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="maximum number of tokens to generate (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="sampling temperature; 0 is greedy (default: 0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="cumulative probability of the tokens to sample from (default: 1)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="number of top tokens to sample from (default: all)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    add_flags(parser, EngineConfig, defaults={})


def _generate(args: argparse.Namespace) -> int:
    from server.cli.commands import generate

    return generate(args)


def _chat_arguments(parser: Parser) -> None:
    from server.cli import chat

    chat.add_arguments(parser)


def _chat(args: argparse.Namespace) -> int:
    from server.cli import chat

    return chat.run(args)


def _run_arguments(parser: Parser) -> None:
    from server.cli import run

    run.add_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    from server.cli import run

    return run.run(args)


def _graphs_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the running server (default: %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="list graphs without a replay too")
    parser.add_argument("--json", action="store_true", help="print the server's JSON")


def _graphs(args: argparse.Namespace) -> int:
    from server.cli.commands import graphs

    return graphs(args)


def _tune_arguments(parser: Parser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--manifest", metavar="FILE", help="manifest written by a server")
    source.add_argument("--metrics", metavar="FILE|URL", help="saved /metrics page, or a server's URL")
    source.add_argument(
        "--packed", metavar="FILE",
        help="documents per batch of packed training data: a JSON object to number of batches, or a list",
    )  # fmt: skip
    parser.add_argument("--site", metavar="NAME", help="count this site only")
    parser.add_argument("--phase", help="count this phase only (default: decode)")
    parser.add_argument(
        "--max-size", type=int, metavar="N",
        help="largest batch size, always a bucket (default: the server's max_num_seqs, else the largest observed)",
    )  # fmt: skip
    parser.add_argument(
        "--max-buckets",
        type=int,
        metavar="N",
        help="maximum number of buckets, including the largest (default: no limit with --max-bytes, else as many as "
        "the default ladder has)",
    )
    parser.add_argument("--max-bytes", type=int, metavar="N", help="maximum total bytes of the graphs; needs --graphs")
    parser.add_argument("--graphs", metavar="FILE|URL", help="saved /graphs response, or its URL, for bytes per graph")
    parser.add_argument(
        "--eager-cost", type=float, metavar="N",
        help="with --packed: time lost by an eager batch, in padding documents (default: 640)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def _tune(args: argparse.Namespace) -> int:
    from server.cli.commands import tune

    return tune(args)


def _bench_arguments(parser: Parser) -> None:
    from server.cli import bench

    bench.add_arguments(parser)


def _bench(args: argparse.Namespace) -> int:
    from server.cli import bench

    return bench.run(args)


def _models_arguments(parser: Parser) -> None:
    from server.cli import models

    models.add_arguments(parser)


def _models(args: argparse.Namespace) -> int:
    from server.cli import models

    return models.run(args)


def _quantize_arguments(parser: Parser) -> None:
    from server.cli import quantize

    quantize.add_arguments(parser)


def _quantize(args: argparse.Namespace) -> int:
    from server.cli import quantize

    return quantize.run(args)


def _batch_arguments(parser: Parser) -> None:
    from server.cli import batch

    batch.add_arguments(parser)


def _batch(args: argparse.Namespace) -> int:
    from server.cli import batch

    return batch.run(args)


def _bench_serve_arguments(parser: Parser) -> None:
    from server.cli import bench_serve

    bench_serve.add_arguments(parser)


def _bench_serve(args: argparse.Namespace) -> int:
    from server.cli import bench_serve

    return bench_serve.run(args)


def _completion_arguments(parser: Parser) -> None:
    from server.cli.completion import SHELLS

    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")


def _completion(args: argparse.Namespace) -> int:
    from server.cli.completion import script

    print(script(args.shell, PROG, {name: command_parser(name) for name in COMMANDS}), end="")
    return 0


SERVING_COMMANDS = ("serve", "batch")  # also read ENCORE_* variables and a file
COMMANDS: dict[str, Command] = {
    "serve": Command("serve a model over HTTP", _serve_arguments, _serve),
    "chat": Command("chat with a model in the terminal", _chat_arguments, _chat),
    "run": Command("answer one prompt and stream the answer", _run_arguments, _run),
    "generate": Command("generate from one prompt and stream the output", _generate_arguments, _generate),
    "graphs": Command("show a running server's graph table", _graphs_arguments, _graphs),
    "tune": Command(
        "choose the buckets with the least padding for observed traffic, or the maximum of packed sequences",
        _tune_arguments,
        _tune,
    ),
    "models": Command("list, pull, show and remove models", _models_arguments, _models),
    "quantize": Command("write a model folder with quantised weights", _quantize_arguments, _quantize),
    "batch": Command("run a file of requests in OpenAI's batch format", _batch_arguments, _batch),
    "bench": Command("measure latency and throughput without a server", _bench_arguments, _bench),
    "bench serve": Command("load a running server and measure it", _bench_serve_arguments, _bench_serve),
    "completion": Command("print the completions of a shell", _completion_arguments, _completion),
}


if __name__ == "__main__":
    sys.exit(main())
