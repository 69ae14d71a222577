"""A GGUF file as a Hugging Face model: config, weight names, shapes and row order.

Rejects architectures, tensors and settings that have no mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.gguf_codes import EIGHT_BITS, FOUR_BITS, SMALL_GROUPS, EightBits, FourBits
from engine.checkpoint.gguf_families import NAMES, family_of, rotated_fraction
from engine.checkpoint.gguf_file import END_TOKENS, GGUFFile
from engine.checkpoint.gguf_keys import ArchitectureKeys
from engine.checkpoint.gguf_rope import rope_scaling
from engine.checkpoint.gguf_tensors import map_tensors
from engine.errors import ModelError


class GGUFModel:
    """A GGUF file as a Hugging Face model: a config dict, and weights by Hugging Face name.

    Raises ModelError for unsupported architectures, settings and tensors.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in NAMES:
            raise ModelError(
                f"{file.path}: architecture {name!r} is not supported; supported in GGUF files: {', '.join(NAMES)}"
            )
        self._keys = ArchitectureKeys(file.metadata, name, file.path)
        self.family = family_of(name, self._keys)
        self.config = self._read_config()
        self._weights = map_tensors(file, self.family, self.config)

    def _read_config(self) -> dict[str, Any]:
        file, keys, family = self.file, self._keys, self.family
        metadata, tensors = file.metadata, file.tensors
        hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
        head_dim = keys.whole("attention.key_length", default=hidden // heads or None)
        layers = keys.whole("block_count") - keys.count("nextn_predict_layers", 0)
        if not 0 < layers <= len(tensors):
            raise ModelError(
                f"{file.path}: block_count is {layers}, but there are only {len(tensors)} tensors"
                if layers > 0
                else f"{file.path}: block_count and nextn_predict_layers leave {layers} layers"
            )
        vocab_size, width = (file.info("token_embd.weight").shape + (0,))[:2]
        if width != hidden:
            raise ModelError(
                f"{file.path}: token_embd.weight is {vocab_size} x {width}, but embedding_length is {hidden}"
            )
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > vocab_size:
            raise ModelError(
                f"{file.path}: the tokenizer has {len(tokens)} tokens, but token_embd.weight only {vocab_size} rows"
            )
        eos = [metadata[key] for key in END_TOKENS if isinstance(metadata.get(key), int)]
        context_length, theta = keys.whole("context_length"), keys.number("rope.freq_base", default=10000.0)
        dims = self._rotated(head_dim)
        config = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys.whole("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "intermediate_size": keys.whole("feed_forward_length"),
            "hidden_act": "silu",
            "max_position_embeddings": context_length,
            family.eps[1]: keys.number(family.eps[0]),
            "rope_theta": theta,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(eos)) or None,
        }
        if family.partial_rotary:
            config["partial_rotary_factor"] = rotated_fraction(dims, head_dim)
        scaling = rope_scaling(keys, file, context_length, dims, theta)
        if scaling is not None:
            config["rope_scaling"] = scaling
        config |= family.read(keys, file, config)
        self._refuse_unread(config)
        return config

    def _rotated(self, head_dim: int) -> int:
        """Return how many elements of a head rotate."""
        dims = self._keys.whole("rope.dimension_count", default=head_dim)
        if dims != head_dim and not (self.family.partial_rotary and dims < head_dim and dims % 2 == 0):
            raise ModelError(f"{self.file.path}: partial RoPE (rope.dimension_count) of {dims} is not supported")
        return dims

    def _refuse_unread(self, config: Mapping[str, Any]) -> None:
        head_dim, hidden = config["head_dim"], config["hidden_size"]
        neutral: dict[str, tuple[Any, ...]] = {
            "attention.value_length": (head_dim,),
            "attention.scale": (0, head_dim**-0.5),
            "embedding_length_out": (hidden,),
        }
        window = self.file.metadata.get(f"{self.family.name}.attention.sliding_window")
        if isinstance(window, int) and window >= config["max_position_embeddings"]:  # as wide as the context
            neutral["attention.sliding_window"] = (window,)
        self._keys.refuse_unread(neutral)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the Hugging Face names of all weights in the file."""
        return list(self._weights)

    def shapes(self) -> dict[str, Tensor]:
        """Return the weights by Hugging Face name, as tensors on the meta device. Reads no data."""

        def empty(source: str) -> Tensor:
            return torch.empty(self.file.info(source).shape, device="meta")

        return {name: self._made(name, empty) for name in self._weights}

    def weight(self, name: str) -> Tensor:
        """Return one weight by Hugging Face name, dequantised exactly into a new float32 tensor."""
        return self._made(name, self.file.dense)

    def weights(self, without: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, float32 tensor) of every weight but some, dequantised one at a time."""
        for name in self._weights:
            if name not in without:
                yield name, self.weight(name)

    def codes_of(self, name: str) -> str | None:
        """Return how CPUs can store weight `name` with the codes that it has.

        "int4" (see `four_bits`), "int8" (see `eight_bits`), "int8/16" with a scale per 16 inputs, or None.
        """
        kind = self._type_of(name)
        if kind in FOUR_BITS:
            return "int4"
        return None if kind not in EIGHT_BITS else "int8/16" if kind in SMALL_GROUPS else "int8"

    def stored_format(self) -> str | None:
        """Return "int4" if most matrices have codes of 4 bits, "int8" if most have 4 or 8 bits, or None."""
        matrices = sum(len(info.shape) == 2 for info in self.file.tensors.values())
        kinds = [self.codes_of(name) for name in self._weights]
        if 2 * kinds.count("int4") > matrices:
            return "int4"
        return "int8" if 2 * (len(kinds) - kinds.count(None)) > matrices else None

    def four_bits(self, name: str) -> FourBits:
        """Return the codes, scales and minima of an "int4" weight, with rows in the checkpoint's order."""
        weight = self._weights[name]
        codes, scale, low = FOUR_BITS[self._type_of(name) or 0](self.file.blocks(weight.sources[0]))
        return weight.arrange(codes), weight.arrange(scale), weight.arrange(low)

    def eight_bits(self, name: str) -> EightBits:
        """Return the codes and scales of an "int8" weight, with rows in the checkpoint's order."""
        weight = self._weights[name]
        codes, scale = EIGHT_BITS[self._type_of(name) or 0](self.file.blocks(weight.sources[0]))
        if not bool(scale.isfinite().all()):
            raise ModelError(f"{self.file.path}: {weight.sources[0]!r} has a scale beyond float16; download it again")
        return weight.arrange(codes), weight.arrange(scale)

    def _type_of(self, name: str) -> int | None:
        """Return the type of a matrix that has the rows of one tensor of the file; None for other weights."""
        weight = self._weights.get(name)
        if weight is None or not weight.moves_rows:
            return None
        info = self.file.info(weight.sources[0])
        return info.type_id if len(info.shape) == 2 else None

    def _made(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        weight = self._weights[name]
        try:
            return weight.arrange(*map(read, weight.sources))
        except RuntimeError as error:  # of shapes
            found = ", ".join(f"{source} {list(self.file.info(source).shape)}" for source in weight.sources)
            raise ModelError(f"{self.file.path}: {name} can't be made of {found}: {error}") from error
