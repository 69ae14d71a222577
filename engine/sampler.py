"""From logits to tokens: each slot's sampling parameters, applied to a batch at once.

Owns what sampling must remember of a running request. Order: repetition penalty, frequency and presence penalties,
logit bias, the min_tokens mask, temperature, top-k, top-p, min-p (Hugging Face's order), all in float32; the draw
itself is in engine/draw.py, and for a GPU's simplest rows in engine/kernels/fused_draw.py. Knows no scheduler, no pages
and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.draw import draw_truncated, draw_whole, uniform, weights_of, whole
from engine.errors import RequestError
from engine.host_copies import ids_to, upload
from engine.logprobs import DeviceLogprobs, prompt_logprobs, raw_logprobs
from engine.penalties import TokenCounts
from engine.request import SamplingParams, TokenLogprob, mix64

__all__ = ["SampleResult", "SamplingState", "prompt_logprobs"]

# Columns of the numbers that go to the device once per step. _FUSED: the temperature where the row is the fused draw's,
# else 0.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _REPETITION, _FREQUENCY, _PRESENCE, _U, _FUSED = range(9)


@dataclass(slots=True)
class _Slot:
    """What the host must know of a slot to decide which work its row needs."""

    random: bool = False
    fused: bool = False  # by the fused draw
    top_k: int = 0
    truncated: bool = False  # by top-k or top-p: drawn in order of likelihood
    min_p: bool = False
    penalised: bool = False
    logprobs: int | None = None
    prompt_len: int = 0
    min_tokens: int = 0
    banned: Tensor | None = None  # int64 [m] on the host, banned until min_tokens
    bias: tuple[Tensor, Tensor] | None = None  # ids int64 [m] and values float32 [m] on the host

    @property
    def is_plain(self) -> bool:
        """Whether argmax of the raw logits is all that the row needs."""
        return not (
            self.random or self.penalised or self.min_tokens or self.bias is not None or self.logprobs is not None
        )


_INACTIVE = _Slot()
# Logits drawn from at a time, by whether on a GPU: there it bounds the scratch (some 20 bytes each); a CPU is several
# times faster when a row's scratch stays in its cache.
_PART_NUMBERS = (2**16, 2**26)
_Pending = tuple[list[int], DeviceLogprobs]  # rows of the batch, and their log-probabilities
_FusedDraw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def _fused_draw(device: torch.device) -> _FusedDraw | None:
    """What draws rows from their whole distributions on this device; None: torch, as all other rows."""
    if device.type != "cuda":
        return None
    from engine.kernels.fused_draw import draw_rows  # triton exists only where CUDA does

    return draw_rows


class SampleResult:
    """token_ids int64 [b] on the device: 0 for an inactive row, -1 where no token could be chosen.

    -1 means that the row's logits hold a NaN or +inf, or are all -inf: fail that request, and don't feed the -1 to
    the model. `logprobs` is None if no row asked for them, else one entry per row (None for a row that did not); the
    first use waits for their copies, which were enqueued with the step.
    """

    __slots__ = ("token_ids", "_pending", "_logprobs")

    def __init__(self, token_ids: Tensor, pending: list[_Pending]):
        self.token_ids = token_ids
        self._pending = pending
        self._logprobs: list[TokenLogprob | None] | None = None

    @property
    def logprobs(self) -> list[TokenLogprob | None] | None:
        if self._pending:
            self._logprobs = [None] * len(self.token_ids)
            for rows, values in self._pending:
                for row, value in zip(rows, values.read(), strict=True):
                    self._logprobs[row] = value
            self._pending = []
        return self._logprobs


class SamplingState:
    """The sampling parameters of every slot in [0, max_num_seqs), and the draw for a batch of them.

    logprobs_mode "processed": of the distribution that was drawn from, after penalties, bias, temperature and
    truncation (a greedy row: temperature 1, no truncation); "raw": of the logits as the model gave them.
    Not thread-safe; owned by the loop's thread.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        eos_token_ids: Sequence[int] = (),
        logprobs_mode: Literal["processed", "raw"] = "processed",
    ):
        if logprobs_mode not in ("processed", "raw"):
            raise ValueError(f"logprobs_mode must be 'processed' or 'raw'; found {logprobs_mode!r}")
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._eos_token_ids = tuple(eos_token_ids)
        self._raw = logprobs_mode == "raw"
        self._step = max(1, _PART_NUMBERS[self.device.type == "cuda"] // vocab_size)  # rows drawn from at a time
        self._fused_draw = _fused_draw(self.device)
        self._counts = TokenCounts(max_num_seqs, vocab_size, self.device)
        # One row more than there are slots: index -1 is the row of inactive entries, and is greedy.
        self._slots = [_INACTIVE] * (max_num_seqs + 1)
        self._special: set[int] = set()  # slots that argmax alone doesn't serve
        self._numbers = torch.zeros(max_num_seqs + 1, 9, dtype=torch.float64)
        self._keys = torch.zeros(max_num_seqs + 1, dtype=torch.int64)

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError for what `set_slot` would refuse, so that a request is refused before it has a slot."""
        params.check_vocab(self.vocab_size)
        self._banned(params)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        """Give a slot to a request; after a preemption, `output_ids` are the tokens it has so far.

        Raises RequestError if a token id is outside the vocabulary or the min_tokens mask would leave none.
        """
        self._check_slot(slot)
        params.check_vocab(self.vocab_size)
        penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        banned = self._banned(params)
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        random, truncated = not params.is_greedy, top_k > 0 or params.top_p < 1.0
        fused = random and not truncated and params.logprobs is None and self._fused_draw is not None
        self._slots[slot] = _Slot(
            random=random,
            fused=fused,
            top_k=top_k,
            truncated=truncated,
            min_p=params.min_p > 0.0,
            penalised=penalised,
            logprobs=params.logprobs,
            prompt_len=len(prompt_ids),
            min_tokens=params.min_tokens if banned is not None else 0,
            banned=banned,
            bias=_bias(params.logit_bias) if params.logit_bias else None,
        )
        self._numbers[slot] = torch.tensor(
            [params.temperature or 1.0, top_k, params.top_p, params.min_p, params.repetition_penalty,
             params.frequency_penalty, params.presence_penalty, 0.0, params.temperature if fused else 0.0],
            dtype=torch.float64,
        )  # fmt: skip
        self._keys[slot] = mix64(seed)
        (self._special.discard if self._slots[slot].is_plain else self._special.add)(slot)
        if penalised:
            self._counts.track(slot, prompt_ids, output_ids)

    def clear_slot(self, slot: int) -> None:
        """Take a slot back from its request."""
        self._check_slot(slot)
        self._slots[slot] = _INACTIVE
        self._special.discard(slot)

    def needs_sampler(self, slots: Iterable[int]) -> bool:
        """False if argmax of the logits is what `sample` would give for each of these slots, and no logprobs."""
        return bool(self._special) and not self._special.isdisjoint(slots)

    def sample(self, logits: Tensor, slots: Sequence[int] | Tensor, positions: Sequence[int] | Tensor) -> SampleResult:
        """Choose one token per row, and count it as an output of its slot. Nothing of it waits for the device, but for
        a draw whose nucleus might exceed the ranked tokens (see `draw_truncated`).

        logits [rows, V] of any float type, never written to; row i belongs to slots[i] (-1: inactive), and rows
        beyond the slots are ignored. positions[i] is the index that the new token will have in its sequence: the
        prompt's length plus the outputs so far. It feeds the random number, so a request draws the same again after
        a preemption and in any batch. Slots and positions are host values; reading them from a device would wait.
        """
        slots, positions = _as_list(slots), _as_list(positions)
        self._check_batch(logits, slots, positions)
        index = torch.tensor(slots, dtype=torch.int64)
        numbers = self._numbers[index]
        numbers[:, _U] = uniform(self._keys[index], torch.tensor(positions, dtype=torch.int64))
        numbers = upload(numbers, self.device)
        states = [self._slots[slot] for slot in slots]
        self._end_min_tokens(slots, states, positions)
        raw = logits[: len(slots)]
        penalised = [i for i, state in enumerate(states) if state.penalised]
        tracked = ids_to(self.device, [slots[i] for i in penalised]) if penalised else None
        x = self._adjusted(raw, penalised, tracked, states, numbers)
        token_ids, pending = self._choose(x, numbers, states)
        if penalised:
            self._counts.add(tracked, _rows(token_ids, penalised))
        if self._raw:
            pending = self._raw_logprobs(raw, token_ids, states)
        if -1 in slots:
            token_ids = token_ids.masked_fill(ids_to(self.device, slots) < 0, 0)
        return SampleResult(token_ids, pending)

    def warm_up(self, logits: Tensor) -> None:
        """Compile what draws from logits like these [rows, V] need, so that no request waits seconds for it."""
        if self._fused_draw is not None:
            none = torch.zeros(1, self._numbers.shape[1], dtype=torch.float64, device=self.device)  # temperature 0
            for x in (logits[:1], logits[:1].to(torch.float32)):  # as they are, and adjusted
                self._draw_fused(x, none, torch.empty(1, dtype=torch.int64, device=self.device))

    def _draw_fused(self, x: Tensor, numbers: Tensor, token_ids: Tensor) -> None:
        """Tokens of those rows of x [b, V] that are the fused draw's, by their numbers [b, 9], into token_ids [b]."""
        self._fused_draw(x, *(numbers[:, c] for c in (_FUSED, _MIN_P, _U)), token_ids)

    def _choose(self, x: Tensor, numbers: Tensor, states: list[_Slot]) -> tuple[Tensor, list[_Pending]]:
        """Tokens int64 [b] from x [b, V] by numbers [b, 9], -1 without a finite best, and the log-probabilities."""
        rest = [i for i, state in enumerate(states) if not state.fused]
        if len(rest) == len(states):
            return self._choose_by_torch(x, numbers, rest, states)
        token_ids = torch.empty(len(states), dtype=torch.int64, device=self.device)
        self._draw_fused(x, numbers, token_ids)
        if not rest:
            return token_ids, []
        chosen, pending = self._choose_by_torch(_rows(x, rest), _rows(numbers, rest), rest, states)
        return _put(token_ids, rest, chosen), pending

    def _choose_by_torch(
        self, x: Tensor, numbers: Tensor, rows: list[int], states: list[_Slot]
    ) -> tuple[Tensor, list[_Pending]]:
        """The same of these rows of the batch: x and numbers are theirs alone, `states` the whole batch's."""
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        best, token_ids = x.max(dim=1)
        pending: list[_Pending] = []
        members = [states[i] for i in rows]
        for part in self._parts(members):
            parts = (_rows(t, part) for t in (x, best, token_ids, numbers))
            drawn, logprobs = self._draw(*parts, [rows[j] for j in part], [members[j] for j in part])
            token_ids = _put(token_ids, part, drawn)
            pending += logprobs
        return torch.where(torch.isfinite(best), token_ids, -1), pending

    def _parts(self, states: list[_Slot]) -> Iterator[list[int]]:
        """The rows that argmax alone doesn't answer: those drawn in the same way together, at most a part's worth."""
        yield from self._split([i for i, s in enumerate(states) if s.random and not s.truncated])
        yield from self._split([i for i, s in enumerate(states) if s.random and s.truncated])
        if not self._raw:
            yield from self._split([i for i, s in enumerate(states) if not s.random and s.logprobs is not None])

    def _split(self, rows: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(rows), self._step):
            yield rows[start : start + self._step]

    def _draw(
        self, x: Tensor, best: Tensor, best_ids: Tensor, numbers: Tensor, rows: list[int], members: list[_Slot]
    ) -> tuple[Tensor, list[_Pending]]:
        """Tokens int64 [b] of one part, and the log-probabilities of its rows that want them.

        x float32 [b, V], its maxima best and best_ids [b], numbers [b, 9] and members belong to the batch's rows
        `rows`, all drawn in the same way.
        """
        z = (x - best.unsqueeze(1)).div_(numbers[:, _TEMPERATURE].to(torch.float32).unsqueeze(1))
        weights = weights_of(z)
        top_k, top_p, min_p, u = (numbers[:, c] for c in (_TOP_K, _TOP_P, _MIN_P, _U))
        if not members[0].random:
            drawn = whole(best_ids, weights)
        elif members[0].truncated:
            ks = [state.top_k for state in members]
            drawn = draw_truncated(z, weights, top_k, top_p, min_p, u, max(ks) if min(ks) > 0 else 0)
        else:
            drawn = draw_whole(weights, min_p if any(state.min_p for state in members) else None, u)
        asked = [j for j, state in enumerate(members) if state.logprobs is not None]
        if self._raw or not asked:
            return drawn.token_ids, []
        # A row of NaN is told from the others by its token: -1, as in the batch.
        token_ids = torch.where(torch.isfinite(best), drawn.token_ids, -1)
        parts = (_rows(t, asked) for t in (z, token_ids, drawn.kept, drawn.total))
        logprobs = DeviceLogprobs.of(*parts, [members[j].logprobs for j in asked])
        return drawn.token_ids, [([rows[j] for j in asked], logprobs)]

    def _raw_logprobs(self, raw: Tensor, token_ids: Tensor, states: list[_Slot]) -> list[_Pending]:
        return [
            (rows, raw_logprobs(_rows(raw, rows), _rows(token_ids, rows), [states[i].logprobs for i in rows]))
            for rows in self._split([i for i, state in enumerate(states) if state.logprobs is not None])
        ]

    def _end_min_tokens(self, slots: list[int], states: list[_Slot], positions: list[int]) -> None:
        """Lift the mask where enough tokens came before: the slot may go back to plain argmax."""
        for slot, state, position in zip(slots, states, positions, strict=True):
            if state.min_tokens and position - state.prompt_len >= state.min_tokens:
                state.min_tokens = 0
                if state.is_plain:
                    self._special.discard(slot)

    def _adjusted(
        self, raw: Tensor, penalised: list[int], tracked: Tensor | None, states: list[_Slot], numbers: Tensor
    ) -> Tensor:
        """The logits in float32 after penalties, bias and the min_tokens mask; `raw` as it is where none applies.

        `penalised` are rows, and `tracked` their slots on the device.
        """
        biased = [i for i, state in enumerate(states) if state.bias is not None]
        banned = [i for i, state in enumerate(states) if state.min_tokens]
        if not (penalised or biased or banned):
            return raw
        x = raw.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for part, rows in enumerate(self._split(penalised)):
            slots = tracked[part * self._step : part * self._step + len(rows)]
            columns = (_column(numbers, rows, c) for c in (_REPETITION, _FREQUENCY, _PRESENCE))
            x = _put(x, rows, self._counts.penalise(_rows(x, rows), slots, *columns))
        if biased:
            where = self._flat(biased, [states[i].bias[0] for i in biased])
            values = torch.cat([states[i].bias[1] for i in biased])
            x.view(-1).index_add_(0, where, upload(values, self.device))
        if banned:
            where = self._flat(banned, [states[i].banned for i in banned])
            x.view(-1).index_fill_(0, where, float("-inf"))
        return x

    def _flat(self, rows: list[int], ids: list[Tensor]) -> Tensor:
        """Places in the flattened logits of each row's token ids, on the device by one copy."""
        lengths = torch.tensor([len(t) for t in ids])
        starts = torch.tensor(rows) * self.vocab_size
        return upload(torch.cat(ids) + starts.repeat_interleave(lengths), self.device)

    def _banned(self, params: SamplingParams) -> Tensor | None:
        """What would end the request before min_tokens; None if nothing can."""
        if params.min_tokens == 0:
            return None
        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            ids.update(i for i in self._eos_token_ids if i < self.vocab_size)
        if len(ids) == self.vocab_size:
            raise RequestError(
                f"min_tokens={params.min_tokens} with stop_token_ids that name the whole vocabulary leaves no token: "
                "give fewer stop_token_ids or min_tokens=0",
                param="stop_token_ids",
            )
        return torch.tensor(sorted(ids), dtype=torch.int64) if ids else None

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.max_num_seqs:
            raise ValueError(f"slot {slot} is not in [0, {self.max_num_seqs})")

    def _check_batch(self, logits: Tensor, slots: list[int], positions: list[int]) -> None:
        if logits.dim() != 2 or logits.shape[0] < len(slots) or logits.shape[1] != self.vocab_size:
            raise ValueError(f"logits must be [at least {len(slots)}, {self.vocab_size}]; found {list(logits.shape)}")
        if not all(-1 <= slot < self.max_num_seqs for slot in slots):
            raise ValueError(f"slots must be in [-1, {self.max_num_seqs}); found {slots}")
        if len(positions) != len(slots):
            raise ValueError(f"{len(slots)} slots, but {len(positions)} positions")


def _bias(bias: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """These ascending rows of x, as an alias where they lie together."""
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows):
        return x[first : last + 1]
    return x.index_select(0, ids_to(x.device, rows))


def _put(x: Tensor, rows: list[int], part: Tensor) -> Tensor:
    """x with these ascending rows replaced: x itself, written to, or `part` if they are all of them."""
    first, last = rows[0], rows[-1]
    if len(rows) == len(x):
        return part
    if last - first + 1 == len(rows):
        x[first : last + 1] = part
        return x
    return x.index_copy_(0, ids_to(x.device, rows), part)


def _column(numbers: Tensor, rows: list[int], column: int) -> Tensor:
    """One parameter of these rows, as float32 [b, 1]."""
    return _rows(numbers, rows)[:, column : column + 1].to(torch.float32)


def _as_list(values: Sequence[int] | Tensor) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
