"""The scheduler's record of one request, and its state machine."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from itertools import zip_longest

import numpy as np

from engine.errors import EngineError
from engine.protocol.request import EngineRequest


class RequestState(enum.Enum):
    """State of a request; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return not _NEXT_STATES[self]


_NEXT_STATES: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.ABORTED, RequestState.FAILED}),
    RequestState.RUNNING: frozenset(
        {RequestState.PREEMPTED, RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED}
    ),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.ABORTED, RequestState.FAILED}),
    RequestState.FINISHED: frozenset(),
    RequestState.ABORTED: frozenset(),
    RequestState.FAILED: frozenset(),
}


class TokenRows:
    """Arrays with a row per token, from the first token on: the parts that have arrived since the last event."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self._count = 0  # leading tokens whose rows have arrived

    def add(self, start: int, rows: np.ndarray) -> None:
        """Take the rows of tokens from position `start`, except those that a run before a preemption gave."""
        new = rows[max(0, self._count - start) :]
        if len(new):
            self.parts.append(new)
            self._count = start + len(rows)

    def take(self) -> np.ndarray | None:
        """Return the parts as one array, and forget them; None if there are none."""
        parts, self.parts = self.parts, []
        return np.concatenate(parts) if parts else None


class Request:
    """The scheduler's record of one request. Owned by the loop's thread; compared and hashed by identity.

    - state: assigning it checks the transition.
    - token_ids: prompt and output tokens known to the host.
    - length: number of tokens, including those in flight: computed by an enqueued step and not read yet.
    - num_computed: number of leading tokens with keys and values in its pages once all enqueued work is done.
    - page_tables: per cache group, the pages of the request: entry i holds tokens [i * page_size, (i + 1) * page_size).
      Empty without a slot. During a lease tables only grow at their ends and get zeros at their beginnings.
    - num_freed: per cache group, the number of leading table entries that are 0 (the scratch page), because no later
      query of the group's window reads them. It only grows during a lease; always 0 for full attention.
    - slot: index in [0, max_num_seqs) while running, else None.
    - lease: a new number, from a counter that increments, each time the request gets a slot; 0 without a slot. Batches
      record it, so that a result of an earlier run of the request is recognised as stale and dropped.
    - max_length: number of tokens at which the request ends; set by Scheduler.add.
    - prompt_token_cost: how much of a step's token budget a prompt token takes; 2 with prompt_logprobs, which need the
      logits of the whole vocabulary after each token.
    """

    def __init__(self, request: EngineRequest, weight_version: str = "", eos_token_ids: Set[int] = frozenset()):
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.params = params
        self.prompt_len = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed = 0
        self.length = self.prompt_len
        self.page_tables: list[list[int]] = []
        self.num_freed: list[int] = []
        self.slot: int = None  # type: ignore[assignment]  # int to its readers, which see running requests only
        self.lease = 0
        self.max_length = 0
        self.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.generates_tokens = params.max_tokens != 0
        self.is_pooled = params.pooling is not None  # every step of it is a prefill chunk
        self.prompt_token_cost = 1 if params.prompt_logprobs is None else 2
        # Drafts are sampled together, so the logits of one must not depend on the tokens sampled before it.
        self.may_have_drafts = (
            self.generates_tokens
            and params.logprobs is None
            and not params.min_tokens
            and not params.has_penalties
            and not params.is_constrained
            and not params.return_hidden_states
            and not params.return_routed_experts
        )
        self.prompt_scores: list[bytes] = []  # records of the chunks prefilled so far in this run, with prompt_logprobs
        self.hidden_states = TokenRows()  # float32 [n, h]
        self.routed_experts = TokenRows()  # int16 [n, L, k]
        self.first_event_sent = False
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.weight_version = weight_version
        self._state = RequestState.WAITING

    @property
    def state(self) -> RequestState:
        return self._state

    @state.setter
    def state(self, new: RequestState) -> None:
        if new not in _NEXT_STATES[self._state]:
            allowed = ", ".join(sorted(s.value for s in _NEXT_STATES[self._state])) or "nothing: it is final"
            raise EngineError(
                f"request {self.request_id!r} can't go from {self._state.value} to {new.value}; allowed: {allowed}"
            )
        self._state = new

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def arrival_time(self) -> float:
        return self.request.arrival_time

    @property
    def seed(self) -> int:
        seed = self.request.seed
        assert seed is not None  # EngineRequest sets it
        return seed

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        """The sampled tokens known to the host, as a copy."""
        return self.token_ids[self.prompt_len :]

    def forget_partial_results(self) -> None:
        """Drop what a preempted prefill has given: the next one computes it again, perhaps with new weights."""
        self.prompt_scores = []
        if not self.first_event_sent:
            self.hidden_states, self.routed_experts = TokenRows(), TokenRows()

    def held_pages(self) -> list[int]:
        """Return the pages of all groups in the order of their positions, without the entries that are 0."""
        if len(self.page_tables) == 1:
            return self.page_tables[0][self.num_freed[0] :]
        return [page for entries in zip_longest(*self.page_tables, fillvalue=0) for page in entries if page]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self._state.value}, prompt={self.prompt_len}, output={self.output_len}, "
            f"in_flight={self.length - len(self.token_ids)}, computed={self.num_computed}, slot={self.slot}, "
            f"pages={len(self.held_pages())})"
        )
