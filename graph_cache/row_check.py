"""Check how the results of a callable depend on its rows, since a run on a bucket has padding rows.

Results must have the batch as their first dimension or not depend on it, and no row may depend on another. Callables
that write caches at addresses from integer inputs are trusted: dummy rows have the same address there. Writes to
parameters are refused: an embedding with `max_norm` renormalises what its rows select, and random rows can't show that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graph_cache.audit import StorageAudit, storage_of
from graph_cache.reference import Reference, same_bits


def check_rows(
    run: Callable[[int], Any],
    inputs: Callable[[int], Sequence[torch.Tensor]],
    rows: int,
    fewer_rows: int,
    generators: Sequence[torch.Generator],
    parameters: Sequence[torch.Tensor] = (),
) -> tuple[list[bool], str]:
    """Run a callable with different rows, and compare the results.

    Args:
        run: Runs the callable on this many rows and returns its result.
        inputs: Returns the input views of this many rows, which the runs overwrite.
        rows: Number of rows, at least 2.
        fewer_rows: Another number of rows, at least 1.
        generators: Generators that the callable may use.
        parameters: Parameters that the callable may use.

    Returns whether each tensor of the result has the batch as its first dimension, and why padding would change a
    result; an empty string if it would not. All memory and generators are as before afterwards.
    """
    audit = StorageAudit(saves=True)
    own = {tensor.untyped_storage()._cdata for tensor in inputs(rows)}
    start = Reference(lambda: list(inputs(rows)), generators, audit)
    try:
        with audit:
            start.with_noise()
            first = [tensor.clone() for tensor in _tensors(run(rows))]
            state = audit.contents(own)
            start.rewind()
            start.with_noise()
            fewer = _tensors(run(fewer_rows))
            if len(first) != len(fewer):
                return [], f"the number of results depends on the rows: {len(first)} and {len(fewer)}"
            changing = [_changing(tensor, less) for tensor, less in zip(first, fewer, strict=True)]
            batched = [dimensions == [0] for dimensions in changing]
            others = [
                f"result {index} has the batch in dimension {dimensions[-1]}, not first"
                for index, dimensions in enumerate(changing)
                if dimensions not in ([], [0])
            ]
            if others:
                return batched, "; ".join(others)
            integers = [tensor for tensor in inputs(rows) if not tensor.is_floating_point()]
            trained = {storage._cdata for one in parameters if (storage := storage_of(one)) is not None}
            if audit.written & trained:
                return batched, "it writes to a parameter, and rows of padding may change what it writes"
            if integers and audit.written - own:
                return batched, ""  # rows may meet in memory that integers address, such as a cache: all pad alike
            start.rewind()
            start.with_noise()
            if not all(map(same_bits, first, _tensors(run(rows)))):
                return batched, ""  # depends on the host or on earlier runs, which a capture finds out
            # Zeros, as in padding, and other values: a normalisation gives the same sums for most rows, but not zeros.
            for change in (lambda row: row.neg_().sub_(0.5), torch.Tensor.zero_):
                start.rewind()
                start.with_noise()
                for tensor in inputs(rows):
                    if tensor.is_floating_point() and tensor.dim() and tensor.shape[0] == rows:
                        change(tensor[-1])
                second = _tensors(run(rows))
                if state != audit.contents(own):
                    return batched, "state that it writes depends on other rows, and would see padding"
                mixed = [
                    f"result {index}" + ("" if is_batched else ", which has no batch dimension,")
                    for index, (one, other, is_batched) in enumerate(zip(first, second, batched, strict=True))
                    if not (same_bits(one[:-1], other[:-1]) if is_batched else same_bits(one, other))
                ]
                if mixed:
                    return batched, f"{mixed[0]} depends on other rows, and would see padding"
            return batched, ""
    finally:
        start.rewind()


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _changing(tensor: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Return the dimensions in which two tensors differ in size; [-1] if they have different numbers of them."""
    if tensor.dim() != other.dim():
        return [-1]
    return [index for index, sizes in enumerate(zip(tensor.shape, other.shape, strict=True)) if sizes[0] != sizes[1]]
