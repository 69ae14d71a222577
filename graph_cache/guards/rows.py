"""Check a declaration that the rows of a callable are independent, since a run on a bucket has padding rows.

Two runs of the same shape with the same first rows and different others must give the same first rows, bit for bit.
Results must have the batch as their first dimension, with one row per row, or not depend on it. Callables that write
caches at addresses from integer inputs are trusted: dummy rows have the same address there. Writes to parameters are
refused: an embedding with `max_norm` renormalises what its rows select, and random rows can't show that.

Shadow checks repeat the comparison with later inputs (`other_padding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from graph_cache.guards.audit import StorageAudit, storages_of
from graph_cache.guards.exact import Exact, close
from graph_cache.guards.reference import Reference
from graph_cache.guards.torch_settings import free_frames
from graph_cache.guards.values import same_bits

# Inputs are tried with noise in [0, 1) plus one of these, and with something else in the last rows: other values, and
# zeros, as in padding. A normalisation gives the same sums for most rows, but not for zeros.
BASES = (0.0, 1.0, -2.0)
CHANGES: tuple[Callable[[Tensor], object], ...] = (lambda padding: padding.neg_().sub_(0.5), Tensor.zero_)


@dataclass
class RowCheck:
    """What a check found.

    - batched: Whether each tensor of the result has the batch as its first dimension.
    - refusal: Why padding would change a result; empty if it would not.
    - compared: Whether runs with different padding were compared; if not, later ones are not either.
    """

    batched: list[bool] = field(default_factory=list)
    refusal: str = ""
    compared: bool = False


def check_rows(
    run: Callable[[int], Any],
    inputs: Callable[[int], Sequence[Tensor]],
    batched_inputs: Sequence[bool],
    bucket: int,
    rows: int,
    generators: Sequence[torch.Generator],
    parameters: Sequence[Tensor] = (),
    *,
    thorough: bool = True,
) -> RowCheck:
    """Run a callable with different rows, and compare the results. All memory and generators are as before afterwards.

    Args:
        run: Runs the callable on this many rows and returns its result.
        inputs: Returns the input views of this many rows, which the runs overwrite.
        batched_inputs: Whether each of these has the batch as its first dimension.
        bucket: Number of rows with padding.
        rows: Number of rows without, at least 1.
        generators: Generators that the callable may use.
        parameters: Parameters that the callable may use.
        thorough: Also try other ranges of values.
    """
    audit = StorageAudit(saves=True)
    own = {tensor.untyped_storage()._cdata for tensor in inputs(bucket)}
    start = Reference(lambda: list(inputs(bucket)), generators, audit)

    def begin(base: float = 0.0, integers: int | None = None) -> None:
        start.rewind()
        start.with_noise()
        for tensor in inputs(bucket):
            if tensor.is_complex():
                noise = torch.Generator().manual_seed(1)
                torch.view_as_real(tensor).copy_(torch.rand(*tensor.shape, 2, generator=noise, device="cpu"))
            if not _is_integer(tensor):
                tensor.add_(base)
            elif integers is not None:
                tensor.fill_(integers)

    def padding(integers: bool = False) -> list[Tensor]:
        pairs = zip(inputs(bucket), batched_inputs, strict=True)
        return [tensor[rows:] for tensor, is_batched in pairs if is_batched and _is_integer(tensor) is integers]

    def results(count: int = bucket) -> list[Tensor]:
        return [tensor.clone() for tensor in _tensors(run(count))]

    try:
        with audit:
            begin()
            whole = run(bucket)
            first, structure = [tensor.clone() for tensor in _tensors(whole)], tree_flatten(whole)[1]
            begin()
            part = run(rows)
            fewer = _tensors(part)
            if structure != tree_flatten(part)[1] or list(map(_kind, first)) != list(map(_kind, fewer)):
                return RowCheck(
                    refusal=f"the number or kind of results depends on the rows: {len(first)} and {len(fewer)}"
                )
            changing = [_changing(tensor, less) for tensor, less in zip(first, fewer, strict=True)]
            found = RowCheck([dimensions == [0] for dimensions in changing])
            if problem := _misplaced_batch(changing, first, fewer, bucket, rows):
                found.refusal = problem
                return found
            has_integers = any(map(_is_integer, inputs(bucket)))
            if audit.written & set(storages_of(parameters)):
                found.refusal = "it writes to a parameter, and rows of padding may change what it writes"
                return found
            if has_integers and audit.written - own:
                return found  # rows may meet in memory that integers address, such as a cache: all pad alike
            begin()
            if not all(map(same_bits, first, _tensors(run(bucket)))):
                return found  # depends on the host or on earlier runs, which a capture finds out
            found.compared = True
            with Exact() as exactly:
                begin()
                first = results()
                begin()
                fewer = results(rows)
            if exactly.is_complete and (scaled := _differing(first, fewer, found.batched, rows, close)):
                found.refusal = f"{scaled} depends on the number of rows, and padding would change it"
                return found
            for base in BASES if thorough else BASES[:1]:
                try:
                    begin(base)
                    one = results()
                    state = audit.contents(own)
                    for change in CHANGES:
                        begin(base)
                        for tensor in padding():
                            change(tensor)
                        if mixed := _differing(one, _tensors(run(bucket)), found.batched, rows, same_bits):
                            found.refusal = f"{mixed} depends on other rows, and would see padding"
                        if state != audit.contents(own):
                            found.refusal = "state that it writes depends on other rows, and would see padding"
                        if found.refusal:
                            return found
                except Exception as error:
                    if not base:
                        raise
                    free_frames(error)  # it takes no such values
                    break
            # On a CPU only: there an index that is out of range raises, and on a GPU it ends the use of the device.
            if has_integers and all(tensor.device.type == "cpu" for tensor in inputs(bucket)):
                found.refusal = _mixing_integers(begin, padding, results, found.batched, rows)
            return found
    finally:
        start.rewind()


def _mixing_integers(
    begin: Callable[..., None],
    padding: Callable[[bool], list[Tensor]],
    results: Callable[[], list[Tensor]],
    batched: Sequence[bool],
    rows: int,
) -> str:
    """Return why integers in other rows would change a result; empty if they would not, or it takes no 0 or 1."""
    for value in (0, 1):
        found = []
        for last in (value, 1 - value):
            begin(integers=value)
            for tensor in padding(True):
                tensor.fill_(last)
            try:
                found.append(results())
            except Exception as error:
                free_frames(error)
                return ""
        if mixed := _differing(found[0], found[1], batched, rows, same_bits):
            return f"{mixed} depends on other rows, and would see padding"
    return ""


def other_padding(tensor: Tensor, number: int) -> None:
    """Fill padding rows with values in [-1.5, -0.5], as `check_rows` has tried them; with others for each number."""
    if not _is_integer(tensor) and tensor.numel():
        values = torch.linspace(-1.5, -0.5, tensor.numel(), device=tensor.device).roll(number)
        tensor.copy_(values.view(tensor.shape))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _kind(tensor: Tensor) -> tuple[int, torch.dtype, torch.layout]:
    return tensor.dim(), tensor.dtype, tensor.layout


def _misplaced_batch(
    changing: Sequence[list[int]], first: Sequence[Tensor], fewer: Sequence[Tensor], bucket: int, rows: int
) -> str:
    """Return which results have the batch in another dimension than the first, or not one row per row."""
    others = [
        f"result {index} has the batch in dimension {dimensions[-1]}, not first"
        for index, dimensions in enumerate(changing)
        if dimensions not in ([], [0])
    ]
    others += [
        f"result {index} has {len(less)} rows for {rows}"
        for index, (dimensions, tensor, less) in enumerate(zip(changing, first, fewer, strict=True))
        if dimensions == [0] and (len(tensor), len(less)) != (bucket, rows)
    ]
    return "; ".join(others)


def _differing(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    batched: Sequence[bool],
    rows: int,
    equal: Callable[[Tensor, Tensor], bool],
) -> str:
    """Return which result of two runs differs in the first `rows`; empty if none does."""
    for index, (one, other, is_batched) in enumerate(zip(first, second, batched, strict=True)):
        if is_batched and not equal(one[:rows], other[:rows]):
            return f"result {index}"
        if not is_batched and not equal(one, other):
            return f"result {index}, which has no batch dimension,"
    return ""


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _changing(tensor: Tensor, other: Tensor) -> list[int]:
    """Return the dimensions in which two tensors differ in size; [-1] if they have different numbers of them."""
    if tensor.dim() != other.dim():
        return [-1]
    return [index for index, sizes in enumerate(zip(tensor.shape, other.shape, strict=True)) if sizes[0] != sizes[1]]
