"""The state of one sequence within its grammar, and the tokens that may follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

MASK_BITS = 32  # tokens per word of a mask


def mask_words(vocab_size: int) -> int:
    """Return the number of int32 words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // MASK_BITS)


class GrammarMatcher:
    """Follows one sequence through its grammar. Not thread-safe, but matchers are independent of each other.

    `native` is llguidance's matcher.
    """

    def __init__(self, matcher: LLMatcher):
        self.native = matcher

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        return GrammarMatcher(self.native.deep_copy())

    def accept(self, token_id: int) -> None:
        """Advance by a token that the last mask allowed. After any other token, `error` says so."""
        self.native.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete and allows no further text."""
        return self.native.is_stopped() and not self.native.is_error()

    @property
    def has_error(self) -> bool:
        """Whether `error` is set."""
        return self.native.is_error()

    @property
    def may_finish(self) -> bool:
        """Whether the text so far is complete, so that the sequence may end here."""
        return self.native.is_accepting()

    @property
    def error(self) -> str:
        """Why the matcher can't go on, such as a limit on its states; "" if it can."""
        return self.native.get_error()


class MaskFiller:
    """Computes the masks of many matchers with a pool of threads."""

    def __init__(self, num_threads: int):
        self._executor = LLExecutor(num_threads=num_threads)

    def fill(self, matchers: Sequence[GrammarMatcher], masks: np.ndarray, at_rows: Sequence[int] | None = None) -> None:
        """Write the mask of matcher i to row i (or at_rows[i]) of masks int32 [>= n, words], C-contiguous.

        Bit t % 32 of word t // 32 says whether token t may follow. The row of a matcher with an `error` is undefined.
        """
        if not matchers:
            return
        rows, words = masks.shape
        chosen = range(len(matchers)) if at_rows is None else at_rows
        pairs = [(matcher.native, row) for row, matcher in zip(chosen, matchers, strict=True)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, words * masks.itemsize, rows)


def forbid(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clear the bits of tokens in a mask int32 [words]."""
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // MASK_BITS] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % MASK_BITS))
