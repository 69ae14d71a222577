"""Write the folder of a family as a GGUF file in the conventions of llama.cpp's converter.

Names come from the gguf package. Only what a family's files differ in is written down here: settings, and what the
converter does to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.constants import MODEL_ARCH_NAMES
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "mixtral": "llama", "mistral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe", "granitemoeshared": "granitemoe", "gemma3_text": "gemma3", "phi": "phi2", "olmo3": "olmo2",
    "glm": "chatglm", "cohere": "command-r", "gpt_neox": "gptneox",
}  # fmt: skip
"""llama.cpp's names of architectures that differ from `model_type`."""
LAYER_NORM = ("phi", "olmo", "starcoder2", "stablelm", "nemotron", "cohere", "cohere2", "gpt_neox")
PERMUTED = ("llama", "mistral", "mixtral", "granite", "granitemoe", "granitemoeshared", "smollm3", "olmo")
PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "nemotron")
WINDOWS = ("gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "olmo3", "phi3")
LISTED = ("exaone4", "olmo3")
"""Their files list the layers with a window; files of other families don't."""


def write_gguf_of(folder: Path, path: Path, matrices: Kind = Kind.F32) -> None:
    """Write the model in `folder`; `matrices`: the type of its matrices, if their rows divide into its blocks."""
    config = transformers.AutoConfig.from_pretrained(folder)
    family = config.model_type
    name = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, name)
    for key, value in settings(config).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{name}.{key}", value)
    table = gguf.get_tensor_name_map(
        next(arch for arch, found in MODEL_ARCH_NAMES.items() if found == name), config.num_hidden_layers
    )
    for source, tensor in converted(config, load_file(folder / "model.safetensors")):
        found = source if source in table.mapping.values() else table.get_name(source, (".weight", ".bias"))
        assert found is not None, source
        values = tensor.float().numpy()
        kind = matrices if values.ndim > 1 and values.shape[-1] % 32 == 0 else Kind.F32
        writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings(config: Any) -> dict[str, Any]:
    """Return the keys of a file, without the architecture."""
    family, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    for key in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"):
        if hasattr(config, key):
            kind = "layer_norm_epsilon" if family in LAYER_NORM else "layer_norm_rms_epsilon"
            found[f"attention.{kind}"] = float(getattr(config, key))
    if family == "olmo":
        found["attention.layer_norm_epsilon"] = 1e-5
        if config.clip_qkv:
            found["attention.clamp_kqv"] = config.clip_qkv
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if family == "phi3":
        original = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        scale = config.max_position_embeddings / original
        found["rope.scaling.original_context_length"] = original
        if rope["rope_type"] == "longrope":
            found["rope.scaling.attn_factor"] = (
                math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            )
    if family in WINDOWS:
        found["attention.sliding_window"] = config.sliding_window or 0
    if family in LISTED:
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if family == "gemma3_text":
        found["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if family == "gemma2":
        found["attn_logit_softcapping"] = config.attn_logit_softcapping
    if getattr(config, "final_logit_softcapping", None):
        found["final_logit_softcapping"] = config.final_logit_softcapping
    if family.startswith("granite"):
        found |= {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": config.residual_multiplier,
            "logit_scale": float(config.logits_scaling),
        }
    if family.startswith("cohere"):
        found |= {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
    if hasattr(config, "use_parallel_residual"):
        found["use_parallel_residual"] = config.use_parallel_residual
    return found | expert_settings(config)


def expert_settings(config: Any) -> dict[str, Any]:
    family = config.model_type
    counts = ("n_routed_experts", "num_local_experts", "num_experts")
    count = next((getattr(config, key) for key in counts if getattr(config, key, None)), None)
    if count is None:
        return {}
    found: dict[str, Any] = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    width = getattr(config, "moe_intermediate_size", config.intermediate_size if family == "gpt_oss" else None)
    if width is not None:
        found["expert_feed_forward_length"] = width
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if getattr(config, key, None):
            found["expert_shared_feed_forward_length"] = getattr(config, key)
    if family == "glm4_moe":
        found |= {
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_gating_func": 2,
        }
    return found


def converted(config: Any, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as a file has them, under checkpoint names, or the file's own."""
    family, stacks = config.model_type, {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else ""
        if family in PERMUTED and part in heads:
            halves = tensor.view(heads[part], 2, -1, *tensor.shape[1:])
            yield name, halves.transpose(1, 2).reshape(tensor.shape)
        elif family in PLUS_ONE and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif part == "query_key_value":
            thirds = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
            yield name, thirds.transpose(0, 1).reshape(tensor.shape)
        elif "input_linear" in name:
            prefix = name.split(".block_sparse_moe")[0].split(".shared_mlp")[0]
            kind = "shexp" if "shared_mlp" in name else "exps"
            for side, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                yield f"blk.{prefix.split('.')[-1]}.ffn_{side}_{kind}.weight", half
        elif family == "gpt_oss" and "experts" in name:
            yield from gpt_oss_experts(name, tensor)
        elif name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), tensor
        elif ".experts." in name:
            before, _, after = name.partition(".experts.")
            index, _, rest = after.partition(".")
            stacks.setdefault(f"{before}.experts.{rest}", {})[int(index)] = tensor
        else:
            yield name, tensor
    for name, parts in stacks.items():
        merged = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        yield (merged if "feed_forward" in merged else name), torch.stack([parts[index] for index in sorted(parts)])
    yield from factors(config)


def gpt_oss_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    before, _, part = name.rpartition(".")
    suffix, matrix = ("bias", tensor) if part.endswith("_bias") else ("weight", tensor.mT)
    if part.startswith("down"):
        yield f"{before}.down_proj.{suffix}", matrix
    else:
        yield f"{before}.gate_proj.{suffix}", matrix[:, ::2]
        yield f"{before}.up_proj.{suffix}", matrix[:, 1::2]


def factors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that divide the frequencies of the rotary embedding."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        rotations = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((rotations - low) / (high - low)).clip(0, 1)
        yield "rope_freqs.weight", torch.from_numpy(1 / ((1 - kept) / rope["factor"] + kept))
    if config.model_type == "phi3" and rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])
