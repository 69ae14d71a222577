"""The constraints of live requests, grammars and rules about tokens, and the masks of a step.

A request whose grammar is being compiled waits here, outside the scheduler. Its matcher advances when the host reads
its tokens, so a preempted request, which gives up tokens in flight, needs no rollback.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np

from engine.core.token_rules import TokenRules, all_tokens
from engine.errors import RequestError
from engine.protocol.request import EngineRequest, SamplingParams
from engine.scheduling.batch import Batch
from engine.scheduling.request import Request
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.grammars.matcher import (
    CompiledGrammar,
    GrammarMatcher,
    MatcherPool,
    fill_threads,
    forbid_rows,
    mask_words,
)
from engine.worker.step_input import MaskInput

GRAMMAR_DEAD_END = (
    "the output's grammar allows only tokens that would end the request before min_tokens: lower min_tokens"
)
DEAD_END = "allowed_token_ids, bad_words and min_tokens leave no token to sample: allow more"


class Constraints:
    """Matchers of the requests of one loop. Not thread-safe.

    - compiler: None if the model has no tokenizer; constrained requests are refused then.
    - new_buffer: returns an int32 array [rows, words] that the device can copy from without the host waiting.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: frozenset[int],
        new_buffer: Callable[[int, int], np.ndarray],
    ):
        self._compiler = compiler
        self._vocab_size, self._max_rows = vocab_size, max_num_seqs
        self._eos = eos_token_ids
        self._all_tokens = all_tokens(vocab_size)
        self._new_buffer = new_buffer
        self._masks: np.ndarray | None = None
        self._pool: MatcherPool | None = None
        self._filled: list[Request] = []  # the requests of the mask rows that were filled, or are being filled
        self._matchers: dict[str, GrammarMatcher] = {}
        self._rules: dict[str, TokenRules] = {}
        self._compiling: dict[str, tuple[EngineRequest, Future[CompiledGrammar]]] = {}

    # ---- before the scheduler --------------------------------------------------------------------------------------

    def compile(self, params: SamplingParams, rank: int = 0, client: str = "") -> Future[CompiledGrammar]:
        """Return the future of a constrained request's grammar. Raises RequestError if the model has no tokenizer.

        `rank`, `client`: as in GrammarCompiler.compile.
        """
        assert params.structured_outputs is not None
        if self._compiler is None:
            raise params.structured_outputs.error(": needs the model's tokenizer, and this model has none")
        return self._compiler.compile(params.structured_outputs, rank, client)

    def begin(self, request: EngineRequest) -> bool:
        """Start a constrained request. Returns whether it may be scheduled now; else `compiled` returns it later.

        Raises RequestError if its grammar is known to be invalid.
        """
        rules = TokenRules.of(request, self._vocab_size)
        if rules is not None:
            self._rules[request.request_id] = rules
        if request.params.structured_outputs is None:
            return True
        try:
            return self._begin_grammar(request)
        except RequestError:
            self.forget(request.request_id)
            raise

    def _begin_grammar(self, request: EngineRequest) -> bool:
        future = self.compile(request.params, request.index, request.sender)
        if not future.done():
            self._compiling[request.request_id] = (request, future)
            return False
        self._matchers[request.request_id] = future.result().start()
        return True

    def compiled(self, seconds: float = 0.0) -> Iterator[tuple[EngineRequest, RequestError | Exception | None]]:
        """Yield the waiting requests whose grammar is compiled, or why it is not. Waits up to `seconds` for one."""
        if seconds:
            wait([future for _, future in self._compiling.values()], seconds, FIRST_COMPLETED)
        for request_id, (request, future) in list(self._compiling.items()):
            if future.done() and request_id in self._compiling:
                del self._compiling[request_id]
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                if error is not None:
                    self.forget(request_id)
                else:
                    self._matchers[request_id] = future.result().start()
                yield request, error

    @property
    def num_compiling(self) -> int:
        """Number of requests that wait for their grammar."""
        return len(self._compiling)

    @property
    def compiling(self) -> list[EngineRequest]:
        """The requests that wait for their grammar."""
        return [request for request, _ in self._compiling.values()]

    def forget(self, request_id: str) -> bool:
        """Drop an ended request, and its grammar if no other waits for it. Returns whether it was waiting for it."""
        self._matchers.pop(request_id, None)
        self._rules.pop(request_id, None)
        waiting = self._compiling.pop(request_id, None)
        if waiting is None:
            return False
        if all(future is not waiting[1] for _, future in self._compiling.values()):
            waiting[1].cancel()  # does nothing once its compilation has begun
        return True

    # ---- a step ----------------------------------------------------------------------------------------------------

    def mark(self, batch: Batch) -> None:
        """Set `batch.constrained`."""
        if self._matchers or self._rules:
            ids = self._matchers.keys() | self._rules.keys()
            batch.constrained = [request for request, _ in batch.sampled if request.request_id in ids]

    @property
    def has_grammars(self) -> bool:
        """Whether a request that was scheduled has a grammar."""
        return bool(self._matchers)

    def advance(
        self, sampled: Iterable[tuple[Request, int]], then_masks_of: Sequence[Request] | None = None
    ) -> frozenset[str]:
        """Advance grammars by tokens that were appended, at most one per request.

        With `then_masks_of`, begin to compute the masks that `masks` returns for these requests, or some of them, in
        the background. Every token of theirs must be known. Returns the ids of the requests whose grammar is complete,
        so that they end.
        """
        pairs = [
            (request.request_id, token_id) for request, token_id in sampled if request.request_id in self._matchers
        ]
        if not pairs and not (then_masks_of and self._matchers):
            return frozenset()
        pool = self._matcher_pool()
        pool.wait()
        ids = [request_id for request_id, _ in pairs]
        finished = pool.accept([self._matchers[request_id] for request_id in ids], [token_id for _, token_id in pairs])
        self._filled = [] if then_masks_of is None else list(then_masks_of)
        if self._filled:
            pool.start_fill(*self._mask_rows(self._filled))
        return frozenset(itertools.compress(ids, finished))

    def masks(self, requests: Sequence[Request]) -> tuple[MaskInput, list[tuple[Request, RequestError | None]]]:
        """Return the masks of running requests, and the requests that must end instead of being sampled.

        Those come with an error, or None if their grammar is complete. Every token of the requests must be known. The
        masks are overwritten by the next call.
        """
        masks = self._fill(requests)
        dead_ends: dict[int, RequestError | None] = {}  # by row
        forbidden: dict[frozenset[int], list[int]] = {}  # tokens: rows
        changed: list[int] = []
        matchers = [self._matchers.get(request.request_id) for request in requests]
        for row, (request, matcher) in enumerate(zip(requests, matchers, strict=True)):
            if matcher is not None and matcher.has_error:
                dead_ends[row] = _error(f"the output's grammar can't be followed further: {matcher.error}")
                continue
            if tokens := self._forbidden(request, matcher is not None):
                forbidden.setdefault(tokens, []).append(row)
            if (rules := self._rules.get(request.request_id)) is not None:
                rules.apply(masks[row], request.token_ids, request.prompt_len)
                changed.append(row)
        for tokens, rows in forbidden.items():
            changed += forbid_rows(masks, rows, tokens)
        is_empty = np.bitwise_or.reduce(masks, axis=1) == 0 if changed else ()  # quicker than row by row
        for row in changed:
            if is_empty[row]:
                dead_ends[row] = self._dead_end(matchers[row], self._rules.get(requests[row].request_id))
        ended = [(requests[row], dead_ends[row]) for row in sorted(dead_ends)]
        return MaskInput([request.slot for request in requests], masks), ended

    def _fill(self, requests: Sequence[Request]) -> np.ndarray:
        """Return int32 [len(requests), words]: the masks of the grammars, and of all tokens for the other requests."""
        buffer, words = self._buffer(), mask_words(self._vocab_size)
        if self._pool is not None:
            self._pool.wait()  # also if all grammars have ended since: it writes to the buffer
        if self._matchers:
            rows = {request: row for row, request in enumerate(self._filled)}
            if not rows.keys() >= set(requests):
                self._matcher_pool().fill(*self._mask_rows(requests))
            elif list(requests) != self._filled:
                buffer[: len(requests)] = buffer[[rows[request] for request in requests]]
        self._filled = []
        others = [row for row, request in enumerate(requests) if request.request_id not in self._matchers]
        if others:
            buffer[others, :words] = self._all_tokens
        return buffer[: len(requests), :words]

    def _mask_rows(self, requests: Sequence[Request]) -> tuple[list[GrammarMatcher], np.ndarray, list[int]]:
        """Return the matchers of the requests that have one, the buffer, and their rows of it."""
        rows = [row for row, request in enumerate(requests) if request.request_id in self._matchers]
        return [self._matchers[requests[row].request_id] for row in rows], self._buffer(), rows

    def _matcher_pool(self) -> MatcherPool:
        if self._pool is None:
            self._pool = MatcherPool(fill_threads())
        return self._pool

    def _dead_end(self, matcher: GrammarMatcher | None, rules: TokenRules | None) -> RequestError | None:
        if matcher is not None and matcher.may_finish:
            return None
        return _error(GRAMMAR_DEAD_END) if rules is None else _error(DEAD_END, rules.field)

    def _forbidden(self, request: Request, has_grammar: bool) -> frozenset[int]:
        """Return the tokens that may not end the request now, although its grammar may be complete."""
        params = request.params
        if request.output_len < params.min_tokens:
            return request.end_token_ids
        return self._eos if params.ignore_eos and has_grammar else frozenset()

    def _buffer(self) -> np.ndarray:
        if self._masks is None:
            tokens = self._vocab_size if self._compiler is None else self._compiler.source.size
            self._masks = self._new_buffer(self._max_rows, mask_words(tokens))
        return self._masks

    def close(self) -> None:
        """End the compiler's threads and processes."""
        if self._pool is not None:
            self._pool.close()
        if self._compiler is not None:
            self._compiler.close()


def _error(message: str, param: str = "structured_outputs") -> RequestError:
    return RequestError(message, param=param)
