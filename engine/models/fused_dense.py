"""A dense decoder on CUDA in few launches: the model's own parameters, read where they lie.

A layer is five launches in a decode step: norm + QKV, attention (with head norms, rotation and the append of keys and
values), output + residual, norm + gate and up + SiLU, down + residual. Prefill is the same with an attention of its
own. Owns the buffers between the launches. Knows no request; what a row or a token is comes from the step's state.
Imports triton: import it only where the device is CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.attention.base import KVCache
from engine.attention.triton_decode import DecodeWorkspace, Rotation, decode_workspace, paged_decode
from engine.attention.triton_prefill import Packing, paged_prefill, turn_and_append
from engine.kernels.launching import launch_options, overlaps
from engine.kernels.skinny_linear import Scratch, half_normed, linear
from engine.kernels.step_kernels import choose_kernel, embed_kernel
from engine.models.dense import DecoderLayer, DenseModel
from engine.step_inputs import SlotState

Attend = Callable[[DecoderLayer, Tensor, Tensor], None]
"""(layer, raw qkv [T, (H + 2 KV) * D], out [T, H * D]): writes this step's keys and values, and attention into out."""


class FusedDense:
    """`model` over the pages of `kv`, for decode steps of up to max_rows rows and prefills of up to max_tokens tokens.

    All methods launch on the current stream, their grids depend on shapes alone, and nothing is read back: safe to
    capture. Calls stay on one stream, since they share scratch.
    """

    def __init__(self, model: DenseModel, kv: KVCache, max_rows: int, max_tokens: int):
        config, device, dtype = model.config, model.device, model.dtype
        self.model, self.kv = model, kv
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_width, width = (self.heads + 2 * self.kv_heads) * self.dim, config.intermediate_size
        tokens = max(max_rows, max_tokens)
        new = lambda *shape: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
        self._qkv = new(tokens, qkv_width)
        self._attended = torch.zeros(tokens, self.heads * self.dim, dtype=dtype, device=device)
        self._gated = new(tokens, width)
        self._scratch = Scratch(tokens, max_rows, config.hidden_size, max(qkv_width, 2 * width), config.vocab_size,
                                dtype, device)
        self._workspaces: dict[int, DecodeWorkspace] = {}

    def embed_rows(self, state: SlotState, hidden: Tensor) -> None:
        """hidden [b, h]: the embedding of each row's newest token."""
        rows, width = hidden.shape
        pdl = overlaps(hidden)
        embed_kernel[(rows,)](state.slots, state.last_tokens, self.model.embed.weight, hidden, H=width,
                              HP=triton.next_power_of_2(width), PDL=pdl, **launch_options(pdl))

    def layer(self, index: int, hidden: Tensor, attend: Attend) -> None:
        """Decoder layer `index` on hidden [T, h], in place."""
        layer, rows = self.model.layers[index], len(hidden)
        qkv, attended, gated = self._qkv[:rows], self._attended[:rows], self._gated[:rows]
        attn, mlp, scratch = layer.attn, layer.mlp, self._scratch
        linear(hidden, attn.qkv.weight, qkv, scratch, norm=layer.input_norm.weight, eps=layer.input_norm.eps,
               bias=attn.qkv.bias, squares=self._left_by_layer(rows) if index else 0)
        attend(layer, qkv, attended)
        linear(attended, attn.o.weight, hidden, scratch, bias=attn.o.bias, add=True, next_norm=layer.post_norm.weight)
        left = half_normed(rows, hidden.shape[1], attended.shape[1], hidden.dtype)
        linear(hidden, mlp.gate_up.weight, gated, scratch, norm=layer.post_norm.weight, eps=layer.post_norm.eps,
               bias=mlp.gate_up.bias, gated=True, squares=left)
        following = self.model.layers[index + 1].input_norm if index + 1 < len(self.model.layers) else self.model.norm
        linear(gated, mlp.down.weight, hidden, scratch, bias=mlp.down.bias, add=True, next_norm=following.weight)

    def _left_by_layer(self, rows: int) -> int:
        """The squares that the last product of a layer leaves for the norm after it."""
        config = self.model.config
        return half_normed(rows, config.hidden_size, config.intermediate_size, self.model.dtype)

    def decode_attention(self, state: SlotState, rows: int) -> Attend:
        """Attention of one token per row over its slot's pages."""
        slots, positions = state.slots[:rows], state.positions[:rows]

        def attend(layer: DecoderLayer, qkv: Tensor, out: Tensor) -> None:
            heads, kv_heads = self.heads, self.kv_heads
            qkv = qkv.view(rows, heads + 2 * kv_heads, self.dim)
            index = layer.attn.index
            paged_decode(qkv[:, :heads], self.kv.k[index], self.kv.v[index], state.page_table, positions,
                         self.dim**-0.5, new_kv=(qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]),
                         slots=slots, rotation=self._rotation(layer), out=out.view(rows, heads, self.dim),
                         workspace=self._workspace(qkv[:, :heads], state.page_table))

        return attend

    def choose(self, slots: Tensor, positions: Tensor | None, last_tokens: Tensor, hidden: Tensor, logits: Tensor,
               next_tokens: Tensor, *, after_layer: bool) -> None:
        """Logits [b, vocab] of hidden [b, h], and the greedy token of each row: -1 where its logits are not finite.

        It also becomes its slot's newest in last_tokens (0 for a -1), and positions, where given, move one on; rows of
        slot 0, padding, leave both alone. `after_layer`: hidden is just what `layer` left, not a choice of its rows.
        """
        norm, head, scratch = self.model.norm, self.model.head, self._scratch
        tiles = linear(hidden, head.weight, logits, scratch, norm=norm.weight, eps=norm.eps, bias=head.bias, best=True,
                       squares=self._left_by_layer(len(hidden)) if after_layer else 0)
        pdl = overlaps(hidden)
        choose_kernel[(len(hidden),)](
            scratch.best, scratch.best_at, slots, slots if positions is None else positions, last_tokens, next_tokens,
            tiles, BLOCK=min(4096, triton.next_power_of_2(tiles)), ADVANCE=positions is not None, PDL=pdl, num_warps=8,
            **launch_options(pdl))

    def prefill(self, tokens: Tensor, packing: Packing, page_table: Tensor) -> Tensor:
        """Hidden [T, h] before the last norm of T packed tokens, which also go into their pages."""

        def attend(layer: DecoderLayer, qkv: Tensor, out: Tensor) -> None:
            k_cache, v_cache = self.kv.k[layer.attn.index], self.kv.v[layer.attn.index]
            turn_and_append(qkv, self.heads, k_cache, v_cache, page_table, packing, self._rotation(layer))
            paged_prefill(qkv, self.heads, k_cache, v_cache, page_table, packing, self.dim**-0.5, out)

        hidden = F.embedding(tokens, self.model.embed.weight)
        for index in range(len(self.model.layers)):
            self.layer(index, hidden, attend)
        return hidden

    def _rotation(self, layer: DecoderLayer) -> Rotation:
        table, norm = self.model.rotary, layer.attn.qk_norm
        if norm is None:
            return Rotation(table.cos, table.sin)
        return Rotation(table.cos, table.sin, norm.q_weight, norm.k_weight, norm.eps)

    def _workspace(self, q: Tensor, page_table: Tensor) -> DecodeWorkspace:
        """Of a row count, made in its warm-up run: scratch made inside a capture would belong to that graph alone."""
        if len(q) not in self._workspaces:
            self._workspaces[len(q)] = decode_workspace(q, self.kv.k[0], page_table)
        return self._workspaces[len(q)]
