"""A step that was enqueued and not read yet: its results on their way to the host.

Owns the waiting for them, and in which order they are read. Knows no request beyond its id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol.request import TokenLogprob
from engine.sampling.logprobs import DeviceLogprobs
from engine.sampling.sampler import SampleResult
from graph_cache.host_ring import Ticket

MAX_STEPS_IN_FLIGHT = 2  # the one that the device computes, and the one enqueued behind it


@dataclass(slots=True)
class StepResult:
    """One step's answers, by row of `Batch.sampled`, and what scoring prompts gave, by request id.

    tokens: the sampled ones, -1 where the logits were not finite. logprobs: of rows that asked for them.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    graph_bucket: int | None = None  # of the graph that ran the decodes; None: they ran eager


class AsyncStepOutput:
    """Made and filled by ModelRunner.launch. `read` waits for the step, not for what was enqueued after it."""

    def __init__(self, num_decodes: int) -> None:
        self.num_decodes = num_decodes  # how many decodes it has
        self.tickets: list[Ticket] = []  # of tokens: the decodes', then the prefills'
        self.samples: list[tuple[int, SampleResult]] = []  # with the row where each begins
        self.prompt_scores: dict[str, list[DeviceLogprobs]] = {}
        self.graph_bucket: int | None = None
        self._outcome: StepResult | Exception | None = None

    @property
    def is_read(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self._outcome is not None

    def wait(self) -> None:
        """Wait for the results and keep them, or what went wrong with them, for `read`."""
        if self._outcome is None:
            try:
                self._outcome = self._collect()
            except Exception as error:  # raised again by `read`, where it fails this step and no other
                self._outcome = error

    def read(self) -> StepResult:
        """The step's results. Raises what the device raised, which may be about later work too."""
        self.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _collect(self) -> StepResult:
        result = StepResult(graph_bucket=self.graph_bucket)
        for ticket in self.tickets:
            result.tokens += ticket.read().tolist()
        for start, sampled in self.samples:  # after the tokens: these arrive later
            for row, logprob in enumerate(sampled.logprobs or ()):
                if logprob is not None:
                    result.logprobs[start + row] = logprob
        result.prompt_logprobs = {
            name: [entry for part in parts for entry in part.read()] for name, parts in self.prompt_scores.items()
        }
        return result
