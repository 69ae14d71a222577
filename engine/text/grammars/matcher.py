"""The state of one sequence within its grammar, and the tokens that may follow."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher

MASK_BITS = 32  # tokens per word of a mask
SERIAL_SECONDS = 5e-4  # of masks by the calling thread, before others are woken, which takes as long
FEW_ROWS = 8


def mask_words(vocab_size: int) -> int:
    """Return the number of int32 words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // MASK_BITS)


def fill_threads() -> int:
    """Return the number of threads that fill masks: one per processor, at most 8."""
    return max(1, min(8, os.cpu_count() or 1))


class CompiledGrammar:
    """A grammar that sequences may start to follow. Not thread-safe.

    Copies of one of llguidance's matchers hold a lock in turn, so that more threads fill their masks no sooner.
    `natives` are therefore compiled independently of each other, at most one per thread. `nbytes` is what they take.
    """

    def __init__(self, natives: Sequence[LLMatcher], nbytes: int = 0):
        self._natives, self.nbytes = natives, nbytes
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


class MatcherPool:
    """Advances many matchers and computes their masks, with a pool of threads if they take long. Use it in one thread.

    While masks are computed in the background, no matcher may be used: call `wait` first.
    """

    def __init__(self, num_threads: int):
        self._executor = LLExecutor(num_threads=num_threads)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filled: Future[None] | None = None

    def accept(self, matchers: Sequence[GrammarMatcher], token_ids: Sequence[int]) -> list[bool]:
        """Advance each matcher by one token that its last mask allowed. After any other token, its `error` says so.

        Returns whether each matcher is finished. One thread does this sooner than several.
        """
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            matcher.accept(token_id)
        return [matcher.is_finished for matcher in matchers]

    def fill(self, matchers: Sequence[GrammarMatcher], masks: np.ndarray, at_rows: Sequence[int] | None = None) -> None:
        """Write the mask of matcher i to row i (or at_rows[i]) of masks int32 [>= n, words], C-contiguous.

        Bit t % 32 of word t // 32 says whether token t may follow. The row of a matcher with an `error` is undefined.
        """
        self.start_fill(matchers, masks, range(len(matchers)) if at_rows is None else at_rows)
        self.wait()

    def start_fill(self, matchers: Sequence[GrammarMatcher], masks: np.ndarray, at_rows: Sequence[int]) -> None:
        """Do what `fill` does, from SERIAL_SECONDS on in the background; `wait` returns when it is done."""
        address, row_bytes = masks.ctypes.data, masks.shape[1] * masks.itemsize
        until = time.perf_counter() + SERIAL_SECONDS
        done = 0
        while done < len(matchers) and time.perf_counter() < until:
            matchers[done].native.unsafe_compute_mask_ptr(address + at_rows[done] * row_bytes, row_bytes)
            done += 1
        if done == len(matchers):
            return
        begun = threading.Event()
        arguments = _arguments(matchers[done:], masks, at_rows[done:])
        self._filled = self._background.submit(self._fill_in_parallel, begun, arguments)
        begun.wait()  # else this thread could keep the interpreter's lock for milliseconds

    @property
    def is_computing(self) -> bool:
        """Whether masks are being computed in the background, or `wait` was not called since."""
        return self._filled is not None

    def wait(self) -> None:
        """Wait until the masks begun last are computed. Raises what that raised."""
        filled, self._filled = self._filled, None
        if filled is not None:
            filled.result()

    def close(self) -> None:
        """End the thread in the background."""
        self._background.shutdown()

    def _fill_in_parallel(self, begun: threading.Event, arguments: tuple[Any, ...]) -> None:
        begun.set()
        self._executor.unsafe_compute_mask_ptr(*arguments)  # without the interpreter's lock


def _arguments(
    matchers: Sequence[GrammarMatcher], masks: np.ndarray, at_rows: Sequence[int]
) -> tuple[list[tuple[LLMatcher, int]], int, int, int]:
    """Return the arguments of llguidance's function that computes masks on several threads."""
    rows, words = masks.shape
    # A thread takes neighbours, so matchers that wait for each other go side by side.
    by_lock = sorted(zip(at_rows, matchers, strict=True), key=lambda pair: pair[1].lock_id)
    return [(matcher.native, row) for row, matcher in by_lock], masks.ctypes.data, words * masks.itemsize, rows


def forbid_rows(masks: np.ndarray, rows: Sequence[int], token_ids: Iterable[int]) -> list[int]:
    """Clear the bits of tokens in these rows of masks int32 [n, words]. Returns the rows in which one of them was set.

    Quicker than `forbid` for many rows and few tokens.
    """
    if len(rows) < FEW_ROWS:
        return [row for row in rows if forbid(masks[row], token_ids)]
    at_rows = np.asarray(rows)
    changed = np.zeros(len(rows), dtype=bool)
    for token_id in token_ids:
        word, bit = token_id // MASK_BITS, np.uint32(token_id % MASK_BITS)
        words = masks[at_rows, word].view(np.uint32)
        is_set = (words >> bit & 1).astype(bool)
        if is_set.any():
            masks[at_rows, word] = (words & ~(np.uint32(1) << bit)).view(np.int32)
            changed |= is_set
    return list(at_rows[changed].tolist())


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
