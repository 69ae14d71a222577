"""The sampler: applies each slot's sampling parameters to a batch of logits.

Keeps the sampling state of running requests. Order: repetition penalty, frequency and presence penalties, logit bias,
the min_tokens mask, the mask of a grammar, temperature, top-k, top-p, min-p (Hugging Face's order), all in float32.
Temperature and later steps are in engine/sampling/slot_sampling.py.

Tokens are sampled by `Sampler.slot_sampling`, from parameters in device memory and by operations that a graph can
contain. So are log-probabilities by `Sampler.slot_scoring`, for the rows that its kernels cover. Others are computed by
launches after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.errors import RequestError
from engine.kernels.logprob_layout import MAX_TOP
from engine.kernels.slot_columns import NUM_FLOATS
from engine.protocol.logprobs import TokenLogprob, TokenLogprobs
from engine.protocol.request import SamplingParams, mix64
from engine.sampling.logprobs import SlotLogprobs, prompt_logprobs, raw_logprobs
from engine.sampling.ops import CANDIDATES, HASH_CONSTANTS
from engine.sampling.penalties import TokenCounts
from engine.sampling.scoring import NUM_COLUMNS, LogprobScorer, Pending, SamplingMethod, put_rows, rows_of
from engine.sampling.slot_sampling import ANY_NUMBER, TOP_K_ONLY, UNTRUNCATED, sample_slots
from engine.sampling.slot_table import SlotTable
from engine.sampling.token_masks import TokenMasks
from engine.utils.async_copy import ids_to, upload

__all__ = ["SampleResult", "Sampler", "prompt_logprobs"]

# Columns of the row parameters, after the scorer's columns.
_REPETITION, _FREQUENCY, _PRESENCE = range(NUM_COLUMNS, NUM_COLUMNS + 3)


@dataclass(slots=True)
class _Slot:
    """Host-side state of a slot that decides which work its row needs."""

    method: SamplingMethod = SamplingMethod()
    penalised: bool = False
    prompt_len: int = 0
    min_tokens: int = 0
    banned: Tensor | None = None  # int64 [m] on the host, banned until min_tokens
    bias: tuple[Tensor, Tensor] | None = None  # ids int64 [m] and values float32 [m] on the host
    constrained: bool = False  # only the tokens of the slot's mask are allowed

    @property
    def is_adjusted(self) -> bool:
        """Whether penalties, bias or a mask change the row's logits."""
        return bool(self.min_tokens) or self.stays_adjusted

    @property
    def stays_adjusted(self) -> bool:
        """Whether they do so until the end of the request."""
        return self.penalised or self.bias is not None or self.constrained

    @property
    def is_argmax(self) -> bool:
        """Whether argmax of the raw logits is enough for this row."""
        return self.method.is_argmax and not self.is_adjusted


_INACTIVE = _Slot()


class SampleResult:
    """Sampled tokens, and their log-probabilities.

    token_ids: int64 [b] on the device. -1 means that the row's logits hold a NaN or +inf, or are all -inf: fail that
    request, and do not feed the -1 to the model.
    logprobs: None if no row requested them, else one entry per row (None for a row that did not). The first access
    waits for their copies, which were enqueued with the step.
    """

    __slots__ = ("token_ids", "_pending", "_logprobs")

    def __init__(self, token_ids: Tensor, pending: list[Pending]):
        self.token_ids = token_ids
        self._pending = pending
        self._logprobs: TokenLogprobs[TokenLogprob | None] | None = None

    @property
    def logprobs(self) -> TokenLogprobs[TokenLogprob | None] | None:
        if self._pending:
            records = [b""] * len(self.token_ids)
            for rows, values in self._pending:
                found = values.read().records
                if len(rows) == len(records):  # all, in order: in most steps
                    records = found
                    continue
                for row, record in zip(rows, found, strict=True):
                    records[row] = record
            self._pending, self._logprobs = [], TokenLogprobs(records)
        return self._logprobs


class Sampler:
    """Sampling parameters of every slot in [0, max_num_seqs), and sampling for a batch of slots.

    - logprobs_mode: "processed" gives log-probabilities of the distribution that was sampled from, after penalties,
      bias, temperature and truncation (greedy rows: temperature 1, no truncation); "raw" gives log-probabilities of
      the model's logits.
    - fused: sample with the Triton kernels; by default on a GPU only.
    - counts: the token counts that penalties are computed from.
    - masks: the tokens that constrained slots may sample; write them before each step that samples from such a slot.

    Not thread-safe: only the engine loop's thread may use it.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        eos_token_ids: Sequence[int] = (),
        logprobs_mode: str = "processed",
        fused: bool | None = None,
    ):
        if logprobs_mode not in ("processed", "raw"):
            raise ValueError(f"logprobs_mode must be 'processed' or 'raw'; found {logprobs_mode!r}")
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._eos_token_ids = tuple(eos_token_ids)
        self._raw = logprobs_mode == "raw"
        self._scorer = LogprobScorer(vocab_size, self.device)
        self._kernels = self._scoring = None
        if self.device.type == "cuda" if fused is None else fused:
            self._kernels, self._scoring = _kernels()
        self.counts = TokenCounts(max_num_seqs, vocab_size, self.device)
        # One extra row: index -1 is the greedy row of inactive entries.
        self._slots = [_INACTIVE] * (max_num_seqs + 1)
        # Slots by what they need, so that a step looks at sets instead of rows.
        self._sampler_slots: set[int] = set()  # more than argmax
        self._sampled: set[int] = set()  # another token than the argmax of unmodified logits
        self._adjusted: set[int] = set()  # penalties, bias or a mask
        self._masked: set[int] = set()  # the min_tokens mask
        self._truncated: set[int] = set()  # top-k or top-p
        self._wide: set[int] = set()  # a truncation that may keep more than CANDIDATES tokens
        self._scored: set[int] = set()  # log-probabilities
        self._scored_by_kernels: set[int] = set()
        self._scored_by_torch: set[int] = set()
        self.masks = TokenMasks(max_num_seqs, vocab_size, self.device)
        self.table = SlotTable(max_num_seqs, vocab_size, len(self._eos_token_ids), self.device)
        self._row_params = torch.zeros(max_num_seqs + 1, NUM_COLUMNS + 3, dtype=torch.float64)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        """Assign a slot to a request. After a preemption, `output_ids` are the tokens generated so far.

        Raises RequestError if a token id is outside the vocabulary or the min_tokens mask would ban every token.
        """
        self._check_slot(slot)
        penalised = params.has_penalties
        banned_ids = check_sampling(params, self.vocab_size, self._eos_token_ids)
        banned = torch.tensor(sorted(banned_ids), dtype=torch.int64) if banned_ids else None
        method = SamplingMethod.of(params, self.vocab_size)
        self._slots[slot] = _Slot(
            method=method,
            penalised=penalised,
            prompt_len=len(prompt_ids),
            min_tokens=params.min_tokens if banned is not None else 0,
            banned=banned,
            bias=_bias_tensors(params.logit_bias) if params.logit_bias else None,
            constrained=params.is_constrained,
        )
        self._row_params[slot] = torch.tensor(
            [*method.row_params(params), params.repetition_penalty, params.frequency_penalty,
             params.presence_penalty],
            dtype=torch.float64,
        )  # fmt: skip
        self._classify(slot)
        state = self._slots[slot]
        full, truncated = (0.0, params.temperature) if method.truncated else (params.temperature, 0.0)
        self.table.set(
            slot,
            [full, truncated, method.top_k, params.top_p, params.min_p, params.repetition_penalty,
             params.frequency_penalty, params.presence_penalty] if slot in self._sampled else [0.0] * NUM_FLOATS,
            key=mix64(seed) if method.random else 0,
            penalised=penalised,
            adjusted_argmax=state.is_adjusted and not method.random,
            bias=state.bias,
            banned=banned,
            banned_until=state.prompt_len + state.min_tokens,
            constrained=state.constrained,
            top_count=1 + (method.logprobs or 0) if self._suits_kernels(state) else 0,
            named=method.logprob_token_ids,
        )  # fmt: skip
        if penalised:
            self.counts.track(slot, prompt_ids, output_ids)

    def _classify(self, slot: int) -> None:
        """Put the slot in the sets of what it needs."""
        state = self._slots[slot]
        method = state.method
        is_scored, suits_kernels = method.logprobs is not None, self._suits_kernels(state)
        suits_kernels = suits_kernels and (self._raw or not state.min_tokens)
        for slots, belongs in (
            (self._sampler_slots, not state.is_argmax),
            (self._sampled, method.random or state.is_adjusted),
            (self._adjusted, state.is_adjusted),
            (self._masked, state.min_tokens > 0),
            (self._truncated, method.random and method.truncated),
            (self._wide, method.random and method.truncated and not 0 < method.top_k <= CANDIDATES),
            (self._scored, is_scored),
            (self._scored_by_kernels, is_scored and suits_kernels),
            (self._scored_by_torch, is_scored and not suits_kernels),
        ):
            (slots.add if belongs else slots.discard)(slot)

    def _suits_kernels(self, state: _Slot) -> bool:
        """Whether the kernels of `slot_scoring` cover a slot, at the latest when its min_tokens mask is lifted."""
        method = state.method
        if self._scoring is None or method.logprobs is None or method.logprobs > MAX_TOP or method.kept_mass:
            return False
        # If fewer tokens than top-k have a weight, the kernels know the last kept one by its place only.
        needs_place = method.random and method.top_k > 0 and bool(method.logprob_token_ids)
        return self._raw or not (state.stays_adjusted or needs_place)

    def needs_sampler(self, slots: Iterable[int]) -> bool:
        """Return False if argmax of the logits is enough for all of these slots and none needs logprobs."""
        return bool(self._sampler_slots) and not self._sampler_slots.isdisjoint(slots)

    def variant(self, slots: Sequence[int]) -> dict[str, Any] | None:
        """Return what `sample_slots` must do for these slots, as its keywords; None if argmax is enough for all."""
        if self._sampled.isdisjoint(slots):
            return None
        processors = not self._adjusted.isdisjoint(slots)
        if self._truncated.isdisjoint(slots):
            return {"processors": processors, "limits": UNTRUNCATED}
        has_wide = self._kernels is not None or not self._wide.isdisjoint(slots)
        return {"processors": processors, "limits": ANY_NUMBER if has_wide else TOP_K_ONLY}

    @property
    def variants(self) -> list[dict[str, Any]]:
        """All keywords that `variant` can return."""
        limits = (UNTRUNCATED, ANY_NUMBER) if self._kernels is not None else (UNTRUNCATED, TOP_K_ONLY, ANY_NUMBER)
        return [{"processors": processors, "limits": limit} for processors in (False, True) for limit in limits]

    @property
    def row_limits(self) -> tuple[int, ...]:
        """Numbers of rows above which `slot_sampling` launches other kernels."""
        return self._kernels.ROW_LIMITS if self._kernels is not None else ()

    def slot_sampling(self) -> Callable[..., None]:
        """Return `sample_slots` on this sampler's slots: with the Triton kernels, or with torch."""
        tensors = self.table.tensors(self.counts, self.masks)
        if self._kernels is not None:
            return partial(self._kernels.sample_slots, tensors, hash_constants=HASH_CONSTANTS)
        return partial(sample_slots, tensors, chunk_rows=self._scorer.chunk_rows)

    def slot_scoring(self) -> Callable[..., None] | None:
        """Return `score_slots` of engine/kernels/fused_logprobs.py on this sampler's slots; None without kernels."""
        if self._scoring is None:
            return None
        return partial(self._scoring.score_slots, self.table.tensors(self.counts, self.masks), raw=self._raw)

    def slot_logprobs(self, slots: Sequence[int]) -> Callable[[Tensor, int], Pending] | None:
        """Return a function of what `slot_scoring` wrote for these slots, and of its bucket; None if it covers none."""
        if self._scored_by_kernels.isdisjoint(slots):
            return None
        rows = [i for i, slot in enumerate(slots) if slot in self._scored_by_kernels]
        methods = [self._slots[slots[i]].method for i in rows]
        top_counts = [method.logprobs or 0 for method in methods]
        named = [method.logprob_token_ids for method in methods]
        return lambda scores, bucket: (rows, SlotLogprobs.of(scores, bucket, rows, top_counts, named))

    def lift_min_tokens(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Lift the min_tokens mask of slots that have enough tokens; argmax may then be enough for them."""
        if self._masked.isdisjoint(slots):
            return
        for slot, position in zip(slots, positions, strict=True):
            state = self._slots[slot]
            if state.min_tokens and position - state.prompt_len >= state.min_tokens:
                state.min_tokens = 0
                self._classify(slot)

    def logprobs_of(
        self, logits: Tensor, slots: Sequence[int], *, beside_kernels: bool = False
    ) -> Callable[[Tensor], list[Pending]] | None:
        """Prepare log-probabilities for logits [b, V]: returns a function of the sampled tokens int64 [b], or None.

        Call it before the tokens are sampled, because penalties then count them too. `beside_kernels`: leave out the
        rows that `slot_scoring` covers.
        """
        scored = self._scored_by_torch if beside_kernels else self._scored
        if scored.isdisjoint(slots):
            return None
        rows = [i for i, slot in enumerate(slots) if slot in scored]
        states = [self._slots[slots[i]] for i in rows]
        if self._raw:
            methods = {i: state.method for i, state in zip(rows, states, strict=True)}
            return lambda token_ids: self._raw_logprobs(logits, token_ids, methods)
        row_params = upload(self._row_params[[slots[i] for i in rows]], self.device)
        penalised = [j for j, state in enumerate(states) if state.penalised]
        tracked = ids_to(self.device, [slots[rows[j]] for j in penalised]) if penalised else None
        x = self._adjust_logits(rows_of(logits, rows), penalised, tracked, states, row_params, [slots[i] for i in rows])

        def complete(token_ids: Tensor) -> list[Pending]:
            pending = self._scorer.score(x, row_params, [state.method for state in states], rows_of(token_ids, rows))
            return [([rows[j] for j in part], logprobs) for part, logprobs in pending]

        return complete

    def _raw_logprobs(self, raw: Tensor, token_ids: Tensor, methods: dict[int, SamplingMethod]) -> list[Pending]:
        return [
            (
                rows,
                raw_logprobs(
                    rows_of(raw, rows),
                    rows_of(token_ids, rows),
                    [methods[i].logprobs or 0 for i in rows],
                    [methods[i].logprob_token_ids for i in rows],
                ),
            )
            for rows in self._scorer.split(list(methods))
        ]

    def _adjust_logits(
        self,
        raw: Tensor,
        penalised: list[int],
        tracked: Tensor | None,
        states: list[_Slot],
        row_params: Tensor,
        slots: Sequence[int],
    ) -> Tensor:
        """Return logits in float32 after penalties, bias and masks, or `raw` if none applies.

        `penalised` are row indices, `tracked` their slots on the device, `slots` the slots of all rows.
        """
        biased = {i: state.bias for i, state in enumerate(states) if state.bias is not None}
        banned = {i: state.banned for i, state in enumerate(states) if state.min_tokens and state.banned is not None}
        constrained = [i for i, state in enumerate(states) if state.constrained]
        if not (penalised or biased or banned or constrained):
            return raw
        x = raw.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if tracked is not None:
            for chunk, rows in enumerate(self._scorer.split(penalised)):
                start = chunk * self._scorer.chunk_rows
                counted = tracked[start : start + len(rows)]
                columns = (_column(row_params, rows, c) for c in (_REPETITION, _FREQUENCY, _PRESENCE))
                x = put_rows(x, rows, self.counts.penalise(rows_of(x, rows), counted, *columns))
        if biased:
            indices = self._flat_indices(list(biased), [ids for ids, _ in biased.values()])
            values = torch.cat([values for _, values in biased.values()])
            x.view(-1).index_add_(0, indices, upload(values, self.device))
        if banned:
            indices = self._flat_indices(list(banned), list(banned.values()))
            x.view(-1).index_fill_(0, indices, float("-inf"))
        for rows in self._scorer.split(constrained):
            x = put_rows(x, rows, self.masks.apply(rows_of(x, rows), [slots[i] for i in rows]))
        return x

    def _flat_indices(self, rows: list[int], ids: list[Tensor]) -> Tensor:
        """Return indices of each row's token ids in the flattened logits, on the device, with one copy."""
        lengths = torch.tensor([len(t) for t in ids])
        starts = torch.tensor(rows) * self.vocab_size
        return upload(torch.cat(ids) + starts.repeat_interleave(lengths), self.device)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.max_num_seqs:
            raise ValueError(f"slot {slot} is not in [0, {self.max_num_seqs})")


def check_sampling(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> set[int]:
    """Return the token ids that would end a request before min_tokens: no such token may be sampled until then.

    Raises RequestError if a token id of the parameters is outside the vocabulary, or if every token would be banned.
    """
    params.check_vocab(vocab_size)
    if params.min_tokens == 0:
        return set()
    ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        ids.update(token for token in eos_token_ids if token < vocab_size)
    if len(ids) == vocab_size:
        raise RequestError(
            f"min_tokens={params.min_tokens} with stop_token_ids that cover the whole vocabulary bans every token: "
            "give fewer stop_token_ids or min_tokens=0",
            param="stop_token_ids",
        )
    return ids


def _bias_tensors(bias: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)


def _column(row_params: Tensor, rows: list[int], column: int) -> Tensor:
    """Return one parameter of these rows as float32 [b, 1]."""
    return rows_of(row_params, rows)[:, column : column + 1].to(torch.float32)


def _kernels() -> tuple[ModuleType, ModuleType]:
    from engine.kernels import fused_logprobs, fused_sampling  # triton is installed only with CUDA

    return fused_sampling, fused_logprobs
