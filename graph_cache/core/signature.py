"""Signatures: the names, shapes, dtypes and devices that inputs of a graph must have.

A graph replays on fixed addresses and checks nothing, so a wrong dtype or shape must be detected here. All differences
are reported together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graph_cache.errors import SignatureMismatch


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """Shape, dtype and device of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSignature:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Signature:
    """Expected tensors by name."""

    tensors: Mapping[str, TensorSignature]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Signature:
        return cls({name: TensorSignature.of(tensor) for name, tensor in tensors.items()})

    def differences(self, actual: Mapping[str, object]) -> list[str]:
        """Return every difference of `actual`, one line each; empty if it matches."""
        found = [f"{name}: missing" for name in self.tensors if name not in actual]
        found += [f"{name}: not an input of this graph" for name in actual if name not in self.tensors]
        for name, expected in self.tensors.items():
            value = actual.get(name)
            if name not in actual:
                continue
            if not isinstance(value, torch.Tensor):
                found.append(f"{name}: a tensor is needed, found {type(value).__name__}")
                continue
            for field in ("shape", "dtype", "device"):
                want, have = getattr(expected, field), getattr(TensorSignature.of(value), field)
                if want != have:
                    found.append(f"{name}: {field} {have} where {want} was captured")
        return found

    def check(self, actual: Mapping[str, object], what: str) -> None:
        """Raise SignatureMismatch listing all differences, if there are any."""
        found = self.differences(actual)
        if found:
            raise SignatureMismatch(f"{what} do not fit the graph: " + "; ".join(found), found)
