"""Pad the microbatches of Megatron-Core's vision encoders to token budgets, so that one graph per layer serves all.

Hooks on the encoder's TransformerBlock pad its inputs and cut its outputs back. Images that are packed into one
sequence (hidden states [patches, 1, h], with packed_seq_params) get the padding as a separate sequence, so no
attention crosses into it. Images of one size ([patches, images, h]) get further images.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, cat, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from graph_cache.adapters.megatron.packed import CU_SEQLENS, PACKED_ARGUMENT, with_cu_seqlens
from graph_cache.adapters.megatron.packed_rotary import AbsoluteRotary
from graph_cache.adapters.megatron.parts import encoder_blocks
from graph_cache.adapters.megatron.vision import ABOVE_LARGEST, TOO_MANY_IMAGES, VisionSettings, token_budgets
from graph_cache.errors import GraphConfigError

POSITIONS = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")  # arguments with a row per patch
MASK = "attention_mask"
POSITION_TABLE = "position_table"  # reason why a microbatch is not padded


class PaddedEncoder:
    """Pad the microbatches of one encoder's TransformerBlock, between `begin` and `end`.

    Images of one size are padded only if the settings give a length. A microbatch beyond the largest budget, or with
    more images than `max_images`, is not padded: `unpadded(reason)` is called. Raises GraphConfigError for sequence
    parallelism, under which a rank has only a part of each sequence, and for budgets that hold no patch.
    """

    def __init__(
        self,
        encoder: nn.Module,
        block: TransformerBlock,
        settings: VisionSettings,
        unpadded: Callable[[str], None] = lambda _: None,
    ):
        if block.config.sequence_parallel:
            raise GraphConfigError(
                f"the vision encoder {type(encoder).__name__} has sequence_parallel=True, so a rank can't pad its "
                "sequences: set it False in the encoder's configuration, or set vision_cuda_graph_impl='none'"
            )
        merge = getattr(block.config, "spatial_merge_size", None) or 1
        self._unit = merge**2
        self._patches_of_image: int | None = getattr(encoder, "num_patches", None)
        self._settings = settings
        self._budgets = token_budgets(
            settings,
            num_position_embeddings=getattr(block.config, "num_position_embeddings", None),
            spatial_merge_size=merge,
        )
        self._block, self._unpadded = block, unpadded
        self._handles: list[RemovableHandle] = []
        self._rotary = AbsoluteRotary(one for one in block.modules() if isinstance(one, Attention))
        self._cut: Callable[[Any], Any] | None = None  # of the current call

    def begin(self) -> None:
        """Start padding, for eager calls too, so that they compute the same as a replay."""
        self._handles = [
            self._block.register_forward_pre_hook(self._pad_call, with_kwargs=True),
            self._block.register_forward_hook(self._cut_output),
        ]
        self._rotary.install()

    def end(self) -> None:
        """Stop padding."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._rotary.remove()

    def _pad_call(
        self, block: TransformerBlock, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        self._cut = None
        call = _signature(type(block)).bind(block, *args, **kwargs)
        hidden = call.arguments.get("hidden_states")
        if not isinstance(hidden, Tensor):
            return None
        packed = call.arguments.get(PACKED_ARGUMENT)
        if isinstance(packed, PackedSeqParams):
            changes = self._packed(hidden, packed, call.arguments)
        else:
            changes = self._images(hidden, call.arguments) if self._settings.is_explicit else None
        if changes is None:
            return None
        call.arguments.update(changes)
        return call.args[1:], call.kwargs

    def _packed(self, hidden: Tensor, packed: PackedSeqParams, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the padded arguments of a call with packed images; None if it is not padded."""
        count, room = hidden.shape[0], self._settings.max_images
        lengths = [len(value) for name in CU_SEQLENS if (value := getattr(packed, name)) is not None]
        if packed.qkv_format != "thd" or not lengths:
            return None
        budget = self._fitting(count, self._budgets)
        if budget is None or max(lengths) - 1 > room:
            self._unpadded(ABOVE_LARGEST if budget is None else TOO_MANY_IMAGES)
            return None
        positions = {name: given for name in POSITIONS if (given := arguments.get(name)) is not None}
        if any(len(one) != count for one in _pytree.tree_leaves(positions)):
            self._unpadded(POSITION_TABLE)  # with a row per position in an image: too few for the padding
            return None
        extra, unit = budget - count, self._unit
        # One sequence of padding, then empty ones.
        longer = with_cu_seqlens(
            packed,
            lambda value: cat([value, value.new_full((room + 2 - len(value),), budget)]),
            max_seqlen=budget,
        )
        if getattr(packed, "total_tokens", None) is not None:
            longer.total_tokens = budget
        rows = {budget // unit: count // unit, budget: count}
        self._cut = lambda output: _cut(output, 0, rows)
        changes = _pytree.tree_map_only(Tensor, lambda one: _padded(one, 0, extra), positions)
        return {"hidden_states": _padded(hidden, 0, extra), PACKED_ARGUMENT: longer} | changes

    def _images(self, hidden: Tensor, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the padded arguments of a call with images of one size; None if it is not padded."""
        length, count = hidden.shape[:2]
        patches = self._patches_of_image or length  # a class token is none
        capacity = self._fitting(count, [budget // patches for budget in self._budgets])
        if capacity is None:
            self._unpadded(ABOVE_LARGEST)
            return None
        extra = capacity - count
        self._cut = lambda output: _cut(output, 1, {capacity: count})
        changes = {"hidden_states": _padded(hidden, 1, extra)}
        mask = arguments.get(MASK)
        if isinstance(mask, Tensor) and len(mask) == count > 1:
            changes[MASK] = _padded(mask, 0, extra)
        return changes

    def _fitting(self, count: int, sizes: Sequence[int]) -> int | None:
        at = bisect_left(sizes, count)
        return sizes[at] if at < len(sizes) else None

    def _cut_output(self, block: nn.Module, args: tuple, output: Any) -> Any:
        cut, self._cut = self._cut, None
        return output if cut is None else cut(output)


def padded_encoders(
    models: Sequence[nn.Module], settings: VisionSettings, unpadded: Callable[[str, str], None]
) -> list[PaddedEncoder]:
    """Create the padding of each vision encoder. `unpadded(name, reason)` is called for what is not padded."""
    return [
        PaddedEncoder(encoder, block, settings, functools.partial(unpadded, name))
        for name, encoder, block in encoder_blocks(models)
    ]


@functools.cache
def _signature(block_class: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(block_class.forward)


def _padded(tensor: Tensor, dim: int, extra: int) -> Tensor:
    """Return the tensor with `extra` rows of zeros at the end of a dimension."""
    return F.pad(tensor, (*[0, 0] * (tensor.dim() - 1 - dim), 0, extra))


def _cut(output: Any, dim: int, rows: Mapping[int, int]) -> Any:
    """Cut tensors of one of these sizes in a dimension."""

    def cut(one: Tensor) -> Tensor:
        return one.narrow(dim, 0, rows[one.shape[dim]]) if one.dim() > dim and one.shape[dim] in rows else one

    return _pytree.tree_map_only(Tensor, cut, output)
