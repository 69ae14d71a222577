"""A function made by `GraphCache.graphed`: a site that any function may be, of which nothing is known before it runs.

The first call of each bucket is observed. A function that changes Python state is refused, and so are results that
depend on padding. What it reads is watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from graph_cache.core.addresses import AddressBook
from graph_cache.core.buckets import Buckets
from graph_cache.core.buffers import BufferSpec, StaticBuffers
from graph_cache.core.function import FunctionState
from graph_cache.core.keys import GraphKey
from graph_cache.core.site import Site
from graph_cache.errors import CaptureError, CaptureRefused, GraphConfigError, SignatureMismatch
from graph_cache.guards.rows import RowCheck, check_rows, other_padding
from graph_cache.guards.torch_settings import free_frames

logger = logging.getLogger(__name__)


class GraphedSite(Site):
    """The site of a function. `default_generator` is the one of its device; `GraphCache.graphed` has the rest.

    `independent_rows` declares that a run may be padded: no row of a result depends on other rows, or on their number.
    It is checked.
    """

    inference = False  # it may differentiate inside

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: Mapping[str, BufferSpec],
        buckets: Buckets,
        device: torch.device,
        default_generator: torch.Generator,
        *,
        independent_rows: bool = False,
        watch: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        generators: Sequence[torch.Generator] = (),
    ):
        addresses = AddressBook()
        if watch is not None:
            _refuse_uninitialized(name, watch)
            addresses.watch(watch, selects_code=True)
        buffers = StaticBuffers(inputs, buckets.max, device)
        super().__init__(name, [function], buffers, buckets, addresses=addresses, generators=generators, restores=True)
        self.independent_rows = independent_rows
        self.state = FunctionState(function, watch, addresses, (*generators, default_generator), device)
        self.observed: set[GraphKey | None] = set()  # keys of which a call was observed; None: above all buckets
        self.refusal = ""  # why the function is never captured
        self._function = function
        self._inputs = list(buffers.specs)
        self._batched_input = next((label for label, spec in buffers.specs.items() if spec.batched), None)
        self._unchecked: set[int] = set()  # buckets at which the rows can't be checked, as the function takes no noise
        self._checked: dict[tuple[int, int], RowCheck] = {}  # by bucket and the rows that are padded to it
        self._batched_results: dict[int, list[bool]] = {}  # by checked bucket: whether each result has the batch first
        self._modes: Hashable = None  # in which the rows were checked; see FunctionState.current

    def inputs_of(
        self, values: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[int, Mapping[str, torch.Tensor]]:
        """Return the number of rows and all inputs of a call by name. Raises SignatureMismatch if some don't fit."""
        if values:
            tensors = self._by_name(values, tensors)
        first = tensors.get(self._batched_input) if self._batched_input is not None else None
        rows = first.shape[0] if isinstance(first, torch.Tensor) and first.dim() else self.buckets.max
        self.buffers.check(tensors, rows)
        return rows, tensors

    def _by_name(self, values: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_position = dict(zip(self._inputs, values, strict=False))
        twice = [name for name in by_position if name in tensors]
        if len(values) > len(self._inputs) or twice:
            what = f"{twice[0]} by position and by name" if twice else f"{len(values)} inputs by position"
            problem = f"site {self.name!r}: found {what}; its inputs are {', '.join(self._inputs)}"
            raise SignatureMismatch(problem, [problem])
        return by_position | dict(tensors)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Set the modes in which the function runs: without gradients, and its results are ordinary tensors."""
        with torch.inference_mode(False), torch.no_grad():
            yield

    def run_beside_replay(self, key: GraphKey) -> str:
        """Do what `run_eager` does, and return what Python state the function changed, which is restored."""
        return self.state.refused_changes(lambda: self.run_eager(key))

    def needs_observation(self, key: GraphKey | None) -> bool:
        """Whether a run of this key must be observed before a capture."""
        return key not in self.observed and not self.refusal

    def observe(
        self, key: GraphKey | None, run: Callable[[], Any], inputs: Mapping[str, torch.Tensor], *, keeps: bool
    ) -> tuple[bool, Any]:
        """Observe a run on these inputs at this key: what the function reads, and whether it can be captured.

        Sets `refusal`. Returns whether the run's effects were kept, and its result; see `FunctionState.observe`.
        """
        self.observed.add(key)
        with self.modes():
            kept, value, self.refusal = self.state.observe(run, inputs, keeps=keeps)
        return kept, value

    def before_capture(self, key: GraphKey, generators: Sequence[torch.Generator]) -> None:
        """Observe a run, unless one was, and check the rows. Raises CaptureError if this key can't be captured."""
        if self.needs_observation(key):
            try:
                self.observe(key, lambda: self.run_bodies(key), self.buffers.view(key.bucket), keeps=False)
            except Exception as error:
                free_frames(error)
                raise CaptureError(f"{self.name}: {type(error).__name__}: {error}") from error
        self._raise_if_refused()
        if self.in_other_modes():
            raise CaptureError(f"{self.name}: its first call or capture had other modes, such as train or eval")
        self.check_rows(key.bucket, None, generators)
        self._raise_if_refused()

    def capture(self, capture: Callable[[], None]) -> None:
        """Run a capture, and refuse it if it changes Python state."""
        self.refusal = self.state.refused_changes(capture)
        self._raise_if_refused()

    def captured(self) -> None:
        """Remember the quantizers that the graphs read."""
        self.state.captured()

    def _raise_if_refused(self) -> None:
        if self.refusal:
            raise CaptureRefused(f"{self.name}: {self.refusal}")

    def forget(self) -> None:
        """Observe and check again: the function may have changed."""
        self.refusal, self._modes = "", None
        for known in (self.observed, self._unchecked, self._checked, self._batched_results):
            known.clear()

    def check_rows(self, bucket: int, rows: int | None, generators: Sequence[torch.Generator]) -> None:
        """Find out, once, which results have the batch first, and whether padding `rows` to a bucket would change one.

        `rows` is by default the least number that is padded to this bucket. `generators` are restored, and so are the
        site's generators.
        """
        if rows is None:
            rows = self._fewest_rows(bucket)
        if not self._checked and not self.refusal:
            self._modes = self.state.current()
            self._checked[0, 0] = RowCheck()
            # The first check is thorough, and costs least at the smallest bucket with padding.
            self.check_rows(next((one for one in self.buckets if self._fewest_rows(one) < one), 0), None, generators)
        if (bucket, rows) in self._checked or self.refusal:
            return
        self._checked[bucket, rows] = RowCheck()
        specs = self.buffers.specs.values()
        if not self.independent_rows or not 0 < rows < bucket or not any(spec.batched for spec in specs):
            return  # no padding

        def run(rows: int) -> Any:
            return self._function(**self.buffers.view(rows))

        def check() -> None:
            try:
                known = self._batched_results.get(bucket)
                found = self._checked[bucket, rows] = check_rows(
                    run,
                    lambda rows: list(self.buffers.view(rows).values()),
                    [spec.batched for spec in specs],
                    bucket,
                    rows,
                    (*self.generators, *generators),
                    self.state.parameters(),
                    thorough=not self._batched_results,
                )
                self._batched_results[bucket], self.refusal = found.batched, found.refusal
                if known not in (None, found.batched):
                    self.refusal = self.refusal or "which results have the batch first depends on the number of rows"
            except Exception as error:  # it may reject noise, or these numbers of rows
                free_frames(error)
                self._unchecked.add(bucket)
                logger.debug("%s: rows are not checked, and calls are not padded: %s", self.name, error)

        with self.modes():
            changes = self.state.refused_changes(check)
            self.refusal = self.refusal or changes

    def can_pad(self, bucket: int, rows: int) -> bool:
        """Whether a run of so many rows may be padded to a bucket: its rows are independent, and could be checked."""
        return rows == bucket or (self.independent_rows and bucket not in self._unchecked)

    def change_padding(self, bucket: int, rows: int, number: int) -> None:
        """Fill the padding of floating-point inputs with other values, of which the results may not depend."""
        for name, spec in self.buffers.specs.items():
            if spec.batched and spec.pad is not None:
                other_padding(self.buffers[name][rows:bucket], number)

    def compares_padding(self, bucket: int, rows: int) -> bool:
        """Whether runs of so many rows with different padding must give the same results."""
        checked = self._checked.get((bucket, rows))
        return checked is not None and checked.compared

    def _fewest_rows(self, bucket: int) -> int:
        """Return the least number of rows for which this is the smallest bucket."""
        return 1 + max((size for size in self.buckets if size < bucket), default=0)

    def in_other_modes(self) -> bool:
        """Whether the function now has other modes than those in which it was checked.

        Its rows may depend on each other in these, as in a batch norm in train mode.
        """
        return bool(self._checked) and (
            self._modes != self.state.current() or not self.state.reads_current_quantizers()
        )

    def batched_results(self, bucket: int) -> list[bool] | None:
        """Return whether each result has the batch first, if that was checked at this bucket."""
        return self._batched_results.get(bucket)


def _refuse_uninitialized(site: str, watch: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    tensors = watch.named_parameters() if isinstance(watch, torch.nn.Module) else watch.items()
    names = [name for name, tensor in tensors if is_lazy(tensor)]
    if names:
        raise GraphConfigError(
            f"site {site!r}: watch has parameters without a shape ({', '.join(names)}): call the module once before"
        )
