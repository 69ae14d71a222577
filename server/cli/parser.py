"""The argument parser of the command line: errors of one line, and a help that shows the most used flags first.

Other flags belong to topics. `--help` lists their names, `--help=TOPIC`, `--help=FLAG` and `--help=all` describe them.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from graph_cache.utils.validation import did_you_mean

ALL = "all"
MOST_USED = "most used flags"
MAX_WIDTH = 100


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints errors as one line, and whose flags may belong to topics."""

    def __init__(self, prog: str | None = None, description: str | None = None, epilog: str | None = None):
        super().__init__(
            prog=prog, description=description, epilog=epilog, add_help=False, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self._most_used: Any = None
        self._topics: dict[str, Any] = {}
        self._flags_of: dict[str, list[str]] = {}
        self._help = self.add_argument("-h", "--help", action=_Help, help="show this help and exit")

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def add_most_used(self, *names: str, **options: Any) -> None:
        """Add a flag that `--help` describes first."""
        if self._most_used is None:
            self._most_used = self.add_argument_group(MOST_USED)
        self._most_used.add_argument(*names, **options)

    def add_to_topic(self, topic: str, *names: str, **options: Any) -> None:
        """Add a flag of which `--help` shows the name only."""
        if not self._topics:
            self._help.nargs, self._help.metavar = "?", "TOPIC"
            self._help.help = "show this help, or that of a topic or flag, and exit"
        if topic not in self._topics:
            self._topics[topic], self._flags_of[topic] = self.add_argument_group(topic), []
        self._topics[topic].add_argument(*names, **options)
        self._flags_of[topic].append(names[0])

    def actions(self) -> list[argparse.Action]:
        """Return the arguments, positional and optional, in the order in which they were added."""
        return list(self._actions)

    def subcommands(self) -> dict[str, Parser]:
        """Return the parsers of the subcommands."""
        return {
            name: parser
            for action in self._actions if isinstance(action.choices, dict)
            for name, parser in action.choices.items()
        }  # fmt: skip

    def flags(self) -> list[str]:
        """Return all flags, including the subcommands' flags."""
        own = [name for action in self._actions for name in action.option_strings]
        return own + [flag for parser in self.subcommands().values() for flag in parser.flags()]

    def format_help(self) -> str:
        """Return the help, in which topics are folded to the names of their flags."""
        return self.help_for(None)

    def help_for(self, wanted: str | None) -> str:
        """Return the help, or that of a topic, of a flag, or of "all". An unknown word ends the program."""
        groups, epilog, usage = self._action_groups, self.epilog, self.usage
        topics = list(self._topics.values())
        if wanted is not None and wanted not in self._topics and wanted != ALL:
            return self._help_of_flags(wanted)
        rest = [group for group in groups if group is not self._most_used and group not in topics]
        if topics and wanted is None:
            self.epilog = "\n\n".join(filter(None, [epilog, self._folded()]))
        if topics:
            names = (action.metavar or action.dest for action in self._actions if not action.option_strings)
            self.usage = " ".join(["%(prog)s", *map(str, names), "[OPTION ...]"])
        shown = [self._topics[wanted]] if wanted in self._topics else self._in_order(rest, topics * (wanted == ALL))
        self._action_groups = shown
        try:
            return super().format_help()
        finally:
            self._action_groups, self.epilog, self.usage = groups, epilog, usage

    def _in_order(self, rest: Sequence[Any], topics: Sequence[Any]) -> list[Any]:
        positionals, *others = rest
        return [positionals, *filter(None, [self._most_used]), *others, *topics]

    def _folded(self) -> str:
        """Return the topics with the names of their flags."""
        width = min(shutil.get_terminal_size().columns - 2, MAX_WIDTH)
        margin = max(map(len, self._topics)) + 4
        lines = ["more flags, by topic (--help=TOPIC or --help=FLAG describes them, --help=all all flags):"]
        for topic, flags in self._flags_of.items():
            text = textwrap.fill(" ".join(flags), max(width - margin, 30), break_on_hyphens=False)
            lines.append(f"  {topic:<{margin - 2}}" + text.replace("\n", "\n" + " " * margin))
        return "\n".join(lines)

    def _help_of_flags(self, wanted: str) -> str:
        """Return the help of the flags whose names contain a word."""
        word = wanted.lstrip("-").replace("_", "-")
        found = [action for action in self._actions if any(word in name for name in action.option_strings)]
        exact = [action for action in found if f"--{word}" in action.option_strings]
        if not word or not found:
            known = [*self._topics, *(name.lstrip("-") for name in self.flags())]
            self.error(f"--help={wanted}: no such topic or flag{did_you_mean(word, known)}")
        formatter = self._get_formatter()
        formatter.start_section(f"flags of {self.prog}")
        formatter.add_arguments(exact or found)
        formatter.end_section()
        return formatter.format_help()


class _Help(argparse.Action):
    """Print the help. With topics, a word may follow."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, _: Any, value: Any, flag: str | None = None) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.help_for(value or None), end="")
        parser.exit()


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return the `type` of an argument that is a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse
