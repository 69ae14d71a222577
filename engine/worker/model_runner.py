"""The model runner: execute a batch on one device.

Owns the model, the KV cache and the static buffers. Decodes, and on a GPU prefills, run through the graph cache;
sampling follows. `execute` enqueues a step and returns an AsyncStepOutput, which is read later, when the next step may
already be enqueued.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.backend import PrefillAttention
from engine.attention.kv_cache import KVCache
from engine.config import ResolvedConfig
from engine.errors import ConfigError, ModelError
from engine.kernels.launch import SHARED_BYTES, fits
from engine.megatron.model import MegatronModel
from engine.models.dense import DenseModel
from engine.sampling.sampler import Sampler, prompt_logprobs
from engine.scheduling.batch import Batch, PrefillChunk
from engine.scheduling.request import Request
from engine.utils.async_copy import ids_to
from engine.worker.async_output import MAX_STEPS_IN_FLIGHT, AsyncStepOutput
from engine.worker.decode_graphs import SITE, decode_site, model_addresses
from engine.worker.input_buffers import DecodeInputs, Layout, decode_buffers
from engine.worker.sizing import WARM_CONTEXT, context_buckets
from graph_cache.buckets import Buckets
from graph_cache.cache import GraphCache
from graph_cache.host_ring import HostRing
from graph_cache.keys import ABOVE_MAX
from graph_cache.manifest import Manifest

if TYPE_CHECKING:  # they import triton
    from engine.models.fused_dense import FusedDense
    from engine.worker.prefill_graphs import Prefill

logger = logging.getLogger(__name__)

PREFILL_SITE = "prefill"
PREFILL_EAGER = "phase_not_captured"
TOO_MANY_CHUNKS = "more_chunks_than_a_graph_takes"
PROMPT_LOGPROB_ROWS = 256  # rows of logits materialised at once for prompt logprobs


class ModelRunner:
    """Runs batches on one device. Not thread-safe."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: DenseModel | MegatronModel,
        eos_token_ids: Sequence[int],
        manifest: Manifest | None = None,
    ):
        spec, device = model.config, torch.device(config.device)
        self.config = config
        self.model = model
        self.device = device
        dtype = getattr(torch, config.dtype)
        self.attention_impl = "triton" if device.type == "cuda" else "sdpa"
        self.kv = KVCache(
            spec.num_layers, config.num_pages, config.page_size, spec.num_kv_heads, spec.head_dim, dtype, device
        )
        pages = -(-config.max_model_len // config.page_size)
        layout = Layout(config.max_num_seqs, pages)
        self.buffers = decode_buffers(layout, spec.hidden_size, spec.vocab_size, dtype, device)
        self.state = layout.views(self.buffers["state"])
        self.inputs = DecodeInputs(self.buffers["state"], layout, config.page_size)
        fused = self._build_fused_model(dtype)
        self.cache = GraphCache(
            config.graph_config(), device, capture_on_miss=config.warmup == "lazy", manifest=manifest
        )
        has_dynamic_lengths = self.attention_impl == "triton"  # read from device memory: one graph serves any context
        self.contexts = () if has_dynamic_lengths else context_buckets(config.max_model_len, config.page_size)
        buckets = Buckets.for_limit(config.max_num_seqs, config.graph_buckets)
        self.site = self.cache.add_site(
            decode_site(
                model,
                self.kv,
                self.buffers,
                layout,
                buckets,
                scope=self.cache.config.inference_cuda_graph_scope,
                impl=self.attention_impl,
                contexts=self.contexts,
                warm_contexts=[width for width in self.contexts if width <= WARM_CONTEXT] or self.contexts[:1],
                fused=fused,
            )
        )
        self.prefill: Prefill | None = None
        self.collectives = None if fused is None else fused.collectives
        if fused is not None:
            from engine.worker.prefill_graphs import Prefill

            self.prefill = Prefill(
                fused, self.state.last_tokens, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len
            )
            self.cache.add_site(self.prefill.site(model_addresses(model, self.kv)))
        self.sampling = Sampler(
            config.max_num_seqs,
            spec.vocab_size,
            device,
            eos_token_ids=eos_token_ids,
            logprobs_mode=config.logprobs_mode,
        )
        self.sampling.warm_up(self.buffers["logits"])
        # Two results per step in flight: the tokens of its decodes and of its prefills.
        self.ring = HostRing(self.cache.pool.backend, config.max_num_seqs, torch.int64, depth=2 * MAX_STEPS_IN_FLIGHT)
        self._in_flight: list[AsyncStepOutput] = []

    def _build_fused_model(self, dtype: torch.dtype) -> FusedDense | None:
        """Build the fused-kernel model; None if device, dtype, settings or model don't support it.

        Raises ConfigError if kernels='fused' was requested and is not supported.
        """
        requested, is_16_bit = self.config.kernels, dtype in (torch.bfloat16, torch.float16)
        is_supported = self.device.type == "cuda" and is_16_bit and fits(self.device)
        if requested == "fused" and not is_supported:
            raise ConfigError(
                f"kernels='fused' needs 16-bit weights and a GPU with {SHARED_BYTES >> 10} KiB of shared "
                f"memory per block, found {self.config.dtype} on {self.device}; use kernels='auto'"
            )
        if requested == "torch" or not is_supported:
            if self.device.type == "cuda":
                logger.info("using the model's own layers: kernels=%r, dtype %s", requested, self.config.dtype)
            return None
        from engine.models.fused_dense import FusedDense  # imports triton, which is installed only with CUDA

        try:
            fused = FusedDense(self.model, self.kv, self.config.max_num_seqs, self.config.max_num_batched_tokens)
            logger.info("using fused kernels")
            return fused
        except ModelError as error:  # a Megatron model that is not fusable: fall back to its own layers
            if requested == "fused":
                raise ConfigError(f"kernels='fused' can't compute this model: {error}; use kernels='auto'") from error
            logger.info("using the model's own layers: %s", error)
            return None

    def admit(self, request: Request) -> None:
        """Set the sampling parameters of a request's slot and discard the slot's previous inputs."""
        self.sampling.set_slot(
            request.slot, request.params, request.seed, request.request.prompt_token_ids, request.output_ids
        )
        self.inputs.assign_slot(request.slot)

    def execute(self, batch: Batch) -> AsyncStepOutput:
        """Enqueue one batch and return without waiting for it.

        The decodes run as one padded graph replay, the prefill chunks as another replay or eager together. At most
        MAX_STEPS_IN_FLIGHT steps may be unread, including this one. After an exception, call `reset_after_failure`.
        """
        self._in_flight = [output for output in self._in_flight if not output.is_read]
        output = AsyncStepOutput(len(batch.decodes))
        with torch.inference_mode():
            if batch.decodes:
                self._decode(batch, output)
            if batch.prefills:
                self._prefill(batch.prefills, output)
            # For the next step, while a GPU is busy with this one.
            self.cache.check_addresses(whole=self.device.type == "cuda", geometry=False)
        self._in_flight.append(output)
        return output

    def reset_after_failure(self) -> None:
        """Recover from a failed step: wait for the results of earlier steps, and reset the ring and decode inputs.

        An unread result would keep its ring entry occupied. How far the failed step came is unknown, so the next step
        takes all inputs from the host.
        """
        for output in self._in_flight:
            output.wait()
        self.ring.clear()
        self.inputs.invalidate()

    def _decode(self, batch: Batch, output: AsyncStepOutput) -> None:
        rows, variant = len(batch.decodes), self._variant(batch)
        plan = self.cache.plan(SITE, rows, **variant)
        assert plan.bucket is not None  # the largest bucket is max_num_seqs
        self.inputs.load(batch, plan.bucket)
        self.cache.run(plan)
        self.inputs.advance()
        executed = self.cache.plan(SITE, rows, **variant)  # again, because a miss may have captured a graph
        output.graph_bucket = executed.bucket if executed.is_graph else None
        tokens = self.buffers["next_tokens"][:rows]
        if self.sampling.needs_sampler(request.slot for request in batch.decodes):
            slots = [request.slot for request in batch.decodes]
            positions = [position + 1 for position in batch.positions]
            sampled = self.sampling.sample(self.buffers["logits"][:rows], slots, positions)
            tokens = sampled.token_ids
            self.state.last_tokens.index_copy_(0, self.state.slots[:rows], tokens.clamp(min=0))
            output.samples.append((0, sampled))
        output.tickets.append(self.ring.push(tokens))

    def _variant(self, batch: Batch) -> dict[str, int]:
        """Return the graph variant for these decodes: the context bucket, if attention uses one."""
        if not self.contexts:
            return {}
        longest = max(batch.positions) + 1
        return {"context": next(width for width in self.contexts if width >= longest)}

    def _prefill(self, chunks: list[PrefillChunk], output: AsyncStepOutput) -> None:
        last_indices = [index for index, chunk in enumerate(chunks) if chunk.is_last]
        logits: Tensor | None
        tokens: Tensor | None
        if self.prefill is not None:
            hidden, logits, tokens = self._packed_prefill(self.prefill, chunks)
            normalize = lambda rows: self.model.norm(hidden[rows])  # noqa: E731
            if 0 < len(last_indices) < len(chunks):
                index = ids_to(self.device, last_indices)
                logits, tokens = logits.index_select(0, index), tokens.index_select(0, index)
        else:
            hidden, logits = self._eager_prefill(chunks, last_indices)
            normalize, tokens = hidden.__getitem__, None
        start = 0
        for chunk in chunks:
            top_count = chunk.request.params.prompt_logprobs
            if top_count is not None:
                self._score_prompt(chunk, normalize(slice(start, start + chunk.length)), top_count, output)
            start += chunk.length
        if last_indices and logits is not None:
            self._sample_first_tokens([chunks[index] for index in last_indices], logits, tokens, output)

    def _packed_prefill(self, prefill: Prefill, chunks: list[PrefillChunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Run packed prefill. Returns hidden [T, h] before the final norm, and each chunk's logits and greedy token."""
        num_tokens = sum(chunk.length for chunk in chunks)
        plan = self.cache.plan(PREFILL_SITE, num_tokens)
        if plan.bucket is None or len(chunks) > prefill.layout(plan.bucket).num_chunks:
            reason = ABOVE_MAX if plan.bucket is None else TOO_MANY_CHUNKS
            self.cache.count_eager(PREFILL_SITE, "prefill", num_tokens, reason)
            return prefill.run_eager(chunks)
        prefill.load(chunks, plan.bucket)
        self.cache.run(plan)
        hidden, logits, tokens = (prefill.buffers[name] for name in ("hidden", "logits", "next_tokens"))
        return hidden[:num_tokens], logits[: len(chunks)], tokens[: len(chunks)]

    def _eager_prefill(self, chunks: list[PrefillChunk], last_indices: list[int]) -> tuple[Tensor, Tensor | None]:
        """Run the model's own layers. Returns normalized hidden [T, h] and the logits [len(last_indices), vocab]."""
        spans = [(chunk.request, range(chunk.start, chunk.start + chunk.length)) for chunk in chunks]
        tokens = [token for request, span in spans for token in request.token_ids[span.start : span.stop]]
        positions = [position for _, span in spans for position in span]
        attention = PrefillAttention(
            self.kv,
            [(chunk.start, chunk.length) for chunk in chunks],
            [chunk.request.page_tables[0] for chunk in chunks],
        )
        hidden = self.model(ids_to(self.device, tokens), ids_to(self.device, positions), attention)
        self.cache.count_eager(PREFILL_SITE, "prefill", len(tokens), PREFILL_EAGER)
        if not last_indices:
            return hidden, None
        chunk_ends = list(itertools.accumulate(chunk.length for chunk in chunks))
        rows = ids_to(self.device, [chunk_ends[index] - 1 for index in last_indices])
        return hidden, self.model.logits(hidden.index_select(0, rows))

    def _sample_first_tokens(
        self, chunks: list[PrefillChunk], logits: Tensor, greedy_tokens: Tensor | None, output: AsyncStepOutput
    ) -> None:
        """Sample the token after each chunk from logits [len(chunks), vocab] and write it to `last_tokens`.

        `greedy_tokens`: the greedy tokens, if the prefill already computed and wrote them.
        """
        slots = [chunk.request.slot for chunk in chunks]
        positions = [chunk.start + chunk.length for chunk in chunks]
        if self.sampling.needs_sampler(slots):
            sampled = self.sampling.sample(logits, slots, positions)
            next_tokens = sampled.token_ids
            output.samples.append((output.num_decodes, sampled))
        elif greedy_tokens is None:
            best, ids = logits.max(dim=-1)
            next_tokens = torch.where(torch.isfinite(best), ids, -1)
        else:
            next_tokens = greedy_tokens
        if next_tokens is not greedy_tokens:
            self.state.last_tokens.index_copy_(
                0, ids_to(self.device, [slot + 1 for slot in slots]), next_tokens.clamp(min=0)
            )
        self.inputs.set_sampled_positions(slots, positions)
        output.tickets.append(self.ring.push(next_tokens))

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Zero free pages and the scratch page, which may hold NaN.

        Attention multiplies masked positions by 0, and 0 * NaN would be NaN for the next request with these pages.
        """
        index = ids_to(self.device, [0, *pages])
        for cache in (*self.kv.k, *self.kv.v):
            cache.index_fill_(0, index, 0)

    def _score_prompt(self, chunk: PrefillChunk, hidden: Tensor, top_count: int, output: AsyncStepOutput) -> None:
        """Compute the logprobs of the prompt tokens that follow the chunk's tokens, in slices to keep logits small."""
        request = chunk.request
        targets = request.token_ids[chunk.start + 1 : min(chunk.start + chunk.length, request.prompt_len - 1) + 1]
        scores = output.prompt_scores.setdefault(request.request_id, [])
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[start : start + PROMPT_LOGPROB_ROWS]
            logits = self.model.logits(hidden[start : start + len(part)])
            scores += prompt_logprobs(logits, ids_to(self.device, part), top_count)
