"""A site: a captured callable with its static inputs, its buckets and the addresses that it reads.

Runs the callable on static buffers and stores its results. Capture policy and counters are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from graph_cache.core.addresses import AddressBook
from graph_cache.core.buckets import Buckets
from graph_cache.core.buffers import StaticBuffers
from graph_cache.core.keys import GraphKey, Plan, Variant, freeze_variant
from graph_cache.core.shadow import Bytes, Whole, WrittenMemory
from graph_cache.errors import GraphConfigError


class OutputLabel(NamedTuple):
    """Identity of an output buffer. Runs whose outputs have the same label share it, across buckets."""

    leaf: int
    batched: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


class Site:
    """One captured callable, or consecutive parts of one.

    `addresses` holds what the parts read beside the buffers; sites may share one book, which is then checked once.

    `parts` are called in order as `part(**buffers, **variant)` on views of `buffers`: one part under scope `block`, one
    per layer under `layer`, each with its own graph. A part may write into its buffers; tensors returned by the last
    part are copied into output buffers that all buckets share. `variants` lists the keyword values that are part of the
    key; empty means none. `warm_variants` are those captured ahead (default: all).

    A returned tensor counts as batched, and is cut to the rows of a run, if its first dimension equalled the bucket at
    every bucket that ran so far.

    `writes` returns, for a bucket and the inputs in the buffers, what a run writes beside the buffers and its results,
    such as the slots of a cache. Shadow checks save, compare and restore it. A site with `restores` needs none: its
    captures find out.

    With `restores`, a capture restores all memory that its runs write. It copies that memory first, so sites that write
    large caches leave it out and direct their dummy runs to rows that no request uses.
    """

    inference = True  # parts run in inference mode
    independent_rows = True  # runs may be padded, unchecked

    def __init__(
        self,
        name: str,
        parts: Sequence[Callable[..., Any]],
        buffers: StaticBuffers,
        buckets: Buckets,
        *,
        scope: str = "block",
        phase: str = "decode",
        variants: Sequence[Mapping[str, Any]] = ({},),
        warm_variants: Sequence[Mapping[str, Any]] | None = None,
        addresses: AddressBook | None = None,
        generators: Sequence[torch.Generator] = (),
        restores: bool = False,
        writes: Callable[[int], Sequence[WrittenMemory]] = lambda bucket: (),
    ):
        if buckets.max > buffers.max_rows:
            raise GraphConfigError(f"site {name!r}: bucket {buckets.max} exceeds {buffers.max_rows} rows of buffers")
        self.name = name
        self.parts = tuple(parts)
        self.buffers = buffers
        self.buckets = buckets
        self.scope = scope
        self.phase = phase
        self.variants: tuple[Variant, ...] = tuple(freeze_variant(dict(variant)) for variant in variants)
        warm = variants if warm_variants is None else warm_variants
        self.warm_variants: tuple[Variant, ...] = tuple(freeze_variant(dict(variant)) for variant in warm)
        own = AddressBook()
        own.watch(buffers.tensors, prefix=f"{name}.buffers.")
        self.address_books = (own,) if addresses is None else (own, addresses)
        self.generators = tuple(generators)
        self.restores = restores
        self._writes = writes
        # Keys that ran and were not captured since, with all their kernels loaded: their captures need no warm-up run.
        self.ran: set[GraphKey] = set()
        self._outputs: dict[OutputLabel, torch.Tensor] = {}
        # By key: the structure of the results and their output buffers.
        self._result_layouts: dict[GraphKey, tuple[Any, list[OutputLabel]]] = {}
        self._unbatched: set[tuple[Variant, int]] = set()  # output leaves that are not batched: some bucket differed

    def key(self, bucket: int, variant: Variant) -> GraphKey:
        """Return the key of this site's graph for a bucket and keyword values."""
        return GraphKey(self.name, self.scope, self.phase, bucket, variant)

    def warm_keys(self) -> list[GraphKey]:
        """Return every key captured ahead, largest bucket first."""
        return [self.key(bucket, variant) for bucket in reversed(self.buckets.sizes) for variant in self.warm_variants]

    def bodies(self, key: GraphKey) -> list[Callable[[], None]]:
        """Return the parts bound to one key's views, as calls without arguments to be captured."""
        views, variant = self.buffers.view(key.bucket), dict(key.variant)
        calls: list[Callable[[], None]] = []
        for index, part in enumerate(self.parts):
            last = index == len(self.parts) - 1

            def body(part: Callable[..., Any] = part, last: bool = last) -> None:
                result = part(**views, **variant)
                if last:
                    self._store_outputs(result, key)

            calls.append(body)
        return calls

    def serves(self, variant: Variant) -> bool:
        """Return whether these keyword values, including their types, are among the variants."""
        return repr(variant) in map(repr, self.variants)

    def modes(self) -> AbstractContextManager[Any]:
        """Return a context with the mode in which the callable runs: inference mode."""
        return torch.inference_mode()

    def run_eager(self, key: GraphKey) -> None:
        """Run all parts eagerly on the static buffers at the key's bucket, as a graph of that key would."""
        with self.modes():
            self.run_bodies(key)

    def run_beside_replay(self, key: GraphKey) -> str:
        """Do what `run_eager` does, and return what Python state it changed, which is restored."""
        self.run_eager(key)
        return ""

    def run_bodies(self, key: GraphKey) -> None:
        """Run all parts on the static buffers at the key's bucket."""
        for body in self.bodies(key):
            body()

    def run_unpadded(self, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Run all parts on `tensors`, and on new buffers that the callable writes if `tensors` lacks them."""
        with self.modes():
            given = self.buffers.unpadded(plan.rows) | dict(tensors)
            result = None
            for part in self.parts:
                result = part(**given, **dict(plan.variant))
        return result

    # ---- what a function of GraphCache.graphed does differently ----------------------------------------------------

    def before_capture(self, key: GraphKey, generators: Sequence[torch.Generator]) -> None:
        """Find out whether this key can be captured, and raise CaptureError if not. Runs restore `generators`."""

    def capture(self, capture: Callable[[], None]) -> None:
        """Run a capture."""
        capture()

    def captured(self) -> None:
        """Remember what the graphs of a key, captured just now, read."""

    def forget(self) -> None:
        """Forget what captures found out: their graphs were dropped, and the callable may have changed."""

    def compares_padding(self, bucket: int, rows: int) -> bool:
        """Whether runs of so many rows with different padding must give the same results."""
        return False

    def change_padding(self, bucket: int, rows: int, number: int) -> None:
        """Fill the padding of floating-point inputs with other values, of which the results may not depend."""

    def batched_results(self, bucket: int) -> list[bool] | None:
        """Return whether each result has the batch first, if that was checked at this bucket."""
        return None

    # ---- memory ----------------------------------------------------------------------------------------------------

    def static_tensors(self, bucket: int) -> list[torch.Tensor]:
        """Return the buffers and outputs that a run at this bucket reads and writes, for comparison with eager."""
        outputs = [buffer[:bucket] if label.batched else buffer for label, buffer in self._outputs.items()]
        return list(self.buffers.view(bucket).values()) + outputs

    def regions(
        self, bucket: int, written: Sequence[torch.UntypedStorage], rows: int | None = None
    ) -> list[WrittenMemory]:
        """Return all memory that a run at this bucket on the inputs in the buffers writes, for a shadow check.

        With `rows`, padding rows are left out. `written` is the memory beside the buffers and outputs that captures of
        a site with `restores` found.
        """
        rows = bucket if rows is None else rows
        found: list[WrittenMemory] = [Whole(name, view) for name, view in self.buffers.view(rows).items()]
        for label, buffer in self._outputs.items():
            found.append(Whole(f"result {label.leaf}", buffer[:rows] if label.batched else buffer))
        own = {tensor.untyped_storage()._cdata for tensor in (*self.buffers.tensors.values(), *self._outputs.values())}
        found += [Bytes(f"memory {index}", one) for index, one in enumerate(written) if one._cdata not in own]
        return found + list(self._writes(bucket))

    def outputs(self, key: GraphKey, rows: int) -> Any:
        """Return the last run's results for a key, cut to `rows`, in the callable's own structure. They are aliases."""
        if key not in self._result_layouts:
            return None
        structure, labels = self._result_layouts[key]
        leaves = []
        for label in labels:
            whole = self._outputs[label]
            if label.batched:
                is_cut = (
                    self.batched_results(key.bucket) is not None or (key.variant, label.leaf) not in self._unbatched
                )
                whole = whole[: rows if is_cut else key.bucket]
            leaves.append(whole)
        return leaves[0] if structure.is_leaf() else tree_unflatten(leaves, structure)

    def _store_outputs(self, result: Any, key: GraphKey) -> None:
        """Copy returned tensors into the output buffers; the copies are captured too."""
        if result is None:
            return
        leaves, structure = tree_flatten(result)
        labels, checked = [], self.batched_results(key.bucket) or []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                raise GraphConfigError(
                    f"site {self.name!r} returned a {type(leaf).__name__} among its outputs: only "
                    "tensors can be returned from a graph; make other values keywords of the key"
                )
            batched = leaf.dim() > 0 and leaf.shape[0] == key.bucket
            if index < len(checked):
                batched = checked[index]
            elif not batched:
                self._unbatched.add((key.variant, index))
            shape = (self.buffers.max_rows, *leaf.shape[1:]) if batched else tuple(leaf.shape)
            label = OutputLabel(index, batched, shape, leaf.dtype)
            if label not in self._outputs:
                # Allocate outside the recording of this run: outputs outlive it.
                with _disable_current_modes():
                    self._outputs[label] = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
            target = self._outputs[label]
            (target[: key.bucket] if batched else target).copy_(leaf)
            labels.append(label)
        self._result_layouts[key] = structure, labels
