"""Dense decoder: Llama, Mistral, Qwen2 and Qwen3 in one class, configured by ModelConfig.

Attention is passed in as a callable, so the model is independent of KV pages, batches and requests. The forward pass
creates no host tensors and never synchronizes with the device, so that a step can be captured whole, by layer or by
module.

Shapes: T tokens, h hidden size, H query heads, KV key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.interface import Attention
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from engine.layers.rotary import RotaryTable, rotate
from engine.layers.weight_slot import Slot
from engine.models.config import ModelConfig
from engine.models.dense_tensors import DenseTensors, HeadLayout, LayerTensors
from engine.models.interface import ForwardContext, Model, tensor_kinds


class SelfAttention(nn.Module):
    """Projections, head norms and RoPE around an `attention` callable: normed hidden [T, h] -> [T, h]."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ):
        super().__init__()
        self.index = index
        self.heads, self.kv_heads = config.num_heads // parallel.size, config.num_kv_heads // parallel.size
        self.head_dim = config.head_dim
        q_rows, kv_rows = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.qkv = ColumnParallelLinear(
            {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
            config.hidden_size,
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
            parallel=parallel,
        )
        self.o = RowParallelLinear(
            {"o_proj": config.hidden_size},
            q_rows,
            bias=config.output_bias,
            dtype=dtype,
            device=device,
            parallel=parallel,
        )
        self.qk_norm = None
        if config.qk_norm:
            self.qk_norm = HeadNorm(self.heads, self.kv_heads, self.head_dim, config.rms_norm_eps, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, cos, sin)
        out = attention(self.index, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :])
        return self.o(out)

    def slots(self, prefix: str) -> dict[str, Slot]:
        slots: dict[str, Slot] = {**self.qkv.slots(prefix), **self.o.slots(prefix)}
        if self.qk_norm is not None:
            slots |= self.qk_norm.slots(prefix)
        return slots


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one GEMM: normed hidden [T, h] -> [T, h]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, parallel: TensorParallel):
        super().__init__()
        width, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.gate_up = ColumnParallelLinear(
            {"gate_proj": width, "up_proj": width}, hidden, bias=bias, dtype=dtype, device=device, parallel=parallel
        )
        self.down = RowParallelLinear(
            {"down_proj": hidden}, width, bias=bias, dtype=dtype, device=device, parallel=parallel
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {**self.gate_up.slots(prefix), **self.down.slots(prefix)}


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a pre-norm and a residual connection: hidden [T, h] -> hidden [T, h]."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ):
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.attn = SelfAttention(config, index, dtype, device, parallel)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = GatedMLP(config, dtype, device, parallel)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        hidden = hidden + self.attn(self.input_norm(hidden), cos, sin, attention)
        return hidden + self.mlp(self.post_norm(hidden))

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {
            **self.input_norm.slots(f"{prefix}.input_layernorm"),
            **self.attn.slots(f"{prefix}.self_attn"),
            **self.post_norm.slots(f"{prefix}.post_attention_layernorm"),
            **self.mlp.slots(f"{prefix}.mlp"),
        }


class DenseModel(Model, nn.Module):
    """A dense decoder with uninitialised parameters on `device`; loader/weights.py fills them through `weight_slots`.

    max_len bounds positions: the length of the RoPE table (default: the config's context_length). Parameters don't
    require gradients. With several ranks in `parallel` it is this rank's shard: all ranks must make the same calls, and
    `self.config` has the attention heads, KV heads and MLP columns of one rank.

    Raises ModelError if max_len exceeds the sliding window, as windowed attention is not supported, or if heads or MLP
    columns can't be split evenly.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        max_len: int | None = None,
        parallel: TensorParallel = SINGLE_RANK,
    ):
        super().__init__()
        device = torch.device(device)
        max_len = config.context_length if max_len is None else max_len
        if config.sliding_window is not None and max_len > config.sliding_window:
            raise ModelError(
                f"this model attends within a sliding window of {config.sliding_window} tokens, which is "
                f"not supported; set max_model_len to at most {config.sliding_window} (found {max_len})"
            )
        self.config, self.parallel = rank_config(config, parallel.size), parallel
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device, parallel=parallel
        )
        self.layers = nn.ModuleList(
            self.make_layer(config, i, dtype, device, parallel) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.lm_head = VocabParallelHead(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            device=device,
            parallel=parallel,
            tied=self.embedding.weight if config.tie_word_embeddings else None,
        )
        self.rotary = RotaryTable(config.head_dim, config.rope_theta, config.rope_scaling, max_len, dtype, device)

    def make_layer(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> nn.Module:
        """Create decoder layer `index`: a DecoderLayer, or another module that `layer` calls and that has `slots`.

        `config` is that of the whole model.
        """
        return DecoderLayer(config, index, dtype, device, parallel)

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32

    def fused(self, max_rows: int, max_tokens: int) -> Model:
        from engine.models.fused_dense import FusedDense  # imports triton, which is installed only with CUDA

        return FusedDense(self, max_rows, max_tokens)

    def layer_kinds(self) -> Sequence[Hashable]:
        """See Model. A subclass with a `layer` of its own, which may treat layers differently, must define its own."""
        if type(self).layer is not DenseModel.layer:
            return super().layer_kinds()
        return self.kinds_of_modules()

    def kinds_of_modules(self) -> Sequence[Hashable]:
        """Return the kind of each layer by its cache spec, the types of its modules, and their tensors."""
        return [
            (spec, tuple(map(type, layer.modules())), tensor_kinds(layer.state_dict().items()))
            for spec, layer in zip(self.cache_specs(), self.layers, strict=True)
        ]

    def embed(self, tokens: Tensor, index: Tensor | None = None) -> Tensor:
        return self.embedding(tokens if index is None else tokens.index_select(0, index))

    def rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Positions int64 [T] -> (cos, sin), each [T, 1, D]."""
        return self.rotary(positions)

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.layers[index](hidden, *context.rope, context.attention)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.final_norm(hidden))

    def weight_slots(self) -> dict[str, Slot]:
        """Map Hugging Face tensor names to slots, in layer order; a tied head has no entry.

        Loading, updating and exporting all use this mapping. It is rebuilt from the current modules at each call.
        """
        slots: dict[str, Slot] = {**self.embedding.slots("model.embed_tokens")}
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}")
        slots |= self.norm.slots("model.norm")
        if not self.config.tie_word_embeddings:
            slots |= {name.removeprefix("."): slot for name, slot in self.lm_head.slots("").items()}
        return slots

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of every weight; tensors alias the model's storage."""
        for name, slot in self.weight_slots().items():
            yield name, slot.read()

    def tensors(self) -> DenseTensors:
        """Return the parameters in the form that the fused kernels use."""
        return NativeTensors(self)

    def cuda_graph_modules(self) -> dict[str, list[str]]:
        """Map Megatron's names of layer parts to submodule paths; "layer" stands for whole layers."""
        layers = [f"layers.{index}" for index in range(len(self.layers))]
        return {"layer": layers, "attn": [f"{path}.attn" for path in layers], "mlp": [f"{path}.mlp" for path in layers]}

    def linears(self, include_head: bool = False) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield (name, parent module, attribute) of each projection, to replace it with another weight format.

        A replacement is called as `parent.attribute(x)` and must have `slots(prefix)` and, for fused kernels,
        `linear_weight`. The head comes last, only with
        `include_head`; a tied head's parameter is the embedding's.
        """
        for index, layer in enumerate(self.layers):
            for owner, attribute in (("attn", "qkv"), ("attn", "o"), ("mlp", "gate_up"), ("mlp", "down")):
                yield f"layers.{index}.{owner}.{attribute}", getattr(layer, owner), attribute
        if include_head:
            yield "lm_head", self, "lm_head"


def rank_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return `config` with the attention heads, KV heads and MLP columns of one of `ranks` tensor-parallel ranks.

    Raises ModelError that lists every size that is not a multiple of `ranks`.
    """
    sizes = {
        "num_heads": "attention heads",
        "num_kv_heads": "key and value heads",
        "intermediate_size": "MLP columns",
    }
    problems = [
        f"its {getattr(config, name)} {text} are not a multiple of {ranks}"
        for name, text in sizes.items()
        if getattr(config, name) % ranks
    ]
    if problems:
        divisor = math.gcd(*(getattr(config, name) for name in sizes))
        raise ModelError(
            f"this {config.architecture} can't be split with tensor_parallel_size={ranks}: {'; '.join(problems)}. "
            + (f"Give a divisor of {divisor}" if divisor > 1 else "Leave tensor_parallel_size out")
        )
    return config if ranks == 1 else replace(config, **{name: getattr(config, name) // ranks for name in sizes})


class NativeTensors:
    """DenseTensors of a DenseModel."""

    def __init__(self, model: DenseModel):
        config = model.config
        self._model, self.config = model, config
        self.group = model.parallel.group if model.parallel.size > 1 else None
        self.first_token = model.embedding.vocab_part.first
        self.heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, by_group=False)

    @property
    def cos(self) -> Tensor:
        return self._model.rotary.cos

    @property
    def sin(self) -> Tensor:
        return self._model.rotary.sin

    def layer(self, index: int) -> LayerTensors:
        layer = self._model.layers[index]
        attn, mlp = layer.attn, layer.mlp
        return LayerTensors(
            input_norm=layer.input_norm.weight,
            qkv=attn.qkv.linear_weight,
            qkv_bias=attn.qkv.bias,
            q_norm=None if attn.qk_norm is None else attn.qk_norm.q_weight,
            k_norm=None if attn.qk_norm is None else attn.qk_norm.k_weight,
            o=attn.o.linear_weight,
            o_bias=attn.o.bias,
            post_norm=layer.post_norm.weight,
            gate_up=mlp.gate_up.linear_weight,
            gate_up_bias=mlp.gate_up.bias,
            down=mlp.down.linear_weight,
            down_bias=mlp.down.bias,
        )

    @property
    def embedding(self) -> Tensor:
        return self._model.embedding.weight

    @property
    def norm(self) -> Tensor:
        return self._model.norm.weight

    @property
    def head(self) -> LinearWeight:
        return self._model.lm_head.linear_weight
