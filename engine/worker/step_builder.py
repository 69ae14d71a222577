"""Build steps on the host: turn a scheduled batch into the arrays and graph choices that every rank executes.

Touches no device memory. What a step reads beyond tokens, positions and pages is added here, and to StepInput.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.protocol.slot_assignment import SlotAssignment
from engine.scheduling.batch import Batch, PrefillChunk, VerifyRow
from engine.worker.decode_graphs import SHARED_SITE, SITE
from engine.worker.input_buffers import DecodeInputs
from engine.worker.packed_graphs import PackedBuckets, PackedRow, decode_row, prefill_row, verify_row
from engine.worker.step_input import (
    ChunkInput,
    DecodeInput,
    PoolingInput,
    PrefillInput,
    PromptScoring,
    StepInput,
    VerifyInput,
)
from graph_cache.core.cache import GraphCache


class StepBuilder:
    """Builds the steps of one engine. Not thread-safe.

    - cache: plans which graph runs the decodes.
    - inputs: what the device's decode inputs hold; a step carries the changes.
    - contexts: the widths in tokens that attention reads, if its graphs differ by context; else empty.
    - captures_prefill: whether packed steps run as graphs.
    - max_mixed_decodes: the most decodes that run in one graph with prompt chunks; may be lowered at any time.
    """

    def __init__(
        self,
        cache: GraphCache,
        inputs: DecodeInputs,
        page_size: int,
        contexts: Sequence[int],
        prefill_buckets: PackedBuckets,
        verify_buckets: PackedBuckets | None,
        *,
        captures_prefill: bool,
        max_mixed_decodes: int,
    ):
        self._cache, self.inputs, self._page_size, self._contexts = cache, inputs, page_size, contexts
        self._prefill_buckets, self._verify_buckets = prefill_buckets, verify_buckets
        self._captures_prefill = captures_prefill
        self.max_mixed_decodes = max_mixed_decodes

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Token counts of the graphs of prompt chunks; empty if these run eager, without padding."""
        return tuple(self._prefill_buckets.sizes.sizes) if self._captures_prefill else ()

    def reset(self) -> None:
        """Take all inputs of the next step from the host: a step failed, and how far it came is unknown."""
        self.inputs.reset()

    def build(self, batch: Batch) -> StepInput:
        """Return the step of a batch, which every rank executes. Each step built must be executed, in order."""
        for request in batch.admitted:
            self.inputs.assign_slot(request.slot)
        mixed = self._build_mixed(batch)
        decode, prefill = None, mixed
        if mixed is None:
            decode = self._build_decode(batch) if batch.decodes else None
            prefill = self._build_prefill(batch.prefills) if batch.prefills else None
        return StepInput(
            admitted=[
                SlotAssignment(
                    request.slot,
                    request.params,
                    request.seed,
                    request.request.prompt_token_ids,
                    request.output_ids,
                    request.request.adapter,
                )
                for request in batch.admitted
            ],
            fresh_pages=self._fresh_pages(batch) if self._contexts else [],
            decode=decode,
            prefill=prefill,
            verify=self._build_verify(batch.verifies) if batch.verifies else None,
            is_constrained=bool(batch.constrained),
            checked_sites=self._cache.shadows.due_sites(),
        )

    def _fresh_pages(self, batch: Batch) -> list[int]:
        """Return the pages that this step begins and does not fill.

        Attention over a padded context reads a page to its end. A request that was aborted or preempted in its prefill
        may have left NaN there, which no sampled token has revealed.
        """
        size = self._page_size
        spans = [(request, position, 1) for request, position in zip(batch.decodes, batch.positions, strict=True)]
        spans += [(chunk.request, chunk.start, chunk.length) for chunk in batch.prefills]
        spans += [(row.request, row.start, row.length) for row in batch.verifies]
        ends = [(request, start, start + length) for request, start, length in spans]
        return [
            table[end // size]
            for request, start, end in ends
            if end % size and end // size * size >= start
            for table in request.page_tables
        ]

    def _build_decode(self, batch: Batch) -> DecodeInput:
        variant, changes = self._variant(batch), self.inputs.changes(batch)
        site = SHARED_SITE if self.inputs.shares_prefixes else SITE
        bucket = self._cache.plan(site, len(batch.decodes), **variant).bucket
        assert bucket is not None  # the largest bucket is max_num_seqs
        self.inputs.advance()
        slots = [request.slot for request in batch.decodes]
        rows = list(enumerate(batch.decodes))
        hidden_states = [(row, request.request_id) for row, request in rows if request.params.return_hidden_states]
        experts = [(row, request.request_id) for row, request in rows if request.params.return_routed_experts]
        return DecodeInput(slots, batch.positions, site, bucket, variant, changes, hidden_states, experts)

    def _variant(self, batch: Batch) -> dict[str, int]:
        """Return the graph variant for these decodes: the context bucket, if attention uses one."""
        if not self._contexts:
            return {}
        longest = max(batch.positions) + 1
        return {"context": next(width for width in self._contexts if width >= longest)}

    def _build_prefill(self, chunks: Sequence[PrefillChunk]) -> PrefillInput:
        rows = [prefill_row(chunk) for chunk in chunks]
        return self._build_packed(rows, [chunk_input(chunk) for chunk in chunks])

    def _build_packed(self, rows: list[PackedRow], chunks: list[ChunkInput], num_decodes: int = 0) -> PrefillInput:
        bucket, packed = self._pack(self._prefill_buckets, rows)
        ended = [chunk for chunk in chunks if chunk.is_last]
        self.inputs.set_sampled_positions(
            [chunk.slot for chunk in ended], [chunk.start + chunk.length for chunk in ended]
        )
        return PrefillInput(chunks, bucket, packed, num_decodes)

    def _build_mixed(self, batch: Batch) -> PrefillInput | None:
        """Return decodes and prompt chunks as one packed step, which reads the weights once; None if they run apart.

        A constrained batch runs them apart: only then do its decodes run while masks are computed.
        """
        chunks, num_decodes = batch.prefills, len(batch.decodes)
        if not (chunks and 0 < num_decodes <= self.max_mixed_decodes) or batch.constrained or batch.verifies:
            return None
        tokens = num_decodes + sum(chunk.length for chunk in chunks)
        if self._prefill_buckets.choose(tokens, num_decodes + len(chunks)) is None:
            return None
        pairs = list(zip(batch.decodes, batch.positions, strict=True))
        rows = [decode_row(request, position) for request, position in pairs]
        rows += [prefill_row(chunk) for chunk in chunks]
        decodes = [
            ChunkInput(
                request.slot, position, 1, True, None,
                request.request_id if request.params.return_hidden_states else None,
                routed_experts=request.request_id if request.params.return_routed_experts else None,
            )
            for request, position in pairs
        ]  # fmt: skip
        self.inputs.forget_rows()
        inputs = decodes + [chunk_input(chunk) for chunk in chunks]
        return self._build_packed(rows, inputs, num_decodes)

    def _build_verify(self, rows: Sequence[VerifyRow]) -> VerifyInput:
        assert self._verify_buckets is not None
        bucket, packed = self._pack(self._verify_buckets, [verify_row(row) for row in rows])
        self.inputs.forget_tokens([row.request.slot for row in rows])
        return VerifyInput(
            slots=[row.request.slot for row in rows for _ in range(row.length)],
            positions=[row.start + 1 + index for row in rows for index in range(row.length)],
            spans=[(row.start, row.length) for row in rows],
            bucket=bucket,
            packed=packed,
        )

    def _pack(self, buckets: PackedBuckets, rows: Sequence[PackedRow]) -> tuple[int | None, np.ndarray]:
        """Return the bucket, None for an eager step, and the packed input tensor."""
        tokens, bucket = sum(len(row.tokens) for row in rows), None
        if self._captures_prefill:
            bucket = buckets.choose(tokens, len(rows))
        if bucket is None:
            return None, buckets.exact_layout(len(rows)).fill(rows, tokens)
        return bucket, buckets.layout(bucket).fill(rows, bucket)


def chunk_input(chunk: PrefillChunk) -> ChunkInput:
    """Return what the worker needs to know of a chunk."""
    request, params = chunk.request, chunk.request.params
    scoring = None
    if params.prompt_logprobs is not None:
        end = min(chunk.start + chunk.length, request.prompt_len - 1)
        targets = request.token_ids[chunk.start + 1 : end + 1]
        scoring = PromptScoring(request.request_id, targets, params.prompt_logprobs, params.logprob_token_ids)
    hidden_states = request.request_id if params.return_hidden_states else None
    pooling = None if params.pooling is None else PoolingInput(request.request_id, params.pooling)
    experts = request.request_id if params.return_routed_experts else None
    return ChunkInput(request.slot, chunk.start, chunk.length, chunk.is_last, scoring, hidden_states, pooling, experts)
