"""The assignment of a slot to a request, as every worker learns it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A slot is given to a request. `output_ids` are the tokens that it generated before a preemption.

    `adapter` is the name of the request's adapter; empty: none.
    """

    slot: int
    params: SamplingParams
    seed: int
    prompt_ids: list[int]
    output_ids: list[int]
    adapter: str = ""
