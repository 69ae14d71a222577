"""Shell completions, generated from the parsers: commands, flags, the values of flags, and files.

Each script finds the command that is being typed by following its words, then offers what may follow.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from engine.config import DEFAULT_MODEL
from engine.library.recommended import RECOMMENDED
from server.cli.parser import Parser

SHELLS = ("bash", "zsh", "fish")
FILE_METAVARS = ("FILE", "FILE|URL", "IN.jsonl", "OUT.jsonl")
FILE_FLAGS = ("--model", "--api-key-file", "--admin-key-file", "--profile-folder", "--graph-manifest")
MODELS = (DEFAULT_MODEL, *(one.name for one in RECOMMENDED if one.name != DEFAULT_MODEL))


@dataclass(frozen=True)
class Value:
    """The values of a flag or of a positional argument: `words`, and files if `is_file`."""

    words: tuple[str, ...] = ()
    is_file: bool = False


@dataclass
class Place:
    """A command: the words that lead to it, the commands below it, its flags, and its positional arguments.

    `flags` are name -> (help, value); value is None for a flag without one.
    """

    words: tuple[str, ...]
    help: str
    below: dict[str, str] = field(default_factory=dict)
    flags: dict[str, tuple[str, Value | None]] = field(default_factory=dict)
    positionals: Value = Value()

    @property
    def name(self) -> str:
        return "/".join(self.words)


def script(shell: str, prog: str, parsers: Mapping[str, Parser]) -> str:
    """Return the completion script of a shell for a program with these commands. A name may have several words."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](prog, list(places(parsers)))


def places(parsers: Mapping[str, Parser]) -> Iterator[Place]:
    """Yield every command, the program itself first."""
    found: dict[tuple[str, ...], Place] = {(): Place((), "")}
    found[()].flags |= {"--help": ("show the help", None), "--version": ("show the version", None)}
    for name, parser in parsers.items():
        _add(found, tuple(name.split()), parser)
    yield from found.values()


def _add(found: dict[tuple[str, ...], Place], words: tuple[str, ...], parser: Parser) -> None:
    text = parser.description or ""
    place = found[words] = Place(words, text)
    found[words[:-1]].below[words[-1]] = text
    positionals: list[Value] = []
    for action in parser.actions():
        value = _value(action)
        if not action.option_strings:
            positionals += [] if isinstance(action.choices, dict) else [value]
        for name in action.option_strings:
            if name.startswith("--"):
                takes_none = action.nargs == 0 or name == "--help"
                place.flags[name] = (" ".join((action.help or "").split()), None if takes_none else value)
    place.positionals = Value(
        tuple(word for one in positionals for word in one.words), any(one.is_file for one in positionals)
    )
    for name, below in parser.subcommands().items():
        _add(found, (*words, name), below)


def _value(action: argparse.Action) -> Value:
    name = action.option_strings[0] if action.option_strings else f"--{action.dest}"
    words = MODELS if name == "--model" else tuple(map(str, action.choices or ()))
    return Value(words, name in FILE_FLAGS or action.metavar in FILE_METAVARS)


def _walk(found: list[Place], start: int, word: str) -> list[str]:
    """Return the lines of a loop that follows the words, in the syntax that bash and zsh share."""
    steps = [
        f"      {shlex.quote(f'{place.name}:{name}')}) place={shlex.quote('/'.join((*place.words, name)))} ;;"
        for place in found
        for name in place.below
    ]
    return [
        f"  for ((i = {start}; i < {word}; i++)); do",
        '    case "$place:${words[i]}" in',
        *steps,
        "    esac",
        "  done",
    ]


def _bash(prog: str, found: list[Place]) -> str:
    lines = [
        f"# Completions of {prog} for bash: source <({prog} completion bash)",
        f"_{prog}() {{",
        '  local words=("${COMP_WORDS[@]}") word="${COMP_WORDS[COMP_CWORD]}" place="" i values="" files="" flags=""',
        '  local previous="${COMP_WORDS[COMP_CWORD-1]}"',
        '  if [[ $word == "=" ]]; then word=""',
        '  elif [[ $previous == "=" ]]; then previous="${COMP_WORDS[COMP_CWORD-2]}"',
        "  fi",
        "  COMPREPLY=()",
        *_walk(found, 1, "COMP_CWORD"),
        '  case "$place:$previous" in',
    ]
    for place in found:
        for name, (_, value) in place.flags.items():
            if value is not None:
                lines.append(f"    {place.name}:{name}) {_offer(value)}")
    lines.append('    *) case "$place" in')
    for place in found:
        words = " ".join((*place.below, *place.positionals.words))
        files = "files=yes; " if place.positionals.is_file else ""
        flags = shlex.quote(" ".join(place.flags))
        lines.append(f"      {shlex.quote(place.name)}) values={shlex.quote(words)}; {files}flags={flags} ;;")
    lines += [
        "    esac ;;",
        "  esac",
        '  [[ $word == -* ]] && values="$flags"',
        '  COMPREPLY=($(compgen -W "$values" -- "$word"))',
        "  if [[ $files && $word != -* ]]; then",
        "    compopt -o filenames 2>/dev/null",
        '    COMPREPLY+=($(compgen -f -- "$word"))',
        "  fi",
        "}",
        f"complete -F _{prog} {prog}",
    ]
    return "\n".join(lines) + "\n"


def _offer(value: Value) -> str:
    words = f"values={shlex.quote(' '.join(value.words))}; " if value.words else ""
    return f"{words}{'files=yes; ' if value.is_file else ''};;".replace("; ;;", " ;;")


def _zsh(prog: str, found: list[Place]) -> str:
    lines = [
        f"#compdef {prog}",
        f'# Completions of {prog} for zsh: {prog} completion zsh > "${{fpath[1]}}/_{prog}", then start zsh again',
        f"_{prog}() {{",
        '  local word="${words[CURRENT]}" previous="${words[CURRENT-1]}" place="" i files=""',
        "  local -a values flags",
        "  if [[ $word == --*=* ]]; then",
        '    previous="${word%%=*}"',
        "    compset -P '*='",
        "  fi",
        *_walk(found, 2, "CURRENT"),
        '  case "$place:$previous" in',
    ]
    for place in found:
        for name, (_, value) in place.flags.items():
            if value is not None:
                words = f"values=({' '.join(map(shlex.quote, value.words))}); " if value.words else ""
                files = "files=yes; " if value.is_file else ""
                lines.append(f"    {place.name}:{name}) {words}{files};;".replace("; ;;", " ;;"))
    lines.append('    *) case "$place" in')
    for place in found:
        described = [_described(name, text) for name, text in place.below.items()]
        values = " ".join((*described, *map(shlex.quote, place.positionals.words)))
        flags = " ".join(_described(name, text) for name, (text, _) in place.flags.items())
        files = "files=yes; " if place.positionals.is_file else ""
        lines.append(f"      {shlex.quote(place.name)}) values=({values}); {files}flags=({flags}) ;;")
    lines += [
        "    esac ;;",
        "  esac",
        "  if [[ $word == -* && $word != --*=* ]]; then",
        "    _describe -o flag flags",
        "  else",
        "    (( $#values )) && _describe value values",
        "    [[ -n $files ]] && _files",
        "  fi",
        "}",
        f'if [[ $funcstack[1] == "_{prog}" ]]; then _{prog} "$@"; else compdef _{prog} {prog}; fi',
    ]
    return "\n".join(lines) + "\n"


def _described(name: str, text: str) -> str:
    return shlex.quote(f"{name}:{text}")


def _fish(prog: str, found: list[Place]) -> str:
    lines = [
        f"# Completions of {prog} for fish: {prog} completion fish > ~/.config/fish/completions/{prog}.fish",
        f"function __{prog}_at --description 'Whether the command that is typed is the given one'",
        "  set -l place ''",
        "  for word in (commandline -opc)[2..]",
        '    switch "$place:$word"',
    ]
    for place in found:
        for name in place.below:
            lines += [
                f"      case {_quoted(f'{place.name}:{name}')}",
                f"        set place {_quoted('/'.join((*place.words, name)))}",
            ]
    lines += ["    end", "  end", '  test "$place" = "$argv[1]"', "end", f"complete -c {prog} -f"]
    for place in found:
        at = f"complete -c {prog} -n {_quoted(f'__{prog}_at {_quoted(place.name)}')}"
        for name, text in place.below.items():
            lines.append(f"{at} -a {name} -d {_quoted(text)}")
        lines += [f"{at} -a {_quoted(word)}" for word in place.positionals.words]
        if place.positionals.is_file:
            lines.append(f"{at} -F")
        for name, (text, value) in place.flags.items():
            kind = "" if value is None else " -r -F" if value.is_file else " -x"
            words = f" -a {_quoted(' '.join(value.words))}" if value is not None and value.words else ""
            lines.append(f"{at} -l {name.removeprefix('--')}{kind}{words} -d {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
