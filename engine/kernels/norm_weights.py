"""The parameters of a norm of hidden states, as models pass them to kernels. This module does not import triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class NormWeights(NamedTuple):
    """The parameters of a norm of hidden states, [h]; None: it has no such parameter."""

    weight: Tensor | None
    bias: Tensor | None = None

    def named_tensors(self, name: str) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, tensor): `name` is the weight's, and the bias, if there is one, is `name`.bias."""
        yield name, self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias


class NormKind(NamedTuple):
    """What all norms of a model compute: LayerNorm if `centred`, else RMSNorm; `offset` is added to the weight."""

    eps: float
    centred: bool = False
    offset: float = 0.0
