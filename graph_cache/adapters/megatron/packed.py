"""Packed sequences as inputs of graphs: how PackedSeqParams are taken apart, and padded to one number of documents.

As they come, nearly every batch is a kind of call of its own: cu_seqlens is as long as the batch has documents, and
max_seqlen is a value that a capture bakes in, and the length of the rotary table. Knows no graphs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, cat, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from graph_cache.errors import GraphConfigError

PACKED_ARGUMENT = "packed_seq_params"  # what models call them
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
ROTARY_TYPES = ("rope", "yarn", "mrope")  # kinds of position embeddings that layers apply


class PackedDocuments:
    """From `begin` to `end`, models are given packed sequences padded to `documents`, so that one graph serves all.

    `models` are those of Megatron-Core or their chunks, wrapped or not. Raises GraphConfigError for what can't be
    padded, or could never be replayed: context parallelism, and rotary embeddings that read lengths on the host.
    """

    def __init__(self, models: Sequence[nn.Module], documents: int):
        setting = f"packed_documents={documents!r}"
        if type(documents) is not int or documents < 1:
            raise GraphConfigError(
                f"{setting}: it must be an int of at least 1, the most documents that a batch has, or "
                "None, which leaves packed sequences alone"
            )
        self._documents = documents
        self._models: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        for model in models:
            targets = [
                one
                for one in model.modules()
                if isinstance(one, LanguageModule)
                and {PACKED_ARGUMENT, "input_ids"} <= set(_signature(type(one)).parameters)
            ]
            if not targets:
                raise GraphConfigError(
                    f"{setting} pads the {PACKED_ARGUMENT} of a GPTModel, a MambaModel or a HybridModel; found "
                    f"none in {type(model).__name__}: attach the whole model, or leave "
                    "packed_documents out"
                )
            for one in targets:
                _check(one, setting)
            self._models += targets

    def begin(self) -> None:
        """Pad from here on, also what runs eager: that computes what a replay does."""
        hook = functools.partial(_pad_call, documents=self._documents)
        self._handles = [model.register_forward_pre_hook(hook, with_kwargs=True) for model in self._models]

    def end(self) -> None:
        """The models as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _check(model: LanguageModule, setting: str) -> None:
    """Refuse a model whose packed sequences can't be padded, or would be so for nothing."""
    config = model.config
    if config.context_parallel_size > 1:
        raise GraphConfigError(
            f"{setting}: padding is not supported with context parallelism, where cu_seqlens count "
            f"tokens of other ranks; found context_parallel_size={config.context_parallel_size}: "
            "leave packed_documents out, or set it 1"
        )
    is_rotary = config.multi_latent_attention or getattr(model, "position_embedding_type", None) in ROTARY_TYPES
    if is_rotary and not config.apply_rope_fusion:
        # It also takes a rotary table as long as the batch for one that goes on through all documents.
        raise GraphConfigError(
            f"{setting}: with apply_rope_fusion=False Megatron's rotary embedding reads cu_seqlens on "
            "the host, which no graph can hold: build the model with apply_rope_fusion=True, or "
            "leave packed_documents out"
        )


# ---- padding ---------------------------------------------------------------------------------------------------------


@functools.cache
def _signature(model_class: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(model_class.forward)


def _pad_call(
    model: LanguageModule, args: tuple, kwargs: dict[str, Any], *, documents: int
) -> tuple[tuple, dict[str, Any]] | None:
    """A forward-pre-hook; None leaves the call as it is. The one padded object goes to all layers."""
    if not any(isinstance(one, PackedSeqParams) for one in (*args, *kwargs.values())):
        return None
    call = _signature(type(model)).bind(model, *args, **kwargs)
    packed, tokens = call.arguments.get(PACKED_ARGUMENT), tokens_of(model, call.arguments)
    if packed is None or tokens is None:
        return None
    call.arguments[PACKED_ARGUMENT] = padded(packed, documents, tokens)
    return call.args[1:], call.kwargs


def tokens_of(model: LanguageModule, arguments: Mapping[str, Any]) -> int | None:
    """How many tokens a call's batch has, from shapes alone; None where nothing says.

    Looks where the model itself does: at `decoder_input`, on a later pipeline stage at the hidden states that
    `set_input_tensor` left, both [s, b, h] (a tensor-parallel rank's part of s under sequence parallelism), else at
    `input_ids` [b, s].
    """
    hidden, ids = arguments.get("decoder_input"), arguments.get("input_ids")
    if hidden is None and not model.pre_process:
        hidden = model.decoder.input_tensor
    if hidden is None:
        return None if ids is None else ids.numel()
    ranks = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    return hidden.shape[0] * hidden.shape[1] * ranks


def padded(packed: PackedSeqParams, documents: int, tokens: int) -> PackedSeqParams:
    """The same documents and empty ones after them, `documents` in all, none longer than the batch's `tokens`.

    Itself if it has more documents, or is not in the format `thd`, whose cu_seqlens alone may have any length. Reads no
    tensor on the host.
    """
    cu_seqlens = {name: value for name in CU_SEQLENS if (value := getattr(packed, name)) is not None}
    if (
        packed.qkv_format != "thd"
        or not cu_seqlens
        or any(value.dim() != 1 or len(value) > documents + 1 for value in cu_seqlens.values())
    ):
        return packed
    # Transformer Engine takes the very same tensor in two fields for two lengths that are equal: it stays one.
    padded_cu_seqlens = {
        id(value): cat([value, value[-1:].expand(documents + 1 - len(value))]) for value in cu_seqlens.values()
    }
    result = copy.copy(packed)  # 0.19's own construction would compute further tensors
    vars(result).update(
        {name: padded_cu_seqlens[id(value)] for name, value in cu_seqlens.items()},
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
    )
    return result


# ---- taking apart ----------------------------------------------------------------------------------------------------


def register_packed_sequences() -> None:
    """Let the tensors of PackedSeqParams be inputs of a graph, and its numbers part of what must equal.

    Put together again as they were: its own construction computes further tensors (0.19's `seq_idx`) of a shape that
    depends on data, which no graph can hold. A tensor in several fields is one input, and in all of them afterwards.
    """
    if PackedSeqParams in _pytree.SUPPORTED_NODES:
        return
    names = [field.name for field in dataclasses.fields(PackedSeqParams)]

    def flatten(packed: PackedSeqParams) -> tuple[list[Any], tuple[int, ...]]:
        leaves: list[Any] = []
        positions: list[int] = []  # among the leaves, of each field
        tensors: dict[int, int] = {}
        for name in names:
            value = getattr(packed, name)
            position = tensors.setdefault(id(value), len(leaves)) if isinstance(value, Tensor) else len(leaves)
            positions.append(position)
            if position == len(leaves):
                leaves.append(value)
        return leaves, tuple(positions)

    def unflatten(values: Iterable[Any], positions: tuple[int, ...]) -> PackedSeqParams:
        leaves, packed = list(values), object.__new__(PackedSeqParams)
        vars(packed).update({name: leaves[position] for name, position in zip(names, positions, strict=True)})
        return packed

    _pytree.register_pytree_node(PackedSeqParams, flatten, unflatten)
