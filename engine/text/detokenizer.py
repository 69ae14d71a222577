"""Incremental detokenization and the search for stop strings in its output.

Text that was returned is never taken back: incomplete characters and possible stop strings are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable, Sequence
from os.path import commonprefix
from typing import Any, Protocol

from tokenizers import decoders

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are invalid, or not yet complete, in UTF-8
_MAX_UTF8_BYTES = 4  # per character, so a character spans at most as many tokens
_CONTEXT_TOKENS = 8  # last prompt tokens that are decoded with the first output token


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's byte-level alphabet.

    Printable bytes stand for themselves; the others are mapped to the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = byte_alphabet()


class Decoder(Protocol):
    """The part of engine.text.tokenizer.Tokenizer that detokenization uses."""

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, shown: Container[int] = frozenset()
    ) -> str: ...


class Detokenizers:
    """Creates detokenizers for one tokenizer: table-based if it is byte-level, else based on its `decode`."""

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend", None)
        self._markers: frozenset[int] = getattr(tokenizer, "marker_ids", frozenset())
        self._pieces: dict[tuple[bool, bool], BytePieces] = {}

    def make(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True, show_markers: bool = False
    ) -> AnyDetokenizer:
        """Create a sequence's detokenizer. A prompt that ends within a character requires the one based on `decode`.

        With `show_markers`, special tokens that mark tool calls or reasoning are not skipped.
        """
        shown = self._markers if show_markers else frozenset()
        pieces = self._byte_pieces(skip_special_tokens, shown)
        if pieces is None or pieces.ends_mid_character(prompt_ids):
            return Detokenizer(self._tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens, shown=shown)
        return ByteDetokenizer(pieces)

    def _byte_pieces(self, skip: bool, shown: frozenset[int]) -> BytePieces | None:
        if not isinstance(getattr(self._backend, "decoder", None), decoders.ByteLevel):
            return None
        key = skip, bool(shown)
        if key not in self._pieces:
            self._pieces[key] = BytePieces(self._tokenizer, self._backend, skip, shown)
        return self._pieces[key]


class BytePieces(dict[int, str | bytes]):
    """Maps each id of a byte-level tokenizer to its text, or to bytes if it isn't a sequence of whole characters.

    Filled on demand. Decoding any sequence of ids equals concatenating their bytes and decoding these as UTF-8.
    """

    def __init__(
        self, tokenizer: Decoder, backend: Any, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ):
        super().__init__()
        self._tokenizer, self._backend = tokenizer, backend
        self._skip, self._shown = skip_special_tokens, shown

    def __missing__(self, token_id: int) -> str | bytes:
        skip = self._skip and token_id not in self._shown
        text = self._tokenizer.decode((token_id,), skip_special_tokens=skip)
        piece: str | bytes = text
        if _REPLACEMENT in text:
            token = self._backend.id_to_token(token_id)
            if all(character in _BYTES for character in token):  # an added token may contain U+FFFD itself
                raw = bytes(_BYTES[character] for character in token)
                piece = text if text.encode() == raw else raw
        self[token_id] = piece
        return piece

    def ends_mid_character(self, ids: Sequence[int]) -> bool:
        """Whether the text of `ids` ends with an incomplete character."""
        tail = b""
        for token_id in reversed(ids[-_CONTEXT_TOKENS:]):
            piece = self[token_id]
            if piece and isinstance(piece, str):
                break
            tail = (piece or b"") + tail
        return codecs.utf_8_decode(tail, "replace", False)[1] < len(tail)


class ByteDetokenizer:
    """Detokenizer for byte-level tokenizers: the same text as Detokenizer, with one table look-up per token."""

    __slots__ = ("_pieces", "_partial")

    def __init__(self, pieces: BytePieces):
        self._pieces = pieces
        self._partial = b""  # bytes of an incomplete character

    def add_one(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        piece = self._pieces[token_id]
        if not self._partial and isinstance(piece, str):
            return piece
        data = self._partial + (piece.encode() if isinstance(piece, str) else piece)
        text, read = codecs.utf_8_decode(data, "replace", False)
        self._partial = data[read:]
        return text

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; may be empty."""
        return "".join(map(self.add_one, token_ids))

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        half, self._partial = self._partial, b""
        return half.decode("utf-8", "replace")


class Detokenizer:
    """Converts one sequence's output ids to text piece by piece.

    The concatenated pieces equal the text that the output adds to the prompt's text: the decode of the output alone,
    but without dropping a leading space, as some tokenizers do. An incomplete character is held back until the token
    that completes it, or `finish`. For byte-level tokenizers this is exact for any ids, unless the prompt ends with an
    incomplete character that is followed by or contains tokens without text. A byte-fallback tokenizer replaces valid
    characters next to invalid bytes, which a stream can't do afterwards.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ):
        self._tokenizer = tokenizer
        self._skip, self._shown = skip_special_tokens, shown
        self._pending: list[int] = []
        # Tokens already written; they determine the spaces of what follows. The context must start with a whole
        # character, because some tokenizers replace valid bytes next to an incomplete character.
        for length in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS - _MAX_UTF8_BYTES, -1):
            self._context = list(prompt_ids[-length:])
            self._context_text = self._decode(self._context)
            if not self._context_text.startswith(_REPLACEMENT):
                break

    def add_one(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        return self.add((token_id,))

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; may be empty."""
        self._pending += token_ids
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._release(text, len(self._pending))
        if len(self._pending) <= _MAX_UTF8_BYTES:
            return ""
        # More is pending than one character can have, so some bytes are invalid: release what later bytes can't change.
        for count in range(len(self._pending) - 1, 0, -1):
            head, tail = self._decode(self._context + self._pending[:count]), self._decode(self._pending[count:])
            if head + tail != text:
                continue
            if tail:
                return self._release(head, count)
            # No text follows the head: its last bytes may still become a character. Drop tokens that write nothing.
            del self._pending[count:]
        return ""

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        if not self._pending:
            return ""
        return self._release(self._decode(self._context + self._pending), len(self._pending))

    def _release(self, text: str, count: int) -> str:
        """Return the unwritten part of `text`, the decode of the context and the first `count` pending tokens."""
        new = text[self._written(text) :]
        released, self._pending = self._pending[:count], self._pending[count:]
        if new:
            self._context = released
            self._context_text = self._decode(released)
        elif not self._context_text:
            # Nothing has been written so far: keep these tokens as context for the next one, though they have no text.
            self._context = (self._context + released)[-_CONTEXT_TOKENS:]
        return new

    def _written(self, text: str) -> int:
        if not text.startswith(self._context_text) and self._context_text.endswith(_REPLACEMENT):
            return len(commonprefix((text, self._context_text)))  # the prompt's incomplete character is now complete
        return len(self._context_text)

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        if self._shown:
            return self._tokenizer.decode(ids, skip_special_tokens=self._skip, shown=self._shown)
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


AnyDetokenizer = ByteDetokenizer | Detokenizer


class StopStrings:
    """Finds the first of several stop strings in text that arrives in pieces, also across piece boundaries.

    The first stop string is the one that ends first; of several that end together, the longest. Text that may be the
    beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False):
        self._stops = tuple(stops)
        self._include = include_in_output
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(stops)  # per stop string, the length of its prefix that the text ends with
        self._held = ""

    def add(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Return the text that can be shown, and the stop string found or None. Matches are ignored unless `armed`.

        After a match the object must not be used again; text after the stop string is dropped.
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
        """Return the text held back: it didn't become a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> list[str]:
        """Advance every search by one character. Returns the stop strings that end with it."""
        completed = []
        for i, stop in enumerate(self._stops):
            n, fallbacks = self._matched[i], self._fallbacks[i]
            while n and stop[n] != character:
                n = fallbacks[n - 1]
            if stop[n] == character:
                n += 1
            if n == len(stop):
                completed.append(stop)
                n = fallbacks[n - 1]
            self._matched[i] = n
        return completed


def _fallbacks(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of its longest proper prefix that is also a suffix (KMP)."""
    lengths = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = lengths[n - 1]
        if stop[i] == stop[n]:
            n += 1
        lengths[i] = n
    return lengths
