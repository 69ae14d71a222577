"""Formats of quantised weights, one file per kind of checkpoint, and the table that finds them.

To add a format, write a subclass of ScaledWeight that names its checkpoint tensors, add it to `LAYOUTS`, and read its
`quantization_config` in engine/checkpoint/quantization.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.checkpoint.quantization import ONLINE, WeightScheme
from engine.layers.formats.awq import AwqWeight
from engine.layers.formats.compressed_tensors import CompressedMxFp4Weight, CompressedWeight, PackedWeight
from engine.layers.formats.fp8 import BlockFp8Weight, Fp8Weight, ModeloptWeight
from engine.layers.formats.gptq import GptqV2Weight, GptqWeight
from engine.layers.formats.mxfp4 import MxFp4Weight
from engine.layers.formats.online import OnlineWeight
from engine.layers.formats.scaled_weight import ScaledWeight

LAYOUTS: dict[str, type[ScaledWeight]] = {
    "fp8": Fp8Weight,
    "fp8-block": BlockFp8Weight,
    "modelopt": ModeloptWeight,
    "ct": CompressedWeight,
    "ct-packed": PackedWeight,
    "ct-mxfp4": CompressedMxFp4Weight,
    "awq": AwqWeight,
    "gptq": GptqWeight,
    "gptq_v2": GptqV2Weight,
    "mxfp4": MxFp4Weight,
    ONLINE: OnlineWeight,
}
"""The weight method of each layout of a WeightScheme."""


def build_method(scheme: WeightScheme, parts: Mapping[str, int], ranks: int = 1) -> ScaledWeight:
    """Return the weight method of a scheme for a layer of these parts, on one of `ranks` tensor-parallel ranks."""
    return LAYOUTS[scheme.layout](scheme, parts, ranks)
