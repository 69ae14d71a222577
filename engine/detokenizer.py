"""Token ids to text as they come, and the search for stop strings in it.

Owns the two streams of one sequence: ids to text that is never taken back, text to text that holds no stop string.
Knows no requests and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

_UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are not, or not yet, a character
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens
_CONTEXT = 8  # tokens of the prompt that decide how the first token is written


class Decoder(Protocol):
    """What of a tokenizer is needed: engine.tokenizer.Tokenizer has it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one sequence's output, piece by piece.

    The pieces together equal the text that the output adds to the prompt's: the decode of the output alone, except
    that a tokenizer which drops a leading space drops none here. The end of an unfinished character is held back
    until the token that completes it, or `finish`. Equality is exact for byte-level tokenizers whatever the ids; a
    byte-fallback tokenizer takes back good characters beside bytes that never become one, which a stream can't.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._pending: list[int] = []
        # Written already; decides the spaces of what follows. It begins with a whole character: some tokenizers give
        # up good bytes that stand beside half a character.
        for length in range(_CONTEXT, _CONTEXT - _LONGEST_CHARACTER, -1):
            self._context = list(prompt_ids[-length:])
            self._context_text = self._decode(self._context)
            if not self._context_text.startswith(_UNKNOWN):
                break

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._pending += token_ids
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if not text.endswith(_UNKNOWN):
            return self._release(text, len(self._pending))
        if len(self._pending) <= _LONGEST_CHARACTER:
            return ""
        # More than one character waits, so some bytes will never be one: release what later bytes can't change.
        for count in range(len(self._pending) - 1, 0, -1):
            head = self._decode(self._context + self._pending[:count])
            if head + self._decode(self._pending[count:]) == text:
                return self._release(head, count)
        return ""

    def finish(self) -> str:
        """What is held back, as it is."""
        if not self._pending:
            return ""
        return self._release(self._decode(self._context + self._pending), len(self._pending))

    def _release(self, text: str, count: int) -> str:
        """The part of `text` not yet written, where `text` is the context and the first `count` pending tokens."""
        new = text[self._written(text) :]
        released, self._pending = self._pending[:count], self._pending[count:]
        if new:
            self._context = released
            self._context_text = self._decode(released)
        elif not self._context_text:
            # Nothing was written at all so far: these tokens, though without text, are what the next one follows.
            self._context = (self._context + released)[-_CONTEXT:]
        return new

    def _written(self, text: str) -> int:
        if not text.startswith(self._context_text) and self._context_text.endswith(_UNKNOWN):
            return len(self._context_text.rstrip(_UNKNOWN))  # the prompt ended within a character, now complete
        return len(self._context_text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces, wherever the pieces break.

    First means: whose last character comes first; of several that end together, the longest. Text that may be the
    beginning of a stop string is held back until it is known.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False):
        self._stops = tuple(stops)
        self._include = include_in_output
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(stops)  # how many characters of each stop string the text now ends with
        self._held = ""

    def add(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text that can be shown, and the stop string found or None. While not `armed`, what is found is ignored.

        After a find the object is done: what followed the stop string is dropped.
        """
        if not self._stops:
            return text, None
        for count, character in enumerate(text, start=1):
            ended = self._step(character)
            if armed and ended:
                stop = max(ended, key=len)
                shown = self._held + text[:count]
                return (shown if self._include else shown[: len(shown) - len(stop)]), stop
        shown = self._held + text
        hold = max(self._matched)
        self._held = shown[len(shown) - hold :]
        return shown[: len(shown) - hold], None

    def finish(self) -> str:
        """What is held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> list[str]:
        """Advance every search by one character; the stop strings that end with it."""
        ended = []
        for i, stop in enumerate(self._stops):
            n, fallbacks = self._matched[i], self._fallbacks[i]
            while n and stop[n] != character:
                n = fallbacks[n - 1]
            if stop[n] == character:
                n += 1
            if n == len(stop):
                ended.append(stop)
                n = fallbacks[n - 1]
            self._matched[i] = n
        return ended


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that also ends it (Knuth, Morris, Pratt)."""
    lengths = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = lengths[n - 1]
        if stop[i] == stop[n]:
            n += 1
        lengths[i] = n
    return lengths
