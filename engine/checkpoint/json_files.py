"""Read the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint.regular_files import read_limited_text
from engine.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from `path`. Raises ModelError if it can't be read or is not an object."""
    try:
        values = json.loads(read_limited_text(path))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model folder needs it (was the download complete?)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download the model again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} has a JSON {type(values).__name__}, expected an object; download the model again")
    return values
