"""Check how the results of a callable depend on its rows, since a run on a bucket has padding rows.

Two runs of the same shape with the same first rows and different others must give the same first rows, bit for bit.
Results must have the batch as their first dimension, with one row per row, or not depend on it. Callables that write
caches at addresses from integer inputs are trusted: dummy rows have the same address there. Writes to parameters are
refused: an embedding with `max_norm` renormalises what its rows select, and random rows can't show that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from graph_cache.audit import StorageAudit, storage_of
from graph_cache.exact import Exact, close
from graph_cache.reference import Reference, same_bits
from graph_cache.torch_settings import free_frames

# Inputs are tried with noise in [0, 1) plus one of these, and with something else in the last rows: other values, and
# zeros, as in padding. A normalisation gives the same sums for most rows, but not for zeros.
BASES = (0.0, 1.0, -2.0)
CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (lambda padding: padding.neg_().sub_(0.5), torch.Tensor.zero_)


def check_rows(
    run: Callable[[int], Any],
    inputs: Callable[[int], Sequence[torch.Tensor]],
    batched_inputs: Sequence[bool],
    bucket: int,
    rows: int,
    generators: Sequence[torch.Generator],
    parameters: Sequence[torch.Tensor] = (),
    *,
    thorough: bool = True,
) -> tuple[list[bool], str]:
    """Run a callable with different rows, and compare the results.

    Args:
        run: Runs the callable on this many rows and returns its result.
        inputs: Returns the input views of this many rows, which the runs overwrite.
        batched_inputs: Whether each of these has the batch as its first dimension.
        bucket: Number of rows with padding.
        rows: Number of rows without, at least 1.
        generators: Generators that the callable may use.
        parameters: Parameters that the callable may use.
        thorough: Also try other ranges of values, and compare numbers of rows exactly.

    Returns whether each tensor of the result has the batch as its first dimension, and why padding would change a
    result; an empty string if it would not. All memory and generators are as before afterwards.
    """
    audit = StorageAudit(saves=True)
    own = {tensor.untyped_storage()._cdata for tensor in inputs(bucket)}
    start = Reference(lambda: list(inputs(bucket)), generators, audit)

    def begin(base: float = 0.0) -> None:
        start.rewind()
        start.with_noise()
        for tensor in inputs(bucket):
            if tensor.is_complex():
                noise = torch.Generator().manual_seed(1)
                torch.view_as_real(tensor).copy_(torch.rand(*tensor.shape, 2, generator=noise, device="cpu"))
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.add_(base)

    def change(changes: Callable[[torch.Tensor], object], matches: Callable[[torch.Tensor], bool]) -> None:
        for tensor, is_batched in zip(inputs(bucket), batched_inputs, strict=True):
            if is_batched and matches(tensor):
                changes(tensor[rows:])

    def result() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in _tensors(run(bucket))]

    try:
        with audit:
            begin()
            whole = run(bucket)
            first, structure = [tensor.clone() for tensor in _tensors(whole)], tree_flatten(whole)[1]
            begin()
            part = run(rows)
            fewer = [tensor.clone() for tensor in _tensors(part)]
            if structure != tree_flatten(part)[1] or list(map(_kind, first)) != list(map(_kind, fewer)):
                return [], f"the number or kind of results depends on the rows: {len(first)} and {len(fewer)}"
            changing = [_changing(tensor, less) for tensor, less in zip(first, fewer, strict=True)]
            batched = [dimensions == [0] for dimensions in changing]
            others = [
                f"result {index} has the batch in dimension {dimensions[-1]}, not first"
                for index, dimensions in enumerate(changing)
                if dimensions not in ([], [0])
            ]
            others += [
                f"result {index} has {len(less)} rows for {rows}"
                for index, (tensor, less) in enumerate(zip(first, fewer, strict=True))
                if batched[index] and (len(tensor), len(less)) != (bucket, rows)
            ]
            if others:
                return batched, "; ".join(others)
            integers = [tensor for tensor in inputs(bucket) if _is_integer(tensor)]
            trained = {storage._cdata for one in parameters if (storage := storage_of(one)) is not None}
            if audit.written & trained:
                return batched, "it writes to a parameter, and rows of padding may change what it writes"
            if integers and audit.written - own:
                return batched, ""  # rows may meet in memory that integers address, such as a cache: all pad alike
            begin()
            if not all(map(same_bits, first, _tensors(run(bucket)))):
                return batched, ""  # depends on the host or on earlier runs, which a capture finds out
            exactly = Exact()
            if thorough:
                with exactly:
                    begin()
                    first = result()
                    begin()
                    fewer = _tensors(run(rows))
            if scaled := _depending_on_count(first, fewer, batched, rows, exactly if thorough else None):
                return batched, f"{scaled} depends on the number of rows, and padding would change it"
            for base in BASES if thorough else BASES[:1]:
                try:
                    begin(base)
                    one = result()
                    state = audit.contents(own)
                    for changes in CHANGES:
                        begin(base)
                        change(changes, lambda tensor: not _is_integer(tensor))
                        other = _tensors(run(bucket))
                        if state != audit.contents(own):
                            return batched, "state that it writes depends on other rows, and would see padding"
                        if mixed := _mixed(one, other, batched, rows):
                            return batched, f"{mixed} depends on other rows, and would see padding"
                except Exception as error:
                    if not base:
                        raise
                    free_frames(error)  # it takes no such values
                    break
            if not any(tensor.device.type == "cpu" for tensor in integers):
                return batched, ""
            # On a CPU only: there an index that is out of range raises, and on a GPU it ends the use of the device.
            for value in (0, 1):
                found = []
                for last in (value, 1 - value):
                    begin()
                    for tensor in integers:
                        tensor.fill_(value)
                    change(functools.partial(torch.Tensor.fill_, value=last), _is_integer)
                    try:
                        found.append(result())
                    except Exception as error:
                        free_frames(error)  # it takes no such values
                        return batched, ""
                if mixed := _mixed(found[0], found[1], batched, rows):
                    return batched, f"{mixed} depends on other rows, and would see padding"
            return batched, ""
    finally:
        start.rewind()


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _kind(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.layout]:
    return tensor.dim(), tensor.dtype, tensor.layout


def _mixed(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], batched: Sequence[bool], rows: int) -> str:
    """Return which result differs in the first `rows`, after which the inputs were changed; empty if none does."""
    for index, (one, other, is_batched) in enumerate(zip(first, second, batched, strict=True)):
        if is_batched and not same_bits(one[:rows], other[:rows]):
            return f"result {index}"
        if not is_batched and not same_bits(one, other):
            return f"result {index}, which has no batch dimension,"
    return ""


def _depending_on_count(
    first: Sequence[torch.Tensor],
    fewer: Sequence[torch.Tensor],
    batched: Sequence[bool],
    rows: int,
    exactly: Exact | None,
) -> str:
    """Return which result differs if fewer rows are given; empty if none does.

    The kernels of other sizes round differently, so results are computed under `exactly` or compared with tolerance.
    """
    for index, (one, less, is_batched) in enumerate(zip(first, fewer, batched, strict=True)):
        if is_batched and not close(one[:rows], less, exactly):
            return f"result {index}"
        if not is_batched and not close(one, less, exactly):
            return f"result {index}, which has no batch dimension,"
    return ""


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _changing(tensor: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Return the dimensions in which two tensors differ in size; [-1] if they have different numbers of them."""
    if tensor.dim() != other.dim():
        return [-1]
    return [index for index, sizes in enumerate(zip(tensor.shape, other.shape, strict=True)) if sizes[0] != sizes[1]]
