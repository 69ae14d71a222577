"""Map a GGUF file to Hugging Face conventions: config, weight names, shapes and row order.

Rejects architectures, tensors and settings that have no mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from engine.checkpoint.gguf_file import END_TOKENS, Q4_1, Q8_0, GGUFFile
from engine.checkpoint.gguf_keys import ArchitectureKeys
from engine.checkpoint.gguf_rope import rope_scaling
from engine.errors import ModelError

SUPPORTED_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


class GGUFModel:
    """A GGUF file as a Hugging Face model: a config dict, and weights by Hugging Face name.

    llama.cpp interleaves each head's rows of Llama's Q and K for its RoPE; all accessors return them in rotate-half
    order. Raises ModelError for unsupported architectures and tensors.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelError(
                f"{file.path}: architecture {architecture!r} is not supported; supported in GGUF "
                f"files: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        self.architecture = architecture
        self._keys = ArchitectureKeys(file.metadata, architecture, file.path)
        self.config = self._read_config()
        self._sources = {self._hf_name(name): name for name in file.tensors}
        self._check_shapes()

    def _read_config(self) -> dict[str, Any]:
        metadata, tensors = self.file.metadata, self.file.tensors
        keys = self._keys
        hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
        head_dim = keys.whole("attention.key_length", default=hidden // heads or None)
        layers = keys.whole("block_count")
        self._reject_unsupported(head_dim, layers)
        vocab_size, width = (self.file.info("token_embd.weight").shape + (0,))[:2]
        if width != hidden:
            raise ModelError(
                f"{self.file.path}: token_embd.weight is {vocab_size} x {width}, but embedding_length is {hidden}"
            )
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > vocab_size:
            raise ModelError(
                f"{self.file.path}: the tokenizer has {len(tokens)} tokens, but token_embd.weight only "
                f"{vocab_size} rows"
            )
        eos = [metadata[key] for key in END_TOKENS if isinstance(metadata.get(key), int)]
        context_length, theta = keys.whole("context_length"), keys.number("rope.freq_base", default=10000.0)
        config = {
            "architectures": [SUPPORTED_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys.whole("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "intermediate_size": keys.whole("feed_forward_length"),
            "hidden_act": "silu",
            "max_position_embeddings": context_length,
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(eos)) or None,
        }
        scaling = rope_scaling(keys, context_length, head_dim, theta)
        if scaling is not None:
            config["rope_scaling"] = scaling
        neutral: dict[str, tuple[Any, ...]] = {
            "attention.value_length": (head_dim,),
            "attention.scale": (0, head_dim**-0.5),
            "embedding_length_out": (hidden,),
        }
        window = metadata.get(f"{self.architecture}.attention.sliding_window")
        if isinstance(window, int) and window >= context_length:  # as wide as the context
            neutral["attention.sliding_window"] = (window,)
        keys.refuse_unread(neutral)
        return config

    def _reject_unsupported(self, head_dim: int, layers: int) -> None:
        if self.file.metadata.get(f"{self.architecture}.expert_count"):
            raise ModelError(f"{self.file.path}: mixture-of-experts models are not supported from GGUF files")
        if self._keys.whole("rope.dimension_count", default=head_dim) != head_dim:
            raise ModelError(f"{self.file.path}: partial RoPE (rope.dimension_count) is not supported")
        if "rope_freqs.weight" in self.file.tensors:
            raise ModelError(
                f"{self.file.path}: per-frequency rope factors (rope_freqs.weight, as in Llama 3.1) are "
                "not supported from GGUF files; use the model's Hugging Face folder"
            )
        if layers > len(self.file.tensors):
            raise ModelError(
                f"{self.file.path}: block_count is {layers}, but there are only {len(self.file.tensors)} tensors"
            )

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that the config implies, by Hugging Face name."""
        config = self.config
        hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_rows, hidden),
            "self_attn.k_proj.weight": (kv_rows, hidden),
            "self_attn.v_proj.weight": (kv_rows, hidden),
            "self_attn.o_proj.weight": (hidden, q_rows),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }
        if config["attention_bias"]:
            layer |= {
                "self_attn.q_proj.bias": (q_rows,),
                "self_attn.k_proj.bias": (kv_rows,),
                "self_attn.v_proj.bias": (kv_rows,),
            }
        if self.architecture == "qwen3":
            layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
        shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (config["vocab_size"], hidden)
        for index in range(config["num_hidden_layers"]):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def _check_shapes(self) -> None:
        """Check the tensors against the metadata before anything is allocated from the metadata's sizes."""
        expected = self._expected_shapes()
        problems = [f"{name} is missing" for name in expected if name not in self._sources]
        for name, source in self._sources.items():
            found = self.file.info(source).shape
            if name not in expected:
                problems.append(f"{source!r} is not part of the model that the metadata describes")
            elif found != expected[name]:
                problems.append(f"{source!r} has shape {list(found)}, the metadata implies {list(expected[name])}")
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise ModelError(f"{self.file.path}: tensors and metadata disagree: {'; '.join(problems[:3])}{more}")

    def _hf_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        match = _LAYER_PATTERN.fullmatch(name)
        if match is None or match[2] not in _LAYER_NAMES:
            raise ModelError(f"{self.file.path}: tensor {name!r} is not part of a {self.architecture} model")
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"

    def _row_order(self, name: str) -> torch.Tensor | None:
        """Return row indices that undo llama.cpp's interleaving of a Q or K projection; None if not interleaved."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or self.architecture != "llama":
            return None
        rows = self.file.info(self._sources[name]).shape[0]
        count = self.config[heads]
        if rows % (2 * count):
            raise ModelError(
                f"{self.file.path}: {self._sources[name]!r} has {rows} rows, not a multiple of 2 x {count} heads"
            )
        return torch.arange(rows).view(count, rows // (2 * count), 2).transpose(1, 2).reshape(-1)

    def names(self) -> list[str]:
        """Return the Hugging Face names of all weights in the file."""
        return list(self._sources)

    def is_q4_1(self, name: str) -> bool:
        """Return whether weight `name` is stored as Q4_1, so that `q4_1` can return its codes."""
        return name in self._sources and self.file.info(self._sources[name]).type_id == Q4_1

    def is_q8_0(self, name: str) -> bool:
        """Return whether weight `name` is stored as Q8_0, so that `q8_0` can return its codes."""
        return name in self._sources and self.file.info(self._sources[name]).type_id == Q8_0

    def is_mostly_4bit(self) -> bool:
        """Return whether most tensors are Q4_1, which the int4 kernel represents exactly, code by code."""
        return sum(map(self.is_q4_1, self.names())) * 2 > len(self.file.tensors)

    def weight(self, name: str) -> torch.Tensor:
        """Return one weight by Hugging Face name, dequantised exactly into a new float32 tensor."""
        values, order = self.file.dense(self._sources[name]), self._row_order(name)
        return values if order is None else values[order]

    def q4_1(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return one Q4_1 weight by Hugging Face name, as GGUFFile.q4_1 does, with rows in rotate-half order."""
        parts, order = self.file.q4_1(self._sources[name]), self._row_order(name)
        if order is None:
            return parts
        codes, scale, low = parts
        return codes[order], scale[order], low[order]

    def q8_0(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one Q8_0 weight by Hugging Face name, as GGUFFile.q8_0 does, with rows in rotate-half order."""
        parts, order = self.file.q8_0(self._sources[name]), self._row_order(name)
        return parts if order is None else (parts[0][order], parts[1][order])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight as (Hugging Face name, float32 tensor), dequantised one at a time."""
        for name in self._sources:
            yield name, self.weight(name)
