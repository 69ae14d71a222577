"""Check how the results of a callable depend on its rows, since a run on a bucket has padding rows.

Results must have the batch as their first dimension or not depend on it, and no row may depend on another. Callables
that write caches at addresses from integer inputs are trusted: dummy rows have the same address there. Writes to
parameters are refused: an embedding with `max_norm` renormalises what its rows select, and random rows can't show that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graph_cache.audit import StorageAudit, storage_of
from graph_cache.reference import Reference, same_bits
from graph_cache.torch_settings import free_frames

# Inputs are tried with noise in [0, 1) plus one of these, and with something else in the last row: other values, and
# zeros, as in padding. A normalisation gives the same sums for most rows, but not for zeros.
BASES = (0.0, 1.0, -2.0)
CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (lambda row: row.neg_().sub_(0.5), torch.Tensor.zero_)
TOLERANCE, MANY = 0.05, 0.1


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
            if scaled := _depending_on_count(first, fewer, batched, fewer_rows):
                return batched, f"{scaled} depends on the number of rows, and padding would change it"
            for base, change in itertools.product(BASES, CHANGES):

                def begin(base: float = base) -> None:
                    start.rewind()
                    start.with_noise()
                    for tensor in inputs(rows):
                        if tensor.is_floating_point():
                            tensor.add_(base)

                begin()
                try:
                    one = [tensor.clone() for tensor in _tensors(run(rows))]
                    state = audit.contents(own)
                    begin()
                    for tensor in inputs(rows):
                        if tensor.is_floating_point() and tensor.dim() and tensor.shape[0] == rows:
                            change(tensor[-1])
                    other = _tensors(run(rows))
                except Exception as error:
                    if not base:
                        raise
                    free_frames(error)  # it takes no such values
                    break
                if state != audit.contents(own):
                    return batched, "state that it writes depends on other rows, and would see padding"
                if mixed := _mixed(one, other, batched):
                    return batched, f"{mixed} depends on other rows, and would see padding"
            return batched, _mixes_integers(run, inputs, rows, start, batched)
    finally:
        start.rewind()


def _mixes_integers(
    run: Callable[[int], Any],
    inputs: Callable[[int], Sequence[torch.Tensor]],
    rows: int,
    start: Reference,
    batched: Sequence[bool],
) -> str:
    """Return why results depend on the integers of other rows; empty if they don't, or if there are none.

    Tries rows of 0 with a last one of 1, and the other way round. On a CPU only: there an index that is out of range
    raises, and on a GPU it ends the process's use of the device.
    """
    if not any(_is_integer(tensor) and tensor.device.type == "cpu" for tensor in inputs(rows)):
        return ""
    for value in (0, 1):
        found = []
        for last in (value, 1 - value):
            start.rewind()
            start.with_noise()
            for tensor in filter(_is_integer, inputs(rows)):
                tensor.fill_(value)
                if tensor.dim() and tensor.shape[0] == rows:
                    tensor[-1] = last
            try:
                found.append([tensor.clone() for tensor in _tensors(run(rows))])
            except Exception as error:
                free_frames(error)  # it takes no such values
                return ""
        if mixed := _mixed(found[0], found[1], batched):
            return f"{mixed} depends on other rows, and would see padding"
    return ""


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _mixed(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], batched: Sequence[bool]) -> str:
    """Return which result differs in other rows than the last, which alone was changed; empty if none does."""
    for index, (one, other, is_batched) in enumerate(zip(first, second, batched, strict=True)):
        if is_batched and not same_bits(one[:-1], other[:-1]):
            return f"result {index}"
        if not is_batched and not same_bits(one, other):
            return f"result {index}, which has no batch dimension,"
    return ""


def _depending_on_count(
    first: Sequence[torch.Tensor], fewer: Sequence[torch.Tensor], batched: Sequence[bool], rows: int
) -> str:
    """Return which result differs in many values if fewer rows are given; empty if none does.

    The kernels of other sizes round differently, so values may differ by a little, and a few by much (a choice between
    nearly equal scores).
    """
    for index, (one, less, is_batched) in enumerate(zip(first, fewer, batched, strict=True)):
        if not is_batched or one.is_complex() or not less.numel():
            continue
        one, less = one[:rows].double(), less.double()
        differing = (one - less).abs() > TOLERANCE * torch.maximum(one.abs(), less.abs())
        if differing.double().mean() > MANY:
            return f"result {index}"
    return ""


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _changing(tensor: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Return the dimensions in which two tensors differ in size; [-1] if they have different numbers of them."""
    if tensor.dim() != other.dim():
        return [-1]
    return [index for index, sizes in enumerate(zip(tensor.shape, other.shape, strict=True)) if sizes[0] != sizes[1]]
