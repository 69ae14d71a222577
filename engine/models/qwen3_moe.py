"""Qwen3-MoE: Qwen3's attention, with a mixture of experts in place of the MLP of all or some layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.attention.interface import Attention
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.layers.moe import EXPERT_ALIGNMENT, MoE
from engine.layers.norm import RMSNorm
from engine.layers.weight_slot import Slot
from engine.models.config import MAX_LAYERS, Family, Fields, ModelConfig, read_model_config
from engine.models.dense import DecoderLayer, DenseModel, SelfAttention
from engine.models.dense_tensors import DenseTensors
from engine.models.interface import ForwardContext, Model
from graph_cache.validation import is_whole_number

QWEN3_MOE = Family(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", qk_norm=True)
MAX_EXPERTS = 1024
GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
"""Names of the stacked tensors [E, 2I, h] and [E, h, I], as in the modules of transformers 5."""


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """ModelConfig with experts. `intermediate_size` is the width of dense MLPs, `moe_intermediate_size` of an expert.

    - normalize_weights: whether a token's weights are scaled to a sum of 1.
    - sparse_layers: the layers with experts; the others have dense MLPs.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    normalize_weights: bool
    sparse_layers: frozenset[int]

    @property
    def mlp_activations(self) -> int:
        routed = self.experts_per_token * (self.moe_intermediate_size + self.hidden_size)
        return max(super().mlp_activations, routed) if self.sparse_layers else super().mlp_activations


def read_qwen3_moe_config(values: Mapping[str, Any], family: Family, where: str) -> Qwen3MoeConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    base, fields = read_model_config(values, family, where), Fields(values, where)
    if fields.flag("use_sliding_window") and values.get("sliding_window", 0) is not None:
        # unlike Qwen3's, this window applies to every layer
        base = replace(base, sliding_window=fields.integer("sliding_window", 4096))
    # transformers 5 saves the number as num_local_experts
    experts_key = "num_experts" if values.get("num_experts") is not None else "num_local_experts"
    experts = fields.integer(experts_key, high=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1, high=MAX_LAYERS)
    width = fields.integer("moe_intermediate_size")
    for key, size in (("hidden_size", base.hidden_size), ("moe_intermediate_size", width)):
        if size % EXPERT_ALIGNMENT:
            raise fields.error(key, f"a multiple of {EXPERT_ALIGNMENT}")
    dense = [] if values.get("mlp_only_layers") is None else values["mlp_only_layers"]
    if not isinstance(dense, list) or not all(is_whole_number(index, 0) for index in dense):
        raise fields.error("mlp_only_layers", "a list of layer indices")
    return Qwen3MoeConfig(
        **vars(base),
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", high=experts),
        moe_intermediate_size=width,
        normalize_weights=fields.flag("norm_topk_prob"),
        sparse_layers=frozenset(i for i in range(base.num_layers) if i not in dense and (i + 1) % step == 0),
    )


class SparseLayer(nn.Module):
    """Attention and experts, each with a pre-norm and a residual connection: hidden [T, h] -> hidden [T, h]."""

    def __init__(self, config: Qwen3MoeConfig, index: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.attn = SelfAttention(config, index, dtype, device, SINGLE_RANK)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MoE(
            config.num_experts,
            config.experts_per_token,
            config.hidden_size,
            config.moe_intermediate_size,
            normalize=config.normalize_weights,
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention, valid: Tensor | None) -> Tensor:
        hidden = hidden + self.attn(self.input_norm(hidden), cos, sin, attention)
        return hidden + self.mlp(self.post_norm(hidden), valid)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {
            **self.input_norm.slots(f"{prefix}.input_layernorm"),
            **self.attn.slots(f"{prefix}.self_attn"),
            **self.post_norm.slots(f"{prefix}.post_attention_layernorm"),
            **self.mlp.slots(f"{prefix}.mlp"),
        }


class Qwen3MoeModel(DenseModel):
    """A Qwen3-MoE decoder with uninitialised parameters on `device`; arguments and errors as in DenseModel."""

    config: Qwen3MoeConfig

    def make_layer(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> nn.Module:
        assert isinstance(config, Qwen3MoeConfig)
        if parallel.size > 1:
            raise ModelError(
                f"{config.architecture} can't be split, found tensor_parallel_size={parallel.size}: leave it out"
            )
        if index in config.sparse_layers:
            return SparseLayer(config, index, dtype, device)
        return DecoderLayer(config, index, dtype, device, parallel)

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        if index not in self.config.sparse_layers:
            return super().layer(index, hidden, context)
        return self.layers[index](hidden, *context.rope, context.attention, context.valid)

    def layer_kinds(self) -> Sequence[Hashable]:
        return self.kinds_of_modules()  # layers with experts have other modules

    def split_stacked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors` with stacked experts, of `GATE_UP` and `DOWN`, as views of each expert's matrices."""
        for item in tensors:
            yield from self._split(*item) if self._is_stacked(item) else (item,)

    def _is_stacked(self, item: Any) -> bool:
        """Return whether the item, which a caller may have sent malformed, is a stacked tensor of as many experts."""
        if not isinstance(item, tuple | list) or len(item) != 2:
            return False
        name, tensor = item
        if not isinstance(name, str) or not name.endswith((GATE_UP, DOWN)) or not isinstance(tensor, Tensor):
            return False
        return tensor.dim() == 3 and len(tensor) == self.config.num_experts

    def _split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        prefix = name.rpartition(".")[0]
        for index, matrix in enumerate(tensor):
            if name.endswith(DOWN):
                yield f"{prefix}.{index}.down_proj.weight", matrix
            else:
                gate, up = matrix.tensor_split(2)
                yield f"{prefix}.{index}.gate_proj.weight", gate
                yield f"{prefix}.{index}.up_proj.weight", up

    def fused(self, max_rows: int, max_tokens: int) -> Model:
        return Model.fused(self, max_rows, max_tokens)

    def tensors(self) -> DenseTensors:
        raise ModelError(f"{self.config.architecture} is not a dense decoder")

    def linears(self, include_head: bool = False) -> NoReturn:
        raise ModelError(
            f"{self.config.architecture} can't be quantised: its experts are stored in 16 or 32 bits; "
            "use cpu_weight_format bf16 or fp32"
        )
