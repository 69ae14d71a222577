"""The families of GGUF files: which model an architecture of llama.cpp is, and how its settings and tensors map.

One row of FAMILIES per model. Facts are from llama.cpp's converter (conversion/) and its models (src/models/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_keys import ArchitectureKeys

Settings = dict[str, Any]
"""Keys and values of a config.json."""

RMS_EPS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
LAYER_EPS = ("attention.layer_norm_epsilon", "layer_norm_eps")

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
JOINED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LLAMA = ATTENTION | MLP | NORMS
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"} | POST_NORMS
ROUTER = {"ffn_gate_inp": "mlp.gate"}


def _stacked(gate_up: str, down: str) -> dict[str, str]:
    """Name the tensors of all experts in a checkpoint."""
    return {GATE_UP_EXPERTS: gate_up, "ffn_gate_up_exps.weight": gate_up, "ffn_down_exps.weight": down}


GATE_UP_EXPERTS = "ffn_gate_exps.weight ffn_up_exps.weight"
EXPERTS = _stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    """How GGUF files store a model.

    - name: `general.architecture`. when: a key that must be there, and not 0; the first row that fits is taken.
    - architecture, model_type: as in a config.json.
    - read: reads further settings; it gets the keys, the file and the settings that all families share.
    - eps: the key of the norms' epsilon, and its name in a config.json.
    - top, layer: names of tensors outside of layers and of a layer in a checkpoint, by their names in the file, without
      `.weight` and `.bias`.
    - whole: whole names of other tensors of a layer. Two names, with a space between: the checkpoint has the rows of
      both in one tensor.
    - rows_interleaved: the two halves of each head's rows of q and k are interleaved, for llama.cpp's rotary embedding.
    - qkv_by_head: the file has all rows of q, then of k and of v; the checkpoint all rows of each head together.
    - norms_plus_one: the file has 1 + weight of norms.
    - experts_interleaved: the checkpoint's experts are transposed, and gate and up take turns.
    - partial_rotary: a part of a head may rotate.
    """

    name: str
    architecture: str
    model_type: str
    when: str | None = None
    read: Callable[[ArchitectureKeys, GGUFFile, Settings], Settings] = lambda keys, file, config: {}
    eps: tuple[str, str] = RMS_EPS
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layer: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    whole: Mapping[str, str] = field(default_factory=dict)
    rows_interleaved: bool = False
    qkv_by_head: bool = False
    norms_plus_one: bool = False
    experts_interleaved: bool = False
    partial_rotary: bool = False


# ---- what several families read -------------------------------------------------------------------------------------


def _has(file: GGUFFile, name: str) -> bool:
    """Return whether the first layer has a tensor."""
    return f"blk.0.{name}" in file.tensors


def _windows(keys: ArchitectureKeys, config: Settings, *, pattern: int, default: int | None = None) -> Settings:
    """Read the window and the layers that have it: all but every n-th by default, with n = `pattern`."""
    window = keys.count("attention.sliding_window", default)
    windowed = keys.layers("attention.sliding_window_pattern", config["num_hidden_layers"], pattern)
    if not window:
        return {"sliding_window": None}
    kinds = ["sliding_attention" if one else "full_attention" for one in windowed]
    return {"sliding_window": window, "layer_types": kinds}


def _experts(keys: ArchitectureKeys, count_key: str = "num_local_experts") -> Settings:
    return {count_key: keys.whole("expert_count"), "num_experts_per_tok": keys.whole("expert_used_count")}


def _scalar(layers: int, config: Settings) -> int:
    """Return Gemma's query_pre_attn_scalar, which files don't have. The largest models, of `layers`, differ."""
    if config["num_hidden_layers"] == layers:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


# ---- readers of single families -------------------------------------------------------------------------------------


def _llama(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return {"mlp_bias": _has(file, "ffn_gate.bias")}


def _mixtral(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return _experts(keys)


def _qwen3_moe(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    width = keys.whole("expert_feed_forward_length")
    return _experts(keys, "num_experts") | {"moe_intermediate_size": width, "norm_topk_prob": True}


def _qwen2_moe(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    shared = keys.whole("expert_shared_feed_forward_length", default=config["intermediate_size"])
    own = {"norm_topk_prob": False, "shared_expert_intermediate_size": shared, "qkv_bias": config["attention_bias"]}
    return _qwen3_moe(keys, file, config) | own


def _olmoe(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return _experts(keys, "num_experts") | {"norm_topk_prob": False}


def _gpt_oss(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    # The published models don't round yarn's bounds, which files don't say.
    rope = (config.get("rope_scaling") or {"rope_type": "default"}) | {"truncate": False}
    own = {"intermediate_size": keys.whole("expert_feed_forward_length"), "rope_scaling": rope}
    return _experts(keys) | _windows(keys, config, pattern=2) | own


def _glm4_moe(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    if keys.count("expert_gating_func", 2) not in (0, 2):
        raise keys.error("expert_gating_func", "2 (sigmoid)")
    return _experts(keys, "n_routed_experts") | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count", 0),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "n_group": keys.count("expert_group_count", 1) or 1,
        "topk_group": keys.count("expert_group_used_count", 1) or 1,
        "routed_scaling_factor": keys.factor("expert_weights_scale") or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "num_nextn_predict_layers": 0,  # left out with their tensors
        "use_qk_norm": _has(file, "attn_q_norm.weight"),
    }


def _granite(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    if not keys.flag("rope.scaling.finetuned", True):
        raise keys.error("rope.scaling.finetuned", "true: Granite without rotary embedding is not supported")
    return {
        "attention_multiplier": keys.factor("attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.factor("embedding_scale") or 1.0,
        "residual_multiplier": keys.factor("residual_scale") or 1.0,
        "logits_scaling": keys.number("logit_scale"),
        "mlp_bias": _has(file, "ffn_gate.bias"),
    }


def _granite_moe(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    shared = keys.count("expert_shared_feed_forward_length", 0)
    return _granite(keys, file, config) | _experts(keys) | {"shared_intermediate_size": shared}


def _gemma(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return _windows(keys, config, pattern=2, default=4096) | {
        "query_pre_attn_scalar": _scalar(46, config),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return _windows(keys, config, pattern=6) | {
        "query_pre_attn_scalar": _scalar(62, config),
        "final_logit_softcapping": keys.factor("final_logit_softcapping"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


def _phi2(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return {"hidden_act": "gelu_new"}


def _phi3(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    original = keys.count("rope.scaling.original_context_length", 0) or config["max_position_embeddings"]
    window = keys.count("attention.sliding_window", 0) or None
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _olmo(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return {"clip_qkv": keys.factor("attention.clamp_kqv")}


def _olmo3(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    if keys.number("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        raise keys.error("rope.freq_base_swa", f"{config['rope_theta']:g}, as rope.freq_base")
    return _windows(keys, config, pattern=4)


def _starcoder2(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return {"use_bias": config["attention_bias"], "hidden_act": "gelu_pytorch_tanh", "sliding_window": None}


def _stablelm(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    keys.flag("use_parallel_residual", False)  # llama.cpp goes by the tensors: with a norm before the MLP it is not
    return {"use_qkv_bias": config["attention_bias"]}


def _nemotron(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    keys.number(RMS_EPS[0], 1e-5)  # the converter writes it beside LayerNorm's
    return {"hidden_act": "relu2", "mlp_bias": _has(file, "ffn_up.bias")}


def _cohere(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return {"logit_scale": keys.factor("logit_scale") or 1.0, "use_qk_norm": _has(file, "attn_q_norm.weight")}


def _cohere2(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return _windows(keys, config, pattern=4) | {"logit_scale": keys.number("logit_scale")}


def _exaone4(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return _windows(keys, config, pattern=4, default=0)


def _gpt_neox(keys: ArchitectureKeys, file: GGUFFile, config: Settings) -> Settings:
    return {
        "hidden_act": "gelu",
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "rotary_pct": config["partial_rotary_factor"],
        "attention_bias": _has(file, "attn_qkv.bias"),
    }


# ---- the table -----------------------------------------------------------------------------------------------------

GRANITE_MOE = ATTENTION | NORMS | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
GRANITE_EXPERTS = _stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")
GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
PRE_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}

FAMILIES = (
    GGUFFamily(
        name="llama",
        when="expert_count",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        read=_mixtral,
        layer=ATTENTION | NORMS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        whole=_stacked("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
        rows_interleaved=True,
    ),
    GGUFFamily(name="llama", architecture="LlamaForCausalLM", model_type="llama", read=_llama, rows_interleaved=True),
    GGUFFamily(name="qwen2", architecture="Qwen2ForCausalLM", model_type="qwen2"),
    GGUFFamily(name="qwen3", architecture="Qwen3ForCausalLM", model_type="qwen3", layer=LLAMA | HEAD_NORMS),
    GGUFFamily(
        name="qwen2moe",
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        read=_qwen2_moe,
        layer=ATTENTION
        | NORMS
        | ROUTER
        | {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        whole=EXPERTS,
    ),
    GGUFFamily(
        name="qwen3moe",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        read=_qwen3_moe,
        layer=ATTENTION | HEAD_NORMS | NORMS | ROUTER,
        whole=EXPERTS,
    ),
    GGUFFamily(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        read=_olmoe,
        layer=ATTENTION | HEAD_NORMS | NORMS | ROUTER,
        whole=EXPERTS,
    ),
    GGUFFamily(
        name="gpt-oss",
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        read=_gpt_oss,
        layer=ATTENTION | PRE_NORMS | {"ffn_gate_inp": "mlp.router"},
        whole={
            GATE_UP_EXPERTS: "mlp.experts.gate_up_proj",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_gate_exps.bias ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
            "attn_sinks.weight": "self_attn.sinks",
        },
        experts_interleaved=True,
    ),
    GGUFFamily(
        name="glm4moe",
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        read=_glm4_moe,
        layer=ATTENTION
        | HEAD_NORMS
        | PRE_NORMS
        | MLP
        | ROUTER
        | {
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        whole=EXPERTS | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        partial_rotary=True,
    ),
    GGUFFamily(
        name="granitemoe",
        when="expert_shared_feed_forward_length",
        architecture="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        read=_granite_moe,
        layer=GRANITE_MOE | {"ffn_down_shexp": "shared_mlp.output_linear"},
        whole=GRANITE_EXPERTS | {"ffn_gate_shexp.weight ffn_up_shexp.weight": "shared_mlp.input_linear.weight"},
        rows_interleaved=True,
    ),
    GGUFFamily(
        name="granitemoe",
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        read=_granite_moe,
        layer=GRANITE_MOE,
        whole=GRANITE_EXPERTS,
        rows_interleaved=True,
    ),
    GGUFFamily(
        name="granite", architecture="GraniteForCausalLM", model_type="granite", read=_granite, rows_interleaved=True
    ),
    GGUFFamily(name="smollm3", architecture="SmolLM3ForCausalLM", model_type="smollm3", rows_interleaved=True),
    GGUFFamily(name="gemma", architecture="GemmaForCausalLM", model_type="gemma", read=_gemma, norms_plus_one=True),
    GGUFFamily(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        read=_gemma2,
        layer=ATTENTION | MLP | GEMMA_NORMS,
        norms_plus_one=True,
    ),
    GGUFFamily(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        read=_gemma3,
        layer=ATTENTION | HEAD_NORMS | MLP | GEMMA_NORMS,
        norms_plus_one=True,
    ),
    GGUFFamily(
        name="phi2",
        architecture="PhiForCausalLM",
        model_type="phi",
        read=_phi2,
        eps=LAYER_EPS,
        top=TOP | {"output_norm": "model.final_layernorm"},
        layer=ATTENTION
        | {
            "attn_output": "self_attn.dense",
            "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        partial_rotary=True,
    ),
    GGUFFamily(
        name="phi3",
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        read=_phi3,
        layer={"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"} | JOINED_MLP | NORMS,
        partial_rotary=True,
    ),
    GGUFFamily(
        name="olmo",
        architecture="OlmoForCausalLM",
        model_type="olmo",
        read=_olmo,
        eps=LAYER_EPS,
        layer=ATTENTION | MLP,
        rows_interleaved=True,
    ),
    GGUFFamily(
        name="olmo2",
        when="attention.sliding_window",
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        read=_olmo3,
        layer=ATTENTION | HEAD_NORMS | MLP | POST_NORMS,
    ),
    GGUFFamily(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        layer=ATTENTION | HEAD_NORMS | MLP | POST_NORMS,
    ),
    GGUFFamily(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        read=_starcoder2,
        eps=(LAYER_EPS[0], "norm_epsilon"),
        layer=ATTENTION | NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    GGUFFamily(
        name="stablelm",
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        read=_stablelm,
        eps=LAYER_EPS,
        partial_rotary=True,
    ),
    GGUFFamily(
        name="nemotron",
        architecture="NemotronForCausalLM",
        model_type="nemotron",
        read=_nemotron,
        eps=(LAYER_EPS[0], "norm_eps"),
        norms_plus_one=True,
        partial_rotary=True,
    ),
    GGUFFamily(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        layer=ATTENTION | MLP | PRE_NORMS,
    ),
    GGUFFamily(
        name="chatglm",
        architecture="GlmForCausalLM",
        model_type="glm",
        layer=ATTENTION | JOINED_MLP | NORMS,
        partial_rotary=True,
    ),
    GGUFFamily(
        name="glm4",
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        layer=ATTENTION | JOINED_MLP | GLM4_NORMS,
        partial_rotary=True,
    ),
    GGUFFamily(
        name="command-r",
        architecture="CohereForCausalLM",
        model_type="cohere",
        read=_cohere,
        eps=LAYER_EPS,
        layer=ATTENTION | HEAD_NORMS | MLP | {"attn_norm": "input_layernorm"},
    ),
    GGUFFamily(
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        read=_cohere2,
        eps=LAYER_EPS,
        layer=ATTENTION | MLP | {"attn_norm": "input_layernorm"},
    ),
    GGUFFamily(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        read=_exaone4,
        layer=ATTENTION | HEAD_NORMS | MLP | POST_NORMS,
    ),
    GGUFFamily(
        name="gptneox",
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        read=_gpt_neox,
        eps=LAYER_EPS,
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layer={
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        }
        | NORMS,
        qkv_by_head=True,
        partial_rotary=True,
    ),
)

NAMES = tuple(dict.fromkeys(family.name for family in FAMILIES))
"""The architectures that are read, as `general.architecture` names them."""


def family_of(name: str, keys: ArchitectureKeys) -> GGUFFamily:
    """Return the family of a file with this `general.architecture`, one of NAMES."""
    return next(one for one in FAMILIES if one.name == name and (one.when is None or keys.count(one.when, 0)))


def rotated_fraction(dims: int, head_dim: int) -> float:
    """Return a factor with int(head_dim * factor) == dims."""
    factor = dims / head_dim
    return factor if int(head_dim * factor) == dims else math.nextafter(factor, 1.0)
