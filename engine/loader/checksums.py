"""Checksums of weights, by which a trainer and an engine prove that they hold the same."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

PIECE_BYTES = 1 << 24  # of a tensor that are copied to the host at once


def sha256_of(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor, contiguous and little-endian, as hexadecimal digits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    found = hashlib.sha256()
    for piece in flat.split(PIECE_BYTES):
        found.update(piece.cpu().numpy().data)
    return found.hexdigest()
