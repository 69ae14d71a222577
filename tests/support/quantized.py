"""Quantised checkpoints written from each format's definition with numpy: shares no code with the engine.

`FORMATS` maps a format's name to a `Format`. Its `matrix` makes up codes and scales for a weight [outputs, inputs] and
returns the checkpoint's tensors and the weight that they stand for, in float64. Its standard deviation is about 0.2, so
that the text of a small model varies.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble, from the lowest
Matrix = tuple[dict[str, Tensor], np.ndarray]


class Format(NamedTuple):
    """A kind of checkpoint: `quantization_config` of its config.json, and the tensors of a matrix."""

    config: Mapping[str, Any]
    matrix: Callable[[np.random.Generator, int, int], Matrix]
    plain_name: bool = False
    """Whether the main tensor is called `weight`."""


def fp8_values() -> np.ndarray:
    """Return the value of each byte of float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f is NaN."""
    found = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found.append(np.nan if byte & 127 == 127 else -size if byte >> 7 else size)
    return np.array(found)


def pack_words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack unsigned codes along the last dimension into int32, word by word, from the lowest bits."""
    per_word = 32 // bits
    width = -(-codes.shape[-1] // per_word)
    words = np.zeros((*codes.shape[:-1], width), dtype=np.uint32)
    for place in range(codes.shape[-1]):
        word, index = divmod(place, per_word)
        shift = (order.index(index) if order else index) * bits
        words[..., word] |= codes[..., place].astype(np.uint32) << np.uint32(shift)
    return torch.from_numpy(words.view(np.int32).copy())


def spread(values: np.ndarray, rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray:
    """Repeat a value per block over its rows and columns."""
    return values.repeat(rows, 0).repeat(columns, 1)[: shape[0], : shape[1]]


def scales(rng: np.random.Generator, shape: tuple[int, ...], size: float, dtype: Any = np.float32) -> np.ndarray:
    return (rng.uniform(0.5, 1.5, shape) * size).astype(dtype)


def fp8_matrix(
    name: str, block: tuple[int, int] | None, shape_of: Callable[[int, int], tuple[int, ...]] | None = None,
    extra: Callable[[], dict[str, Tensor]] = dict,
) -> Callable[[np.random.Generator, int, int], Matrix]:  # fmt: skip
    """Make a matrix of fp8 with a scale per block (0: all rows, or columns), or one for all (None)."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Matrix:
        bytes_ = rng.integers(0, 256, (outputs, inputs), dtype=np.uint8)
        bytes_[(bytes_ & 127) > 110] &= 0x9F  # no NaN, and no outliers
        rows, columns = block or (0, 0)
        rows, columns = rows or outputs, columns or inputs
        grid = scales(rng, (-(-outputs // rows), -(-inputs // columns)), 0.008)
        weight = fp8_values()[bytes_] * spread(grid, rows, columns, (outputs, inputs)).astype(np.float64)
        stored = torch.from_numpy(grid.copy())
        if shape_of is not None:
            stored = stored.reshape(shape_of(*grid.shape))
        codes = torch.from_numpy(bytes_).view(torch.float8_e4m3fn)
        return {"weight": codes, name: stored, **extra()}, weight

    return make


def integer_matrix(
    bits: int, group: int, symmetric: bool, packed: bool, act_order: bool = False, per_tensor: bool = False
) -> Callable[[np.random.Generator, int, int], Matrix]:
    """Make a matrix of compressed-tensors' integers with a scale per group (0: per row)."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Matrix:
        half, columns = 1 << (bits - 1), group or inputs
        codes = rng.integers(-half, half, (outputs, inputs))
        groups = -(-inputs // columns)
        grid = scales(rng, (1 if per_tensor else outputs, groups), 0.35 / half)
        zeros = np.zeros_like(grid, dtype=np.int64)
        if not symmetric:
            zeros = rng.integers(-half // 2, half // 2, grid.shape)
        group_of = np.arange(inputs) // columns
        if act_order:
            group_of = rng.permutation(group_of)
        wide = np.broadcast_to(grid, (outputs, groups)), np.broadcast_to(zeros, (outputs, groups))
        weight = (codes - wide[1][:, group_of]) * wide[0][:, group_of].astype(np.float64)
        tensors = {"weight_scale": torch.from_numpy(grid).reshape((1,) if per_tensor else grid.shape)}
        if packed:
            tensors["weight_packed"] = pack_words(codes + half, bits)
            tensors["weight_shape"] = torch.tensor([outputs, inputs])
            if not symmetric and not per_tensor:
                tensors["weight_zero_point"] = pack_words((zeros + half).T, bits).T.contiguous()
            elif not symmetric:  # compressed-tensors packs zero points of rows and groups only
                tensors["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8).reshape(1)
        else:
            tensors["weight"] = torch.from_numpy(codes).to(torch.int8)
            if not symmetric:
                tensors["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_of).to(torch.int32)
        return tensors, weight

    return make


def awq_matrix(group: int) -> Callable[[np.random.Generator, int, int], Matrix]:
    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Matrix:
        columns = group if group > 0 else inputs
        groups = -(-inputs // columns)
        codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(4, 12, (groups, outputs))
        grid = scales(rng, (groups, outputs), 0.04, np.float16)
        index = np.arange(inputs) // columns
        weight = ((codes - zeros[index]) * grid[index].astype(np.float64)).T
        tensors = {
            "qweight": pack_words(codes, 4, AWQ_NIBBLES),
            "qzeros": pack_words(zeros, 4, AWQ_NIBBLES),
            "scales": torch.from_numpy(grid),
        }
        return tensors, weight

    return make


def gptq_matrix(
    bits: int, group: int, act_order: bool = False, offset: int = 1, index: bool = True, bias: bool = False
) -> Callable[[np.random.Generator, int, int], Matrix]:
    """Make a matrix of GPTQ; `offset` is what the stored zeros lack, 1 in its first version."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Matrix:
        columns, top = group if group > 0 else inputs, 1 << bits
        groups = -(-inputs // columns)
        codes = rng.integers(0, top, (inputs, outputs))
        zeros = rng.integers(top // 4, 3 * top // 4, (groups, outputs))
        zeros[0, 0] = 0  # stored as the largest code if there is an offset
        grid = scales(rng, (groups, outputs), 0.6 / top, np.float16)
        group_of = np.arange(inputs) // columns
        if act_order:
            group_of = rng.permutation(group_of)
        weight = ((codes - zeros[group_of]) * grid[group_of].astype(np.float64)).T
        tensors = {
            "qweight": pack_words(codes.T, bits).T.contiguous(),
            "qzeros": pack_words((zeros - offset) % top, bits),
            "scales": torch.from_numpy(grid),
        }
        if index:
            tensors["g_idx"] = torch.from_numpy(group_of).to(torch.int32)
        if bias:
            tensors["bias"] = torch.zeros(outputs, dtype=torch.float16)
        return tensors, weight

    return make


def mxfp4_matrix(blocks: bool) -> Callable[[np.random.Generator, int, int], Matrix]:
    """Make a matrix of MXFP4, with the names of gpt-oss (`blocks`), or of compressed-tensors."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Matrix:
        codes = rng.integers(0, 16, (outputs, inputs))
        exponents = rng.integers(121, 125, (outputs, inputs // 32), dtype=np.uint8)
        exponents[0, 0] = 0
        values = np.array([*FP4, *(-value for value in FP4)])[codes]
        weight = values * 2.0 ** (exponents.astype(np.float64).repeat(32, 1) - 127)
        packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        scale = torch.from_numpy(exponents)
        if blocks:
            return {"weight_blocks": packed.reshape(outputs, -1, 16), "weight_scales": scale}, weight
        return {"weight_packed": packed, "weight_scale": scale}, weight

    return make


def compressed(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, **more}}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def integers(bits: int, group: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy, **more}


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
DYNAMIC = {"input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}
GPTQ = {"quant_method": "gptq", "sym": False, "damp_percent": 0.01}


def input_scale() -> dict[str, Tensor]:
    return {"input_scale": torch.tensor(0.7)}


FORMATS: dict[str, Format] = {
    "fp8-block": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]},
        fp8_matrix("weight_scale_inv", (32, 48)), True,
    ),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8_matrix("weight_scale", None, lambda *_: (), input_scale), True,
    ),
    "fp8-tensor-inv": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8_matrix("weight_scale_inv", None, lambda *_: (), lambda: {"activation_scale": torch.tensor(0.7)}), True,
    ),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        fp8_matrix("weight_scale", None, lambda *_: (), input_scale), True,
    ),
    "modelopt-channel": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        fp8_matrix("weight_scale", (1, 0), lambda rows, _: (rows,)), True,
    ),
    "modelopt-block": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        fp8_matrix("weight_scale", (128, 128), lambda rows, columns: (rows, 1, columns, 1)), True,
    ),
    "ct-fp8-channel": Format(
        compressed("float-quantized", {**FLOAT, "strategy": "channel"}, **DYNAMIC),
        fp8_matrix("weight_scale", (1, 0)), True,
    ),
    "ct-fp8-tensor": Format(
        compressed("float-quantized", {**FLOAT, "strategy": "tensor"}),
        fp8_matrix("weight_scale", None, lambda *_: (1,), input_scale), True,
    ),
    "ct-fp8-block": Format(
        compressed("float-quantized", {**FLOAT, "strategy": "block", "block_structure": [48, 32]}),
        fp8_matrix("weight_scale", (48, 32)), True,
    ),
    "ct-w8a16": Format(compressed("pack-quantized", integers(8, 0)), integer_matrix(8, 0, True, True)),
    "ct-w8a16-group": Format(
        compressed("pack-quantized", integers(8, 16, False)), integer_matrix(8, 16, False, True)
    ),
    "ct-int8": Format(compressed("int-quantized", integers(8, 0)), integer_matrix(8, 0, True, False), True),
    "ct-int8-zeros": Format(
        compressed("int-quantized", integers(8, 0, False)), integer_matrix(8, 0, False, False), True
    ),
    "ct-int8-tensor": Format(
        compressed("naive-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
        integer_matrix(8, 0, True, False, per_tensor=True), True,
    ),
    "ct-int4-group": Format(compressed("pack-quantized", integers(4, 16)), integer_matrix(4, 16, True, True)),
    "ct-int4-channel": Format(compressed("pack-quantized", integers(4, 0)), integer_matrix(4, 0, True, True)),
    "ct-int4-zeros": Format(
        compressed("pack-quantized", integers(4, 16, False)), integer_matrix(4, 16, False, True)
    ),
    "ct-int4-tensor": Format(
        compressed("pack-quantized", {**integers(4, 0, False), "strategy": "tensor"}),
        integer_matrix(4, 0, False, True, per_tensor=True),
    ),
    "ct-int4-g-idx": Format(
        compressed("pack-quantized", integers(4, 16, actorder="group")), integer_matrix(4, 16, True, True, True)
    ),
    "ct-int4-static-order": Format(
        compressed("pack-quantized", integers(4, 16, actorder="weight")), integer_matrix(4, 16, True, True)
    ),
    "ct-mxfp4": Format(
        compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
        mxfp4_matrix(blocks=False),
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, awq_matrix(16)
    ),
    "awq-channel": Format({"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}, awq_matrix(-1)),
    "gptq": Format({**GPTQ, "bits": 4, "group_size": 16, "desc_act": False}, gptq_matrix(4, 16, bias=True)),
    "gptq-desc-act": Format(
        {**GPTQ, "bits": 4, "group_size": 16, "desc_act": True}, gptq_matrix(4, 16, act_order=True)
    ),
    "gptq-channel": Format({**GPTQ, "bits": 4, "group_size": -1, "desc_act": True}, gptq_matrix(4, -1)),
    "gptq-8bit": Format({**GPTQ, "bits": 8, "group_size": 16}, gptq_matrix(8, 16, index=False)),
    "gptq-v2": Format(
        {**GPTQ, "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}, gptq_matrix(4, 16, offset=0)
    ),
    "mxfp4": Format({"quant_method": "mxfp4"}, mxfp4_matrix(blocks=True)),
}  # fmt: skip
"""Group sizes and blocks are small, so that small matrices have several."""


def quantize_folder(plain: Path, quantized: Path, dequantized: Path, name: str, seed: int = 0) -> None:
    """Replace the linear layers of a float32 folder by made-up ones of format `name`, and write two folders.

    `quantized` has the format's tensors, `dequantized` the same values in float32.
    """
    form, rng = FORMATS[name], np.random.default_rng(seed)
    shutil.copytree(plain, quantized, dirs_exist_ok=True)
    shutil.copytree(plain, dequantized, dirs_exist_ok=True)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if not key.endswith("_proj.weight"):
            stored[key] = values[key] = tensor
            continue
        tensors, weight = form.matrix(rng, *tensor.shape)
        stored |= {f"{module}.{last}": value for last, value in tensors.items()}
        values[key] = torch.from_numpy(np.ascontiguousarray(weight)).float()
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(values, dequantized / "model.safetensors", metadata={"format": "pt"})
    path = quantized / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": form.config}))
