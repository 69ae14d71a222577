"""The model runner: execute steps on one device.

Owns the model, the KV cache and the static buffers. Decodes, and on a GPU prefills, run through the graph cache;
sampling follows. A step is prepared on the host and then enqueued, which returns an AsyncStepOutput. That is read
later, when the next step may already be enqueued.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.attention.kv_cache import FP8_DTYPES, KVCache
from engine.attention.selection import choose_backend
from engine.config import ResolvedConfig
from engine.errors import ConfigError, ModelError
from engine.kernels.launch import SHARED_BYTES, fits
from engine.models.interface import Model
from engine.protocol.phase import Phase
from engine.sampling.greedy import GreedySampler
from engine.sampling.sampler import Sampler, prompt_logprobs
from engine.utils.async_copy import Download, ids_to, upload
from engine.worker.async_output import MAX_STEPS_IN_FLIGHT, AsyncStepOutput
from engine.worker.decode_graphs import (
    DecodeStep,
    decode_site,
    model_addresses,
    shared_buckets,
)
from engine.worker.input_buffers import DecodeInputs, Layout, decode_buffers
from engine.worker.packed_graphs import (
    MAX_MIXED_DECODES,
    PackedOutput,
    PackedStep,
    prefill_buckets,
    verify_buckets,
)
from engine.worker.pooling import Pooler
from engine.worker.prefix_groups import MIN_MEMBERS
from engine.worker.releasable import new_region
from engine.worker.routed_experts import record_experts
from engine.worker.sampling_graphs import SamplingStep
from engine.worker.sizing import WARM_CONTEXT, context_buckets
from engine.worker.step_builder import StepBuilder
from engine.worker.step_input import (
    DecodeInput,
    MaskInput,
    PrefillInput,
    PromptScoring,
    StepInput,
    VerifyInput,
)
from graph_cache.backends import backend_for
from graph_cache.core.addresses import AddressBook
from graph_cache.core.buckets import Buckets
from graph_cache.core.cache import GraphCache
from graph_cache.core.host_ring import HostRing
from graph_cache.core.manifest import Manifest
from graph_cache.core.pool import GraphPool
from graph_cache.core.site import Site

logger = logging.getLogger(__name__)

PREFILL_EAGER = "phase_not_captured"
MIN_SHARED_BYTES = 16 << 20  # keys and values of a layer that sharing prefixes must save: it costs a launch
PROMPT_LOGPROB_ROWS = 256  # rows of logits materialised at once for prompt logprobs


class ModelRunner:
    """Runs steps on one device. Not thread-safe.

    `model` is the model as loaded; `step_model` is what steps run: the model, or its form with fused kernels.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: Model,
        eos_token_ids: Sequence[int],
        manifest: Manifest | None = None,
    ):
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        self.config, self.model, self.device = config, model, device
        stored = FP8_DTYPES.get(config.kv_cache_dtype)
        self.kv_region = new_region(device) if config.enable_sleep_mode else None
        with nullcontext() if self.kv_region is None else self.kv_region.allocation():
            self.kv = KVCache(model.cache_specs(), config.num_pages, config.page_size, dtype, device, stored)
            self.model_state = model.make_state(config.max_num_seqs, config.max_num_batched_tokens)
        self.attention = self._make_attention(dtype, stored)
        pages, groups = -(-config.max_model_len // config.page_size), len(self.kv.groups)
        max_mixed_decodes = self._max_mixed_decodes()
        self.prefill_buckets = prefill_buckets(config, pages, groups, max_mixed_decodes)
        self.verify_buckets = verify_buckets(config, pages, groups) if config.num_speculative_tokens else None
        max_rows = max(config.max_num_seqs, self.prefill_buckets.max_chunks, self.max_verify_tokens)
        self.step_model = self._fuse(dtype, max_rows) or model
        layout = Layout(config.max_num_seqs, pages, groups, self._prefix_members())
        sizes, logits_dtype = (model.config.hidden_size, model.config.vocab_size), self.step_model.logits_dtype
        self.buffers = decode_buffers(layout, max_rows, *sizes, dtype, device, logits_dtype)
        self.state = layout.views(self.buffers["state"])
        self.cache = GraphCache(
            config.graph_config(),
            device,
            pool=GraphPool(backend_for(device), releasable=config.enable_sleep_mode),
            capture_on_miss=config.warmup == "lazy",
            manifest=manifest,
        )
        # One book of addresses for all sites, which is checked once. Prefill writes the decode buffers too.
        addresses = model_addresses(self.step_model, self.kv, self.model_state)
        addresses.watch(self.buffers.tensors, prefix="buffers.")
        self.routed_experts = None
        if config.enable_return_routed_experts:
            self.routed_experts = record_experts(model, max(max_rows, config.max_num_batched_tokens))
            addresses.watch({"routed_experts": self.routed_experts.buffer})
        greedy = GreedySampler(max_rows, model.config.vocab_size, device)
        has_dynamic_lengths = self.attention.support.dynamic_lengths or not self.kv.groups
        self.contexts = () if has_dynamic_lengths else context_buckets(config.max_model_len, config.page_size)
        inputs = self._make_inputs(layout, (stored or dtype).itemsize)
        self.site = self._add_decode_sites(layout, inputs.prefix_group, greedy, addresses)
        self.packed_steps = self._add_packed_steps(greedy, addresses)
        self.builder = StepBuilder(
            self.cache,
            inputs,
            config.page_size,
            self.contexts,
            self.prefill_buckets,
            self.verify_buckets,
            captures_prefill=self.attention.support.captures_prefill,
            max_mixed_decodes=max_mixed_decodes,
        )
        self.sampling = Sampler(
            config.max_num_seqs,
            model.config.vocab_size,
            device,
            eos_token_ids=eos_token_ids,
            logprobs_mode=config.logprobs_mode,
        )
        self.sampling_step = SamplingStep(
            self.cache,
            self.sampling,
            self.buffers["logits"],
            self.buffers["next_tokens"],
            self.state.last_tokens,
            Buckets((*self.site.buckets.sizes, *self._verify_sizes())),
        )
        self.pooler = Pooler(self.model, self.step_model)
        # Results per step in flight: the tokens of its decodes, of its prefills, and of its drafts.
        self.ring = HostRing(self.cache.pool.backend, max_rows, torch.int64, depth=len(Phase) * MAX_STEPS_IN_FLIGHT)
        self._in_flight: list[AsyncStepOutput] = []
        self._masked: tuple[StepInput, AsyncStepOutput] | None = None  # the last step, if its output awaits masks

    # ---- parts, in the order in which they are made ----------------------------------------------------------------

    def _make_attention(self, dtype: torch.dtype, stored: torch.dtype | None) -> AttentionBackend:
        """Create the fastest backend for the model's layers. `stored`: the cache's dtype, if it is another."""
        backend = choose_backend(list(self.kv.paged.values()), dtype, self.device, stored)
        if stored is not None:
            logger.info(
                "KV cache in %s, read by %s attention: it halves the cache's memory",
                self.config.kv_cache_dtype,
                backend.name,
            )
        return backend(self.kv, self.config.max_num_seqs)

    def _make_inputs(self, layout: Layout, itemsize: int) -> DecodeInputs:
        """Create the host's side of the decode inputs. `itemsize`: bytes of a value in the KV cache."""
        token_bytes = 2 * self.kv.kv_heads * self.kv.head_dim * itemsize  # of a layer
        return DecodeInputs(
            layout,
            self.config.page_size,
            [group.window for group in self.kv.groups],
            min_saved=-(-MIN_SHARED_BYTES // max(1, token_bytes)),
        )

    def _add_decode_sites(
        self, layout: Layout, prefix_group: int | None, greedy: GreedySampler, addresses: AddressBook
    ) -> Site:
        """Add the sites of the decode step to the cache, and return the one of rows that share no prefixes."""
        make_step = partial(
            DecodeStep,
            self.step_model,
            self.attention,
            greedy,
            layout,
            self.kv,
            self.model_state,
            self.config.enable_return_hidden_states,
            routed_experts=self.routed_experts,
        )
        make_site = partial(
            decode_site, addresses=addresses, buffers=self.buffers, scope=self.cache.config.inference_scope
        )
        row_buckets = Buckets.for_limit(self.config.max_num_seqs, self.config.graph_buckets)
        site = self.cache.add_site(
            make_site(
                make_step(),
                buckets=row_buckets,
                contexts=self.contexts,
                warm_contexts=[width for width in self.contexts if width <= WARM_CONTEXT] or self.contexts[:1],
            )
        )
        if prefix_group is not None:
            shared_step = make_step(prefix_group=prefix_group)
            self.cache.add_site(make_site(shared_step, buckets=shared_buckets(row_buckets)))
        return site

    def _add_packed_steps(self, greedy: GreedySampler, addresses: AddressBook) -> dict[Phase, PackedStep]:
        """Create the packed step of each phase, and add its site to the cache if it can be captured."""
        steps: dict[Phase, PackedStep] = {}
        for buckets in (self.prefill_buckets, self.verify_buckets):
            if buckets is not None:
                step = steps[buckets.phase] = PackedStep(
                    self.step_model,
                    self.attention,
                    greedy,
                    buckets,
                    self.state.last_tokens,
                    self.buffers["logits"],
                    self.buffers["next_tokens"],
                    self.kv,
                    self.model_state,
                    self.routed_experts,
                )
                if self.attention.support.captures_prefill:
                    self.cache.add_site(step.site(addresses))
        return steps

    def _fuse(self, dtype: torch.dtype, max_rows: int) -> Model | None:
        """Build the model with fused kernels; None if device, dtype, settings or model don't support it.

        `max_rows`: of logits, in a step of any phase.

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
        try:
            if not self.attention.support.fuses_rotary:
                raise ModelError(f"fused kernels need another attention than {self.attention.name}")
            fused = self.model.fused(max_rows, self.config.max_num_batched_tokens)
            logger.info("using fused kernels")
            return fused
        except ModelError as error:
            if requested == "fused":
                raise ConfigError(f"kernels='fused' can't compute this model: {error}; use kernels='auto'") from error
            logger.info("using the model's own layers: %s", error)
            return None

    def _prefix_members(self) -> int:
        """Return how many decodes may read a prefix together; 0 if they never share one."""
        has_full_attention = any(group.window is None for group in self.kv.groups)
        if not self.config.enable_prefix_caching or self.config.max_num_seqs < MIN_MEMBERS or not has_full_attention:
            return 0
        return self.attention.prefix_members(self.model.config.num_heads // self.kv.kv_heads)

    def _max_mixed_decodes(self) -> int:
        """Return how many decodes may run in one graph with prompt chunks.

        Only the kernels for Hopper GPUs are fast enough. They read keys once for each tile of heads, so that decodes of
        more heads than a tile holds cost more in there than the second reading of the weights that they save.
        """
        reads = self.attention.short_chunk_reads(self.model.config.num_heads // max(1, self.kv.kv_heads))
        if not reads or not self.model_state.joins_phases or self.config.num_speculative_tokens:
            return 0
        return MAX_MIXED_DECODES // reads

    @property
    def max_verify_tokens(self) -> int:
        """The most tokens in the rows of one step that verify drafts; 0 without speculative decoding."""
        return 0 if self.verify_buckets is None else self.verify_buckets.sizes.max

    def _verify_sizes(self) -> tuple[int, ...]:
        """Return the row buckets that sampling after VERIFY needs beyond the decode step's buckets."""
        if self.verify_buckets is None:
            return ()
        return tuple(size for size in self.verify_buckets.sizes.sizes if size > self.site.buckets.max)

    # ---- on the device ---------------------------------------------------------------------------------------------

    def execute(self, step: StepInput) -> AsyncStepOutput:
        """Enqueue one step and return without waiting for it.

        The decodes run as one padded graph replay, the prompt chunks as another replay or eager together; on Hopper
        GPUs, few decodes run in the replay of the chunks. At most MAX_STEPS_IN_FLIGHT steps may be unread,
        including this one. After an exception, call `reset_after_failure`.

        Of a constrained step, enqueues only the decodes' forward graph, which doesn't depend on the masks: `sample`
        does the rest. Without it, the next step replaces this one.
        """
        self._in_flight = [output for output in self._in_flight if not output.is_read]
        output = AsyncStepOutput(0 if step.decode is None else len(step.decode.slots))
        self.cache.shadows.chosen = step.checked_sites
        with torch.inference_mode():
            for slot in step.admitted:
                self.sampling.set_slot(slot.slot, slot.params, slot.seed, slot.prompt_ids, slot.output_ids)
            if step.admitted:
                self.model_state.assign(step.admitted)
            if step.fresh_pages:
                self.zero_pages(step.fresh_pages)
            if step.decode is not None:
                self._decode(step.decode, output)
            output.awaits_masks = step.is_constrained
            self._masked = (step, output) if step.is_constrained else None
            if self._masked is None:
                self._finish_step(step, output)
        # For the next step, while a GPU is busy with this one. A constrained step leaves the host less time.
        self.cache.check_addresses(whole=self.device.type == "cuda" and not step.is_constrained, geometry=False)
        return output

    def sample(self, masks: MaskInput) -> None:
        """Enqueue the rest of the constrained step that was executed last. All earlier steps must have been read."""
        assert self._masked is not None
        (step, output), self._masked = self._masked, None
        with torch.inference_mode():
            self.sampling.masks.write(masks.slots, masks.masks)
            self._finish_step(step, output)
        output.awaits_masks = False

    def _finish_step(self, step: StepInput, output: AsyncStepOutput) -> None:
        """Enqueue what follows the decodes' forward graph: their sampling, the prefill chunks and the drafts."""
        if step.decode is not None:
            self._sample_decodes(step.decode, output)
        if step.prefill is not None:
            self._prefill(step.prefill, output)
        if step.verify is not None:
            self._verify(step.verify, output)
        self._in_flight.append(output)

    def reset_after_failure(self) -> None:
        """Recover from a failed step: wait for the results of earlier steps, and reset the ring and decode inputs.

        An unread result would keep its ring entry occupied. How far the failed step came is unknown, so the next step
        takes all inputs from the host.
        """
        self._masked = None
        for output in self._in_flight:
            output.wait()
        self.ring.clear()
        self.buffers["state"].zero_()
        self.builder.reset()

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Zero free pages and the scratch page, which may hold NaN.

        Attention multiplies masked positions by 0, and 0 * NaN would be NaN for the next request with these pages.
        Recurrent states need no such call: they are zeroed when their slot is assigned.
        """
        self.kv.zero_pages(ids_to(self.device, [0, *pages]))

    def _decode(self, step: DecodeInput, output: AsyncStepOutput) -> None:
        rows = len(step.slots)
        if step.changes is not None:
            indices, values = upload(torch.from_numpy(step.changes), self.device)
            self.buffers["state"].index_copy_(0, indices, values)
        ran = self.cache.run(self.cache.plan(step.site, rows, **step.variant))
        output.graph_bucket = ran.bucket if ran.is_graph else None

    def _sample_decodes(self, step: DecodeInput, output: AsyncStepOutput) -> None:
        if step.hidden_states:
            index = ids_to(self.device, [row for row, _ in step.hidden_states])
            rows = self.buffers["hidden"].index_select(0, index)
            owners = [(name, step.positions[row], 1) for row, name in step.hidden_states]
            output.hidden_states.append((Download(self.step_model.final_norm(rows)), owners))
        if step.routed_experts:
            assert self.routed_experts is not None  # requests that want them are refused otherwise
            index = ids_to(self.device, [row for row, _ in step.routed_experts])
            owners = [(name, step.positions[row], 1) for row, name in step.routed_experts]
            output.routed_experts.append((Download(self.routed_experts.rows(index)), owners))
        tokens = self.buffers["next_tokens"][: len(step.slots)]
        if self.sampling.needs_sampler(step.slots):
            # The step advanced the positions: they are the positions of the tokens to sample.
            state = self.buffers["state"][: 2 * self.config.max_num_seqs].view(2, -1)
            self.sampling_step.load(state[:, : step.bucket])
            positions = [position + 1 for position in step.positions]
            output.samples.append((0, self.sampling_step.run(step.slots, positions)))
        output.tickets.append(self.ring.push(tokens))

    def _prefill(self, step: PrefillInput, output: AsyncStepOutput) -> None:
        chunks = step.chunks
        ended = [index for index, chunk in enumerate(chunks) if chunk.is_last]
        spans = [(chunk.start, chunk.length) for chunk in chunks]
        found = self._run_packed(Phase.PREFILL, step.bucket, step.packed, spans, ended)
        if step.num_decodes:
            output.graph_bucket = step.bucket
        start = 0
        for chunk in chunks:
            if chunk.scoring is not None:
                self._score_prompt(chunk.scoring, found.hidden[start : start + chunk.length], output)
            if chunk.hidden_states is not None:
                rows = self.step_model.final_norm(found.hidden[start : start + chunk.length])
                output.hidden_states.append((Download(rows), [(chunk.hidden_states, chunk.start, chunk.length)]))
            if chunk.routed_experts is not None:
                assert self.routed_experts is not None
                rows = self.routed_experts.span(start, chunk.length)
                output.routed_experts.append((Download(rows), [(chunk.routed_experts, chunk.start, chunk.length)]))
            start += chunk.length
        self.pooler.pool(chunks, found.hidden, output)
        if ended:
            slots = [chunks[index].slot for index in ended]
            positions = [chunks[index].start + chunks[index].length for index in ended]
            self._sample_packed(slots, positions, found, output.num_decodes, output)

    def _verify(self, step: VerifyInput, output: AsyncStepOutput) -> None:
        rows = range(len(step.slots))
        found = self._run_packed(Phase.VERIFY, step.bucket, step.packed, step.spans, rows)
        # Requests with log-probabilities have no drafts, so the first row of the results doesn't matter.
        self._sample_packed(step.slots, step.positions, found, 0, output)

    def _run_packed(
        self,
        phase: Phase,
        bucket: int | None,
        packed: np.ndarray,
        spans: Sequence[tuple[int, int]],
        sampled: Sequence[int],
    ) -> PackedOutput:
        """Run rows of these (start, length); `sampled`: see PackedStep.outputs."""
        step, tokens = self.packed_steps[phase], sum(length for _, length in spans)
        if bucket is None:
            self.cache.count_eager(phase.value, phase.value, tokens, PREFILL_EAGER)
            return step.run_eager(packed, spans, sampled)
        step.load(packed)
        self.cache.run(self.cache.plan(phase.value, step.buckets.rows(tokens, bucket)))
        return step.outputs(tokens, sampled)

    def _sample_packed(
        self, slots: list[int], positions: list[int], found: PackedOutput, first_row: int, output: AsyncStepOutput
    ) -> None:
        """Sample the rows of a packed step, the first ones of the logits buffer, and send their tokens to the host."""
        if self.sampling.needs_sampler(slots):
            self.sampling_step.load(ids_to(self.device, [[slot + 1 for slot in slots], positions]))
            output.samples.append((first_row, self.sampling_step.run(slots, positions)))
        output.tickets.append(self.ring.push(found.next_tokens))

    def _score_prompt(self, scoring: PromptScoring, hidden: Tensor, output: AsyncStepOutput) -> None:
        """Compute the logprobs of prompt tokens from hidden [T, h], in slices to keep logits small."""
        scores = output.prompt_scores.setdefault(scoring.request_id, [])
        for start in range(0, len(scoring.targets), PROMPT_LOGPROB_ROWS):
            part = scoring.targets[start : start + PROMPT_LOGPROB_ROWS]
            logits = self.step_model.compute_logits(hidden[start : start + len(part)])
            scores += prompt_logprobs(logits, ids_to(self.device, part), scoring.top_count, scoring.named)
