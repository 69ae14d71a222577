"""A batch becomes tokens: decodes by the graph cache's plan, prefills eagerly, then sampling.

Owns the model, the KV cache and the static buffers on the device, and the way of results to the host. Knows requests
only by their tokens, pages and slots; decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.attention.base import KVCache, PrefillAttention
from engine.batch import Batch, PrefillChunk
from engine.config import EngineConfig
from engine.decode_site import SITE, decode_site
from engine.models.dense import DenseModel
from engine.request import Request, TokenLogprob
from engine.sampler import SamplingState, prompt_logprobs
from engine.sizing import WARM_CONTEXT, context_buckets
from engine.step_inputs import StepInputs, decode_buffers
from graph_cache.buckets import Buckets
from graph_cache.cache import GraphCache
from graph_cache.manifest import Manifest
from graph_cache.ring import HostRing

PREFILL_SITE = "prefill"
PREFILL_EAGER = "phase_not_captured"
PROMPT_LOGPROB_ROWS = 256  # rows of full logits held at once while scoring a prompt


@dataclass
class StepResult:
    """One step's answers by request id: the sampled token (-1: its logits were not finite), and log-probabilities."""

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    graph_bucket: int | None = None  # of the graph that ran the decodes; None: they ran eager


class ModelRunner:
    """Runs batches on one device. Everything here is used by one thread."""

    def __init__(self, config: EngineConfig, model: DenseModel, eos_token_ids: Sequence[int],
                 manifest: Manifest | None = None):
        spec, device = model.config, torch.device(config.device)
        self.config = config
        self.model = model
        self.device = device
        dtype = getattr(torch, config.dtype)
        self.attention_impl = "triton" if device.type == "cuda" else "sdpa"
        self.kv = KVCache(spec.num_layers, config.num_pages, config.page_size, spec.num_kv_heads, spec.head_dim, dtype,
                          device)
        pages = -(-config.max_model_len // config.page_size)
        self.buffers = decode_buffers(config.max_num_seqs, pages, spec.hidden_size, spec.vocab_size, dtype, device)
        self.inputs = StepInputs(self.buffers)
        self.cache = GraphCache(config.graph_config(), device, capture_on_miss=config.warmup == "lazy",
                                manifest=manifest)
        reads_lengths = self.attention_impl == "triton"  # from device memory: any context from one graph
        self.contexts = () if reads_lengths else context_buckets(config.max_model_len, config.page_size)
        buckets = Buckets.for_limit(config.max_num_seqs, config.graph_buckets)
        self.site = self.cache.add_site(decode_site(
            model, self.kv, self.buffers, buckets, scope=self.cache.config.inference_cuda_graph_scope,
            impl=self.attention_impl, contexts=self.contexts,
            warm_contexts=[width for width in self.contexts if width <= WARM_CONTEXT] or self.contexts[:1],
        ))
        self.sampling = SamplingState(config.max_num_seqs, spec.vocab_size, device, eos_token_ids=eos_token_ids,
                                      logprobs_mode=config.logprobs_mode)
        self.ring = HostRing(self.cache.pool.backend, config.max_num_seqs, torch.int64)

    def run(self, batch: Batch) -> StepResult:
        """Compute one batch: the decodes as one padded replay, the prefill chunks together as one eager run."""
        result = StepResult()
        try:
            with torch.inference_mode():
                if batch.decodes:
                    self._decode(batch.decodes, result)
                if batch.prefills:
                    self._prefill(batch.prefills, result)
        except BaseException:  # an interruption too: a result that nobody read would hold its place in the ring
            self.ring.clear()
            raise
        return result

    def _decode(self, requests: list[Request], result: StepResult) -> None:
        rows, statics = len(requests), self._statics(requests)
        plan = self.cache.plan(SITE, rows, **statics)
        self.inputs.load(requests, plan.bucket)
        self.cache.run(plan)
        ran = self.cache.plan(SITE, rows, **statics)  # a miss may have captured
        result.graph_bucket = ran.bucket if ran.is_graph else None
        self._choose(requests, self.buffers["logits"][:rows], self.buffers["next_tokens"][:rows], result)

    def _statics(self, requests: list[Request]) -> dict[str, int]:
        """The keyword values of the graph that these requests need: the context bucket, where attention has one."""
        if not self.contexts:
            return {}
        longest = max(request.num_computed for request in requests) + 1
        return {"context": next(width for width in self.contexts if width >= longest)}

    def _prefill(self, chunks: list[PrefillChunk], result: StepResult) -> None:
        spans = [(chunk.request, range(chunk.start, chunk.start + chunk.length)) for chunk in chunks]
        tokens = [token for request, span in spans for token in request.token_ids[span.start : span.stop]]
        positions = [place for _, span in spans for place in span]
        attention = PrefillAttention(self.kv, [(chunk.start, chunk.length) for chunk in chunks],
                                     [chunk.request.pages for chunk in chunks])
        hidden = self.model(torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device),
                            attention)
        self.cache.count_eager(PREFILL_SITE, "prefill", len(tokens), PREFILL_EAGER)
        ends, first = [], 0
        for chunk in chunks:
            if chunk.request.params.prompt_logprobs is not None:
                self._score_prompt(chunk, hidden[first : first + chunk.length], result)
            first += chunk.length
            if chunk.is_last:
                ends.append((chunk.request, first - 1))
        if ends:
            logits = self.model.logits(hidden[[row for _, row in ends]])
            best, ids = logits.max(dim=-1)
            self._choose([request for request, _ in ends], logits, torch.where(torch.isfinite(best), ids, -1), result)

    def _choose(self, requests: list[Request], logits: torch.Tensor, greedy: torch.Tensor, result: StepResult) -> None:
        """One token per request, sampled where its parameters ask for more than the greedy choice."""
        slots = [request.slot for request in requests]
        sampled = None
        if self.sampling.needs_sampler(slots):
            sampled = self.sampling.sample(logits, slots, [len(request.token_ids) for request in requests])
            greedy = sampled.token_ids
        ticket = self.ring.push(greedy)
        # For the next step; a GPU is busy with this one meanwhile.
        self.cache.check_addresses(whole=self.device.type == "cuda")
        tokens = ticket.read().tolist()
        logprobs = None if sampled is None else sampled.logprobs  # read after the tokens: reading waits for the device
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            result.tokens[request.request_id] = token
            if token >= 0:
                self.sampling.append(request.slot, token)
            if logprobs is not None and logprobs[row] is not None:
                result.logprobs[request.request_id] = logprobs[row]

    def scrub(self, pages: Sequence[int]) -> None:
        """Zero free pages, and the scratch page, that may hold NaN: attention multiplies masked slots by 0, and 0 * NaN
        is NaN for whoever gets them next.
        """
        index = torch.tensor([0, *pages], device=self.device)
        for cache in (*self.kv.k, *self.kv.v):
            cache.index_fill_(0, index, 0)

    def _score_prompt(self, chunk: PrefillChunk, hidden: torch.Tensor, result: StepResult) -> None:
        """Log-probabilities of the prompt's tokens that follow this chunk's, in slices so that logits stay small."""
        request = chunk.request
        targets = request.token_ids[chunk.start + 1 : min(chunk.start + chunk.length, request.prompt_len - 1) + 1]
        found = result.prompt_logprobs.setdefault(request.request_id, [])
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[start : start + PROMPT_LOGPROB_ROWS]
            logits = self.model.logits(hidden[start : start + len(part)])
            found += prompt_logprobs(logits, torch.tensor(part, device=self.device), request.params.prompt_logprobs)
