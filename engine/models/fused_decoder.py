"""Decoder on CUDA with fused kernels, reading the model's own parameters in place.

A decoder layer is composed of two parts. Where each begins with an RMSNorm and its last GEMM adds to hidden, attention
takes three launches in a decode step:

1. norm + QKV
2. attention, with head norms, RoPE and the append to the KV cache
3. output projection + residual

An MLP takes two more, and experts in a decode step three to five (engine/kernels/expert_step.py). Other experts, and
experts in a prefill, run as the model's own layer does:

4. norm + gate and up + activation
5. down projection + residual

Models with other norms, factors or orders of these parts (see `fuses_residuals`) add to hidden in a launch after 3 and
5, which norms what it adds, and hidden for the next GEMM: engine/kernels/row_steps.py. Norms of q and k other than by
head take one more launch, after 1.

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
from engine.kernels.norm_weights import NormKind, NormWeights
from engine.kernels.paged_decode import NormRope
from engine.kernels.row_steps import add_norm, change_qkv
from engine.kernels.small_batch_gemm import Scratch
from engine.kernels.step_kernels import embed_kernel
from engine.kernels.step_linear import FORMATS, half_normed, linear
from engine.layers.moe import MoE, Router
from engine.layers.parallel import embed_part
from engine.layers.weight_slot import Slot
from engine.models.config import ModelConfig
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
        self._fuses_residuals = fuses_residuals(config)
        self._norm_kind = NormKind(self.eps, config.norm != "rms", float(config.norm_offset))
        # SiLU of the gate is the kernels' default
        self._activation = None if config.gated_mlp and config.activation == "silu" else config.activation
        self._outputs = self._normed = self._attention_out  # unused
        if not self._fuses_residuals:
            self._outputs, self._normed = empty(tokens, config.hidden_size), empty(tokens, config.hidden_size)
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
        if self.config.norm != "rms" or self.config.norm_offset or not self.config.norms.before_mlp:
            return None  # the router's kernel computes a plain RMSNorm
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
            next_norm = self._norm_after_layer(index)
            tensors = *layer.named_tensors(), *(() if next_norm is None else next_norm.named_tensors("next_norm"))
            own, last = None if layer.mlp is None else own_kinds[index], self._last_weight(index - 1)
            last_format, has_rotary = None if last is None else last.format, self.tensors.rotary(index) is not None
            return index == 0, last_format, spec, has_rotary, next_norm is None, tensor_kinds(tensors), own

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
            SCALE=self.tensors.embedding_scale or 1.0,
            PDL=pdl,
            **launch_options(pdl),
        )
        if self.collectives is not None:
            self.collectives.all_reduce(hidden)
        return hidden

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        """See Model. Changes `hidden` in place and returns it."""
        layer = self.tensors.layer(index)
        if not self._fuses_residuals:
            self._layer_with_norms(index, layer, hidden, context)
            return hidden
        self._add_attention(index, layer, hidden, context)
        if layer.mlp is None:
            self._add_mlp(index, layer, hidden)
        elif (moe := self._fused_experts(layer, len(hidden))) is not None:
            self._add_experts(layer, moe, hidden, context, hidden)
        else:
            hidden.add_(layer.mlp(hidden, context))
        return hidden

    def _fused_experts(self, layer: LayerTensors, rows: int) -> MoE | None:
        """Return the layer's experts if the kernels of a decode step compute them for this many rows."""
        return layer.moe if self._experts is not None and rows <= MAX_ROWS else None

    def _add_experts(self, layer: LayerTensors, moe: MoE, hidden: Tensor, context: ForwardContext, out: Tensor) -> None:
        """Add the experts' outputs for the normed hidden to `out` [T, h], which may be hidden."""
        experts = expert_tensors(moe)
        assert experts is not None and self._experts is not None
        norm = _weight(layer.post_norm)
        assert norm is not None
        normed = add_experts(hidden, experts, self._experts, norm=norm, eps=self.eps, valid=context.valid, out=out)
        moe.record(self._experts.chosen[: len(hidden)])
        if moe.shared is not None:
            out.add_(moe.shared(normed))

    def _layer_with_norms(self, index: int, layer: LayerTensors, hidden: Tensor, context: ForwardContext) -> None:
        """Compute a layer whose residual additions and norms have their own launches."""
        config, rows = self.config, len(hidden)
        x, normed = self._outputs[:rows], self._normed[:rows]
        scale = 1.0 if config.residual_scale is None else config.residual_scale
        next_norm = self._norm_after_layer(index)
        if index == 0 and layer.input_norm is not None:  # later ones are computed by the layer before
            add_norm(hidden, self._norm_kind, norm=layer.input_norm, normed=normed)
        attention_out = self._attend(index, layer, hidden if layer.input_norm is None else normed, context)
        self._write_linear(x, attention_out, layer.o, layer.o_bias, buffer_index=0)
        if config.parallel_block:
            if layer.post_norm is not None:
                add_norm(hidden, self._norm_kind, norm=layer.post_norm, normed=normed)
            has_norm = layer.post_norm is not None or layer.input_norm is not None
            self._write_mlp(x, normed if has_norm else hidden, layer, add=True)
            add_norm(hidden, self._norm_kind, x=x, scale=scale, norm=next_norm, normed=normed)
            return
        norm = layer.post_norm if layer.mlp is None else None
        out_norm = layer.attention_out_norm
        add_norm(hidden, self._norm_kind, x=x, out_norm=out_norm, scale=scale, norm=norm, normed=normed)
        if layer.mlp is None:
            self._write_mlp(x, hidden if norm is None else normed, layer)
        elif (moe := self._fused_experts(layer, rows)) is not None:
            self._add_experts(layer, moe, hidden, context, x.zero_())
        else:
            hidden.add_(layer.mlp(hidden, context))
            if next_norm is not None:
                add_norm(hidden, self._norm_kind, norm=next_norm, normed=normed)
            return
        add_norm(hidden, self._norm_kind, x=x, out_norm=layer.mlp_out_norm, scale=scale, norm=next_norm, normed=normed)

    def _write_mlp(self, out: Tensor, x: Tensor, layer: LayerTensors, *, add: bool = False) -> None:
        """Write the MLP of x [T, h] to `out`, or add it."""
        gated = self._expand(layer, x)
        assert layer.down is not None
        self._write_linear(out, gated, layer.down, layer.down_bias, buffer_index=1, add=add)

    def _write_linear(
        self,
        out: Tensor,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None,
        buffer_index: int,
        add: bool = False,
    ) -> None:
        """Write x Wᵀ + bias to `out` [T, h], or add it, all-reduced over the ranks."""
        if self.collectives is None:
            linear(x, weight, out, self._scratch, bias=bias, add=add)
            return
        if not add:
            out.zero_()
        self._add_linear(out, x, weight, bias, None, buffer_index)

    def _attend(
        self,
        index: int,
        layer: LayerTensors,
        x: Tensor,
        context: ForwardContext,
        norm: Tensor | None = None,
        squares: int = 0,
    ) -> Tensor:
        """Return attention [T, H * D] of x [T, h], before the output projection; `norm`, `squares`: as of `linear`."""
        rows, config = len(x), self.config
        qkv, attention_out = self._qkv[:rows], self._attention_out[:rows]
        linear(
            x,
            layer.qkv,
            qkv,
            self._scratch,
            norm=norm,
            eps=self.eps,
            bias=layer.qkv_bias,
            squares=squares,
            late=True,
        )
        q, k, v = self.heads.cut(qkv)
        by_attention = config.qk_norm_kind == "head" and config.qkv_clip is None
        if not by_attention:
            change_qkv(
                q,
                k,
                v,
                kind=config.qk_norm_kind if config.qk_norm else "none",
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=self.eps,
                offset=self._norm_kind.offset,
                clip=config.qkv_clip,
            )
        attention = cast(FusedAttention, context.attention)
        attention.attend_raw(index, q, k, v, self._norm_rope(index, layer, by_attention), attention_out, layer.sinks)
        return attention_out

    def _add_attention(self, index: int, layer: LayerTensors, hidden: Tensor, context: ForwardContext) -> None:
        squares = self._squares_after_layer(index - 1, len(hidden))
        attention_out = self._attend(index, layer, hidden, context, _weight(layer.input_norm), squares)
        next_norm = None if layer.gate_up is None else _weight(layer.post_norm)
        self._add_linear(hidden, attention_out, layer.o, layer.o_bias, next_norm, buffer_index=0)

    def _expand(self, layer: LayerTensors, x: Tensor, norm: Tensor | None = None, squares: int = 0) -> Tensor:
        """Return the input [T, intermediate] of an MLP's last GEMM; `norm`, `squares`: as of `linear`."""
        assert layer.gate_up is not None
        expanded = self._mlp_activations[: len(x)]
        linear(
            x,
            layer.gate_up,
            expanded,
            self._scratch,
            norm=norm,
            eps=self.eps,
            bias=layer.gate_up_bias,
            gated=self.config.gated_mlp,
            activation=self._activation,
            squares=squares,
        )
        return expanded

    def _add_mlp(self, index: int, layer: LayerTensors, hidden: Tensor) -> None:
        assert layer.down is not None
        squares = self._partial_squares(len(hidden), layer.o)
        expanded = self._expand(layer, hidden, _weight(layer.post_norm), squares)
        next_norm = _weight(self._norm_after_layer(index))
        self._add_linear(hidden, expanded, layer.down, layer.down_bias, next_norm, buffer_index=1)

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

    def _norm_after_layer(self, index: int) -> NormWeights | None:
        """Return the norm that reads the output of layer `index`; None: the next layer has no norm before attention."""
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
        scratch, rows, config = self._scratch, len(hidden), self.config
        norm, squares = _weight(self.tensors.norm), 0
        if not self._fuses_residuals:
            normed = self._normed[:rows]
            if not after_layer:
                add_norm(hidden, self._norm_kind, norm=self.tensors.norm, normed=normed)
            hidden, norm = normed, None
        elif after_layer:
            squares = self._squares_after_layer(self.depth - 1, rows)
        local_logits = logits if self.collectives is None else self.collectives.part(rows)
        tiles = linear(
            hidden,
            self.tensors.head,
            local_logits,
            scratch,
            norm=norm,
            eps=self.eps,
            bias=self.tensors.head_bias,
            best=self.collectives is None,
            squares=squares,
            scale=1.0 if config.logit_scale is None else config.logit_scale,
            softcap=config.logit_softcap,
        )
        if self.collectives is not None:
            self.collectives.gather(local_logits, logits)
            return None
        return TileMaxima(*scratch.maxima(rows, tiles))

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        table, scale = self.tensors.embedding, self.tensors.embedding_scale
        if self.collectives is None:
            hidden = F.embedding(tokens, table)
        else:
            hidden = embed_part(tokens, table, self.tensors.first_token)
            self.collectives.all_reduce(hidden)
        return hidden if scale is None else hidden.mul_(scale)

    def _norm_rope(self, index: int, layer: LayerTensors, with_norms: bool) -> NormRope:
        config = self.config
        cos, sin = self.tensors.rotary(index) or (None, None)
        q_norm, k_norm = (layer.q_norm, layer.k_norm) if with_norms else (None, None)
        return NormRope(cos, sin, q_norm, k_norm, self.eps, config.rope_interleaved, config.norm_offset)


def fuses_residuals(config: ModelConfig) -> bool:
    """Return whether the GEMMs of all layers add to hidden and compute the norms, which are RMSNorms before each part.

    Otherwise separate launches add and norm rows.
    """
    norms = config.norms
    are_before = norms.before_attention is not None and norms.before_mlp is not None
    are_after = norms.after_attention is not None or norms.after_mlp is not None
    is_plain = config.norm == "rms" and not config.norm_offset and are_before and not are_after
    return is_plain and not config.parallel_block and config.residual_scale is None


def _weight(norm: NormWeights | None) -> Tensor | None:
    return None if norm is None else norm.weight


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
