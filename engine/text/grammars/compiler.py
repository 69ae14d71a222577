"""Compile constraints in a pool of threads, with a cache."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future

from llguidance import LLMatcher, LLTokenizer

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.checker import CHECK_SECONDS, GrammarChecker
from engine.text.grammars.checks import explained, parser_limits
from engine.text.grammars.fair_pool import FairPool
from engine.text.grammars.matcher import CompiledGrammar, fill_threads
from engine.text.grammars.vocabulary import VocabularySource

MAX_WORKERS = 4  # constraints compiled at a time: each has a thread, and a checking process once it is needed
MAX_CACHED = 256
MAX_CACHED_BYTES = 256 << 20  # of compiled constraints that no request follows; the newest is always kept
COPY_SECONDS = 0.01  # time to spend on compiling a constraint again, so that more threads can fill its masks


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Thread-safe.

    A constraint is first checked in another process, which is killed if it takes too long (`GrammarChecker`), and then
    compiled here. Threads and processes start when they are first needed. `close` ends them.
    """

    def __init__(self, source: VocabularySource, max_workers: int = MAX_WORKERS, check_seconds: float = CHECK_SECONDS):
        self.source = source
        self._seconds = check_seconds
        self._threads = FairPool(max_workers, "grammars")
        self._lock = threading.Lock()
        self._load_lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, Future[CompiledGrammar]] = OrderedDict()
        self._idle: queue.SimpleQueue[GrammarChecker] = queue.SimpleQueue()
        self._checkers: list[GrammarChecker] = []
        self._closed = False
        self._vocabulary: LLTokenizer | None = None

    def compile(self, outputs: StructuredOutputs, rank: int = 0, client: str = "") -> Future[CompiledGrammar]:
        """Return the future of a constraint's grammar, which callers share.

        It fails with a RequestError that names the field if the constraint is invalid or exceeds a limit. `client`
        says who sent it: one client's many constraints make way for other clients' constraints. `rank` is the number
        of constraints of the same request before it, which make way for other requests.
        """
        with self._lock:
            future = self._cache.get(outputs)
            if future is not None:
                self._cache.move_to_end(outputs)
                return future
            future = self._cache[outputs] = self._threads.submit(rank, lambda: self._compile(outputs), client)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        future.add_done_callback(lambda done: self._on_done(outputs, done))
        return future

    def close(self) -> None:
        """Stop the threads and the checking processes. Constraints that still wait are cancelled."""
        self._threads.cancel_all()
        with self._lock:
            self._closed = True
            checkers = list(self._checkers)
        for checker in checkers:
            checker.stop()
        self._threads.join()
        for checker in self._checkers:
            checker.close()

    def _compile(self, outputs: StructuredOutputs) -> CompiledGrammar:
        vocabulary = self._load_vocabulary()
        checker = self._take_checker()
        try:
            grammar, nbytes = checker.check(outputs)
        finally:
            self._idle.put(checker)
        started = time.perf_counter()
        matchers = [_matcher(vocabulary, grammar)]
        if matchers[0].is_error():
            raise outputs.error(f": {explained(matchers[0].get_error())}")
        copies = COPY_SECONDS / max(time.perf_counter() - started, 1e-9)
        matchers += [_matcher(vocabulary, grammar) for _ in range(min(int(copies), fill_threads() - 1))]
        return CompiledGrammar(matchers, nbytes * len(matchers))

    def _load_vocabulary(self) -> LLTokenizer:
        with self._load_lock:
            if self._vocabulary is None:
                self._vocabulary = self.source.load()
            return self._vocabulary

    def _take_checker(self) -> GrammarChecker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            checker = GrammarChecker(self.source, self._seconds)
            with self._lock:
                self._checkers.append(checker)
                if self._closed:
                    checker.stop()
            return checker

    def _on_done(self, outputs: StructuredOutputs, done: Future[CompiledGrammar]) -> None:
        """Keep the cache within its bytes, and drop a failure from it: its error names the field of one caller."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                if self._cache.get(outputs) is done:
                    del self._cache[outputs]
                return
            sizes = {key: _nbytes(future) for key, future in self._cache.items()}
            total = sum(sizes.values())
            for key in list(self._cache)[:-1]:  # the least recently used first
                if total <= MAX_CACHED_BYTES:
                    return
                if sizes[key]:
                    total -= sizes[key]
                    del self._cache[key]


def _nbytes(future: Future[CompiledGrammar]) -> int:
    """Return the bytes of a compiled constraint; 0 if it is not compiled yet."""
    return future.result().nbytes if future.done() and not future.cancelled() and not future.exception() else 0


def _matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
