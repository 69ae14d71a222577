"""The bytes of single tokens, and the position of each token in its text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from engine.text.detokenizer import byte_alphabet
from engine.text.tokenizer import Tokenizer

_BYTES = byte_alphabet()
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))  # in UTF-8, bytes within a character
_CONTEXT_TOKENS = 8  # last tokens of a prompt, one of which may begin a character
_ANCHOR = "a"  # text before a token whose own text depends on what precedes it


class TokenBytes:
    """The UTF-8 bytes that each token adds to a text, within which it stands.

    A token may be part of a character: its bytes are then no valid text. A token that begins a word has its space,
    which the decoders of some tokenizers leave out at the beginning of a text. An unknown id has no bytes. Cached,
    since log-probabilities repeat the same few tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._found: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._look_up(token_id)
        return found

    def text(self, token_id: int) -> str:
        """Return the text of a token, with U+FFFD for bytes that are no whole characters."""
        return self.of(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, which texts may leave out."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def _look_up(self, token_id: int) -> bytes:
        entry = self._backend.id_to_token(token_id)
        if entry is None:
            return b""
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        if "ByteLevel" in self._decoders and all(character in _BYTES for character in entry):
            return bytes(_BYTES[character] for character in entry)
        if self.has_byte_tokens and (byte := _fallback_byte(entry)) is not None:
            return bytes([byte])
        anchor = self._anchor
        whole, before = self._tokenizer.decode([*anchor, token_id], False), self._tokenizer.decode(anchor, False)
        if not whole.startswith(before):
            return self._tokenizer.decode([token_id], False).encode()
        return whole[len(before) :].encode()

    @cached_property
    def has_byte_tokens(self) -> bool:
        """Whether there is a token for each byte, such as <0xF0>."""
        return "ByteFallback" in self._decoders

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The types of the tokenizer's decoder and of the decoders in it."""
        decoder = self._backend.decoder
        return frozenset() if decoder is None else frozenset(_types(json.loads(decoder.__getstate__())))

    @cached_property
    def _anchor(self) -> list[int]:
        return self._tokenizer.encode(_ANCHOR, add_special_tokens=False)


class TokenPlaces:
    """The position of each token in a text that grows token by token: the number of characters before it.

    A token that continues a character stands at that character. A token without text, such as a special token that is
    skipped, stands where the next token does. `at` is the position of the end of the text that is complete so far.
    The text is the one that engine/text/detokenizer.py returns, except that a byte-fallback tokenizer may replace valid
    characters next to invalid bytes.
    """

    def __init__(
        self, token_bytes: TokenBytes, prompt_ids: Sequence[int] = (), *, at: int = 0, skip_special_tokens: bool = True
    ):
        self._bytes, self._skip = token_bytes, skip_special_tokens
        # What stands for invalid bytes is counted: one U+FFFD for the beginning of a character, or one for each byte.
        self._errors = "surrogateescape" if token_bytes.has_byte_tokens else "replace"
        tail = b"".join(map(self._own, prompt_ids[-_CONTEXT_TOKENS:]))
        self._held = tail[codecs.utf_8_decode(tail, self._errors, False)[1] :]  # the beginning of a character
        self._is_prompts = True
        self.at = at

    def add(self, token_id: int) -> int:
        """Return the position of the next token."""
        own = self._own(token_id)
        if not own:
            return self.at
        if self._held and own[:1] not in _CONTINUATIONS:
            self.finish()
        place = self.at
        data = self._held + own
        text, read = codecs.utf_8_decode(data, self._errors, False)
        self._held, self._is_prompts = data[read:], False
        self.at += len(text)
        return place

    def finish(self) -> int:
        """Return the position of the end, after the beginning of a character that does not continue."""
        if not self._is_prompts:  # the prompt's text has it
            self.at += len(self._held.decode("utf-8", self._errors))
        self._held = b""
        return self.at

    def _own(self, token_id: int) -> bytes:
        return b"" if self._skip and self._bytes.is_special(token_id) else self._bytes.of(token_id)


def prompt_places(
    tokenizer: Tokenizer, token_bytes: TokenBytes, text: str | None, ids: Sequence[int], add_special_tokens: bool
) -> list[int]:
    """Return the positions of a prompt's tokens in its text; None stands for the text that the ids decode to.

    The special tokens that the tokenizer adds to a text stand between its characters.
    """
    if text is not None:
        encoding = tokenizer.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        if encoding.ids == list(ids):
            return _from_encoding(encoding)
    places = TokenPlaces(token_bytes, skip_special_tokens=False)
    found = [places.add(token_id) for token_id in ids]
    shown = tokenizer.decode(ids, skip_special_tokens=False) if text is None else text
    if places.finish() > len(shown) and token_bytes.text(ids[0]).startswith(" "):  # a text begins without the space
        found = [max(0, place - 1) for place in found]
    return found


def _from_encoding(encoding: Any) -> list[int]:
    """Return the start of each token: the end of the one before, where a tokenizer leaves spaces out of its offsets."""
    found: list[int] = []
    start = end = 0
    for (first, last), is_special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
        if is_special:
            found.append(end)
            continue
        start = max(start, min(first, end))  # of two tokens of one character, both offsets are the character's
        found.append(start)
        end = max(end, last)
    return found


def _types(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _types(inner)


def _fallback_byte(entry: str) -> int | None:
    """Return the byte that an entry such as "<0xF0>" stands for; None for other entries."""
    if len(entry) != 6 or not entry.startswith("<0x") or not entry.endswith(">"):
        return None
    try:
        return int(entry[3:5], 16)
    except ValueError:
        return None
