"""The state of one sequence within its grammar, and the tokens that may follow."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

MASK_BITS = 32  # tokens per word of a mask


def mask_words(vocab_size: int) -> int:
    """Return the number of int32 words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // MASK_BITS)


def fill_threads() -> int:
    """Return the number of threads that fill masks: one per processor, at most 8."""
    return max(1, min(8, os.cpu_count() or 1))


class CompiledGrammar:
    """A grammar that sequences may start to follow. Not thread-safe.

    Copies of one of llguidance's matchers hold a lock in turn, so that more threads fill their masks no sooner.
    `natives` are therefore compiled independently of each other, at most one per thread.
    """

    def __init__(self, natives: Sequence[LLMatcher]):
        self._natives = natives
        self._started: list[weakref.WeakSet[GrammarMatcher]] = [weakref.WeakSet() for _ in natives]

    def start(self) -> GrammarMatcher:
        """Return a matcher of a new sequence, which shares its lock with as few others as possible."""
        counts = [len(started) for started in self._started]
        index = counts.index(min(counts))
        matcher = GrammarMatcher(self._natives[index].deep_copy(), lock_id=id(self._natives[index]))
        self._started[index].add(matcher)
        return matcher


class GrammarMatcher:
    """Follows one sequence through its grammar. Not thread-safe.

    `native` is llguidance's matcher. Matchers with the same `lock_id` wait for each other.
    """

    def __init__(self, native: LLMatcher, lock_id: int):
        self.native = native
        self.lock_id = lock_id

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
        # A thread takes neighbours, so matchers that wait for each other go side by side.
        by_lock = sorted(zip(chosen, matchers, strict=True), key=lambda pair: pair[1].lock_id)
        pairs = [(matcher.native, row) for row, matcher in by_lock]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, words * masks.itemsize, rows)


def forbid(mask: np.ndarray, token_ids: Iterable[int]) -> bool:
    """Clear the bits of tokens in a mask int32 [words]. Returns whether one of them was set."""
    changed = False
    for token_id in token_ids:
        word, bit = token_id // MASK_BITS, token_id % MASK_BITS
        bits = int(mask[word])
        if bits >> bit & 1:
            changed = True
            mask[word] = bits ^ (1 << bit if bit < MASK_BITS - 1 else -(1 << bit))
    return changed
