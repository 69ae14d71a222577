"""A site: a callable that is captured, with its static inputs, its buckets and what it reads by address.

Owns how the callable is run on static buffers and where its results go. Knows no policy and no counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from graph_cache.addresses import AddressBook
from graph_cache.buckets import Buckets
from graph_cache.buffers import StaticBuffers
from graph_cache.errors import GraphConfigError
from graph_cache.keys import GraphKey, Variant, freeze_variant


class OutputLabel(NamedTuple):
    """Names an output buffer: every run whose leaf has this form writes into it, so buckets share what they can."""

    leaf: int
    batched: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


class Site:
    """One captured callable, or the consecutive parts of one.

    `parts` are called in order as `part(**buffers, **variant)` on views of `buffers`; under scope `block` there is one,
    under `layer` one per layer, each with a graph of its own. A part may write into the buffers it is given; tensors
    that the last part returns are copied into output buffers that all buckets share. `variants` lists the keyword
    values that are part of the key; empty means none. `warm_variants` are those captured ahead (default: all).

    A returned tensor counts as batched, and is cut to the rows of a run, if its first dimension was the bucket at every
    bucket that ran so far.
    """

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
        self.addresses = addresses if addresses is not None else AddressBook()
        self.addresses.watch(buffers._tensors, prefix=f"{name}.buffers.")
        self.generators = tuple(generators)
        self._outputs: dict[OutputLabel, torch.Tensor] = {}
        self._result_layouts: dict[
            GraphKey, tuple[Any, list[OutputLabel]]
        ] = {}  # how a key's run returns what it returns
        self._unbatched: set[tuple[Variant, int]] = set()  # leaves that some bucket has shown not to follow it

    def key(self, bucket: int, variant: Variant) -> GraphKey:
        """The identity of this site's graph for a bucket and keyword values."""
        return GraphKey(self.name, self.scope, self.phase, bucket, variant)

    def warm_keys(self) -> list[GraphKey]:
        """Every key captured ahead, largest bucket first."""
        return [self.key(bucket, variant) for bucket in reversed(self.buckets.sizes) for variant in self.warm_variants]

    def bodies(self, key: GraphKey) -> list[Callable[[], None]]:
        """The parts bound to one key's views, as calls without arguments: what a capture records."""
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
        """Whether these keyword values, types included, are among the variants."""
        return repr(variant) in map(repr, self.variants)

    def run_eager(self, key: GraphKey) -> None:
        """Run all parts on the static buffers at the key's bucket, exactly what a graph of that key would do."""
        with torch.inference_mode():
            for body in self.bodies(key):
                body()

    def static_tensors(self, bucket: int) -> list[torch.Tensor]:
        """The buffers and outputs that a run at this bucket reads and writes, for checks against eager."""
        outputs = [buffer[:bucket] if label.batched else buffer for label, buffer in self._outputs.items()]
        return list(self.buffers.view(bucket).values()) + outputs

    def outputs(self, key: GraphKey, rows: int) -> Any:
        """What the last run of a key returned, cut to `rows`, in the callable's own structure: aliases."""
        if key not in self._result_layouts:
            return None
        structure, labels = self._result_layouts[key]
        leaves = []
        for label in labels:
            whole = self._outputs[label]
            if label.batched:
                whole = whole[: key.bucket if (key.variant, label.leaf) in self._unbatched else rows]
            leaves.append(whole)
        return tree_unflatten(leaves, structure)

    def _store_outputs(self, result: Any, key: GraphKey) -> None:
        """Copy returned tensors into the output buffers; the copies are part of what is captured."""
        if result is None:
            return
        leaves, structure = tree_flatten(result)
        labels = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                raise GraphConfigError(
                    f"site {self.name!r} returned a {type(leaf).__name__} among its outputs: only "
                    "tensors come out of a graph; make other values keywords of the key"
                )
            batched = leaf.dim() > 0 and leaf.shape[0] == key.bucket
            if not batched:
                self._unbatched.add((key.variant, index))
            shape = (self.buffers.max_rows, *leaf.shape[1:]) if batched else tuple(leaf.shape)
            label = OutputLabel(index, batched, shape, leaf.dtype)
            if label not in self._outputs:
                # Allocated outside whatever records this run: outputs outlive it.
                with _disable_current_modes():
                    self._outputs[label] = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
            target = self._outputs[label]
            (target[: key.bucket] if batched else target).copy_(leaf)
            labels.append(label)
        self._result_layouts[key] = structure, labels
