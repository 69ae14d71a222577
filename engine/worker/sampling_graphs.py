"""The captured sampling step, which runs after the forward graph if a row needs more than its greedy token.

One graph per row bucket and variant (see `Sampler.variants`), over static buffers and the sampler's table of slots in
device memory. A step uploads nothing: the table is written when a request gets its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.sampling.sampler import Sampler, SampleResult
from graph_cache.addresses import AddressBook
from graph_cache.buckets import Buckets
from graph_cache.buffers import BATCH, BufferSpec, StaticBuffers
from graph_cache.cache import GraphCache
from graph_cache.site import Site

SITE = "sampling"
PHASE = "sample"


class SamplingStep:
    """Samples the rows that need more than argmax, by graph replay. Not thread-safe.

    The forward step leaves its results in logits [max_rows, V], next_tokens int64 [max_rows] (the greedy token of each
    row, -1 if its logits are not finite) and last_tokens int64 [max_num_seqs + 1] (by slot + 1, always a valid token).
    `run` replaces the tokens of the rows that are sampled; logits are never written to. `buckets` are the forward
    step's row buckets.

    - slots int64 [max_rows]: slot + 1 of each row; 0 is padding. positions int64 [max_rows]: of the tokens to sample.
      `load` writes them; a captured forward step may write them itself.
    """

    def __init__(
        self,
        cache: GraphCache,
        sampler: Sampler,
        logits: Tensor,
        next_tokens: Tensor,
        last_tokens: Tensor,
        buckets: Buckets,
    ):
        self._cache = cache
        self._sampler = sampler
        self._logits, self._next_tokens = logits, next_tokens
        self._rows = torch.zeros(2, len(logits), dtype=torch.int64, device=logits.device)
        self.slots, self.positions = self._rows
        self._num_loaded = 0
        buffers = {
            "logits": (BufferSpec((BATCH, logits.shape[1]), logits.dtype, pad=None), logits),
            "slots": (BufferSpec((BATCH,), torch.int64), self.slots),
            "positions": (BufferSpec((BATCH,), torch.int64), self.positions),
            "next_tokens": (BufferSpec((BATCH,), torch.int64, pad=None), next_tokens),
            "last_tokens": (BufferSpec(tuple(last_tokens.shape), torch.int64, pad=None), last_tokens),
        }
        addresses = AddressBook()
        addresses.watch(sampler.table.tensors(sampler.counts, sampler.masks)._asdict(), prefix=f"{SITE}.slots.")
        self._site = cache.add_site(
            Site(
                SITE,
                [sampler.slot_sampling()],
                StaticBuffers(
                    {name: spec for name, (spec, _) in buffers.items()},
                    len(logits),
                    logits.device,
                    tensors={name: tensor for name, (_, tensor) in buffers.items()},
                ),
                sampling_buckets(buckets),
                phase=PHASE,
                variants=sampler.variants,
                addresses=addresses,
            )
        )

    def warm_up(self) -> None:
        """Load the kernels, so that no request waits for them: run every variant on padding."""
        for variant in self._site.variants:
            self._site.run_eager(self._site.key(self._site.buckets.sizes[0], variant))

    def load(self, rows: Tensor) -> None:
        """Copy slots + 1 and positions int64 [2, n], on the device or in pinned memory, and make other rows padding."""
        count = rows.shape[1]
        self._rows[:, :count].copy_(rows, non_blocking=True)
        if self._num_loaded > count:
            self._rows[:, count : self._num_loaded].zero_()
        self._num_loaded = count

    def run(self, slots: Sequence[int], positions: Sequence[int]) -> SampleResult:
        """Sample the rows of these slots at these positions, which are loaded already, and count their tokens.

        Replays a graph, or runs the same operations eager if it is missing; neither if argmax is enough for all rows.
        `token_ids` of the result alias next_tokens: copy them before the next step. Log-probabilities are computed by
        launches after the replay.
        """
        rows = len(slots)
        logits, token_ids = self._logits[:rows], self._next_tokens[:rows]
        self._sampler.lift_min_tokens(slots, positions)
        logprobs_of = self._sampler.logprobs_of(logits, slots)
        variant: dict[str, Any] | None = self._sampler.variant(slots)
        if variant is not None:
            self._cache.run(self._cache.plan(SITE, rows, **variant))
        return SampleResult(token_ids, [] if logprobs_of is None else logprobs_of(token_ids))


def sampling_buckets(buckets: Buckets) -> Buckets:
    """Return the buckets that are powers of two, and the largest: padding rows cost little, and captures time."""
    return Buckets(tuple(size for size in buckets if size & (size - 1) == 0 or size == buckets.max))
