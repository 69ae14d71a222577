"""A step as the worker executes it: plain arrays and numbers, which can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.protocol.slot_assignment import SlotAssignment


@dataclass(frozen=True, slots=True)
class DecodeInput:
    """Rows that advance by one token.

    - slots, positions: per row, its slot and the position of its newest token.
    - site: the name of the step's site: that of rows that share prefixes, or the other.
    - bucket: the padded number of rows.
    - variant: the keyword values of the graph's key.
    - changes: int64 [2, n], indices into the decode state and the values to write there; None if nothing changed.
    - hidden_states: (row, request id) of the rows whose hidden states are wanted.
    - routed_experts: the same for the experts of the rows.
    """

    slots: list[int]
    positions: list[int]
    site: str
    bucket: int
    variant: dict[str, Any]
    changes: np.ndarray | None
    hidden_states: list[tuple[int, str]]
    routed_experts: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Prompt logprobs to compute, of `targets`, the tokens after the chunk's first ones.

    Each comes with the logprobs of the `top_count` most likely tokens and of the tokens `named`.
    """

    request_id: str
    targets: list[int]
    top_count: int
    named: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """The vector to compute from a prompt's chunks. `mode`: one of `engine.protocol.pooling.POOLING_MODES`."""

    request_id: str
    mode: str


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """A row that advances by `length` tokens from position `start`. `is_last`: a token is sampled after it.

    `hidden_states` is the request's id, if its hidden states are wanted; so is `routed_experts`. `pooling` is what the
    request wants instead of tokens, see PoolingInput.
    """

    slot: int
    start: int
    length: int
    is_last: bool
    scoring: PromptScoring | None
    hidden_states: str | None
    pooling: PoolingInput | None = None
    routed_experts: str | None = None


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """Prompt chunks, after `num_decodes` decodes that run in the same packed step, as chunks of one token.

    - bucket: the padded number of tokens; None: the chunks run eager, without padding.
    - packed: the int64 input tensor of that size, see PackedLayout.
    """

    chunks: list[ChunkInput]
    bucket: int | None
    packed: np.ndarray
    num_decodes: int = 0


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """Rows that compute their newest token and drafts after it, and sample a token after each.

    - slots, positions: per computed token, its slot and the position of the token to sample.
    - spans: (start, length) of each row.
    - bucket, packed: see PrefillInput.
    """

    slots: list[int]
    positions: list[int]
    spans: list[tuple[int, int]]
    bucket: int | None
    packed: np.ndarray


@dataclass(frozen=True, slots=True)
class MaskInput:
    """The tokens that constrained slots may sample in a step: masks int32 [len(slots), words], see TokenMasks."""

    slots: list[int]
    masks: np.ndarray


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: slots to assign first, then the decodes, the prefill chunks, and the drafts to verify.

    - fresh_pages: pages to zero before, see `ModelRunner.prepare`.
    - is_constrained: a MaskInput follows, before any token of the step is sampled.
    - checked_sites: the graph sites whose replays in this step are compared with eager, on all ranks.
    """

    admitted: list[SlotAssignment] = field(default_factory=list)
    fresh_pages: list[int] = field(default_factory=list)
    decode: DecodeInput | None = None
    prefill: PrefillInput | None = None
    verify: VerifyInput | None = None
    is_constrained: bool = False
    checked_sites: frozenset[str] = frozenset()
