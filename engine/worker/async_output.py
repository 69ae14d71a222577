"""The results of a step in flight, which are copied to the host asynchronously."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.sampling.logprobs import DeviceLogprobs
from engine.sampling.sampler import SampleResult
from engine.utils.async_copy import Download
from graph_cache.core.host_ring import Ticket

MAX_STEPS_IN_FLIGHT = 2  # one running on the device and one enqueued behind it


@dataclass(slots=True)
class StepResult:
    """The results of one step on the host.

    - tokens: the sampled token of each row of `Batch.sampled`, then of each token of `Batch.verifies`; -1 if its
      logits were not finite.
    - logprobs: of the rows of `Batch.sampled`, as records of engine/protocol/logprobs.py; empty if none has any.
    - prompt_logprobs: by request id, for the prompt tokens scored in this step, as records.
    - hidden_states: by request id, for those that want them: the first position, and float32 [n, h] of the tokens
      computed from there on.
    - routed_experts: the same, with int16 [n, L, k]: see RoutedExperts.
    - graph_bucket: bucket of the graph that ran the decodes: in rows, or in tokens if prompt chunks ran in the same
      graph. None if they ran eager.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    prompt_logprobs: dict[str, list[bytes]] = field(default_factory=dict)
    hidden_states: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)
    routed_experts: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)
    graph_bucket: int | None = None


class AsyncStepOutput:
    """A step's pending results; created by ModelRunner.execute. `read` doesn't wait for steps enqueued later."""

    def __init__(self, num_decodes: int) -> None:
        self.num_decodes = num_decodes
        self.tickets: list[Ticket] = []  # tokens of the decodes, of the prefills, of the drafts
        self.samples: list[tuple[int, SampleResult]] = []  # (first row, result)
        self.prompt_scores: dict[str, list[DeviceLogprobs]] = {}
        # Rows of hidden states [n, h], and per request: its id, its first position and the number of its rows.
        self.hidden_states: list[tuple[Download, list[tuple[str, int, int]]]] = []
        self.routed_experts: list[tuple[Download, list[tuple[str, int, int]]]] = []  # rows of experts [n, L, k]
        self.graph_bucket: int | None = None
        self.awaits_masks = False  # its decodes are to be sampled once their masks arrive
        self._tokens: list[int] = []  # of the tickets read so far
        self._outcome: StepResult | Exception | None = None

    @property
    def is_read(self) -> bool:
        """Whether the results, or the error, have arrived on the host."""
        return self._outcome is not None

    def wait(self) -> StepResult | Exception:
        """Wait for the results and store them, or the exception, for `read`."""
        if self._outcome is None:
            try:
                self._outcome = self._collect()
            except Exception as error:  # raised by `read`, so that it fails this step only
                self._outcome = error
        return self._outcome

    def read(self) -> StepResult:
        """Wait for and return the step's results. Raises device errors, which may come from later work too."""
        outcome = self.wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _collect(self) -> StepResult:
        while self.tickets:  # a ticket is read once: an interrupted wait must go on with those that are left
            tokens = self.tickets[0].read().tolist()
            del self.tickets[0]
            self._tokens += tokens
        result = StepResult(self._tokens, graph_bucket=self.graph_bucket)
        for start, sampled in self.samples:  # after the tokens, because logprobs arrive later
            if sampled.logprobs is not None:
                result.logprobs = result.logprobs or [b""] * len(self._tokens)
                result.logprobs[start : start + len(sampled.logprobs)] = sampled.logprobs.records
        result.prompt_logprobs = {
            name: [record for part in parts for record in part.read().records]
            for name, parts in self.prompt_scores.items()
        }
        for download, owners in self.hidden_states:
            rows = download.read().float().numpy()
            for name, position, count in owners:
                result.hidden_states[name], rows = (position, rows[:count]), rows[count:]
        for download, owners in self.routed_experts:
            rows = download.read().numpy()
            for name, position, count in owners:
                result.routed_experts[name], rows = (position, rows[:count]), rows[count:]
        return result
