"""Write small GGUF files in llama.cpp's conventions for tests, and return the weights they contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf.constants import GGMLQuantizationType as Kind

HF_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "wide": 96, "layers": 2, "context": 128}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Return tokens, merges and token types of a byte-level BPE: 3 control tokens, 256 bytes, 13 words; 272 ids."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["t h", "th e", "Ġ the", "1 2", "a n", "an d", "Ġ and", "h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ 1"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = specials + sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + words
    return tokens, merges, [3] * len(specials) + [1] * (len(tokens) - len(specials))


def random_weights(architecture: str, tied: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random float32 weights of SIZES by Hugging Face name."""
    rng = torch.Generator().manual_seed(seed)
    s = SIZES
    q_rows, kv_rows = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]

    def random(*shape: int, around: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * 0.1 + around

    weights = {"model.embed_tokens.weight": random(len(vocabulary()[0]), s["hidden"])}
    for index in range(s["layers"]):
        layer = {
            "input_layernorm.weight": random(s["hidden"], around=1.0),
            "self_attn.q_proj.weight": random(q_rows, s["hidden"]),
            "self_attn.k_proj.weight": random(kv_rows, s["hidden"]),
            "self_attn.v_proj.weight": random(kv_rows, s["hidden"]),
            "self_attn.o_proj.weight": random(s["hidden"], q_rows),
            "post_attention_layernorm.weight": random(s["hidden"], around=1.0),
            "mlp.gate_proj.weight": random(s["wide"], s["hidden"]),
            "mlp.up_proj.weight": random(s["wide"], s["hidden"]),
            "mlp.down_proj.weight": random(s["hidden"], s["wide"]),
        }
        if architecture == "qwen2":
            layer |= {
                f"self_attn.{name}.bias": random(rows)
                for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
            }
        if architecture == "qwen3":
            layer |= {f"self_attn.{name}_norm.weight": random(s["head_dim"], around=1.0) for name in "qk"}
        weights |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    weights["model.norm.weight"] = random(s["hidden"], around=1.0)
    if not tied:
        weights["lm_head.weight"] = random(len(vocabulary()[0]), s["hidden"])
    return weights


def llama_cpp_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleave the two halves of each head's rows, as llama.cpp's converter does to Llama's Q and K."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face weight."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, index, rest = name.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    return f"blk.{index}.{_LAYER[stem]}.{suffix}"


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    matrices: Kind = Kind.F32,
    embedding: Kind = Kind.F32,
    tied: bool = True,
    metadata: dict[str, Any] | None = None,
    tokenizer: bool = True,
    drop: tuple[str, ...] = (),
    embedding_rows: int | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokens: dict[str, int] | None = None,
    kinds: dict[str, Kind] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a model to `path` and return its weights by Hugging Face name, after quantisation.

    `metadata` adds or replaces keys under the architecture's prefix, `drop` omits tensors and `extra` adds tensors
    (both by GGUF name), `embedding_rows` truncates the embedding, `tokens` adds ids of special tokens.
    `kinds`: types of matrices by their GGUF name within a layer, instead of `matrices`.
    """
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": SIZES["layers"],
        "context_length": SIZES["context"],
        "embedding_length": SIZES["hidden"],
        "feed_forward_length": SIZES["wide"],
        "attention.head_count": SIZES["heads"],
        "attention.head_count_kv": SIZES["kv_heads"],
    } | (metadata or {})
    adders = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}
    for key, value in numbers.items():
        adders.get(type(value), writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 20000.0)
    if tokenizer:
        add_tokenizer(writer)
    for key, index in (tokens or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", index)
    stored = {}
    for name, weight in random_weights(architecture, tied).items():
        weight = weight[:embedding_rows] if "embed_tokens" in name else weight
        heads = {"q_proj": SIZES["heads"], "k_proj": SIZES["kv_heads"]}.get(name.split(".")[-2])
        permuted = architecture == "llama" and heads is not None
        kind = Kind.F32 if weight.ndim == 1 else embedding if "embed_tokens" in name else matrices
        kind = (kinds or {}).get(gguf_name(name).split(".")[-2], kind)
        values = (llama_cpp_order(weight, heads) if permuted else weight).numpy()
        raw = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        if gguf_name(name) not in drop:
            writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        # quantisation works within rows, so the row order doesn't matter
        exact = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), kind), kind)
        stored[name] = torch.from_numpy(np.array(exact, dtype=np.float32).reshape(weight.shape))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def add_tokenizer(writer: gguf.GGUFWriter, *, merges: list[str] | None = None, pre: str = "smollm") -> None:
    """Add the tokenizer of `vocabulary` to the metadata."""
    tokens, own_merges, types = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(own_merges if merges is None else merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
