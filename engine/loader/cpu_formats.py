"""Which form a model's weights take on a CPU, and loading a GGUF file or quantising a model into it.

Owns the meaning of --cpu-weight-format and what `auto` picks. Knows the models' seams (`linears`, `weight_slots`), not
their insides.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_model import GGUFModel
from engine.errors import ConfigError, ModelError
from engine.layers.int4 import Int4Linear, fits_int4, int4_available
from engine.layers.linear import Linear
from engine.models import DenseModel, ModelConfig, build_model, config_from_dict

_FORMAT_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}
_DTYPE_OF_FORMAT = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16}

KEEP_DENSE_BYTES = 1 << 30
"""A 4-bit model whose bfloat16 matrices are no larger keeps them too, for prefill; above, memory counts more."""


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_cpu_format(requested: str = "auto", dtype: str = "auto", is_4bit: bool = False) -> str:
    """The weight format "fp32", "bf16" or "int4" for a CPU, from what was asked, the dtype and the file.

    `auto`: fp32 for dtype float32; else int4 for a file in 4 bits where the kernel is fast, and it is exact; else bf16
    where the dtype says so or the CPU has it in hardware; else fp32. Raises ConfigError for what can't be had together.
    """
    if dtype == "float16":
        raise ConfigError("dtype='float16' is not offered on a CPU; use bfloat16 or float32")
    dtype_format = _FORMAT_OF_DTYPE.get(dtype)
    if requested == "auto":
        if dtype_format != "fp32" and is_4bit and has_fast_bf16() and int4_available():
            return "int4"
        return dtype_format or ("bf16" if has_fast_bf16() else "fp32")
    if requested not in _DTYPE_OF_FORMAT:
        raise ConfigError(f"cpu_weight_format={requested!r} is not one of auto, {', '.join(_DTYPE_OF_FORMAT)}")
    if dtype_format == "fp32" and requested != "fp32" or dtype_format == "bf16" and requested == "fp32":
        raise ConfigError(
            f"cpu_weight_format={requested!r} and dtype={dtype!r} contradict each other; leave one at auto"
        )
    if requested == "int4" and not int4_available():
        raise ConfigError(
            "cpu_weight_format='int4' needs torch's 4-bit kernel and a CPU with AVX2 or AVX-512; use bf16 or fp32"
        )
    return requested


def format_dtype(cpu_format: str) -> torch.dtype:
    """The activations' dtype of a weight format."""
    return _DTYPE_OF_FORMAT[cpu_format]


def gguf_config(path: str) -> tuple[ModelConfig, bool]:
    """Only the config of a GGUF file, and whether its weights are mostly in 4 bits. Raises ModelError."""
    model = GGUFModel(GGUFFile(path))
    return config_from_dict(model.config, path), model.is_mostly_4bit()


def load_gguf(
    path: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    cpu_weight_format: str = "auto",
    max_len: int | None = None,
) -> tuple[ModelConfig, DenseModel]:
    """Read a GGUF file into a model on `device`.

    On a CPU `choose_cpu_format` decides; elsewhere weights are dense in `dtype` (auto: bfloat16). Q4_1 matrices go into
    the 4-bit form code by code, everything else is dequantised exactly and rounded to the dtype. `max_len` as
    DenseModel's. Raises ModelError for a file that can't be used.
    """
    source = GGUFModel(GGUFFile(path))
    config = config_from_dict(source.config, path)
    is_cpu = torch.device(device).type == "cpu"
    chosen = choose_cpu_format(cpu_weight_format, dtype, source.is_mostly_4bit()) if is_cpu else None
    if chosen is None:
        torch_dtype = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    else:
        torch_dtype = _DTYPE_OF_FORMAT[chosen]
    model = build_model(config, torch_dtype, device, max_len)
    loaded: set[str] = set()
    if chosen == "int4":
        loaded = _fill_int4(model, source)
    try:
        slots = model.weight_slots()
        for name in source.names():
            if name not in loaded:
                slots[name].write(source.weight(name))
    except KeyError as error:
        raise ModelError(f"{path}: weight {error} has no place in a {config.architecture}") from error
    return config, model


def quantize_model(model: DenseModel, keep_dense: bool | None = None) -> None:
    """Turn a filled bfloat16 CPU model's projections into 4 bits in place, layer by layer. Lossy.

    For models that come in full precision, when int4 was asked for by name. Embedding and head stay as they are. The
    model's parameter addresses change: do it before graphs are captured. `keep_dense` None: by KEEP_DENSE_BYTES.
    """
    keep = _dense_copies_fit(model) if keep_dense is None else keep_dense
    for _, parent, attribute in model.linears():
        old: Linear = getattr(parent, attribute)
        if fits_int4(old.outputs, old.inputs):
            new = _empty_int4(old, keep)
            new.load_dense(old.weight)
            if old.bias is not None:
                new.bias.data.copy_(old.bias)
            setattr(parent, attribute, new)


def _fill_int4(model: DenseModel, source: GGUFModel) -> set[str]:
    """Replace and fill every projection whose parts are all Q4_1; returns the names that are done."""
    keep = _dense_copies_fit(model)
    prefixes = {id(owner): prefix for prefix, owner in _projection_prefixes(model)}
    loaded: set[str] = set()
    for _, parent, attribute in model.linears():
        old: Linear = getattr(parent, attribute)
        names = [f"{prefixes[id(parent)]}.{part}.weight" for part in old.parts]
        if all(map(source.is_q4_1, names)) and fits_int4(old.outputs, old.inputs):
            new = _empty_int4(old, keep)
            codes, scale, low = (torch.cat(pieces) for pieces in zip(*map(source.q4_1, names), strict=True))
            new.load_codes(codes, scale, low + 8 * scale)
            setattr(parent, attribute, new)
            loaded |= set(names)
    return loaded


def _projection_prefixes(model: DenseModel) -> list[tuple[str, nn.Module]]:
    """Hugging Face's name prefix of every module that owns projections."""
    return [
        (f"model.layers.{index}.{name}", module)
        for index, layer in enumerate(model.layers)
        for name, module in (("self_attn", layer.attn), ("mlp", layer.mlp))
    ]


def _empty_int4(old: Linear, keep_dense: bool) -> Int4Linear:
    return Int4Linear(old.parts, old.inputs, bias=old.bias is not None, keep_dense=keep_dense)


def _dense_copies_fit(model: DenseModel) -> bool:
    return sum(getattr(parent, name).weight.nbytes for _, parent, name in model.linears()) <= KEEP_DENSE_BYTES
