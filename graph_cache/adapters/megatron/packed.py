"""Packed sequences as graph inputs: flatten PackedSeqParams, and pad them to a fixed number of documents.

Without padding nearly every batch has its own call signature: the length of cu_seqlens is the number of documents, and
a capture bakes in max_seqlen, which is also the length of the rotary table.
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

PACKED_ARGUMENT = "packed_seq_params"  # parameter name in Megatron's forward methods
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
ROTARY_TYPES = ("rope", "yarn", "mrope")  # position embeddings that layers apply


class PackedDocuments:
    """Pad packed sequences of models to `documents` between `begin` and `end`, so that one graph serves all batches.

    `models`: Megatron-Core models or model chunks, wrapped or not. Raises GraphConfigError for context parallelism,
    which can't be padded, and for rotary embeddings that read lengths on the host, which can't be captured.
    """

    def __init__(self, models: Sequence[nn.Module], documents: int):
        setting = f"packed_documents={documents!r}"
        if type(documents) is not int or documents < 1:
            raise GraphConfigError(
                f"{setting}: it must be an int of at least 1, the largest number of documents in a batch, or "
                "None to leave packed sequences unpadded"
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
        """Start padding, for eager calls too, so that they compute the same as a replay."""
        hook = functools.partial(_pad_call, documents=self._documents)
        self._handles = [model.register_forward_pre_hook(hook, with_kwargs=True) for model in self._models]

    def end(self) -> None:
        """Stop padding."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _check(model: LanguageModule, setting: str) -> None:
    """Raise GraphConfigError if packed sequences can't be padded, or if padding would not make calls replay."""
    config = model.config
    if config.context_parallel_size > 1:
        raise GraphConfigError(
            f"{setting}: padding is not supported with context parallelism, where cu_seqlens count "
            f"tokens of other ranks; found context_parallel_size={config.context_parallel_size}: "
            "leave packed_documents out, or set it 1"
        )
    is_rotary = config.multi_latent_attention or getattr(model, "position_embedding_type", None) in ROTARY_TYPES
    if is_rotary and not config.apply_rope_fusion:
        # It would also treat a rotary table of the batch's length as one table continuing through all documents.
        raise GraphConfigError(
            f"{setting}: with apply_rope_fusion=False Megatron's rotary embedding reads cu_seqlens on "
            "the host, which can't be captured: build the model with apply_rope_fusion=True, or "
            "leave packed_documents out"
        )


# ---- padding ---------------------------------------------------------------------------------------------------------


@functools.cache
def _signature(model_class: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(model_class.forward)


def _pad_call(
    model: LanguageModule, args: tuple, kwargs: dict[str, Any], *, documents: int
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward-pre-hook of the model that pads its packed sequences once for all layers. None: call unchanged."""
    if not any(isinstance(one, PackedSeqParams) for one in (*args, *kwargs.values())):
        return None
    call = _signature(type(model)).bind(model, *args, **kwargs)
    packed, tokens = call.arguments.get(PACKED_ARGUMENT), tokens_of(model, call.arguments)
    if packed is None or tokens is None:
        return None
    call.arguments[PACKED_ARGUMENT] = padded(packed, documents, tokens)
    return call.args[1:], call.kwargs


def tokens_of(model: LanguageModule, arguments: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a call's batch, from shapes alone; None if it is unknown.

    Reads the same input as the model: `decoder_input`, or on a later pipeline stage the hidden states from
    `set_input_tensor`, both [s, b, h] (s is sharded over tensor-parallel ranks under sequence parallelism), else
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
    """Return a copy padded with empty documents to `documents`, with max_seqlen set to `tokens`.

    Returns `packed` itself if it has more documents, or if its format is not `thd`, the only format in which cu_seqlens
    may have any length. Reads no tensor on the host.
    """
    cu_seqlens = {name: value for name in CU_SEQLENS if (value := getattr(packed, name)) is not None}
    if (
        packed.qkv_format != "thd"
        or not cu_seqlens
        or any(value.dim() != 1 or len(value) > documents + 1 for value in cu_seqlens.values())
    ):
        return packed
    # Transformer Engine compares fields by identity: one tensor in two fields must stay one tensor.
    padded_cu_seqlens = {
        id(value): cat([value, value[-1:].expand(documents + 1 - len(value))]) for value in cu_seqlens.values()
    }
    result = copy.copy(packed)  # the constructor of 0.19 would compute further tensors
    vars(result).update(
        {name: padded_cu_seqlens[id(value)] for name, value in cu_seqlens.items()},
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
    )
    return result


# ---- pytree registration ---------------------------------------------------------------------------------------------


def register_packed_sequences() -> None:
    """Register PackedSeqParams as a pytree node: tensors become graph inputs, numbers part of the call signature.

    Unflattening bypasses the constructor, which computes further tensors (`seq_idx` in 0.19) of a data-dependent shape
    that can't be captured. A tensor in several fields is one input and is restored to all of them.
    """
    if PackedSeqParams in _pytree.SUPPORTED_NODES:
        return
    names = [field.name for field in dataclasses.fields(PackedSeqParams)]

    def flatten(packed: PackedSeqParams) -> tuple[list[Any], tuple[int, ...]]:
        leaves: list[Any] = []
        positions: list[int] = []  # index of each field's leaf
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
