"""Quantise a model folder: plain safetensors to compressed-tensors, which other engines read too.

Needs no calibration data: scales follow from the largest weights, and codes are the nearest ones.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.json_files import read_json_object
from engine.checkpoint.quantization import KEY, Quantization, WeightScheme, online_quantization, read_quantization
from engine.errors import ModelError
from engine.layers.formats import build_method
from engine.layers.formats.slots import PLAIN_NAME, PlainSlot
from engine.layers.linear import Linear
from engine.loader.quantized import weight_methods
from engine.loader.weights import READABLE_DTYPES, iterate_shards, safetensors_files
from engine.models.config import ModelConfig
from engine.models.interface import Model
from engine.models.registry import build_model, config_from_folder
from engine.utils.progress import Progress

INT4_GROUPS = (128, 64, 32)
"""Inputs that share a scale in int4: the first that divides the inputs of every matrix."""

TARGETS = ("fp8", "int8", "int4")


class Written(NamedTuple):
    """What `quantize_folder` wrote: the number of quantised matrices, and the bytes of the weights before and after."""

    matrices: int
    bytes_before: int
    bytes_after: int


def quantize_folder(source: Path, target: Path, element: str, progress: Progress | None = None) -> Written:
    """Write the model in folder `source` to folder `target` with its linear layers quantised to `element`.

    - fp8: a scale per output; activations are marked as quantised per token, which other engines do.
    - int8: a scale per output, weight-only. int4: symmetric, a scale per group of inputs, weight-only.

    Embedding, head, norms and routers keep their dtype. Holds one file's weights in memory. config.json is written
    last, so that an interrupted run leaves no folder that loads. Raises ModelError for a model that is not supported or
    quantised already, and if `target` has files.
    """
    if element not in TARGETS:
        raise ModelError(f"{element!r} is not one of {', '.join(TARGETS)}")
    config = config_from_folder(source)
    if config.quantization is not None:
        raise ModelError(f"{source} is quantised already ({config.quantization.method}); use the model's plain weights")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not empty: give a new folder")
    files = safetensors_files(source)
    model = _model(config)
    shapes = {name: slot.shape for name, slot in model.weight_slots().items() if isinstance(slot, PlainSlot)}
    form, embedding = _settings(element, shapes), f"{config.names.embedding}.{PLAIN_NAME}"
    target.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    before = after = matrices = 0
    ignored: set[str] = {config.names.head}
    for done, path in enumerate(files, 1):
        written: dict[str, Tensor] = {}
        for name, tensor in model.split_stacked(iterate_shards([path])):
            before += tensor.nbytes
            if name in shapes:
                _check(path, name, tensor, shapes[name])
                module = name.removesuffix(f".{PLAIN_NAME}")
                written |= {f"{module}.{last}": value for last, value in _quantized(form, tensor)}
                matrices += 1
                continue
            written[name] = tensor.clone()
            if tensor.dim() == 2 and name.endswith(f".{PLAIN_NAME}") and name != embedding:
                ignored.add(name.removesuffix(f".{PLAIN_NAME}"))
        after += sum(tensor.nbytes for tensor in written.values())
        save_file(written, target / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(written, path.name)
        if progress is not None:
            progress(done, len(files))
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf"):
            if path.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copyfile(path, target / path.name)
    if len(files) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": places}
        _write_json(target / "model.safetensors.index.json", index)
    values = read_json_object(source / "config.json")
    _write_json(target / "config.json", {**values, KEY: form | {"ignore": sorted(ignored)}})
    return Written(matrices, before, after)


def _model(config: ModelConfig) -> Model:
    """Return the model without storage, whose slots say which tensors are matrices of linear layers."""
    quantized = replace(config, quantization=online_quantization("int8"))
    return build_model(quantized, torch.float32, "meta", 1, methods=weight_methods(quantized))


def _settings(element: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors for `element`."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = None
    if element == "fp8":
        weights["type"] = "float"
        activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    elif element == "int4":
        inputs = math.gcd(*(shape[1] for shape in shapes.values()))
        group = next((size for size in INT4_GROUPS if inputs % size == 0), None)
        if group is None:
            raise ModelError(
                f"int4 needs inputs that are a multiple of {INT4_GROUPS[-1]} in every linear layer, found a common "
                f"divisor of {inputs}: use int8 or fp8"
            )
        weights |= {"num_bits": 4, "strategy": "group", "group_size": group}
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if element == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "kv_cache_scheme": None,
    }


def _scheme(form: dict[str, Any]) -> WeightScheme:
    quantization = read_quantization({KEY: form}, "the new config.json")
    assert isinstance(quantization, Quantization)
    return quantization.schemes[0][1]


def _quantized(form: dict[str, Any], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the last part of the name, and the tensor, of each checkpoint tensor of a matrix."""
    rows, inputs = tensor.shape
    method = build_method(_scheme(form), {"weight": rows})
    layer = Linear({"weight": rows}, inputs, bias=False, dtype=torch.float32, device=torch.device("cpu"), method=method)
    scale_dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    codes, scale, _ = method.quantize(tensor.float(), scale_dtype)
    region = method.region(layer, 0, rows, None)
    method.store_codes(region, codes)
    method.store_scales(region, "scale", scale)
    for last, found in method.checkpoint_tensors(region).items():
        if found.load is not None and (found.required or last == "weight_shape"):
            value = found.load()
            yield last, (value.to(scale_dtype) if last == "weight_scale" else value).contiguous()


def _check(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in READABLE_DTYPES or tuple(tensor.shape) != shape:
        raise ModelError(
            f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected a floating-point tensor {list(shape)}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{path}: {name} contains NaN or infinity, for which there is no scale")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
