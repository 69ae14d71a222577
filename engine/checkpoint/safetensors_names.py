"""Read the names of the tensors in a safetensors file from its header, without mapping the file."""

from __future__ import annotations

import json
from pathlib import Path

from engine.checkpoint.regular_files import require_regular_file
from engine.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format


def tensor_names(path: Path) -> frozenset[str]:
    """Return the names of the tensors in a file. Raises ModelError if its header can't be read."""
    require_regular_file(path)
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            return frozenset(json.loads(file.read(size))) - {"__metadata__"}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is not a readable safetensors file ({error}); download it again") from error
