"""The interface of a model: what the worker calls in a step, and what loading, updates and memory sizing need.

Shapes: T tokens, h hidden size, H query heads, KV key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.cache_spec import CacheSpec, recurrent_layers
from engine.attention.interface import Attention
from engine.attention.model_state import ModelState, ModelStates
from engine.attention.recurrent_states import RecurrentStates, StepStates
from engine.distributed.collectives import TensorParallelCollectives
from engine.errors import ModelError
from engine.layers.weight_slot import Slot
from engine.models.adapters import AdapterRows
from engine.models.config import ModelConfig


class ForwardContext:
    """What the layers of one forward pass share.

    - rope: the model's own rotary values, from `Model.rope`.
    - attention: attention over the KV cache.
    - rows: int64 [T], 0 for padding tokens; None if there is no padding.
    - states: the recurrent states of the step's sequences; None if no layer has any.
    """

    def __init__(
        self,
        rope: tuple[Tensor, ...],
        attention: Attention,
        rows: Tensor | None = None,
        states: StepStates | None = None,
    ):
        self.rope, self.attention, self._rows, self._states = rope, attention, rows, states
        self._valid: Tensor | None = None

    @property
    def valid(self) -> Tensor | None:
        """Bool [T], False for padding tokens; None if there is no padding."""
        if self._valid is None and self._rows is not None:
            self._valid = self._rows != 0
        return self._valid

    @property
    def states(self) -> StepStates:
        """The recurrent states of the step's sequences. Raises ModelError if the cache specs list none."""
        if self._states is None:
            raise ModelError("a layer reads recurrent state, but cache_specs() has no RecurrentStateSpec")
        return self._states


class TileMaxima(NamedTuple):
    """The largest logit of each tile of the vocabulary, float32 [N, tiles], and its token, int32 [N, tiles].

    Ties go to the first token; a NaN counts as infinity.
    """

    values: Tensor
    tokens: Tensor


class Model(ABC):
    """A decoder that the engine runs. Its tensors stay at fixed addresses.

    A step calls `embed`, `rope`, every `layer` and a head, as one graph or with one graph per layer, so each must be
    capturable on the model's device: no host reads, no shapes that depend on data. `max_len` bounds positions.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_len: int
    collectives: TensorParallelCollectives | None = None
    """The collectives of a tensor-parallel step that wait on the device, to abandon them if a rank is lost."""
    adapters: AdapterRows | None = None
    """The adapters with which the model's layers compute; None: requests can't name one."""
    _layers_run: Sequence[int] | None = None

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of the logits that `compute_logits` returns and for which `head` needs a buffer.

        Float32 if the head's GEMM doesn't round its sums: see layers/float32_linear.py.
        """
        return self.dtype

    @property
    def module(self) -> nn.Module:
        """The module that holds every parameter and buffer that a step reads."""
        assert isinstance(self, nn.Module)
        return self

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return what each decoder layer stores, in layer order."""
        return self.config.cache_specs()

    def make_state(self, max_num_seqs: int, max_tokens: int) -> ModelState:
        """Create what steps of up to `max_tokens` tokens need of each slot beside its tokens and pages.

        By default recurrent states, if `cache_specs` lists any, and the adapters of rows. Called once.
        """
        states: list[ModelState] = []
        if recurrent_layers(self.cache_specs()):
            states.append(RecurrentStates(self.cache_specs(), max_num_seqs, self.dtype, self.device))
        if self.adapters is not None:
            self.adapters.allocate(max_num_seqs, max_tokens, self.device)
            states.append(self.adapters)
        return ModelStates(states)

    def layer_kinds(self) -> Sequence[Hashable]:
        """Return a key per decoder layer, equal for layers that launch the same kernels beside equal page tables.

        By default all layers differ.
        """
        return range(self.config.num_layers)

    def fused(self, max_rows: int, max_tokens: int) -> Model:
        """Return a model that computes the same with fused kernels on CUDA, on this model's tensors.

        It serves decode steps of up to max_rows rows and prefills of up to max_tokens tokens. Raises ModelError if
        there are no such kernels for this model.
        """
        raise ModelError(f"{self.config.architecture} has no fused kernels")

    @abstractmethod
    def embed(self, tokens: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the embedding [T, h] of token ids int64 [T], or of `tokens[index]` if `index` int64 [T] is given."""

    @abstractmethod
    def rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the rotary values of positions int64 [T] for `ForwardContext.rope`."""

    @abstractmethod
    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Run decoder layer `index` on hidden [T, h]. Returns a new tensor, or `hidden` itself if changed in place."""

    def run_layers(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Run the decoder layers on hidden [T, h]. Returns a new tensor, or `hidden` itself if changed in place."""
        for index in range(self.config.num_layers) if self._layers_run is None else self._layers_run:
            hidden = self.layer(index, hidden, context)
        return hidden

    @contextmanager
    def one_layer_of_each_kind(self, page_tables: Sequence[int]) -> Iterator[None]:
        """Make `run_layers` run only the first layer of each kind within the block, for a run without results.

        `page_tables` has the index of each layer's page table. Kernels differ between tables too: by their alignment.
        """
        first_of_kind: dict[Hashable, int] = {}
        for index, kind in enumerate(zip(self.layer_kinds(), page_tables, strict=True)):
            first_of_kind.setdefault(kind, index)
        self._layers_run = tuple(first_of_kind.values())
        try:
            yield
        finally:
            self._layers_run = None

    @abstractmethod
    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return hidden [N, h] after the last layer, normalised as the head reads it: a new tensor [N, h]."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, vocab] of hidden [N, h] after the last layer, in `logits_dtype`. Applies the last norm.

        With tensor parallelism every rank gets all columns.
        """

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the outputs [N, labels] of the classification head for hidden [N, h] after the last norm.

        Raises ModelError if the model has none.
        """
        raise ModelError(f"{self.config.architecture} has no classification head")

    def head(self, hidden: Tensor, logits: Tensor, *, after_layer: bool) -> TileMaxima | None:
        """Write the logits of hidden [N, h] to `logits` [N, vocab] of `logits_dtype`.

        Returns their maxima by tile if they are a by-product, in memory that the next call overwrites. `after_layer`:
        hidden is what `layer` returned last, not a selection of its rows.
        """
        logits.copy_(self.compute_logits(hidden))
        return None

    @abstractmethod
    def weight_slots(self) -> dict[str, Slot]:
        """Map Hugging Face tensor names to the storage of this rank, for loading, updates and export."""

    def split_stacked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return checkpoint tensors under the names of `weight_slots`: tensors that stack several become views."""
        return tensors

    def close(self) -> None:  # noqa: B027 (most models change nothing)
        """Undo what the model changed outside itself. The model can't be used afterwards."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        rows: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        """Token ids and positions int64 [T] -> hidden [T, h] after the last layer, before its norm.

        `attention` writes this step's keys and values. `rows` and `context`: see ForwardContext.
        """
        shared = ForwardContext(self.rope(positions), attention, rows, **context)
        return self.run_layers(self.embed(tokens), shared)


def tensor_kinds(tensors: Iterable[tuple[str, Tensor | None]]) -> tuple[Hashable, ...]:
    """Return what decides which kernels read these named tensors: dtypes, shapes, strides and alignment."""
    return tuple(
        (name, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0)
        for name, tensor in tensors
        if tensor is not None
    )
