"""Packed sequences as graph inputs: flatten PackedSeqParams, and pad them to a fixed number of documents.

Without padding nearly every batch has its own call signature: the length of cu_seqlens is the number of documents, and
a capture bakes in max_seqlen, which is also the length of the rotary table.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, cat, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from graph_cache.adapters.megatron.packed_rotary import DeviceRotary, reads_lengths_on_host
from graph_cache.adapters.megatron.packed_seq_idx import (
    PrecomputedIndices,
    computes_indices,
    with_sequence_indices,
)
from graph_cache.errors import GraphConfigError

PACKED_ARGUMENT = "packed_seq_params"  # parameter name in Megatron's forward methods
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
TOO_MANY_DOCUMENTS = "too_many_documents"  # reason why a batch is not padded
ROTARY_TYPES = ("rope", "yarn", "mrope")  # position embeddings that layers apply


class PackedDocuments:
    """Pad packed sequences of models to `documents` between `begin` and `end`, so that one graph serves all batches.

    `models`: Megatron-Core models or model chunks, wrapped or not. `option`: the option that gave `documents`, for
    errors. `unpadded(class name, reason)` is called for a batch with more documents, which is not padded. Raises
    GraphConfigError for rotary embeddings inside layers that read lengths on the host, which can't be
    captured.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        documents: int,
        option: str = "packed_documents",
        unpadded: Callable[[str, str], None] = lambda name, reason: None,
    ):
        setting = f"{option}={documents!r}"
        if type(documents) is not int or documents < 1:
            raise GraphConfigError(
                f"{setting}: it must be an int of at least 1, the largest number of documents in a batch, or "
                "None to leave packed sequences unpadded"
            )
        self._documents, self._unpadded = documents, unpadded
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
                    f"{option} out"
                )
            for one in targets:
                _check(one, option, setting)
            self._models += targets
        self._rotary = [DeviceRotary()] if any(map(_is_unfused_rotary, self._models)) else []
        self._indices = [PrecomputedIndices(model) for model in self._models]

    def begin(self) -> None:
        """Start padding, for eager calls too, so that they compute the same as a replay."""
        self._handles = [
            model.register_forward_pre_hook(
                functools.partial(
                    _pad_call,
                    documents=self._documents,
                    indices=computes_indices(model),
                    unpadded=functools.partial(self._unpadded, type(model).__name__),
                ),
                with_kwargs=True,
            )
            for model in self._models
        ]
        for indices in self._indices:
            indices.install()
        for rotary in self._rotary if reads_lengths_on_host() else ():
            rotary.install()
            self._handles += [
                model.rotary_pos_emb.register_forward_pre_hook(_longer_table, with_kwargs=True)
                for model in self._models
                if _is_unfused_rotary(model) and model.position_embedding_type != "mrope"
            ]

    def end(self) -> None:
        """Stop padding."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for rotary in self._rotary:
            rotary.remove()
        for indices in self._indices:
            indices.remove()


def _is_unfused_rotary(model: LanguageModule) -> bool:
    return getattr(model, "position_embedding_type", None) in ROTARY_TYPES and not model.config.apply_rope_fusion


def _longer_table(rotary: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward-pre-hook of a rotary embedding: make a packed table one row longer than the batch.

    A padded max_seqlen is the number of tokens, but a table of that length would stand for absolute positions.
    """
    return ((args[0] + 1, *args[1:]), kwargs) if args and kwargs.get("packed_seq") else None


def _check(model: LanguageModule, option: str, setting: str) -> None:
    """Raise GraphConfigError if packed sequences can't be padded, or if padding would not make calls replay."""
    config = model.config
    if config.multi_latent_attention and not config.apply_rope_fusion:
        raise GraphConfigError(
            f"{setting}: with multi_latent_attention and apply_rope_fusion=False, layers compute rotary tables from "
            "max_seqlen and read cu_seqlens on the host, which can't be captured: build the model with "
            f"apply_rope_fusion=True, or leave {option} out"
        )
    is_unfused_mrope = _is_unfused_rotary(model) and getattr(model, "position_embedding_type", None) == "mrope"
    if is_unfused_mrope and config.context_parallel_size > 1:
        raise GraphConfigError(
            f"{setting}: with mrope, apply_rope_fusion=False and context_parallel_size={config.context_parallel_size}, "
            "each rank gets a part of the table that does not hold the positions of its tokens: build the model with "
            f"apply_rope_fusion=True, or leave {option} out"
        )
    if is_unfused_mrope and not reads_lengths_on_host():
        raise GraphConfigError(
            f"{setting}: with mrope and apply_rope_fusion=False, this version of Megatron-Core chooses positions by "
            "comparing the table with max_seqlen, which padding changes: build the model with "
            f"apply_rope_fusion=True, or leave {option} out"
        )


# ---- padding ---------------------------------------------------------------------------------------------------------


@functools.cache
def _signature(model_class: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(model_class.forward)


def _pad_call(
    model: LanguageModule,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    documents: int,
    indices: bool,
    unpadded: Callable[[str], None],
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward-pre-hook of the model that pads its packed sequences once for all layers. None: call unchanged."""
    if not any(isinstance(one, PackedSeqParams) for one in (*args, *kwargs.values())):
        return None
    call = _signature(type(model)).bind(model, *args, **kwargs)
    packed, tokens = call.arguments.get(PACKED_ARGUMENT), tokens_of(model, call.arguments)
    if packed is None or tokens is None:
        return None
    given, packed = packed, padded(packed, documents, tokens)
    if packed is given and packed.qkv_format == "thd":
        unpadded(TOO_MANY_DOCUMENTS)
    call.arguments[PACKED_ARGUMENT] = with_sequence_indices(packed, tokens) if indices else packed
    return call.args[1:], call.kwargs


def tokens_of(model: LanguageModule, arguments: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a call's batch, from shapes alone; None if it is unknown.

    Under context parallelism it is the number over all ranks, which cu_seqlens count. Each rank has an equal part.

    Reads the same input as the model: `decoder_input`, or on a later pipeline stage the hidden states from
    `set_input_tensor`, both [s, b, h] (s is sharded over tensor-parallel ranks under sequence parallelism), else
    `input_ids` [b, s].
    """
    hidden, ids = arguments.get("decoder_input"), arguments.get("input_ids")
    if hidden is None and not model.pre_process:
        hidden = model.decoder.input_tensor
    context_ranks = _context_ranks(model, arguments.get(PACKED_ARGUMENT))
    if hidden is None:
        return None if ids is None else ids.numel() * context_ranks
    ranks = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    return hidden.shape[0] * hidden.shape[1] * ranks * context_ranks


def _context_ranks(model: LanguageModule, packed: PackedSeqParams | None) -> int:
    """Return the number of ranks that a batch is spread over: the batch's own (dynamic context parallelism), else the
    model's.
    """
    return getattr(packed, "local_cp_size", None) or model.config.context_parallel_size


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
    return with_cu_seqlens(
        packed, lambda value: cat([value, value[-1:].expand(documents + 1 - len(value))]), max_seqlen=tokens
    )


def with_cu_seqlens(packed: PackedSeqParams, change: Callable[[Tensor], Tensor], *, max_seqlen: int) -> PackedSeqParams:
    """Return a copy with each cu_seqlens changed and this max_seqlen. Reads no tensor on the host.

    Transformer Engine compares fields by identity, so one tensor in two fields stays one tensor.
    """
    found = {name: value for name in CU_SEQLENS if (value := getattr(packed, name)) is not None}
    changed = {id(value): change(value) for value in found.values()}
    result = copy.copy(packed)  # the constructor of 0.19 would compute further tensors
    if getattr(packed, "pad_between_seqs", False) is None:
        result.pad_between_seqs = _pads_between(packed)
    vars(result).update(
        {name: changed[id(value)] for name, value in found.items()}, max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen
    )
    return result


def _pads_between(packed: PackedSeqParams) -> bool:
    """Whether there may be padding between documents, by Transformer Engine's rule. It reads no lengths.

    If the field is unset, some of its versions compare lengths on the device.
    """
    padded_q, padded_kv = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    if padded_q is packed.cu_seqlens_q and padded_kv is packed.cu_seqlens_kv:
        return False
    return padded_q is not None or padded_kv is not None


# ---- pytree registration ---------------------------------------------------------------------------------------------


def register_packed_sequences() -> None:
    """Register PackedSeqParams as a pytree node: tensors become graph inputs, numbers part of the call signature.

    Unflattening bypasses the constructor, which computes further tensors (`seq_idx` in 0.19) of a data-dependent shape
    that can't be captured. A tensor in several fields is one input and is restored to all of them.
    """
    if PackedSeqParams in _pytree.SUPPORTED_NODES:
        return

    def flatten(packed: PackedSeqParams) -> tuple[list[Any], tuple[tuple[str, int], ...]]:
        leaves: list[Any] = []
        positions: list[tuple[str, int]] = []  # each attribute and the index of its leaf
        tensors: dict[int, int] = {}
        for name, value in vars(packed).items():
            position = tensors.setdefault(id(value), len(leaves)) if isinstance(value, Tensor) else len(leaves)
            positions.append((name, position))
            if position == len(leaves):
                leaves.append(value)
        return leaves, tuple(positions)

    def unflatten(values: Iterable[Any], positions: tuple[tuple[str, int], ...]) -> PackedSeqParams:
        leaves, packed = list(values), object.__new__(PackedSeqParams)
        vars(packed).update({name: leaves[position] for name, position in positions})
        return packed

    _pytree.register_pytree_node(PackedSeqParams, flatten, unflatten)
