"""The capturable decode step: one callable under scope `block`, one per layer under scope `layer`.

A step reads only static buffers, the model's weights and the KV cache, so that it can be captured. It writes the next
step's inputs itself (the sampled token and each row's next position), so that it can be replayed again before the host
reads its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from engine.attention.model_state import ModelState, StepRows
from engine.kernels.shared_prefixes import SharedPrefixes
from engine.models.interface import ForwardContext, Model
from engine.sampling.greedy import GreedySampler
from engine.worker.input_buffers import Layout
from engine.worker.prefix_groups import MIN_MEMBERS, max_groups_of
from engine.worker.routed_experts import RoutedExperts
from engine.worker.written_memory import written_experts, written_slots
from graph_cache.core.addresses import AddressBook
from graph_cache.core.buckets import Buckets
from graph_cache.core.buffers import StaticBuffers
from graph_cache.core.shadow import WrittenMemory
from graph_cache.core.site import Site

SITE = "decode"
SHARED_SITE = "decode_shared"  # the step of rows that share prefixes
Part = Callable[..., None]


def decode_site(
    step: DecodeStep,
    addresses: AddressBook,
    buffers: StaticBuffers,
    buckets: Buckets,
    *,
    scope: str,
    contexts: Sequence[int] = (),
    warm_contexts: Sequence[int] = (),
) -> Site:
    """Build the site of a decode step over `buffers` (see `decode_buffers`).

    `contexts` are the KV widths, in tokens, that attention can read; each is a graph variant. Empty if the attention
    backend reads lengths from device memory. `warm_contexts` are the ones to capture at warm-up.
    """
    is_by_layer = scope == "layer"
    return Site(
        SITE if step.prefix_group is None else SHARED_SITE,
        step.layer_parts() if is_by_layer else [step.run],
        buffers,
        buckets,
        scope="layer" if is_by_layer else "block",
        phase="decode",
        variants=[{"context": width} for width in contexts] or [{}],
        warm_variants=[{"context": width} for width in warm_contexts] or [{}],
        addresses=addresses,
        writes=lambda bucket: step.writes(buffers["state"], bucket),
    )


def shared_buckets(buckets: Buckets) -> Buckets:
    """Return the buckets for rows that share prefixes: the largest, and those with few padding rows in between.

    From bucket to bucket, rows grow by at least a quarter: these graphs are used less than the others.
    """
    chosen = [buckets.max]
    for size in reversed(buckets.sizes):
        if size >= MIN_MEMBERS and 1.25 * size <= chosen[-1]:
            chosen.append(size)
    return Buckets(tuple(reversed(chosen)))


def model_addresses(model: Model, kv: KVCache, state: ModelState) -> AddressBook:
    """Collect the tensors that a step reads by address, beside its site's static buffers: weights, KV cache, state."""
    addresses = AddressBook()
    addresses.watch(model.module, prefix="model.")
    for index, tensors in enumerate(kv.storage):
        addresses.watch(dict(zip("kv", tensors, strict=False)), prefix=f"kv.{index}.")
    addresses.watch(state.tensors())
    return addresses


class DecodeStep:
    """One decode step of a model over static buffers.

    The parts of `layer_parts` do the same work as `run`. Only `hidden` is passed from part to part: a graph's internal
    memory is reused by the next graph's replay, so each layer recomputes the rotary values and page metadata. With
    `keeps_hidden`, `run` leaves the output of the last layer in `hidden` too. `prefix_group`: attention reads the
    prefixes that rows share in this cache group once, as the state says. `kv` is the cache that `attention` writes,
    `routed_experts` what the layers with experts write.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: GreedySampler,
        layout: Layout,
        kv: KVCache,
        model_state: ModelState,
        keeps_hidden: bool = False,
        prefix_group: int | None = None,
        routed_experts: RoutedExperts | None = None,
    ):
        self._routed_experts = routed_experts
        self.model, self.prefix_group = model, prefix_group
        self._keeps_hidden = keeps_hidden
        self._attention, self._sampler, self._layout, self._kv = attention, sampler, layout, kv
        self._model_state = model_state

    def run(
        self, state: Tensor, hidden: Tensor, logits: Tensor, next_tokens: Tensor, context: int | None = None, **_: Any
    ) -> None:
        """Run the whole step on the first rows of the buffers."""
        out, shared = self._embed(state, len(next_tokens)), self._context(state, len(next_tokens), context)
        out = self.model.run_layers(out, shared)
        if self._keeps_hidden:
            hidden.copy_(out)
        self._sample(state, out, logits, next_tokens)

    def layer_parts(self) -> list[Part]:
        """Return the parts: embedding, each layer, and the head."""

        def embed(state: Tensor, hidden: Tensor, **_: Any) -> None:
            hidden.copy_(self._embed(state, len(hidden)))

        def head(state: Tensor, hidden: Tensor, logits: Tensor, next_tokens: Tensor, **_: Any) -> None:
            self._sample(state, hidden, logits, next_tokens)

        return [embed, *(self._layer_part(index) for index in range(self.model.config.num_layers)), head]

    def writes(self, state: Tensor, rows: int) -> list[WrittenMemory]:
        """Return what the step of this state writes beside the buffers."""
        views = self._layout.views(state)
        slots, positions = views.slots[:rows], views.positions[:rows]
        written = written_slots(self._kv, views.page_tables, slots, positions)
        written += self._model_state.written(StepRows(slots))
        return written + written_experts(self._routed_experts, rows)

    def _layer_part(self, index: int) -> Part:
        def layer(state: Tensor, hidden: Tensor, context: int | None = None, **_: Any) -> None:
            out = self.model.layer(index, hidden, self._context(state, len(hidden), context))
            if out is not hidden:
                hidden.copy_(out)

        return layer

    def _embed(self, state: Tensor, rows: int) -> Tensor:
        views = self._layout.views(state)
        slots = views.slots[:rows]
        self._model_state.begin(StepRows(slots))
        return self.model.embed(views.last_tokens, slots)

    def _context(self, state: Tensor, rows: int, context: int | None) -> ForwardContext:
        views = self._layout.views(state)
        slots, positions = views.slots[:rows], views.positions[:rows]
        metadata = DecodeMetadata(views.page_tables, slots, positions, context)
        if self.prefix_group is not None:
            members = views.prefix_members[: max_groups_of(rows)]
            shared = SharedPrefixes(views.shared_keys[:rows], members, views.num_prefix_groups)
            metadata = metadata._replace(shared=shared, prefix_group=self.prefix_group)
        attention = self._attention.decode(metadata)
        more = self._model_state.context(StepRows(slots))
        return ForwardContext(self.model.rope(positions), attention, slots, **more)

    def _sample(self, state: Tensor, hidden: Tensor, logits: Tensor, next_tokens: Tensor) -> None:
        """Write the logits and greedy tokens to their buffers, and the next step's tokens and positions."""
        views, rows = self._layout.views(state), len(next_tokens)
        maxima = self.model.head(hidden, logits, after_layer=True)
        self._sampler(logits, maxima, views.slots[:rows], views.positions[:rows], views.last_tokens, next_tokens)
