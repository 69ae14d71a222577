"""Decoder on CUDA with fused kernels, reading the model's own parameters in place.

A decoder layer is composed of two parts. Attention takes three launches in a decode step:

1. norm + QKV
2. attention, with head norms, RoPE and the append to the KV cache
3. output projection + residual

A gated MLP takes two more, and experts in a decode step three to five (engine/kernels/expert_step.py). Another kind,
and experts in a prefill, run as the model's own layer does:

4. norm + gate and up + SiLU
5. down projection + residual

Prefill uses the same launches with its own attention kernels. With tensor parallelism each rank computes its shard, and
an all-reduce follows steps 3 and 5. This module imports triton: import it only if the device is CUDA (or under
TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.cache_spec import CacheSpec
from engine.attention.interface import FusedAttention
from engine.distributed.collectives import TensorParallelCollectives
from engine.kernels.expert_step import FORMATS as EXPERT_FORMATS
from engine.kernels.expert_step import MAX_ROWS, ExpertScratch, ExpertTensors, add_experts
from engine.kernels.launch import launch_options, next_power_of_2, overlaps
from engine.kernels.linear_weight import LinearWeight
from engine.kernels.paged_decode import NormRope
from engine.kernels.small_batch_gemm import Scratch
from engine.kernels.step_kernels import embed_kernel
from engine.kernels.step_linear import FORMATS, half_normed, linear
from engine.layers.moe import MoE, Router
from engine.layers.parallel import embed_part
from engine.layers.weight_slot import Slot
from engine.models.decoder_tensors import DecoderTensors, FusableModel, LayerTensors, require_formats
from engine.models.interface import ForwardContext, Model, TileMaxima, tensor_kinds


class FusedDecoder(Model):
    """Compute `model` with fused kernels: decode steps of up to max_rows rows, prefills of up to max_tokens tokens.

    All methods launch on the current stream with grids that depend only on shapes, and never synchronize with the
    host: safe to capture. Use one stream for all calls, since they share scratch. With tensor parallelism all ranks
    must make the same calls. Attention must be a FusedAttention. Raises ModelError if the kernels can't read a
    weight's format.
    """

    def __init__(self, model: FusableModel, tensors: DecoderTensors, max_rows: int, max_tokens: int):
        config, device, dtype = model.config, model.device, model.dtype
        self._model, self.tensors = model, tensors
        require_formats(self.tensors, FORMATS)
        self.config, self.dtype, self.device, self.max_len = config, dtype, device, model.max_len
        self.heads, self.eps, self.depth = self.tensors.heads, config.rms_norm_eps, config.num_layers
        width = config.intermediate_size
        tokens = max(max_rows, max_tokens)
        empty = lambda *shape: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
        self._qkv = empty(tokens, self.heads.width)
        self._attention_out = torch.zeros(tokens, self.heads.heads * self.heads.dim, dtype=dtype, device=device)
        self._mlp_activations = empty(tokens, width)
        self._scratch = Scratch(
            tokens, max_rows, config.hidden_size, max(self.heads.width, 2 * width), config.vocab_size, dtype, device
        )
        self._experts = self._expert_scratch(min(tokens, MAX_ROWS))
        group, head = self.tensors.group, self.tensors.head.weight
        self.collectives = (
            None if group is None else TensorParallelCollectives(group, max_rows, head, self.logits_dtype)
        )

    def _expert_scratch(self, rows: int) -> ExpertScratch | None:
        """Return the scratch of all layers with experts; None if there are none, or the kernels can't compute one."""
        layers = [layer.moe for layer in map(self.tensors.layer, range(self.depth)) if layer.moe is not None]
        found = [expert_tensors(moe) for moe in layers]
        if not found or found[0] is None or None in found:
            return None
        return ExpertScratch(rows, found[0], self.dtype, self.device)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The model's 16-bit dtype: float32 logits would double what the head writes and sampling reads."""
        return self.dtype

    @property
    def module(self) -> nn.Module:
        return self._model.module

    def weight_slots(self) -> dict[str, Slot]:
        return self._model.weight_slots()

    def close(self) -> None:
        self._model.close()

    def rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return nothing: attention reads cos and sin at its positions from the whole tables."""
        return ()

    def layer_kinds(self) -> Sequence[Hashable]:
        """See Model. No GEMM before the first layer starts its norm; a layer's last GEMM starts the next norm."""

        own_kinds = self._model.layer_kinds()

        def kind(index: int, spec: CacheSpec) -> Hashable:
            layer = self.tensors.layer(index)
            tensors = *layer.named_tensors(), ("next_norm", self._norm_after_layer(index))
            own, last = None if layer.mlp is None else own_kinds[index], self._last_weight(index - 1)
            return index == 0, None if last is None else last.format, spec, tensor_kinds(tensors), own

        return [kind(index, spec) for index, spec in enumerate(self.cache_specs())]

    def embed(self, tokens: Tensor, index: Tensor | None = None) -> Tensor:
        table = self.tensors.embedding
        if index is None:
            return self._embed_tokens(tokens)
        hidden = torch.empty(len(index), table.shape[1], dtype=self.dtype, device=self.device)
        (rows, width), pdl = hidden.shape, overlaps(hidden)
        embed_kernel[(rows,)](
            index,
            tokens,
            table,
            hidden,
            self.tensors.first_token,
            len(table),
            H=width,
            HP=next_power_of_2(width),
            SPLIT=self.collectives is not None,
            PDL=pdl,
            **launch_options(pdl),
        )
        if self.collectives is not None:
            self.collectives.all_reduce(hidden)
        return hidden

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        """See Model. Changes `hidden` in place and returns it."""
        layer = self.tensors.layer(index)
        self._add_attention(index, layer, hidden, context)
        if layer.mlp is None:
            self._add_gated_mlp(index, layer, hidden)
        elif self._experts is not None and layer.moe is not None and len(hidden) <= MAX_ROWS:
            self._add_experts(layer, layer.moe, hidden, context)
        else:
            hidden.add_(layer.mlp(hidden, context))
        return hidden

    def _add_experts(self, layer: LayerTensors, moe: MoE, hidden: Tensor, context: ForwardContext) -> None:
        experts = expert_tensors(moe)
        assert experts is not None and self._experts is not None
        normed = add_experts(hidden, experts, self._experts, norm=layer.post_norm, eps=self.eps, valid=context.valid)
        moe.record(self._experts.chosen[: len(hidden)])
        if moe.shared is not None:
            hidden.add_(moe.shared(normed))

    def _add_attention(self, index: int, layer: LayerTensors, hidden: Tensor, context: ForwardContext) -> None:
        rows = len(hidden)
        qkv, attention_out = self._qkv[:rows], self._attention_out[:rows]
        linear(
            hidden,
            layer.qkv,
            qkv,
            self._scratch,
            norm=layer.input_norm,
            eps=self.eps,
            bias=layer.qkv_bias,
            squares=self._squares_after_layer(index - 1, rows),
            late=True,
        )
        attention = cast(FusedAttention, context.attention)
        attention.attend_raw(index, *self.heads.cut(qkv), self._norm_rope(layer), attention_out, layer.sinks)
        next_norm = None if layer.gate_up is None else layer.post_norm
        self._add_linear(hidden, attention_out, layer.o, layer.o_bias, next_norm, buffer_index=0)

    def _add_gated_mlp(self, index: int, layer: LayerTensors, hidden: Tensor) -> None:
        assert layer.gate_up is not None and layer.down is not None
        rows = len(hidden)
        gated = self._mlp_activations[:rows]
        linear(
            hidden,
            layer.gate_up,
            gated,
            self._scratch,
            norm=layer.post_norm,
            eps=self.eps,
            bias=layer.gate_up_bias,
            gated=True,
            squares=self._partial_squares(rows, layer.o),
        )
        self._add_linear(hidden, gated, layer.down, layer.down_bias, self._norm_after_layer(index), buffer_index=1)

    def _add_linear(
        self,
        hidden: Tensor,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None,
        next_norm: Tensor | None,
        buffer_index: int,
    ) -> None:
        """Add x Wᵀ + bias to hidden [T, h], all-reduced over the ranks; only the first rank adds the bias.

        `next_norm`: the weight of the norm that a fused kernel computes next; None: another operation reads hidden.
        """
        if self.collectives is None:
            linear(x, weight, hidden, self._scratch, bias=bias, add=True, next_norm=next_norm)
            return
        partial_sum, accumulate = self.collectives.all_reduce_into(hidden, buffer_index)
        linear(x, weight, partial_sum, self._scratch, bias=bias if self.collectives.is_first else None, add=accumulate)
        self.collectives.all_reduce_shared(hidden, buffer_index)

    def _partial_squares(self, rows: int, weight: LinearWeight) -> int:
        """Return the partial sums of squares per row that `_add_linear` of `weight` leaves for the next norm; 0: none.

        With tensor parallelism it is 0, since the norm needs the all-reduced hidden.
        """
        return 0 if self.collectives else half_normed(rows, weight, self.dtype)

    def _norm_after_layer(self, index: int) -> Tensor:
        """Return the weight of the norm that reads the output of layer `index`."""
        return self.tensors.norm if index + 1 == self.depth else self.tensors.layer(index + 1).input_norm

    def _last_weight(self, index: int) -> LinearWeight | None:
        """Return the weight of the GEMM that ends layer `index`, which can start the norm after it; None: no GEMM does.

        Index -1 is the embedding.
        """
        return self.tensors.layer(index).down if index >= 0 else None

    def _squares_after_layer(self, index: int, rows: int) -> int:
        """Return the partial sums of squares per row that layer `index` leaves for the norm after it; 0: none."""
        weight = self._last_weight(index)
        return 0 if weight is None else self._partial_squares(rows, weight)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._model.final_norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden).to(self.logits_dtype)

    def head(self, hidden: Tensor, logits: Tensor, *, after_layer: bool) -> TileMaxima | None:
        scratch, rows = self._scratch, len(hidden)
        local_logits = logits if self.collectives is None else self.collectives.part(rows)
        tiles = linear(
            hidden,
            self.tensors.head,
            local_logits,
            scratch,
            norm=self.tensors.norm,
            eps=self.eps,
            best=self.collectives is None,
            squares=self._squares_after_layer(self.depth - 1, rows) if after_layer else 0,
        )
        if self.collectives is not None:
            self.collectives.gather(local_logits, logits)
            return None
        return TileMaxima(*scratch.maxima(rows, tiles))

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        table = self.tensors.embedding
        if self.collectives is None:
            return F.embedding(tokens, table)
        hidden = embed_part(tokens, table, self.tensors.first_token)
        self.collectives.all_reduce(hidden)
        return hidden

    def _norm_rope(self, layer: LayerTensors) -> NormRope:
        return NormRope(self.tensors.cos, self.tensors.sin, layer.q_norm, layer.k_norm, self.eps)


def expert_tensors(moe: MoE) -> ExpertTensors | None:
    """Return the parameters of a layer's router and experts; None: the kernels of a decode step don't compute it.

    They compute routers with a softmax and plain 16-bit weights, on one rank.
    """
    router, experts = moe.router, moe.experts
    gate_up, down = experts.gate_up.linear_weight, experts.down.linear_weight
    if (
        not isinstance(router, Router)
        or experts.parallel.size > 1
        or {gate_up.format, down.format} - set(EXPERT_FORMATS)
    ):
        return None
    return ExpertTensors(
        router.weight, router.bias, router.top_k, router.normalize, gate_up, experts.gate_up.bias, down,
        experts.down.bias, experts.activation.limit, experts.activation.alpha,
    )  # fmt: skip
