"""Log-probabilities of chosen tokens, their ranks and the most likely alternatives.

Computes them on the device and copies the result to the host without blocking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.kernels import logprob_layout as layout
from engine.kernels.sampling_constants import ONE
from engine.protocol.logprobs import TokenLogprob, TokenLogprobs, pack_records, with_support
from engine.protocol.sampling_params import MAX_LOGPROB_TOKEN_IDS
from engine.sampling.ops import ranked, weights_of
from engine.utils.async_copy import Download, ids_to

SCORE_COLUMNS = layout.NAMED + MAX_LOGPROB_TOKEN_IDS
"""Most columns of the scores that the kernels write: see engine/kernels/logprob_layout.py."""

_CHUNK_LOGITS = 2**24  # logits per chunk: bounds the scratch of a long prompt, which would take gigabytes


@dataclass(slots=True)
class Support:
    """What rows get of the tokens that top-k, top-p and min-p kept, beside their log-probabilities.

    weights int64 [b, V] of all tokens. `has_mass` and `has_ids`: whether each row gets the log of the kept probability,
    and the kept ids if some were cut off (`is_cut`).
    """

    weights: Tensor
    has_mass: Sequence[bool]
    has_ids: Sequence[bool]
    is_cut: Sequence[bool]
    width: int = 0

    def columns(self, z: Tensor, kept: Tensor, total: Tensor) -> list[Tensor]:
        """Return columns int64 for the host: the mass, the number of kept ids, and as many ids as the widest row has.

        Waits for the device if a row gets ids, to know how many.
        """
        mass = (total.to(torch.float64) / self.weights.sum(dim=1).to(torch.float64)).log()
        columns = [mass.view(torch.int64).unsqueeze(1), kept.unsqueeze(1)]
        lists = [row for row, (wanted, cut) in enumerate(zip(self.has_ids, self.is_cut, strict=True)) if wanted and cut]
        if lists:
            widest = int(kept.index_select(0, ids_to(kept.device, lists)).max())
            columns.append(ranked(z, widest))
        self.width = sum(column.shape[1] for column in columns)
        self.weights = self.weights[:0]  # not needed any more
        return columns

    def added_to(self, records: list[bytes], columns: np.ndarray) -> list[bytes]:
        """Return records with the support that their rows get."""
        masses = np.ascontiguousarray(columns[:, 0]).view(np.float64)
        found = list(records)
        for row, record in enumerate(records):
            if self.has_mass[row]:
                has_list = self.has_ids[row] and self.is_cut[row]
                ids = columns[row, 2 : 2 + int(columns[row, 1])] if has_list else None
                found[row] = with_support(record, float(masses[row]), ids)
        return found


@dataclass(slots=True)
class DeviceLogprobs:
    """Log-probabilities being copied to the host: int64 [b, 3 + 2k + m]. `read` waits for the copy.

    The first columns are laid out as in engine/kernels/logprob_layout.py; the log-probabilities of `named` follow.
    """

    packed: Download
    top_counts: Sequence[int]
    named: Sequence[Sequence[int]]
    support: Support | None = None

    @classmethod
    def of(
        cls,
        z: Tensor,
        token_ids: Tensor,
        kept: Tensor,
        total: Tensor,
        top_counts: Sequence[int],
        named: Sequence[Sequence[int]],
        truncated: bool = False,
        support: Support | None = None,
    ) -> DeviceLogprobs:
        """Compute log-probabilities of the chosen ids int64 [b] from z float32 [b, V] (row maximum 0).

        Each row's distribution has its `kept` int64 [b] most likely tokens; `total` int64 [b] is the sum of their
        integer weights (engine/sampling/ops.py). Row i gets top_counts[i] alternatives, and the tokens named[i].
        `truncated`: some row may keep fewer than V tokens. `support`: what rows get of the kept tokens.
        """
        log_total = (total.to(torch.float64) / ONE).log().unsqueeze(1)
        chosen_z = z.gather(1, token_ids.clamp(min=0).unsqueeze(1))
        rank = (z > chosen_z).sum(dim=1, keepdim=True) + 1
        columns = [token_ids.unsqueeze(1), (chosen_z - log_total).view(torch.int64), rank]
        k = min(max(top_counts, default=0), z.shape[1])
        if k:
            ids = ranked(z, k)
            dropped = torch.arange(k, device=z.device) >= kept.unsqueeze(1)
            values = (z.gather(1, ids) - log_total).masked_fill(dropped, -math.inf)
            columns.append(torch.stack((values.view(torch.int64), ids), dim=2).flatten(1))
        m = max(map(len, named), default=0)
        if m:
            wanted = ids_to(z.device, [[*ids, *[0] * (m - len(ids))] for ids in named])
            values = z.gather(1, wanted)
            if truncated:  # the least likely token that is kept ends the order by probability, then by id
                last = ranked(z, z.shape[1]).gather(1, (kept - 1).clamp(min=0).unsqueeze(1))
                least = z.gather(1, last)
                values = values.masked_fill((values < least) | ((values == least) & (wanted > last)), -math.inf)
            columns.append((values - log_total).view(torch.int64))
        if support is not None:
            columns += support.columns(z, kept, total)
        return cls(Download(torch.cat(columns, dim=1)), top_counts, named, support)

    def read(self) -> TokenLogprobs[TokenLogprob | None]:
        """Return one entry per row, None if no token could be chosen. Alternatives of probability 0 are left out."""
        packed = self.packed.read().numpy()
        last = packed.shape[1] - (0 if self.support is None else self.support.width)
        end = last - max(map(len, self.named), default=0)
        named = packed[:, end:last].view(np.float64)
        records = pack_records(packed[:, :end], self.top_counts, named, self.named)
        if self.support is not None:
            records = self.support.added_to(records, packed[:, last:])
        return TokenLogprobs(records)


@dataclass(slots=True)
class SlotLogprobs:
    """Log-probabilities of slots, computed by kernels, which are being copied to the host. `read` waits for the copy.

    `packed`: the first columns of the layout in engine/kernels/logprob_layout.py, [columns, bucket]. `rows` are those
    to read, ascending. Row rows[i] has top_counts[i] alternatives, and the tokens named[i].
    """

    packed: Download
    rows: list[int]
    top_counts: list[int]
    named: list[tuple[int, ...]]

    @classmethod
    def of(
        cls, scores: Tensor, bucket: int, rows: list[int], top_counts: list[int], named: list[tuple[int, ...]]
    ) -> SlotLogprobs:
        """Begin to copy the columns that these rows need of scores int64 [at least SCORE_COLUMNS * bucket]."""
        columns = layout.TOP + 2 * max(top_counts)
        if any(named):
            columns = layout.NAMED + max(map(len, named))
        return cls(Download(scores[: columns * bucket].view(columns, bucket)), rows, top_counts, named)

    def read(self) -> TokenLogprobs[TokenLogprob | None]:
        """Return one entry per row, None if no token could be chosen. Alternatives of probability 0 are left out."""
        packed, count = self.packed.read().numpy(), len(self.rows)
        packed = (packed[:, :count] if self.rows[-1] + 1 == count else packed[:, self.rows]).T
        end = layout.TOP + 2 * max(self.top_counts)
        named = packed[:, layout.NAMED :].view(np.float64)
        return TokenLogprobs(pack_records(packed[:, :end], self.top_counts, named, self.named))


def raw_logprobs(
    logits: Tensor, token_ids: Tensor, top_counts: Sequence[int], named: Sequence[Sequence[int]]
) -> DeviceLogprobs:
    """Compute the log-softmax of unmodified model logits [b, V] of any float dtype. See DeviceLogprobs.of."""
    x = logits.to(torch.float32)
    z = x - x.amax(dim=1, keepdim=True)
    kept = torch.full_like(token_ids, z.shape[1])
    return DeviceLogprobs.of(z, token_ids, kept, weights_of(z).sum(dim=1), top_counts, named)


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int, named: Sequence[int] = ()) -> list[DeviceLogprobs]:
    """Compute log-probabilities of targets int64 [T] under raw logits [T, V], with k alternatives and `named` each.

    logits[i] is the model's output at the token before targets[i]. Returns chunks, to be read in order.
    """
    chunk_rows = max(1, _CHUNK_LOGITS // logits.shape[1])
    out: list[DeviceLogprobs] = []
    for start in range(0, len(targets), chunk_rows):
        chunk = targets[start : start + chunk_rows]
        out.append(raw_logprobs(logits[start : start + chunk_rows], chunk, [k] * len(chunk), [named] * len(chunk)))
    return out
