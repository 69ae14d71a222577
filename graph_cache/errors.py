"""Exceptions of graph_cache.

GraphError
├── GraphConfigError     an invalid setting or combination of settings (also ValueError)
├── SignatureMismatch    arguments that differ from the captured ones (also ValueError); .differences lists all
├── CaptureError         a failed capture; nothing of it remains, and the call may run eager
│   └── CaptureRefused   an operation that a CUDA graph cannot contain
├── GraphClosed          use of a closed graph or cache
└── ManifestError        a manifest or metrics snapshot that cannot be read or written
"""

from __future__ import annotations

from collections.abc import Iterable


class GraphError(Exception):
    """Base class of all errors of graph_cache. The message says what to do."""


class GraphConfigError(GraphError, ValueError):
    """An invalid setting or combination of settings."""


class SignatureMismatch(GraphError, ValueError):
    """Arguments that differ from those a graph was captured with; `differences` has one line per difference."""

    def __init__(self, message: str, differences: Iterable[str] = ()):
        super().__init__(message)
        self.differences: list[str] = list(differences)


class CaptureError(GraphError):
    """A failed capture. The partial graph is dropped, and the process and device remain usable."""


class CaptureRefused(CaptureError):
    """A capture that met an operation which a CUDA graph cannot contain, such as a host read."""


class GraphClosed(GraphError):
    """Use of a graph or a cache after it was closed."""


class ManifestError(GraphError):
    """A manifest or a metrics snapshot that cannot be read or written."""
