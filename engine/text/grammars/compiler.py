"""Compile constraints in a pool of threads, with a cache."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.checker import CHECK_SECONDS, GrammarChecker
from engine.text.grammars.checks import parser_limits
from engine.text.grammars.matcher import CompiledGrammar, fill_threads
from engine.text.grammars.vocabulary import VocabularySource

MAX_WORKERS = 4  # constraints compiled at a time: each has a thread, and a checking process once it is needed
MAX_CACHED = 256
COPY_SECONDS = 0.01  # time to spend on compiling a constraint again, so that more threads can fill its masks


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Thread-safe.

    A constraint is first checked in another process, which is killed if it takes too long (`GrammarChecker`), and then
    compiled here. Threads and processes start when they are first needed. `close` ends them.
    """

    def __init__(self, source: VocabularySource, max_workers: int = MAX_WORKERS, check_seconds: float = CHECK_SECONDS):
        self.source = source
        self._seconds = check_seconds
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._load_lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, Future[CompiledGrammar]] = OrderedDict()
        self._idle: queue.SimpleQueue[GrammarChecker] = queue.SimpleQueue()
        self._checkers: list[GrammarChecker] = []
        self._closed = False
        self._vocabulary: LLTokenizer | None = None

    def compile(self, outputs: StructuredOutputs) -> Future[CompiledGrammar]:
        """Return the future of a constraint's grammar, which callers share.

        It fails with a RequestError that names the field if the constraint is invalid or exceeds a limit.
        """
        with self._lock:
            future = self._cache.get(outputs)
            if future is not None:
                self._cache.move_to_end(outputs)
                return future
            future = self._cache[outputs] = self._threads.submit(self._compile, outputs)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        future.add_done_callback(lambda done: self._forget_failed(outputs, done))
        return future

    def close(self) -> None:
        """Stop the threads and the checking processes. Constraints that still wait are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            checkers = list(self._checkers)
        for checker in checkers:
            checker.stop()
        self._threads.shutdown(wait=True)
        for checker in self._checkers:
            checker.close()

    def _compile(self, outputs: StructuredOutputs) -> CompiledGrammar:
        vocabulary = self._load_vocabulary()
        checker = self._take_checker()
        try:
            grammar = checker.check(outputs)
        finally:
            self._idle.put(checker)
        started = time.perf_counter()
        matchers = [_matcher(vocabulary, grammar)]
        if matchers[0].is_error():
            raise outputs.error(f": {matchers[0].get_error()}")
        copies = COPY_SECONDS / max(time.perf_counter() - started, 1e-9)
        matchers += [_matcher(vocabulary, grammar) for _ in range(min(int(copies), fill_threads() - 1))]
        return CompiledGrammar(matchers)

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

    def _forget_failed(self, outputs: StructuredOutputs, done: Future[CompiledGrammar]) -> None:
        """Drop a failure from the cache: its error names the field of one caller."""
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                if self._cache.get(outputs) is done:
                    del self._cache[outputs]


def _matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
