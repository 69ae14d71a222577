"""The base of this package's dispatch modes."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose first operation does not import the compiler, which takes a second or two."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
