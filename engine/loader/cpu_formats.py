"""CPU weight formats: choose one for --cpu-weight-format, load a GGUF file into it, quantise a model to int4.

Accesses models only through `linears`, `weight_slots`, `embedding` and `lm_head`.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from engine.checkpoint.gguf_file import open_gguf
from engine.checkpoint.gguf_model import GGUFModel
from engine.errors import ConfigError, ModelError
from engine.layers.float32_table import Float32Embedding, Float32Head
from engine.layers.int4 import Int4Linear, fits_int4, int4_available
from engine.layers.linear import Linear
from engine.models import Decoder, ModelConfig, build_model, config_from_dict
from engine.models.interface import Model

_FORMAT_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}
_DTYPE_OF_FORMAT = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16}

KEEP_DENSE_BYTES = 1 << 30
"""A 4-bit model also keeps its bfloat16 matrices, for prefill, if they are no larger than this in total."""

FLOAT32_HEAD_BYTES = 1 << 30
"""A 4-bit model stores its head in float32 if that takes no more than this."""


def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_cpu_format(requested: str = "auto", dtype: str = "auto", is_4bit: bool = False) -> str:
    """Choose the CPU weight format, "fp32", "bf16" or "int4", from the requested format, the dtype and the file.

    `auto` selects the first that applies:

    - fp32 for dtype float32;
    - int4 for a 4-bit file, which it represents exactly, if the CPU has fast bfloat16 and the int4 kernel;
    - bf16 if the dtype is bfloat16 or the CPU has fast bfloat16;
    - fp32.

    Raises ConfigError for an unsupported or contradictory combination.
    """
    if dtype == "float16":
        raise ConfigError("dtype='float16' is not supported on a CPU; use bfloat16 or float32")
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
    """Return the activation dtype of a weight format."""
    return _DTYPE_OF_FORMAT[cpu_format]


def gguf_config(path: str) -> tuple[ModelConfig, bool]:
    """Read only the config of a GGUF file, and whether its weights are mostly 4-bit. Raises ModelError."""
    model = GGUFModel(open_gguf(path))
    return config_from_dict(model.config, path), model.is_mostly_4bit()


def load_gguf(
    path: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    cpu_weight_format: str = "auto",
    max_len: int | None = None,
) -> tuple[ModelConfig, Model]:
    """Load a GGUF file into a new model on `device`.

    On a CPU, `choose_cpu_format` selects the format; elsewhere weights are dense in `dtype` (auto: bfloat16). In int4
    format, Q4_1 matrices are converted code by code; all other tensors are dequantised exactly and rounded to the
    dtype. `max_len` as in Decoder. Raises ModelError for an unusable file.
    """
    source = GGUFModel(open_gguf(path))
    config = config_from_dict(source.config, path)
    is_cpu = torch.device(device).type == "cpu"
    chosen = choose_cpu_format(cpu_weight_format, dtype, source.is_mostly_4bit()) if is_cpu else None
    if chosen is None:
        torch_dtype = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    else:
        torch_dtype = _DTYPE_OF_FORMAT[chosen]
    model = build_model(config, torch_dtype, device, max_len)
    loaded: set[str] = set()
    if chosen == "int4" and isinstance(model, Decoder):  # GGUF files hold dense models only
        loaded = _fill_int4(model, source)
    try:
        slots = model.weight_slots()
        for name in source.names():
            if name not in loaded:
                slots[name].write(source.weight(name))
    except KeyError as error:
        raise ModelError(f"{path}: weight {error} is not part of a {config.architecture}") from error
    return config, model


def quantize_model(model: Model, keep_dense: bool | None = None) -> None:
    """Quantise the projections of a loaded bfloat16 CPU model to int4 in place, layer by layer. Lossy.

    For full-precision checkpoints when int4 was requested explicitly. Embedding and head are not quantised: the head
    gets float32 storage. Parameter addresses change, so call it before graphs are captured. `keep_dense` None: decide
    by KEEP_DENSE_BYTES. Raises ModelError for a shard of a tensor-parallel model, and for a model that is not a
    Decoder.
    """
    if not isinstance(model, Decoder):
        raise ModelError(f"{model.config.architecture} can't be quantised; use cpu_weight_format bf16 or fp32")
    if model.parallel.size > 1:
        raise ModelError("int4 weights can't be split over tensor-parallel ranks; use cpu_weight_format bf16 or fp32")
    keep = _dense_copies_fit(model) if keep_dense is None else keep_dense
    for _, parent, attribute in model.linears():
        old: Linear = getattr(parent, attribute)
        if fits_int4(old.outputs, old.inputs):
            new = _empty_int4(old, keep)
            new.load_dense(old.weight)
            if old.bias is not None and new.bias is not None:
                new.bias.data.copy_(old.bias)
            setattr(parent, attribute, new)
    head = model.lm_head.weight
    if _store_head_in_float32(model):
        with torch.no_grad():
            model.lm_head.weight.copy_(head)


def _store_head_in_float32(model: Decoder) -> bool:
    """Replace the head, and the embedding if it is tied to it, by empty ones in float32 storage, unless too large."""
    size = (model.config.vocab_size, model.config.hidden_size)
    if 4 * math.prod(size) > FLOAT32_HEAD_BYTES:
        return False
    if model.config.tie_word_embeddings:
        model.embedding = Float32Embedding(*size, model.dtype)
        model.lm_head = Float32Head(*size, model.dtype, tied=model.embedding.weight)
    else:
        model.lm_head = Float32Head(*size, model.dtype)
    return True


def _fill_int4(model: Decoder, source: GGUFModel) -> set[str]:
    """Replace and fill every projection whose parts are all Q4_1; return the names of the loaded weights.

    Each thread converts projections of its own. Threads that share the many small operations of a conversion wait for
    each other after each one: beside another busy process, 12 s instead of 0.6 s for 135M parameters.
    """
    keep = _dense_copies_fit(model)
    _store_head_in_float32(model)
    prefixes = {id(owner): prefix for prefix, owner in _projection_prefixes(model)}
    found: list[tuple[nn.Module, str, list[str]]] = []
    for _, parent, attribute in model.linears():
        old: Linear = getattr(parent, attribute)
        names = [f"{prefixes[id(parent)]}.{part}.weight" for part in old.parts]
        if all(map(source.is_q4_1, names)) and fits_int4(old.outputs, old.inputs):
            found.append((parent, attribute, names))

    def convert(projection: tuple[nn.Module, str, list[str]]) -> Int4Linear:
        parent, attribute, names = projection
        new = _empty_int4(getattr(parent, attribute), keep)
        codes, scale, low = (torch.cat(pieces) for pieces in zip(*map(source.q4_1, names), strict=True))
        new.load_codes(codes, scale, low + 8 * scale)
        return new

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of each operation
    try:
        with ThreadPoolExecutor(threads) as pool:
            for (parent, attribute, _), new in zip(found, pool.map(convert, found), strict=True):
                setattr(parent, attribute, new)
    finally:
        torch.set_num_threads(threads)
    return {name for _, _, names in found for name in names}


def _projection_prefixes(model: Decoder) -> list[tuple[str, nn.Module]]:
    """Return (Hugging Face name prefix, module) of every module that owns projections."""
    return [
        (f"model.layers.{index}.{name}", layer.get_submodule(attribute))
        for index, layer in enumerate(model.layers)
        for name, attribute in (("self_attn", "attn"), ("mlp", "mlp"))
    ]


def _empty_int4(old: Linear, keep_dense: bool) -> Int4Linear:
    return Int4Linear(old.parts, old.inputs, bias=old.bias is not None, keep_dense=keep_dense)


def _dense_copies_fit(model: Decoder) -> bool:
    return sum(getattr(parent, name).weight.nbytes for _, parent, name in model.linears()) <= KEEP_DENSE_BYTES
