"""A limit on the log-probabilities and hidden states that all running requests of an API worker hold together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np

from engine.client.output_queue import LOGPROB_BYTES
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.outputs import OutputDelta
from server.http.errors import WireError

TOKEN_BYTES = 300  # of one token's log-probabilities without alternatives
VALUE_BYTES = 44  # of one value of a hidden state, in memory and while it is written as JSON; measured
EXPERT_BYTES = 8  # of the number of an expert: int16, a byte or two joined, and base64 of it


class Share:
    """The part of the budget that one request holds. `running` are its jobs' ids, to abort if it has to give way."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.held = 0
        self.is_sent = False  # the answer is on its way to the client: it can't give way any more
        self.error: WireError | None = None  # set when it has to give way


class OutputBudget:
    """Bytes of log-probabilities and hidden states that wait for the end of their answers: `max_bytes` in all.

    If more arrive, the running request that holds most is aborted with 503, so that one request can't fail the others.
    An answer counts until it is sent. `abort` is the engine client's.
    """

    def __init__(self, max_bytes: int, abort: Callable[[str], Coroutine[Any, Any, None]]):
        self.max_bytes, self._abort = max_bytes, abort
        self._aborts: set[asyncio.Task[None]] = set()
        self.used = 0
        self._shares: set[Share] = set()

    def add(self, share: Share, deltas: Iterable[OutputDelta]) -> None:
        """Count the log-probabilities of deltas. Raises WireError 503 if this request has to give way."""
        self._hold(share, sum(size_of(delta.logprobs) + size_of(delta.prompt_logprobs) for delta in deltas))
        if share.error is not None:
            raise share.error

    def add_hidden_states(self, share: Share, parts: Iterable[np.ndarray]) -> None:
        """Count hidden states and experts, also those that nobody has read yet.

        If the request has to give way, `add` raises.
        """
        self._hold(share, sum(part.size * (VALUE_BYTES if part.dtype.kind == "f" else EXPERT_BYTES) for part in parts))

    def _hold(self, share: Share, count: int) -> None:
        if count:
            share.held += count
            self.used += count
            self._shares.add(share)
        while self.used > self.max_bytes and (running := [one for one in self._shares if not one.is_sent]):
            self._drop(max(running, key=lambda one: one.held))

    def release(self, share: Share) -> None:
        """Stop counting what a request holds. A second call does nothing."""
        self.used -= share.held
        share.held = 0
        self._shares.discard(share)

    def _drop(self, share: Share) -> None:
        self.release(share)
        share.error = WireError(
            503, f"the log-probabilities and hidden states of all running requests reached {self.max_bytes} bytes, the "
            "limit (--max-total-logprob-bytes), and this request has most of them: ask for fewer, or for fewer prompts",
            type="service_unavailable_error", code="too_many_logprobs",
        )  # fmt: skip
        for running in share.running:
            task = asyncio.create_task(self._abort(running))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


def size_of(logprobs: TokenLogprobs | None) -> int:
    """Return an estimate of the bytes of log-probabilities while they are written as JSON."""
    return 0 if logprobs is None else TOKEN_BYTES * len(logprobs) + LOGPROB_BYTES * logprobs.num_alternatives
