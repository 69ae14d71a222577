"""The field bad_words as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the beginning of a text and after a space.

    Raises RequestError if there are words and the model has no tokenizer.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words needs the model's tokenizer, and this model has none", param="bad_words")
    found = {
        tuple(ids): None
        for word in words
        for text in (word.lstrip(), " " + word.lstrip())
        if (ids := tokenizer.encode(text, add_special_tokens=False))
    }
    return tuple(found)
