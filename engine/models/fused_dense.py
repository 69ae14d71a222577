"""Dense decoder on CUDA with fused kernels, reading the model's own parameters in place.

A decoder layer takes five launches in a decode step:

1. norm + QKV
2. attention, with head norms, RoPE and the append to the KV cache
3. output projection + residual
4. norm + gate and up + SiLU
5. down projection + residual

Prefill uses the same launches with its own attention kernels. With tensor parallelism each rank computes its shard, and
an all-reduce follows steps 3 and 5. This module imports triton: import it only if the device is CUDA (or under
TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.attention.metadata import SlotState
from engine.distributed.collectives import TensorParallelCollectives
from engine.kernels.launch import launch_options, overlaps
from engine.kernels.paged_decode import DecodeScratch, DecodeWorkspace, NormRope, paged_decode
from engine.kernels.paged_prefill import VarlenLayout, norm_rope_append, paged_prefill
from engine.kernels.small_batch_gemm import Scratch, best_of_tiles, half_normed, linear
from engine.kernels.step_kernels import choose_kernel, embed_kernel
from engine.models.dense_tensors import FusableModel, LayerTensors

AttentionFn = Callable[[int, LayerTensors, Tensor, Tensor], None]
"""(layer index, layer tensors, raw qkv [T, width], out [T, H * D]): append this step's keys and values to the KV cache
and write the attention output to `out`."""


class FusedDense:
    """Compute `model` over the KV pages of `kv`: decode steps of up to max_rows rows, prefills of up to max_tokens.

    All methods launch on the current stream with grids that depend only on shapes, and never synchronize with the
    host: safe to capture. Use one stream for all calls, since they share scratch. With tensor parallelism all ranks
    must make the same calls.
    """

    def __init__(self, model: FusableModel, kv: KVCache, max_rows: int, max_tokens: int):
        config, device, dtype = model.config, model.device, model.dtype
        self.model, self.kv, self.tensors = model, kv, model.tensors()
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
        group = self.tensors.group
        self.collectives = None if group is None else TensorParallelCollectives(group, max_rows, self.tensors.head)
        self._max_rows = max_rows
        self._decode_scratch: DecodeScratch | None = None

    def embed_rows(self, state: SlotState, hidden: Tensor) -> None:
        """Write the embedding of each row's newest token to hidden [b, h]."""
        table, (rows, width), pdl = self.tensors.embedding, hidden.shape, overlaps(hidden)
        embed_kernel[(rows,)](
            state.slots,
            state.last_tokens,
            table,
            hidden,
            self.tensors.first_token,
            len(table),
            H=width,
            HP=triton.next_power_of_2(width),
            SPLIT=self.collectives is not None,
            PDL=pdl,
            **launch_options(pdl),
        )
        if self.collectives is not None:
            self.collectives.all_reduce(hidden)

    def layer(self, index: int, hidden: Tensor, attend: AttentionFn) -> None:
        """Run decoder layer `index` on hidden [T, h], in place."""
        layer, rows, scratch = self.tensors.layer(index), len(hidden), self._scratch
        qkv, attention_out, gated = self._qkv[:rows], self._attention_out[:rows], self._mlp_activations[:rows]
        linear(
            hidden,
            layer.qkv,
            qkv,
            scratch,
            norm=layer.input_norm,
            eps=self.eps,
            bias=layer.qkv_bias,
            squares=self._squares_after_layer(rows) if index else 0,
            late=True,
        )
        attend(index, layer, qkv, attention_out)
        self._add_linear(hidden, attention_out, layer.o, layer.o_bias, layer.post_norm, buffer_index=0)
        linear(
            hidden,
            layer.gate_up,
            gated,
            scratch,
            norm=layer.post_norm,
            eps=self.eps,
            bias=layer.gate_up_bias,
            gated=True,
            squares=self._partial_squares(rows, attention_out.shape[1]),
        )
        last = index + 1 == self.depth
        next_norm = self.tensors.norm if last else self.tensors.layer(index + 1).input_norm
        self._add_linear(hidden, gated, layer.down, layer.down_bias, next_norm, buffer_index=1)

    def _add_linear(
        self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, next_norm: Tensor, buffer_index: int
    ) -> None:
        """Add x Wᵀ + bias to hidden [T, h], all-reduced over the ranks; only the first rank adds the bias."""
        if self.collectives is None:
            linear(x, weight, hidden, self._scratch, bias=bias, add=True, next_norm=next_norm)
            return
        partial_sum, accumulate = self.collectives.all_reduce_into(hidden, buffer_index)
        linear(x, weight, partial_sum, self._scratch, bias=bias if self.collectives.is_first else None, add=accumulate)
        self.collectives.all_reduce_shared(hidden, buffer_index)

    def _partial_squares(self, rows: int, inputs: int) -> int:
        """Return the partial sums of squares per row that `_add_linear` leaves for the next norm; 0: none.

        With tensor parallelism it is 0, since the norm needs the all-reduced hidden.
        """
        return 0 if self.collectives else half_normed(rows, self.model.config.hidden_size, inputs, self.model.dtype)

    def _squares_after_layer(self, rows: int) -> int:
        """Return the partial sums of squares per row that a layer's last GEMM leaves for the norm after it."""
        return self._partial_squares(rows, self.model.config.intermediate_size)

    def decode_attention(self, state: SlotState, rows: int) -> AttentionFn:
        """Return attention for decode: one token per row, over the pages of the row's slot."""
        slots, positions = state.slots[:rows], state.positions[:rows]

        def attend(index: int, layer: LayerTensors, qkv: Tensor, out: Tensor) -> None:
            q, k, v = self.heads.cut(qkv)
            paged_decode(
                q,
                self.kv.k[index],
                self.kv.v[index],
                state.page_table,
                positions,
                self.heads.dim**-0.5,
                new_kv=(k, v),
                slots=slots,
                rotation=self._norm_rope(layer),
                out=out.view(rows, self.heads.heads, self.heads.dim),
                workspace=self._workspace(q, state.page_table),
            )

        return attend

    def sample_greedy(
        self,
        slots: Tensor,
        positions: Tensor | None,
        last_tokens: Tensor,
        hidden: Tensor,
        logits: Tensor,
        next_tokens: Tensor,
        *,
        after_layer: bool,
    ) -> None:
        """Compute logits [b, vocab] of hidden [b, h] and each row's greedy token; -1 if its logits are not finite.

        Also writes the token to its slot in last_tokens (0 for -1) and increments positions, unless None. Padding rows
        (slot 0) change neither. `after_layer`: hidden is the direct output of `layer`, not a selection of its rows.
        """
        scratch, head = self._scratch, self.tensors.head
        local_logits = logits if self.collectives is None else self.collectives.part(len(hidden))
        tiles = linear(
            hidden,
            head,
            local_logits,
            scratch,
            norm=self.tensors.norm,
            eps=self.eps,
            best=self.collectives is None,
            squares=self._squares_after_layer(len(hidden)) if after_layer else 0,
        )
        if self.collectives is not None:
            self.collectives.gather(local_logits, logits)
            tiles = best_of_tiles(logits, scratch)
        pdl = overlaps(hidden)
        choose_kernel[(len(hidden),)](
            scratch.best,
            scratch.best_at,
            slots,
            slots if positions is None else positions,
            last_tokens,
            next_tokens,
            tiles,
            BLOCK=min(4096, triton.next_power_of_2(tiles)),
            ADVANCE=positions is not None,
            PDL=pdl,
            num_warps=8,
            **launch_options(pdl),
        )

    def prefill(self, tokens: Tensor, layout: VarlenLayout, page_table: Tensor) -> Tensor:
        """Return hidden [T, h] of T packed tokens before the final norm; write their keys and values to the pages."""

        def attend(index: int, layer: LayerTensors, qkv: Tensor, out: Tensor) -> None:
            k_cache, v_cache = self.kv.k[index], self.kv.v[index]
            q, k, v = self.heads.cut(qkv)
            norm_rope_append(q, k, v, k_cache, v_cache, page_table, layout, self._norm_rope(layer))
            paged_prefill(q, k_cache, v_cache, page_table, layout, self.heads.dim**-0.5, out)

        hidden = self._embed_tokens(tokens)
        for index in range(self.depth):
            self.layer(index, hidden, attend)
        return hidden

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        table = self.tensors.embedding
        if self.collectives is None:
            return F.embedding(tokens, table)
        local_ids = tokens - self.tensors.first_token
        is_local = (local_ids >= 0) & (local_ids < len(table))
        hidden = F.embedding(local_ids * is_local, table).masked_fill_(~is_local.unsqueeze(1), 0)
        self.collectives.all_reduce(hidden)
        return hidden

    def _norm_rope(self, layer: LayerTensors) -> NormRope:
        return NormRope(self.tensors.cos, self.tensors.sin, layer.q_norm, layer.k_norm, self.eps)

    def _workspace(self, q: Tensor, page_table: Tensor) -> DecodeWorkspace:
        """Return decode scratch, allocated in the first warm-up run.

        If allocated during a capture, it would belong to that graph's memory pool alone.
        """
        if self._decode_scratch is None:
            self._decode_scratch = DecodeScratch(self._max_rows, q, self.kv.k[0], page_table)
        return self._decode_scratch.of(len(q))
