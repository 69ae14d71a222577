"""Choose the weight method of each linear layer of a quantised checkpoint, by its config and the names in its files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.quantization import ONLINE, Quantization, WeightScheme
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.kernels.launch import fits
from engine.layers.formats import build_method
from engine.layers.formats.slots import PLAIN_NAME
from engine.layers.weight_method import PLAIN, WeightMethod, WeightMethods, plain_weights
from engine.models.config import ModelConfig

logger = logging.getLogger(__name__)

PLAIN_TYPES = frozenset({"F64", "F32", "BF16", "F16"})
"""The dtypes of plain weights, as safetensors files name them."""

PLAIN_SUFFIXES = (PLAIN_NAME, "bias")


def quantized_modules(files: Iterable[Path]) -> frozenset[str]:
    """Return the modules that have quantised tensors in safetensors files, by name. Reads only the files' headers.

    A module is quantised if it has a tensor other than `weight` and `bias`, such as a scale, or a `weight` that is not
    floating point. Raises ModelError for an unreadable file.
    """
    found = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                    module, _, last = name.rpartition(".")
                    if last not in PLAIN_SUFFIXES or (
                        last == PLAIN_NAME and shard.get_slice(name).get_dtype() not in PLAIN_TYPES
                    ):
                        found.add(module)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}); download it again") from error
    return frozenset(found)


def weight_methods(
    config: ModelConfig, parallel: TensorParallel = SINGLE_RANK, files: Iterable[Path] | None = None
) -> WeightMethods:
    """Return the weight methods of a model, for `build_model`.

    With `files`, a layer is quantised if it is in them, whatever the config's list of ignored modules says: programs
    match such lists in different ways. Without files, that list decides. Raises ModelError, at the layer, for parts of
    a fused layer that are stored in different ways.
    """
    quantization = config.quantization
    if quantization is None:
        return plain_weights
    if files is None or quantization.method == ONLINE:
        scheme_of = partial(_listed_scheme, quantization)
    else:
        stored = quantized_modules(files)
        scheme_of = partial(_stored_scheme, quantization, stored, _experts(stored))

    def choose(prefix: str, parts: Mapping[str, int], inputs: int) -> WeightMethod:
        schemes = {part: scheme_of(prefix, part) for part in parts}
        distinct = set(schemes.values())
        if len(distinct) > 1:
            found = ", ".join(f"{part} {_described(scheme)}" for part, scheme in schemes.items())
            raise ModelError(
                f"{prefix} computes {' and '.join(parts)} together, which the checkpoint stores in different ways "
                f"({found}): use a checkpoint that stores them alike"
            )
        scheme = distinct.pop()
        return PLAIN if scheme is None else build_method(scheme, parts, parallel.size)

    return choose


def _listed_scheme(quantization: Quantization, prefix: str, part: str) -> WeightScheme | None:
    """Return the scheme of a module without its file."""
    module = f"{prefix}.{part}"
    return None if quantization.ignores(module) else quantization.scheme(module)


def _stored_scheme(
    quantization: Quantization, stored: frozenset[str], experts: Mapping[str, str], prefix: str, part: str
) -> WeightScheme | None:
    """Return the scheme of a module, or of all experts under `prefix`; None if it is stored plain."""
    module = f"{prefix}.{part}"
    if module not in stored:
        if prefix not in experts:
            return None
        module = experts[prefix]
    return quantization.scheme(module)


def _experts(stored: frozenset[str]) -> dict[str, str]:
    """Map what comes before a number in names of modules, such as `model.layers.0.mlp.experts`, to one such module."""
    found: dict[str, str] = {}
    for name in sorted(stored):
        parts = name.split(".")
        for index, part in enumerate(parts):
            if part.isdigit():
                found.setdefault(".".join(parts[:index]), name)
    return found


def _described(scheme: WeightScheme | None) -> str:
    return "plain" if scheme is None else f"{scheme.element} in blocks of {scheme.block}"


def describe(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> str:
    """Return a line for the start-up log: what is stored, and what a step with activations of `dtype` computes."""
    source = "while loading" if quantization.method == ONLINE else f"by {quantization.method}"
    how = (
        "each step dequantises them with PyTorch operations, which saves memory and is slower than plain weights: "
        f"there are no kernels for them on {device.type} in {dtype}"
    )
    if device.type == "cuda" and fits(device) and dtype in (torch.bfloat16, torch.float16):
        from engine.kernels.quantized_gemm import MAX_ROWS  # imports triton, which is installed only with CUDA

        longer = "dequantise a tile at a time"
        if any(scheme.dynamic_activations for _, scheme in quantization.schemes):
            longer = "quantise activations to fp8 too, as the checkpoint's config says"
        how = f"steps of up to {MAX_ROWS} rows multiply these bytes, longer ones {longer}"
    return f"weights quantised {source} stay {quantization.element} in memory; {how}"
