"""Added tokens of a tokenizer's files: their form, their limits, and adding those that tokenizer.json lacks."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import ModelError
from engine.text.load_warnings import warn

logger = logging.getLogger(__name__)

# The tokenizers library keeps a search automaton of all added tokens, with about 80 bytes per character. Speech and
# image models add the most: 65,536 tokens of 10 characters (Llasa), 32,768 of 23 (Emu3).
MAX_ADDED_TOKENS = 100_000
MAX_TOKEN_CHARS = 4096
MAX_ADDED_CHARS = 4 * 2**20
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Declared:
    """An added token that a file declares; `index` is its id there, `with_flags` whether the file gives its flags."""

    token: AddedToken
    index: int | None = None
    with_flags: bool = False


def read_token(value: Any, special: bool | None = None) -> AddedToken:
    """Return the token of a JSON value: its text, or an object with `content` and flags. `special` replaces that flag.

    Raises ValueError for another value.
    """
    fields = {"content": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or not isinstance(fields.get("content"), str):
        raise ValueError(f"an added token must be text or an object with 'content', found {str(value)[:100]!r}")
    flags = {name: bool(fields[name]) for name in FLAGS if fields.get(name) is not None}
    return AddedToken(fields["content"], **flags if special is None else flags | {"special": special})


def require_limits(contents: Iterable[str], where: str) -> None:
    """Raise ModelError if a tokenizer has more or longer added tokens than the limits; `where` names the file."""
    require_counts(contents, where, "added tokens", MAX_ADDED_TOKENS, MAX_ADDED_CHARS)


def require_counts(contents: Iterable[str], where: str, what: str, max_count: int, max_chars: int) -> None:
    """Raise ModelError if there are more texts than `max_count`, or more characters in one or all of them."""
    lengths = list(map(len, contents))
    for found, limit, measure in (
        (len(lengths), max_count, what),
        (max(lengths, default=0), MAX_TOKEN_CHARS, f"characters in one of its {what}"),
        (sum(lengths), max_chars, f"characters in all {what}"),
    ):
        if found > limit:
            raise ModelError(f"{where} has {found} {measure}, and at most {limit} are read: give the model's own file")


def add_missing(
    backend: tokenizers.Tokenizer, declared: Sequence[Declared], named: Container[str], folder: str
) -> None:
    """Add the tokens that are no added tokens of `backend` yet; those in `named` become special.

    Where both have a token, its id and flags in `backend` stay, and a warning is logged if they differ. Raises
    ModelError for a new token that doesn't get its declared id: the model would read another row of its embedding.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    new: dict[str, AddedToken] = {}
    for one in declared:
        if one.token.content not in known:
            new.setdefault(one.token.content, one.token)
    require_limits([*known, *new], folder)
    size = backend.get_vocab_size(with_added_tokens=True)
    if new:  # even for none, the library would build its automaton again
        backend.add_tokens([_special(token) if text in named else token for text, token in new.items()])
    differing = []
    for one in declared:
        text = one.token.content
        index = backend.token_to_id(text)
        if one.index not in (None, index) and index is not None and index >= size:
            raise ModelError(
                f"{folder}: the added token {text!r} is declared with id {one.index}, but tokenizer.json has {size} "
                f"tokens without it, so it would get id {index}: add it to tokenizer.json"
            )
        same_flags = not one.with_flags or text not in known or _flags(one.token) == _flags(known[text])
        if one.index not in (None, index) or not same_flags:
            differing.append(text)
    if differing:
        shown = ", ".join(map(repr, differing[:3])) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        warn(logger, "%s: ids and flags of tokenizer.json are used; another file differs in %s", folder, shown)


def _special(token: AddedToken) -> AddedToken:
    return read_token({name: getattr(token, name) for name in ("content", *FLAGS)}, special=True)


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return tuple(getattr(token, name) for name in FLAGS)
