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
from engine.protocol.logprobs import TokenLogprob, TokenLogprobs, pack_records
from engine.protocol.sampling_params import MAX_LOGPROB_TOKEN_IDS
from engine.sampling.ops import ranked, weights_of
from engine.utils.async_copy import Download, ids_to

SCORE_COLUMNS = layout.NAMED + MAX_LOGPROB_TOKEN_IDS
"""Most columns of the scores that the kernels write: see engine/kernels/logprob_layout.py."""

_CHUNK_LOGITS = 2**24  # logits per chunk: bounds the scratch of a long prompt, which would take gigabytes


@dataclass(slots=True)
class DeviceLogprobs:
    """Log-probabilities being copied to the host: int64 [b, 3 + 2k + m]. `read` waits for the copy.

    The first columns are laid out as in engine/kernels/logprob_layout.py; the log-probabilities of `named` follow.
    """

    packed: Download
    top_counts: Sequence[int]
    named: Sequence[Sequence[int]]

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
    ) -> DeviceLogprobs:
        """Compute log-probabilities of the chosen ids int64 [b] from z float32 [b, V] (row maximum 0).

        Each row's distribution has its `kept` int64 [b] most likely tokens; `total` int64 [b] is the sum of their
        integer weights (engine/sampling/ops.py). Row i gets top_counts[i] alternatives, and the tokens named[i].
        `truncated`: some row may keep fewer than V tokens.
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
        return cls(Download(torch.cat(columns, dim=1)), top_counts, named)

    def read(self) -> TokenLogprobs[TokenLogprob | None]:
        """Return one entry per row, None if no token could be chosen. Alternatives of probability 0 are left out."""
        packed = self.packed.read().numpy()
        end = packed.shape[1] - max(map(len, self.named), default=0)
        named = packed[:, end:].view(np.float64)
        return TokenLogprobs(pack_records(packed[:, :end], self.top_counts, named, self.named))


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
