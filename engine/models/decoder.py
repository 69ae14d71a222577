"""The decoder of every family: embedding, layers, final norm, head, rotary tables, and weight slots.

A family is a table of options (`Family`) and a reader of its config.json. One whose layers compute something else
subclasses Decoder and defines `make_layer`. The forward pass creates no host tensors and never synchronizes with the
device, so that a step can be captured whole, by layer or by module.

Shapes: T tokens, h hidden size, H query heads, KV key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.mxfp4 import dequantised
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.kernels.norm_weights import NormWeights
from engine.layers.linear import Linear
from engine.layers.moe import EXPERT_ALIGNMENT, MoE
from engine.layers.parallel import VocabParallelEmbedding, VocabParallelHead
from engine.layers.rotary import RopeScaling, RotaryTable
from engine.layers.weight_method import WeightMethods, plain_weights
from engine.layers.weight_slot import Slot
from engine.models.config import ModelConfig
from engine.models.decoder_tensors import DecoderTensors, HeadLayout, LayerTensors
from engine.models.interface import ForwardContext, Model, tensor_kinds
from engine.models.layer import DecoderLayer, GatedMLP, Norm, PlainMLP, make_norm
from engine.models.options import LayerOptions

FUSED_OPTIONS = frozenset(
    """rope_scaling local_rope_theta local_rope_scaling rotary_dim rope_interleaved nope_layers tie_word_embeddings
    attention_bias output_bias mlp_bias head_bias norm norm_offset norms qk_norm qk_norm_kind qkv_clip
    windows names attention_scale attention_softcap attention_sinks scaled_positions
    activation gated_mlp parallel_block embedding_scale embedding_scale_in_dtype residual_scale
    logit_scale logit_softcap
    num_experts experts_per_token moe_intermediate_size normalize_weights sparse_layers
    sigmoid_routing draft_layers router_bias expert_bias expert_activation shared_expert_size shared_expert_gate
    expert_names bos_token_id eos_token_ids dtype has_lm_head num_labels quantization""".split()
)
"""Options of ModelConfig that FusedDecoder computes, but for what `unfused_parts` names."""

FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
"""Activations of MLPs that its kernels compute."""


class Decoder(Model, nn.Module):
    """A decoder with uninitialised parameters on `device`; loader/weights.py fills them through `weight_slots`.

    max_len bounds positions: the length of the RoPE table (default: the config's context_length). Parameters don't
    require gradients. With several ranks in `parallel` it is this rank's shard: all ranks must make the same calls, and
    `self.config` has the attention heads, KV heads and MLP columns of one rank. `methods` chooses how each linear layer
    stores its weight.

    Raises ModelError if heads or MLP columns can't be split evenly.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        max_len: int | None = None,
        parallel: TensorParallel = SINGLE_RANK,
        methods: WeightMethods = plain_weights,
    ):
        super().__init__()
        device = torch.device(device)
        max_len = config.context_length if max_len is None else max_len
        self.config, self.parallel = rank_config(config, parallel.size), parallel
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device, parallel=parallel
        )
        options = LayerOptions(dtype, device, parallel, methods)
        self.layers = nn.ModuleList(
            self.make_layer(config, index, f"{config.names.layers}.{index}", options)
            for index in range(config.num_layers)
        )
        self.norm = make_norm(config, dtype, device)
        self.lm_head = VocabParallelHead(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            device=device,
            parallel=parallel,
            tied=self.embedding.weight if config.tie_word_embeddings else None,
            bias=config.head_bias,
        )
        self.score = None
        if config.num_labels:
            self.score = Linear(
                {"score": config.num_labels}, config.hidden_size, bias=False, dtype=dtype, device=device
            )

        def rotary(theta: float, scaling: RopeScaling | None) -> RotaryTable:
            dims, interleaved = config.rotary_dim or config.head_dim, config.rope_interleaved
            return RotaryTable(dims, theta, scaling, max_len, dtype, device, interleaved=interleaved)

        self.rotary, self.local_rotary = rotary(config.rope_theta, config.rope_scaling), None
        if config.local_rope_theta is not None:
            self.local_rotary = rotary(config.local_rope_theta, config.local_rope_scaling)
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale is not None and config.embedding_scale_in_dtype:
            # rounded as in training: in bfloat16, sqrt(3072) is 55.5
            self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    def make_layer(self, config: ModelConfig, index: int, prefix: str, options: LayerOptions) -> nn.Module:
        """Create decoder layer `index`: a DecoderLayer, or another module with `slots(prefix)` and the same call.

        `config` is the config of the whole model; `prefix` begins the names of the layer's tensors.
        """
        return DecoderLayer(config, index, prefix, options)

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32

    def fused(self, max_rows: int, max_tokens: int) -> Model:
        tensors = self.tensors()
        from engine.models.fused_decoder import FusedDecoder  # imports triton, which is installed only with CUDA

        return FusedDecoder(self, tensors, max_rows, max_tokens)

    def layer_kinds(self) -> Sequence[Hashable]:
        """See Model. A subclass with a `layer` method that treats layers differently must define its own."""
        if type(self).layer is not Decoder.layer:
            return super().layer_kinds()
        return self.kinds_of_modules()

    def kinds_of_modules(self) -> Sequence[Hashable]:
        """Return the kind of each layer by its cache spec, rotary embedding, types of modules, and tensors."""
        rope_index = self.config.rope_index
        return [
            (spec, rope_index(index), tuple(map(type, layer.modules())), tensor_kinds(layer.state_dict().items()))
            for index, (spec, layer) in enumerate(zip(self.cache_specs(), self.layers, strict=True))
        ]

    def embed(self, tokens: Tensor, index: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens if index is None else tokens.index_select(0, index))
        return hidden if self.embedding_scale is None else hidden * self.embedding_scale

    def rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Positions int64 [T] -> cos and sin [T, 1, rotary_dim]; then cos and sin of window layers, if they differ."""
        values = self.rotary(positions)
        return values if self.local_rotary is None else (*values, *self.local_rotary(positions))

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.layers[index](hidden, context)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, softcap = self.lm_head(self.final_norm(hidden)), self.config.logit_softcap
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def classify(self, hidden: Tensor) -> Tensor:
        return super().classify(hidden) if self.score is None else self.score(hidden)

    def weight_slots(self) -> dict[str, Slot]:
        """Map Hugging Face tensor names to slots, in layer order; a tied head has no entry.

        Loading, updating and exporting all use this mapping. It is rebuilt from the current modules at each call.
        """
        names = self.config.names
        slots: dict[str, Slot] = {**self.embedding.slots(names.embedding)}
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"{names.layers}.{index}")
        slots |= self.norm.slots(names.norm)
        if not self.config.tie_word_embeddings:
            slots |= {name.replace(".lm_head", names.head): slot for name, slot in self.lm_head.slots("").items()}
        if self.score is not None:
            slots |= {name.removeprefix("."): slot for name, slot in self.score.slots("").items()}
        return slots

    def split_stacked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return `tensors` under the checkpoint's names, MXFP4 ones dequantised; see ExpertNames.checkpoint_tensors."""
        config = self.config
        if config.draft_layers:
            tensors = self._without_draft_layers(tensors)
        if not config.num_experts:
            return tensors
        if config.expert_names.interleaved:
            tensors = dequantised(tensors, self.device)
        return config.expert_names.checkpoint_tensors(tensors, config.num_experts)

    def _without_draft_layers(self, tensors: Iterable[Any]) -> Iterator[Any]:
        """Yield `tensors` without the tensors of the draft layers, which follow the decoder layers."""
        first = self.config.num_layers
        prefixes = tuple(f"{self.config.names.layers}.{first + index}." for index in range(self.config.draft_layers))
        for item in tensors:
            is_named = isinstance(item, tuple | list) and len(item) > 0 and isinstance(item[0], str)
            if not is_named or not item[0].startswith(prefixes):
                yield item

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of every weight; tensors alias the model's storage.

        Of a quantised matrix, yields new tensors in the checkpoint's format.
        """
        for name, slot in self.weight_slots().items():
            if getattr(slot, "is_kept", True):
                yield name, slot.read()

    def tensors(self) -> DecoderTensors:
        """Return the parameters in the form that the fused kernels use.

        Raises ModelError that names the parts that no fused kernel computes.
        """
        if missing := unfused_parts(self):
            raise ModelError(
                f"{self.config.architecture} has parts that no fused kernel computes: {', '.join(missing)}"
            )
        return NativeTensors(self)

    def cuda_graph_modules(self) -> dict[str, list[str]]:
        """Map Megatron's names of layer parts to submodule paths; "layer" stands for whole layers."""
        layers = [f"layers.{index}" for index in range(len(self.layers))]
        return {"layer": layers, "attn": [f"{path}.attn" for path in layers], "mlp": [f"{path}.mlp" for path in layers]}


def rank_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return `config` with the attention heads, KV heads and MLP columns of one of `ranks` tensor-parallel ranks.

    Raises ModelError that lists every size that can't be split evenly.
    """
    if ranks == 1:
        return config
    sizes = {"num_heads": ("attention heads", 1), "num_kv_heads": ("key and value heads", 1)}
    if config.has_dense_layers:
        sizes["intermediate_size"] = ("MLP columns", 1)
    if config.num_experts:
        sizes["moe_intermediate_size"] = ("columns of an expert", EXPERT_ALIGNMENT)
    if config.shared_expert_size:
        sizes["shared_expert_size"] = ("columns of the shared expert", 1)
    problems = [
        f"its {getattr(config, name)} {text} are not a multiple of {ranks * unit}"
        for name, (text, unit) in sizes.items()
        if getattr(config, name) % (ranks * unit)
    ]
    if problems:
        divisor = math.gcd(*(getattr(config, name) // unit for name, (_, unit) in sizes.items()))
        raise ModelError(
            f"this {config.architecture} can't be split with tensor_parallel_size={ranks}: {'; '.join(problems)}. "
            + (f"Give a divisor of {divisor}" if divisor > 1 else "Leave tensor_parallel_size out")
        )
    return replace(config, **{name: getattr(config, name) // ranks for name in sizes})


def unfused_parts(model: Decoder) -> list[str]:
    """Return the options and layers of a decoder that no fused kernel computes."""
    parts = [f"{name}={value!r}" for name, value in model.config.options().items() if name not in FUSED_OPTIONS]
    config = model.config
    if config.activation not in FUSED_ACTIVATIONS:
        parts.append(f"activation={config.activation!r}")
    if config.qk_norm and config.qk_norm_kind == "all_heads" and model.parallel.size > 1:
        parts.append("qk_norm_kind='all_heads' over several ranks")
    if config.parallel_block and (config.norms.after_attention or config.norms.after_mlp or config.num_experts):
        parts.append("parallel_block=True with experts, or with norms after attention or the MLP")
    if type(model).layer is not Decoder.layer or any(type(layer) is not DecoderLayer for layer in model.layers):
        parts.append("layers that are not DecoderLayer")
    if model.adapters is not None:
        parts.append("adapters")
    return parts


class NativeTensors:
    """DecoderTensors of a Decoder."""

    def __init__(self, model: Decoder):
        config = model.config
        self._model, self.config = model, config
        self.group = model.parallel.group if model.parallel.size > 1 else None
        self.first_token = model.embedding.vocab_part.first
        by_group = config.names.qkv_by_group
        self.heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, by_group=by_group)

    def rotary(self, index: int) -> tuple[Tensor, Tensor] | None:
        which = self.config.rope_index(index)
        if which is None:
            return None
        table = self._model.local_rotary if which else self._model.rotary
        assert table is not None  # rope_index is 1 only if there is a local one
        return table.cos, table.sin

    def layer(self, index: int) -> LayerTensors:
        layer = self._model.layers[index]
        attn, mlp = layer.attn, layer.mlp
        dense = isinstance(mlp, GatedMLP | PlainMLP)
        up = mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up if dense else None
        return LayerTensors(
            input_norm=norm_weights(layer.input_norm),
            qkv=attn.qkv.linear_weight,
            qkv_bias=attn.qkv.bias,
            q_norm=None if attn.qk_norm is None else attn.qk_norm.q_weight,
            k_norm=None if attn.qk_norm is None else attn.qk_norm.k_weight,
            o=attn.o.linear_weight,
            o_bias=attn.o.bias,
            post_norm=norm_weights(layer.post_norm),
            gate_up=None if up is None else up.linear_weight,
            gate_up_bias=None if up is None else up.bias,
            down=mlp.down.linear_weight if dense else None,
            down_bias=mlp.down.bias if dense else None,
            mlp=None if dense else layer.mlp_part,
            moe=mlp if isinstance(mlp, MoE) else None,
            sinks=attn.sinks,
            attention_out_norm=norm_weights(layer.attn_out_norm),
            mlp_out_norm=norm_weights(layer.mlp_out_norm),
        )

    @property
    def embedding(self) -> Tensor:
        return self._model.embedding.weight

    @property
    def embedding_scale(self) -> float | None:
        return self._model.embedding_scale

    @property
    def norm(self) -> NormWeights:
        found = norm_weights(self._model.norm)
        assert found is not None
        return found

    @property
    def head(self) -> LinearWeight:
        return self._model.lm_head.linear_weight

    @property
    def head_bias(self) -> Tensor | None:
        return self._model.lm_head.bias


def norm_weights(norm: Norm | None) -> NormWeights | None:
    """Return the parameters of a norm; None: there is no norm."""
    return None if norm is None else NormWeights(norm.weight, getattr(norm, "bias", None))
