"""The capture core's exceptions, one tree.

GraphError
├── GraphConfigError     settings that can't be meant (also ValueError)
├── SignatureMismatch    arguments that differ from the captured ones (also ValueError); .differences lists all
├── CaptureError         a capture that failed; nothing of it is left, and the call may run eager
│   └── CaptureRefused   an operation that a CUDA graph could not hold
├── StaleGraph           a graph whose storage has moved; .moved lists every tensor
├── GraphClosed          a graph or cache that was closed
└── ManifestError        a manifest or metrics snapshot that can't be read or written
"""

from __future__ import annotations

from collections.abc import Iterable


class GraphError(Exception):
    """Anything the capture core refuses or fails at, with a message that says what to do."""


class GraphConfigError(GraphError, ValueError):
    """A setting, or a combination of settings, that can't be meant."""


class SignatureMismatch(GraphError, ValueError):
    """Arguments that differ from those a graph was captured with; `differences` has one line for each of them."""

    def __init__(self, message: str, differences: Iterable[str] = ()):
        super().__init__(message)
        self.differences: list[str] = list(differences)


class CaptureError(GraphError):
    """A capture that failed. The partial graph is dropped and the process is as healthy as before."""


class CaptureRefused(CaptureError):
    """A capture that met an operation which a CUDA graph could not hold, such as a read of the host."""


class StaleGraph(GraphError):
    """A graph that may not be replayed because storage it reads has moved; `moved` names every tensor."""

    def __init__(self, message: str, moved: Iterable[str] = ()):
        super().__init__(message)
        self.moved: list[str] = list(moved)


class GraphClosed(GraphError):
    """Something was asked of a graph or a cache after it was closed."""


class ManifestError(GraphError):
    """A manifest or a metrics snapshot that can't be read or written."""
