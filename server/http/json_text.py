"""JSON text of large answers, encoded in pieces by a thread: one call for all of it would stall the event loop."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

PIECE_ITEMS = 64  # items of a list per call of the encoder, which holds the GIL
MAX_DEPTH = 6  # of nested objects and lists that are taken apart


class Encoded(NamedTuple):
    """A value as JSON text in UTF-8."""

    text: bytes


def encoded(value: Any) -> Encoded:
    """Return a value as JSON, as starlette's JSONResponse writes it.

    Parts of it may be Encoded already, or arrays of one or two dimensions, of which each row is a piece. Infinities and
    NaN in them become null.
    """
    return Encoded(b"".join(_pieces(value, MAX_DEPTH)))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, Encoded):
        yield value.text
    elif isinstance(value, np.ndarray) and value.ndim == 2:
        for number, row in enumerate(value):
            yield b"," if number else b"["
            yield from _pieces(row, depth)
        yield b"]" if len(value) else b"[]"
    elif isinstance(value, np.ndarray):
        yield _dumps([one if math.isfinite(one) else None for one in value.tolist()])
    elif isinstance(value, dict) and depth:
        for number, (name, one) in enumerate(value.items()):
            yield (b"," if number else b"{") + _dumps(name) + b":"
            yield from _pieces(one, depth - 1)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > PIECE_ITEMS and not isinstance(value[0], (Encoded, np.ndarray)):
        for start in range(0, len(value), PIECE_ITEMS):
            yield (b"," if start else b"[") + _dumps(value[start : start + PIECE_ITEMS])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value and depth:
        for number, one in enumerate(value):
            yield b"," if number else b"["
            yield from _pieces(one, depth - 1)
        yield b"]"
    else:
        yield _dumps(value)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
