"""Static input and output buffers: allocated once for the largest bucket and shared by every graph of a site.

Bucket b is the first b rows of each buffer, so all buckets share one storage and one address. This module allocates the
buffers, copies inputs in and pads unused rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from graph_cache.core.signature import Signature, TensorSignature
from graph_cache.core.thread_owner import ThreadOwner
from graph_cache.errors import GraphConfigError, GraphError

BATCH = "batch"


@dataclass(frozen=True)
class BufferSpec:
    """Shape, dtype and padding of one static buffer.

    `shape` may begin with the string "batch": that dimension takes the bucket's size. `pad` fills the unused rows; None
    leaves them unchanged (outputs, or buffers that the captured callable itself overwrites).
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    pad: int | float | bool | None = 0

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        object.__setattr__(self, "shape", shape)
        if any(not (size == BATCH if isinstance(size, str) else size >= 0) for size in shape) or BATCH in shape[1:]:
            raise GraphConfigError(f"buffer shape {shape}: sizes are whole numbers, and only the first may be 'batch'")

    @property
    def batched(self) -> bool:
        """True if the first dimension is the batch size."""
        return bool(self.shape) and self.shape[0] == BATCH

    def resolve(self, rows: int) -> tuple[int, ...]:
        """Return the concrete shape for `rows` rows."""
        return tuple(rows if isinstance(size, str) else size for size in self.shape)


class StaticBuffers(Mapping[str, torch.Tensor]):
    """Named buffers sized for `max_rows`; as a mapping, the full tensors by name.

    Two sites may share one object. Every returned view aliases the same storage, whose address never changes. `tensors`
    gives existing tensors to use as buffers, such as another site's outputs; the others are allocated. Raises
    SignatureMismatch if one of them does not match its spec.
    """

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        max_rows: int,
        device: torch.device | str,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ):
        self.specs = dict(specs)
        self.max_rows = max_rows
        self.device = torch.device(device)
        existing = dict(tensors or {})
        if existing:
            found_on = torch.empty(0, device=device).device  # with an index, as the tensors have
            wanted = {
                name: TensorSignature(self.specs[name].resolve(max_rows), self.specs[name].dtype, found_on)
                for name in existing
            }
            Signature(wanted).check(existing, what=f"buffers of {max_rows} rows")
        self._tensors = {
            name: existing[name]
            if name in existing
            else torch.full(spec.resolve(max_rows), spec.pad or 0, dtype=spec.dtype, device=device)
            for name, spec in self.specs.items()
        }
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self.owner = ThreadOwner(f"the buffers {', '.join(self.specs)}")
        self._loaded_by: int | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The full tensors by name: the same dictionary at every access, for an AddressBook."""
        return self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def view(self, bucket: int) -> dict[str, torch.Tensor]:
        """Return the first `bucket` rows of every buffer: aliases, the same objects at every call."""
        views = self._views.get(bucket)
        if views is None:
            views = self._views[bucket] = {
                name: whole[:bucket] if self.specs[name].batched else whole for name, whole in self._tensors.items()
            }
        return views

    def signature(self, rows: int, names: tuple[str, ...] | None = None) -> Signature:
        """Return the signature that inputs of `rows` rows must match to be copied in."""
        chosen = self.specs if names is None else names
        return Signature(
            {
                name: TensorSignature(
                    self.specs[name].resolve(rows), self._tensors[name].dtype, self._tensors[name].device
                )
                for name in chosen
            }
        )

    def load(self, tensors: Mapping[str, torch.Tensor], rows: int, bucket: int) -> None:
        """Copy `rows` rows of each tensor in and fill the rows up to `bucket` with padding.

        Every input is required; buffers without padding are outputs and may be left out. Raises SignatureMismatch,
        listing every difference, before anything is written.
        """
        self.check(tensors, rows)
        self.copy_in(tensors, rows, bucket)

    def copy_in(self, tensors: Mapping[str, torch.Tensor], rows: int, bucket: int) -> None:
        """Do what `load` does for tensors that were checked."""
        self._loaded_by = threading.get_ident()
        # Otherwise an input that requires grad would attach its autograd graph to the buffers.
        with torch.inference_mode():
            for name, tensor in tensors.items():
                whole = self._tensors[name]
                (whole[:rows] if self.specs[name].batched else whole).copy_(tensor, non_blocking=True)
        self.fill_padding(rows, bucket)

    def claim(self, takes_over: bool) -> None:
        """Make the calling thread the user of these buffers, see ThreadOwner. Raises GraphError.

        It is also refused if the last `load` was in another thread: these are not its inputs.
        """
        self.owner.claim(takes_over)
        if self._loaded_by not in (None, threading.get_ident()):
            loaded_by, self._loaded_by = self._loaded_by, None
            raise GraphError(
                f"the buffers {', '.join(self.specs)} were loaded by the thread {loaded_by} and run by the thread "
                f"{threading.get_ident()}: load, run and copy the results within `with cache.pool.turn():`"
            )

    def check(self, tensors: Mapping[str, object], rows: int) -> None:
        """Raise SignatureMismatch, listing every difference, unless `tensors` can be loaded as `rows` rows."""
        if self._fit(tensors, rows):
            return
        required = [name for name, spec in self.specs.items() if spec.pad is not None or name in tensors]
        self.signature(rows, tuple(required)).check(tensors, what=f"inputs of {rows} rows")

    def _fit(self, tensors: Mapping[str, object], rows: int) -> bool:
        """Return whether `check` has nothing to report. Runs at every call, so it builds no descriptions."""
        for name, spec in self.specs.items():
            tensor = tensors.get(name)
            if tensor is None and spec.pad is None and name not in tensors:
                continue
            whole = self._tensors[name]
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.dtype != whole.dtype
                or tensor.device != whole.device
                or tensor.shape != ((rows, *spec.shape[1:]) if spec.batched else spec.shape)
            ):
                return False
        return tensors.keys() <= self.specs.keys()

    def unpadded(self, rows: int) -> dict[str, torch.Tensor]:
        """Return new zeroed tensors of `rows` rows for the buffers that the captured callable writes."""
        return {
            name: torch.zeros(spec.resolve(rows), dtype=spec.dtype, device=self.device)
            for name, spec in self.specs.items()
            if spec.pad is None
        }

    def fill_padding(self, rows: int, bucket: int) -> None:
        """Fill the rows from `rows` up to `bucket` with their padding value."""
        if rows == bucket:
            return
        for name, spec in self.specs.items():
            if spec.batched and spec.pad is not None:
                self._tensors[name][rows:bucket].fill_(spec.pad)

    def fill_dummy(self) -> None:
        """Fill every row with padding for a capture, whose dummy runs must not touch rows of a live request."""
        for name, spec in self.specs.items():
            if spec.pad is not None:
                self._tensors[name].fill_(spec.pad)

    def snapshot(self, bucket: int) -> dict[str, torch.Tensor]:
        """Return copies of the first `bucket` rows, for `restore`."""
        return {name: view.clone() for name, view in self.view(bucket).items()}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Write a snapshot back into the buffers."""
        for name, tensor in saved.items():
            (self._tensors[name][: tensor.shape[0]] if self.specs[name].batched else self._tensors[name]).copy_(tensor)
