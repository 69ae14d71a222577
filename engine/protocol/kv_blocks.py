"""Blocks of the KV cache as a safetensors file, for their way from one engine to another.

A tensor, uint8, is a block: its name is the cache group, "-" and the digest of the tokens up to its end. The metadata
have, under the tensor's name, a checksum of the name and the block, and what the engines must agree on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from engine.errors import RequestError

FORMAT = "encore-kv-blocks-1"
BODY = "kv_blocks"  # name of the file in errors
HASH_BYTES = 8  # of a digest, which KV events publish as an unsigned 64-bit integer
MAX_HASHES = 65536  # of one command
_NAME = re.compile(r"\d{1,4}-[0-9a-f]{64}")
_LENGTH_BYTES = 8  # of the header's length, where a safetensors file begins
_HEADER_BYTES = 512  # of a block's entry in the header, at most


@dataclass(frozen=True)
class KVBlocks:
    """Blocks by name. `fingerprint`: of the weights, the model, and the form of the pages. `weight_version`: the name
    of the weights, which the digests depend on.
    """

    fingerprint: str
    weight_version: str
    blocks: Mapping[str, bytes]


def file_bytes(count: int, block_bytes: int) -> int:
    """Return an upper bound of the size of a file with `count` blocks."""
    return count * (block_bytes + _HEADER_BYTES) + 4096


def pack(found: KVBlocks) -> bytes:
    """Return the file with these blocks."""
    tensors = {name: np.frombuffer(block, np.uint8) for name, block in found.blocks.items()}
    metadata = {"format": FORMAT, "fingerprint": found.fingerprint, "weight_version": found.weight_version}
    return save(tensors, metadata | {name: _checksum(name, block) for name, block in found.blocks.items()})


def unpack(data: bytes) -> KVBlocks:
    """Return the blocks of a file. Raises RequestError if it is not one of `pack`, or if a checksum differs."""
    try:
        tensors = load(data)
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(f"not a safetensors file ({str(error)[:200]})") from error
    metadata = header.get("__metadata__") or {}
    if metadata.get("format") != FORMAT:
        raise _refusal(f"its metadata have format={str(metadata.get('format'))[:64]!r}, expected {FORMAT!r}")
    blocks = {}
    for name, tensor in tensors.items():
        if not _NAME.fullmatch(name):
            raise _refusal(f"tensor {name[:80]!r} is not named by a cache group and a digest")
        if tensor.dtype != np.uint8 or tensor.ndim != 1:
            raise _refusal(f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, expected uint8 [n]")
        block = tensor.tobytes()
        if metadata.get(name) != _checksum(name, block):
            raise _refusal(f"the checksum of block {name!r} differs, or is missing")
        blocks[name] = block
    return KVBlocks(metadata.get("fingerprint", ""), metadata.get("weight_version", ""), blocks)


def check_hashes(block_hashes: Sequence[int]) -> list[int]:
    """Return the hashes. Raises RequestError if they are not distinct unsigned 64-bit integers, at least one."""
    name = "block_hashes"
    found = list(block_hashes)
    if not 0 < len(found) <= MAX_HASHES:
        raise RequestError(f"{name} has {len(found)} hashes: give 1 to {MAX_HASHES}", param=name)
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 2 ** (8 * HASH_BYTES):
            raise RequestError(f"{name}: {one!r} is no unsigned 64-bit integer, as KV events publish", param=name)
    if len(set(found)) < len(found):
        raise RequestError(f"{name} has a hash twice: leave one out", param=name)
    return found


def hash_of(digest: bytes) -> int:
    """Return the hash of a digest, as KV events publish it."""
    return int.from_bytes(digest[:HASH_BYTES], "big")


def _checksum(name: str, block: bytes) -> str:
    found = blake2b(name.encode() + b"\0", digest_size=32)
    found.update(block)
    return found.hexdigest()


def _refusal(message: str) -> RequestError:
    return RequestError(f"{BODY} can't be imported: {message}; send a file that an export has written", param=BODY)
