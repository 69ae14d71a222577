"""The captured sampling step, which runs after the forward graph if a row needs more than its greedy token.

One graph per row bucket and variant (see `Sampler.variants`), and on a GPU one per row bucket for log-probabilities,
over static buffers and the sampler's table of slots in device memory. A step uploads nothing: the table is written when
a request gets its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.sampling.logprobs import SCORE_COLUMNS
from engine.sampling.sampler import Sampler, SampleResult
from graph_cache.core.addresses import AddressBook
from graph_cache.core.buckets import Buckets
from graph_cache.core.buffers import BATCH, BufferSpec, StaticBuffers
from graph_cache.core.cache import GraphCache
from graph_cache.core.shadow import Rows
from graph_cache.core.site import Site

SITE = "sampling"
LOGPROBS_SITE = "logprobs"
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
        addresses = AddressBook()
        addresses.watch(sampler.table.tensors(sampler.counts, sampler.masks)._asdict(), prefix=f"{SITE}.slots.")
        shared = {
            "logits": (BufferSpec((BATCH, logits.shape[1]), logits.dtype, pad=None), logits),
            "slots": (BufferSpec((BATCH,), torch.int64), self.slots),
            "next_tokens": (BufferSpec((BATCH,), torch.int64, pad=None), next_tokens),
        }

        def add_site(
            name: str, part: Callable[..., None], more: dict[str, tuple[BufferSpec, Tensor]], **options: Any
        ) -> Site:
            buffers = shared | more
            static = StaticBuffers(
                {label: spec for label, (spec, _) in buffers.items()},
                len(logits),
                logits.device,
                tensors={label: tensor for label, (_, tensor) in buffers.items()},
            )
            sizes = sampling_buckets(buckets)
            return cache.add_site(Site(name, [part], static, sizes, phase=PHASE, addresses=addresses, **options))

        sampling = add_site(
            SITE,
            sampler.slot_sampling(),
            {
                "positions": (BufferSpec((BATCH,), torch.int64), self.positions),
                "last_tokens": (BufferSpec(tuple(last_tokens.shape), torch.int64, pad=None), last_tokens),
            },
            variants=sampler.variants,
            writes=lambda rows: [Rows("token counts", sampler.counts.values, (self.slots[:rows] - 1).clamp_(min=0))],
        )
        self._sites = [sampling]
        self._scores = torch.empty(0)
        scoring = sampler.slot_scoring()
        if scoring is not None:
            self._scores = torch.zeros(SCORE_COLUMNS * len(logits), dtype=torch.int64, device=logits.device)
            scores = {"scores": (BufferSpec(tuple(self._scores.shape), torch.int64, pad=None), self._scores)}
            self._sites.append(add_site(LOGPROBS_SITE, scoring, scores))

    def warm_up(self) -> None:
        """Load the kernels, so that no request waits for them: run every variant on padding.

        That is the smallest bucket, and the smallest one of each larger number of rows that has other kernels.
        """
        for site in self._sites:
            sizes = site.buckets.sizes
            larger = (next((size for size in sizes if size > most), sizes[0]) for most in self._sampler.row_limits)
            for size in dict.fromkeys([sizes[0], *larger]):
                for variant in site.variants:
                    site.run_eager(site.key(size, variant))

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
        `token_ids` of the result alias next_tokens: copy them before the next step. Log-probabilities come from another
        graph, and those that it doesn't cover from launches after the replay.
        """
        rows = len(slots)
        logits, token_ids = self._logits[:rows], self._next_tokens[:rows]
        self._sampler.lift_min_tokens(slots, positions)
        slot_logprobs = self._sampler.slot_logprobs(slots)
        logprobs_of = self._sampler.logprobs_of(logits, slots, beside_kernels=True)
        variant: dict[str, Any] | None = self._sampler.variant(slots)
        if variant is not None:
            self._cache.run(self._cache.plan(SITE, rows, **variant))
        pending = [] if logprobs_of is None else logprobs_of(token_ids)
        if slot_logprobs is not None:
            ran = self._cache.run(self._cache.plan(LOGPROBS_SITE, rows))
            pending.append(slot_logprobs(self._scores, ran.bucket))
        return SampleResult(token_ids, pending)


def sampling_buckets(buckets: Buckets) -> Buckets:
    """Return the buckets that are powers of two, and the largest: padding rows cost little, and captures time."""
    return Buckets(tuple(size for size in buckets if size & (size - 1) == 0 or size == buckets.max))
