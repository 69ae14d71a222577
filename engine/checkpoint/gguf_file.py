"""Read GGUF files: metadata and tensors, as stored or dequantised.

All header fields are bounds-checked: a damaged file raises a ModelError that names the file and the problem.
gguf_model.py maps the tensors to a model.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.checkpoint.regular_files import require_regular_file
from engine.errors import ModelError

if TYPE_CHECKING:
    import torch  # the server process reads tokenizer metadata without importing torch

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string
_MAX_DIMS = 4
_MAX_ITEMS = 2**22  # of an array; the largest of known models has 514,906 merges
END_TOKENS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))  # of text, turn and message
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the file. `shape` is in torch order; `offset` and `nbytes` are bytes in the file.

    `part` is the number of the file that has it, from 0, if the model is split into several.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    nbytes: int
    part: int = 0


class _Cursor:
    """Sequential reader of the header. Reading past the end of the file raises ModelError.

    `field` describes the value being read, for error messages.
    """

    def __init__(self, path: str, data: mmap.mmap):
        self.path, self.data, self.position = path, data, 0

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: not a usable GGUF file: {problem}")

    def require(self, nbytes: int, field: str) -> None:
        remaining = len(self.data) - self.position
        if nbytes > remaining:
            raise self.error(
                f"{field} at byte {self.position} needs {nbytes} bytes and the file has {remaining} left; it is "
                "truncated or damaged, download it again"
            )

    def limit(self, count: int, field: str) -> None:
        if count > _MAX_ITEMS:
            raise self.error(f"{field} has {count} items, and at most {_MAX_ITEMS} are read")

    def scalar(self, code: str, field: str) -> Any:
        size = struct.calcsize("<" + code)
        self.require(size, field)
        value = struct.unpack_from("<" + code, self.data, self.position)[0]
        self.position += size
        return value

    def string(self, field: str) -> str:
        length = self.scalar("Q", field)
        self.require(length, field)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{field} at byte {self.position - length} is not UTF-8") from error

    def _strings(self, count: int, field: str) -> list[str]:
        """Read strings one after another: as `string` does, in a loop without calls, since vocabularies are long."""
        data, end, position, unpack = self.data, len(self.data), self.position, _LENGTH.unpack_from
        found = []
        for _ in range(count):
            start = position + _LENGTH.size
            position = start + unpack(data, position)[0] if start <= end else end + 1
            if position > end:
                break
            try:
                found.append(data[start:position].decode())
            except UnicodeDecodeError as error:
                raise self.error(f"{field} at byte {start} is not UTF-8") from error
            self.position = position
        found += [self.string(field) for _ in range(count - len(found))]  # says which one is cut off
        return found

    def value(self, value_type: int, field: str) -> Any:
        if value_type == _STRING:
            return self.string(field)
        if value_type == _ARRAY:
            return self.array(field)
        if value_type not in _SCALARS:
            raise self.error(f"{field} has unknown value type {value_type}")
        return self.scalar(_SCALARS[value_type], field)

    def array(self, field: str) -> list[Any]:
        value_type, count = self.scalar("I", field), self.scalar("Q", field)
        if value_type == _STRING:
            self.require(8 * count, field)  # each string has an 8-byte length, which bounds the loop
            self.limit(count, field)
            return self._strings(count, field)
        if value_type not in _SCALARS:
            raise self.error(f"{field} is an array of unsupported value type {value_type}")
        code = _SCALARS[value_type]
        nbytes = struct.calcsize("<" + code) * count
        self.require(nbytes, field)
        self.limit(count, field)
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.position))
        self.position += nbytes
        return values


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Return the GGUF file at a path. Config, tokenizer and weights share one reading of unchanged files."""
    path = os.fspath(path)
    files = [path, *_later_parts(path)]
    if not all(map(os.path.exists, files)):
        return GGUFFile(path)  # says what can't be read
    return _read_once(path, tuple((status.st_mtime_ns, status.st_size) for status in map(os.stat, files)))


@functools.lru_cache(maxsize=1)
def _read_once(path: str, versions: tuple[tuple[int, int], ...]) -> GGUFFile:
    return GGUFFile(path)


def _later_parts(path: str) -> list[str]:
    """Return the paths of the other parts of a split model, by the name of its first part."""
    match = _PART_NAME.fullmatch(path)
    if match is None or int(match[2]) != 1:
        return []
    return [f"{match[1]}-{part:05}-of-{match[3]}.gguf" for part in range(2, int(match[3]) + 1)]


class GGUFFile:
    """A GGUF file, memory-mapped read-only. `metadata` has plain Python values, `tensors` maps names to TensorInfo.

    The constructor reads the header and checks that every tensor lies within the file. For the first part of a split
    model it also reads the others, next to it; `metadata` is the first part's. Arrays returned by `raw` alias the
    mapping; tensors returned by `dense` are copies. Raises ModelError.
    """

    def __init__(self, path: str | os.PathLike[str]):
        first = _Part(path)
        self.path, self.metadata, self.tensors = first.path, first.metadata, first.tensors
        self._mapped = [first.data]
        paths = _paths_of_later_parts(first)
        for number, later in enumerate(paths, start=1):
            part = _Part(later, number)
            _require_same_model(first, part, number, len(paths) + 1)
            if twice := self.tensors.keys() & part.tensors.keys():
                raise ModelError(f"{part.path}: tensor {min(twice)!r} is in an earlier part, too; download it again")
            self.tensors |= part.tensors
            self._mapped.append(part.data)
        total = first.metadata.get("split.tensors.count")
        if paths and total is not None and total != len(self.tensors):
            raise ModelError(
                f"{self.path}: its {len(paths) + 1} parts have {len(self.tensors)} tensors, and split.tensors.count is "
                f"{total}; download the parts again"
            )

    def info(self, name: str) -> TensorInfo:
        """Return the entry of tensor `name`. Raises ModelError if the file has no such tensor."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: has no tensor {name!r}")
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes, uint8 [rows, bytes per row]: read-only, aliasing the mapped file."""
        info = self.info(name)
        flat = np.frombuffer(self._mapped[info.part], dtype=np.uint8, count=info.nbytes, offset=info.offset)
        return flat.reshape(math.prod(info.shape[:-1]), -1)

    def dense(self, name: str) -> torch.Tensor:
        """Return the tensor dequantised exactly, as a new float32 tensor. Raises ModelError if it can't be read."""
        import torch
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        from engine.checkpoint.gguf_codes import FOUR_BITS

        info = self.info(name)
        if info.type_id in FOUR_BITS and len(info.shape) == 2:  # four times as fast as the gguf package
            codes, scale, low = FOUR_BITS[info.type_id](self.blocks(name))
            groups = codes.view(*scale.shape, -1).float()
            return groups.mul_(scale.unsqueeze(2)).add_(low.unsqueeze(2)).view(info.shape)
        try:
            values = quants.dequantize(self.raw(name), GGMLQuantizationType(info.type_id))
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name!r} is quantised as {info.type_name}, which is not supported; "
                "use a file in Q4_K, Q8_0, F16 or F32"
            ) from error
        values = np.require(values, np.float32, "W")  # a copy of float32 tensors, which alias the file
        return torch.from_numpy(values.reshape(info.shape))

    def blocks(self, name: str) -> torch.Tensor:
        """Return a copy of a quantised matrix as uint8 [N, blocks of a row, bytes per block]."""
        import torch
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        info = self.info(name)
        size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)]
        return torch.from_numpy(np.array(self.raw(name))).view(-1, info.shape[-1] // size, nbytes)


def _paths_of_later_parts(first: _Part) -> list[str]:
    """Return the paths of the other parts that a file's metadata declares. Raises ModelError if one is missing."""
    count, number = (first.metadata.get(key, default) for key, default in (("split.count", 1), ("split.no", 0)))
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (count, number))
    if not whole or not 0 <= number < max(count, 1):
        raise ModelError(f"{first.path}: split.no is {number!r} and split.count {count!r}; download it again")
    if number > 0:
        raise ModelError(
            f"{first.path} is part {number + 1} of {count}: give the first part, whose name ends in "
            f"-00001-of-{count:05}.gguf"
        )
    if count <= 1:
        return []
    paths = _later_parts(first.path)
    if len(paths) != count - 1:
        raise ModelError(
            f"{first.path} is part 1 of {count}, and its name doesn't end in -00001-of-{count:05}.gguf, from which the "
            "other parts' names follow: rename it as it was"
        )
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise ModelError(
            f"{first.path} is part 1 of {count}, and {missing[0]} is missing: download it to the same folder"
        )
    return paths


def _require_same_model(first: _Part, part: _Part, number: int, count: int) -> None:
    expected = first.metadata | {"split.no": number, "split.count": count}
    own = {"split.no", "split.count"} | part.metadata.keys() - {"general.alignment"}
    for key in sorted(own):
        found = part.metadata.get(key)
        if found != expected.get(key):
            raise ModelError(
                f"{part.path}: {key} is {_shown(found)}, and {_shown(expected.get(key))} by {first.path}: they are not "
                "parts of one model"
            )


def _shown(value: Any) -> str:
    return "another list" if isinstance(value, list) else "missing" if value is None else repr(value)


class _Part:
    """The header and mapping of one file."""

    def __init__(self, path: str | os.PathLike[str], number: int = 0):
        self.path = os.fspath(path)
        if not os.path.isdir(self.path):
            require_regular_file(self.path)  # a FIFO would block the open
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < 24:
                    raise ModelError(
                        f"{self.path}: not a usable GGUF file: only {os.fstat(file.fileno()).st_size} bytes long"
                    )
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{self.path}: can't be read as a GGUF file: {error.strerror or error}") from error
        cursor = _Cursor(self.path, self.data)
        tensor_count, metadata_count = self._read_preamble(cursor)
        self.metadata = self._read_metadata(cursor, metadata_count)
        self.tensors = self._read_tensor_infos(cursor, tensor_count, number)

    def _read_preamble(self, cursor: _Cursor) -> tuple[int, int]:
        magic = self.data[:4]
        if magic != b"GGUF":
            raise cursor.error(f"it starts with {magic!r} instead of b'GGUF'")
        cursor.position = 4
        version = cursor.scalar("I", "the version")
        if version not in (2, 3):
            raise cursor.error(f"version {version} is not supported (2 and 3 are; big-endian files are not)")
        tensor_count, metadata_count = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the metadata count")
        # Minimum sizes: 12 + 1 bytes per metadata entry, 24 per tensor. An absurd count fails here, not in a loop.
        if 13 * metadata_count + 24 * tensor_count > len(self.data):
            raise cursor.error(
                f"{metadata_count} metadata entries and {tensor_count} tensors don't fit in {len(self.data)} bytes"
            )
        return tensor_count, metadata_count

    def _read_metadata(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = cursor.string(f"metadata key {index}")
            if key in metadata:
                raise cursor.error(f"metadata key {key!r} appears twice")
            value_type = cursor.scalar("I", f"the type of {key!r}")
            metadata[key] = cursor.value(value_type, f"metadata {key!r}")
        return metadata

    def _read_tensor_infos(self, cursor: _Cursor, count: int, part: int) -> dict[str, TensorInfo]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        entries = []
        for index in range(count):
            name = cursor.string(f"the name of tensor {index}")
            num_dims = cursor.scalar("I", f"the rank of tensor {name!r}")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise cursor.error(f"tensor {name!r} has {num_dims} dimensions")
            shape = tuple(cursor.scalar("Q", f"the shape of tensor {name!r}") for _ in range(num_dims))[::-1]
            entries.append((name, shape, cursor.scalar("I", f"the type of {name!r}"), cursor.scalar("Q", f"{name!r}")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            try:
                quantization = GGMLQuantizationType(type_id)
            except ValueError as error:
                raise cursor.error(f"tensor {name!r} has unknown type {type_id}") from error
            block, block_bytes = GGML_QUANT_SIZES[quantization]
            if name in tensors or 0 in shape or shape[-1] % block:
                raise cursor.error(
                    f"tensor {name!r} appears twice"
                    if name in tensors
                    else f"tensor {name!r} has shape {shape}, not divisible into {quantization.name} blocks of {block}"
                )
            nbytes = math.prod(shape) // block * block_bytes
            if start + offset + nbytes > len(self.data):
                raise cursor.error(
                    f"tensor {name!r} ends at byte {start + offset + nbytes} and the file at "
                    f"{len(self.data)}; it is truncated, download it again"
                )
            tensors[name] = TensorInfo(name, shape, type_id, quantization.name, start + offset, nbytes, part)
        return tensors
