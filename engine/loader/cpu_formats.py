"""CPU weight formats: choose one for --cpu-weight-format, build a model with it, load a GGUF file into it."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.checkpoint.gguf_file import open_gguf
from engine.checkpoint.gguf_model import GGUFModel
from engine.config import CPU_WEIGHT_FORMATS
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ConfigError, ModelError
from engine.kernels.cpu_library import cpu_kernels_loaded
from engine.layers import int4, int8
from engine.layers.float32_table import Float32Embedding, Float32Head
from engine.layers.int4 import Int4Weight, fits_int4, int4_available
from engine.layers.int8 import Int8Weight, fits_int8
from engine.layers.int8_table import GROUP, Int8Embedding, Int8Head, Int8Slot, Int8Table
from engine.layers.linear import Linear
from engine.layers.weight_method import PLAIN, WeightMethod
from engine.models import Decoder, ModelConfig, build_model, config_from_dict
from engine.models.interface import Model
from engine.utils.progress import Progress

logger = logging.getLogger(__name__)

_FORMAT_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}
_DTYPE_OF_FORMAT = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int4": torch.bfloat16,
    "int8": torch.bfloat16,  # of a file whose codes are kept; no setting
}

_GROUPS = {"int8": GROUP, "int8/16": GROUP // 2}
"""Inputs that share a scale, by the names of codes of 8 bits; see GGUFModel.codes_of."""

KEEP_DENSE_BYTES = 1 << 30
"""A 4-bit model also keeps its bfloat16 matrices, for prefill, if they are no larger than this in total."""

FLOAT32_HEAD_BYTES = 1 << 30
"""A 4-bit model stores its head in float32 if that takes no more than this."""


def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_cpu_format(requested: str = "auto", dtype: str = "auto", stored: str | None = None) -> str:
    """Choose the CPU weight format, from the requested format, the dtype and how the file stores its weights.

    `auto` selects the first that applies:

    - fp32 for dtype float32;
    - int4 or int8 for a file that has these codes (`stored`), which are kept, if the CPU has fast bfloat16 and the
      kernels;
    - bf16 if the dtype is bfloat16 or the CPU has fast bfloat16;
    - fp32.

    Raises ConfigError for an unsupported or contradictory combination.
    """
    if dtype == "float16":
        raise ConfigError("dtype='float16' is not supported on a CPU; use bfloat16 or float32")
    dtype_format = _FORMAT_OF_DTYPE.get(dtype)
    if requested == "auto":
        if dtype_format != "fp32" and stored is not None and has_fast_bf16() and _has_kernels(stored):
            return stored
        return dtype_format or ("bf16" if has_fast_bf16() else "fp32")
    if requested not in CPU_WEIGHT_FORMATS and requested != stored:
        raise ConfigError(f"cpu_weight_format={requested!r} is not one of {', '.join(CPU_WEIGHT_FORMATS)}")
    if dtype_format == "fp32" and requested != "fp32" or dtype_format == "bf16" and requested == "fp32":
        raise ConfigError(
            f"cpu_weight_format={requested!r} and dtype={dtype!r} contradict each other; leave one at auto"
        )
    if requested == "int4" and not int4_available():
        raise ConfigError(
            "cpu_weight_format='int4' needs torch's 4-bit kernel and a CPU with AVX2 or AVX-512; use bf16 or fp32"
        )
    return requested


def _has_kernels(stored: str) -> bool:
    return int4_available() if stored == "int4" else cpu_kernels_loaded()


def format_dtype(cpu_format: str) -> torch.dtype:
    """Return the activation dtype of a weight format."""
    return _DTYPE_OF_FORMAT[cpu_format]


def gguf_config(path: str) -> tuple[ModelConfig, str | None]:
    """Read only the config of a GGUF file, and the format in which a CPU keeps its codes. Raises ModelError."""
    source, config = _open(path)
    return config, _stored_format(source, config)


def _stored_format(source: GGUFModel, config: ModelConfig) -> str | None:
    return None if config.num_experts else source.stored_format()


def _open(path: str) -> tuple[GGUFModel, ModelConfig]:
    """Read a file's config and check its tensors against it, before anything of the sizes it gives is allocated."""
    source = GGUFModel(open_gguf(path))
    config = config_from_dict(source.config, path)
    model = build_model(config, torch.float32, "meta", 1)
    slots, found = model.weight_slots(), dict(model.split_stacked(source.shapes().items()))
    problems = [f"{name} is missing" for name in slots if name not in found]
    for name, tensor in found.items():
        if name not in slots:
            problems.append(f"{name} is not part of the model that the metadata describes")
        elif tensor.shape != slots[name].shape:
            problems.append(f"{name} has shape {[*tensor.shape]}, the metadata implies {[*slots[name].shape]}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ModelError(f"{path}: tensors and metadata disagree: {'; '.join(problems[:3])}{more}")
    return source, config


def load_gguf(
    path: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    cpu_weight_format: str = "auto",
    max_len: int | None = None,
    progress: Progress | None = None,
) -> tuple[ModelConfig, Model]:
    """Load a GGUF file into a new model on `device`.

    On a CPU, `choose_cpu_format` selects the format; elsewhere weights are dense in `dtype` (auto: bfloat16). In int4
    and int8, matrices with codes of 4 or 8 bits are converted code by code; all others are dequantised exactly
    and rounded to the dtype. `max_len` as in Decoder. Raises ModelError for an unusable file.
    """
    source, config = _open(path)
    is_cpu = torch.device(device).type == "cpu"
    stored = _stored_format(source, config)
    chosen = choose_cpu_format(cpu_weight_format, dtype, stored) if is_cpu else None
    if chosen is None:
        torch_dtype = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    else:
        torch_dtype = _DTYPE_OF_FORMAT[chosen]
    loaded: set[str] = set()
    model: Model
    if chosen in ("int4", "int8"):
        model = build_low_bit_model(config, torch_dtype, max_len, codes_of=source.codes_of)
        loaded = _fill_codes(model, source, progress)
    else:
        model = build_model(config, torch_dtype, device, max_len)
    if not is_cpu:
        logger.info(
            "%s: the weights are dequantised to %s on %s and take %.2f GB; a folder in fp8 or int4 keeps its bytes",
            path,
            str(torch_dtype).removeprefix("torch."),
            device,
            sum(parameter.nbytes for parameter in model.module.parameters()) / 1e9,
        )
    slots = model.weight_slots()
    for done, (name, tensor) in enumerate(model.split_stacked(source.weights(without=loaded)), len(loaded) + 1):
        slots[name].write(tensor)
        if progress is not None:
            progress(done, len(slots))
    return config, model


def _all_int4(name: str) -> str | None:
    return "int4"


def build_low_bit_model(
    config: ModelConfig,
    dtype: torch.dtype,
    max_len: int | None = None,
    parallel: TensorParallel = SINGLE_RANK,
    *,
    codes_of: Callable[[str], str | None] = _all_int4,
    keep_dense: bool | None = None,
) -> Decoder:
    """Create an uninitialised model on the CPU whose projections are stored in 4 or 8 bits, if their shapes allow it.

    Writing to their slots quantises (lossy). `codes_of` tells how a checkpoint tensor is stored: see GGUFModel. All
    parts of a fused projection must have 4 bits, or 8. Embedding and head are not quantised further than in the
    checkpoint: a head in 8 bits, and the embedding if it is tied to it, keeps them if the kernels are compiled; another
    head gets float32 storage. `keep_dense` None: decide by KEEP_DENSE_BYTES. Raises ModelError for a model with experts
    or that is not a Decoder.
    """
    if config.num_experts:
        raise ModelError(
            f"{config.architecture} can't be quantised: its experts are stored in 16 or 32 bits; "
            "use cpu_weight_format bf16 or fp32"
        )
    keep = _dense_copies_fit(config, parallel) if keep_dense is None else keep_dense
    in_4_bits = Int4Weight(keep_dense=keep)
    in_8_bits = {group: Int8Weight(keep_dense=keep, group=group) for group in _GROUPS.values()}

    def choose(prefix: str, parts: Mapping[str, int], inputs: int) -> WeightMethod:
        found = {codes_of(f"{prefix}.{part}.weight") for part in parts}
        if found == {"int4"} and fits_int4(sum(parts.values()), inputs):
            return in_4_bits
        if found <= _GROUPS.keys() and fits_int8(inputs):
            return in_8_bits[min(_GROUPS[str(one)] for one in found)]
        return PLAIN

    model = build_model(config, dtype, "cpu", max_len, parallel, choose)
    assert isinstance(model, Decoder)  # else build_model refuses the methods
    if parallel.size == 1 and not _store_head_in_8_bits(model, codes_of):
        _store_head_in_float32(model)
    return model


def _store_head_in_8_bits(model: Decoder, codes_of: Callable[[str], str | None]) -> bool:
    """Replace the head, and the embedding if it is tied to it, by empty ones in 8 bits; return whether that is done."""
    config = model.config
    tensor = f"{config.names.embedding}.weight" if config.tie_word_embeddings else f"{config.names.head}.weight"
    fits = config.hidden_size % GROUP == 0 and not config.head_bias and model.dtype == torch.bfloat16
    codes = codes_of(tensor)
    if not fits or codes not in _GROUPS or not cpu_kernels_loaded():
        return False
    table = Int8Table(config.vocab_size, config.hidden_size, _GROUPS[codes])
    model.add_module("lm_head", Int8Head(table))
    if config.tie_word_embeddings:
        model.add_module("embedding", Int8Embedding(table))
    return True


def _store_head_in_float32(model: Decoder) -> None:
    """Replace the head, and the embedding if it is tied to it, by empty ones in float32 storage.

    Not if they are too large, or if the head has a bias.
    """
    size = (model.config.vocab_size, model.config.hidden_size)
    if 4 * math.prod(size) > FLOAT32_HEAD_BYTES or model.config.head_bias:
        return
    if model.config.tie_word_embeddings:
        model.embedding = Float32Embedding(*size, model.dtype)
        model.lm_head = Float32Head(*size, model.dtype, tied=model.embedding.weight)
    else:
        model.lm_head = Float32Head(*size, model.dtype)


def _fill_codes(model: Decoder, source: GGUFModel, progress: Progress | None = None) -> set[str]:
    """Fill every 4- or 8-bit projection and table with the codes of a file; return the names of the loaded weights.

    Each thread converts separate projections. Threads that share the many small operations of a conversion wait for
    each other after each one: beside another busy process, 12 s instead of 0.6 s for 135M parameters.
    """
    names = model.config.names
    found = [
        (layer, [f"{names.layers}.{index}.{part}.{name}.weight" for name in layer.parts])
        for index in range(model.config.num_layers)
        for part, attribute in ((names.attention, "attn"), ("mlp", "mlp"))
        for layer in model.layers[index].get_submodule(attribute).children()
        if isinstance(layer, Linear) and isinstance(layer.method, (Int4Weight, Int8Weight))
    ]

    def convert(projection: tuple[Linear, list[str]]) -> None:
        layer, tensors = projection
        if isinstance(layer.method, Int8Weight):
            starts = itertools.accumulate(layer.parts.values(), initial=0)
            for name, start in zip(tensors, starts, strict=False):
                int8.load_codes(layer, *source.eight_bits(name), start)
            return
        codes, scale, low = (torch.cat(pieces) for pieces in zip(*map(source.four_bits, tensors), strict=True))
        int4.load_codes(layer, codes, scale, low + 8 * scale)

    loaded: set[str] = set()
    for name, slot in model.weight_slots().items():
        if type(slot) is Int8Slot:
            slot.table.store(*source.eight_bits(name))
            loaded.add(name)
    total = len(model.weight_slots())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of each operation
    try:
        with ThreadPoolExecutor(threads) as pool:
            for (_, tensors), _ in zip(found, pool.map(convert, found), strict=True):
                loaded.update(tensors)
                if progress is not None:
                    progress(len(loaded), total)
    finally:
        torch.set_num_threads(threads)
    return loaded


def _dense_copies_fit(config: ModelConfig, parallel: TensorParallel) -> bool:
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    values = config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
    return 2 * values // parallel.size <= KEEP_DENSE_BYTES
