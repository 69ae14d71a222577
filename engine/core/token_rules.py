"""Rules about the tokens that a request may sample, beside a grammar: allowed_token_ids and bad_words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.protocol.request import EngineRequest
from engine.text.grammars.matcher import MASK_BITS, forbid, mask_words


def all_tokens(vocab_size: int) -> np.ndarray:
    """Return the mask int32 [words] that allows every token of the vocabulary."""
    return packed(np.arange(vocab_size), vocab_size)


def packed(token_ids: np.ndarray | Sequence[int], vocab_size: int) -> np.ndarray:
    """Return the mask int32 [words] that allows these tokens: bit t % 32 of word t // 32 is token t."""
    bits = np.zeros(mask_words(vocab_size) * MASK_BITS, bool)
    bits[np.asarray(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenRules:
    """The rules of one request. `bad_words` are token sequences whose last token must not follow the others."""

    def __init__(self, allowed: Sequence[int] | None, bad_words: Sequence[tuple[int, ...]], vocab_size: int):
        self._allowed = None if allowed is None else packed(allowed, vocab_size)
        # A tokenizer may have more tokens than the model.
        self._bad_words = [word for word in bad_words if max(word) < vocab_size]
        self.field = "allowed_token_ids" if allowed is not None else "bad_words"

    @classmethod
    def of(cls, request: EngineRequest, vocab_size: int) -> TokenRules | None:
        """Return the rules of a request; None if it has none."""
        allowed = request.params.allowed_token_ids
        if allowed is None and not request.bad_word_ids:
            return None
        return cls(allowed, request.bad_word_ids, vocab_size)

    def apply(self, mask: np.ndarray, token_ids: Sequence[int], prompt_len: int) -> None:
        """Clear the bits of the tokens that may not follow `token_ids`, a prompt and its output, in int32 [words]."""
        if self._allowed is not None:
            np.bitwise_and(mask, self._allowed, out=mask)
        output_len = len(token_ids) - prompt_len
        banned = []
        for *start, last in self._bad_words:
            if not start or (len(start) <= output_len and list(token_ids[-len(start) :]) == start):
                banned.append(last)
        forbid(mask, banned)
