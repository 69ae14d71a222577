"""MXFP4 tensors of a checkpoint, dequantised while it is read (gpt-oss).

A matrix [..., rows, columns] is stored as two tensors of bytes:

- `NAME_blocks` [..., rows, columns / 32, 16]: 32 numbers per block in 4 bits (E2M1), the even ones in the low bits.
- `NAME_scales` [..., rows, columns / 32]: the exponent of each block's scale, 2 ** (byte - 127).

Format: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError

logger = logging.getLogger(__name__)

BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the low three bits; the highest bit is the sign."""

NAN_SCALE = 255


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the matrices [..., rows, columns] in bfloat16, which holds every value below 2 ** 128 exactly.

    Computed one leading index at a time, so that intermediate results stay small.
    """
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.bfloat16, device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    pairs = torch.stack((values[byte % 16], values[byte // 16]), dim=-1)
    out = torch.empty(*blocks.shape[:-2], blocks.shape[-2] * 32, dtype=torch.bfloat16, device=blocks.device)
    for part, packed, exponents in zip(out, blocks, scales, strict=True):
        numbers = pairs.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], 32)
        part.copy_(torch.ldexp(numbers, exponents.int().sub(127).unsqueeze(-1)).view(part.shape))
    return out


def dequantised(tensors: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield (name, tensor) pairs, with each pair of blocks and scales as one transposed matrix [..., columns, rows].

    A tensor waits for its partner. One that never comes, and everything that is no such pair, passes unchanged. The
    work is done on `device`. Raises ModelError for scales that don't fit their blocks and for NaN scales.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    has_logged = False
    for item in tensors:
        base, suffix = _split_name(item)
        if not suffix:
            yield item
            continue
        pair = waiting.setdefault(base, {})
        if suffix in pair:
            yield item  # a repeated name, for the reader to reject
            continue
        pair[suffix] = item[1]
        if len(pair) < 2:
            continue
        if not has_logged:
            logger.warning(
                "this checkpoint's experts are MXFP4 and are stored in 16 bits: they take 3.8 times as much memory as "
                "in its files, and are read as fast as bfloat16 experts"
            )
            has_logged = True
        del waiting[base]
        yield base, _matrix(base, pair[BLOCKS], pair[SCALES], device)
    for base, pair in waiting.items():
        yield from ((base + suffix, tensor) for suffix, tensor in pair.items())


def _split_name(item: Any) -> tuple[str, str]:
    """Return the name without its suffix, and the suffix; "" for what is no tensor of bytes with such a name."""
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
        for suffix in (BLOCKS, SCALES):
            if item[0].endswith(suffix) and item[1].dtype == torch.uint8:
                return item[0].removesuffix(suffix), suffix
    return "", ""


def _matrix(name: str, blocks: Tensor, scales: Tensor, device: torch.device) -> Tensor:
    if blocks.dim() < 4 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ModelError(
            f"{name}{SCALES} has shape {list(scales.shape)}, which doesn't fit {name}{BLOCKS} of shape "
            f"{list(blocks.shape)}: expected [experts, rows, columns / 32] and [experts, rows, columns / 32, 16]; "
            "download the model again"
        )
    if bool((scales == NAN_SCALE).any()):
        raise ModelError(f"{name}{SCALES} contains NaN (byte {NAN_SCALE}); download the model again")
    return dequantise(blocks.to(device), scales.to(device)).mT
