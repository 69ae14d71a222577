"""The graph cache: plan, capture, replay, evict and invalidate graphs.

`plan` alone decides whether a batch replays a graph or runs eager. A stale graph is never replayed. Handles callables
and tensors only, not models or requests.

Any thread may call functions of `graphed`, capture, drop graphs and read reports. `run` uses static memory that its
caller loads and reads: one thread does so, or each within `pool.turn()`; a second one is refused.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.utils._pytree import tree_map

from graph_cache.backends import backend_for
from graph_cache.config import GraphConfig
from graph_cache.core.addresses import GEOMETRY_PARTS, PARTS, AddressBook, Moved
from graph_cache.core.buckets import Buckets
from graph_cache.core.buffers import BufferSpec
from graph_cache.core.capture_state import CaptureState, CaptureStatus
from graph_cache.core.graphed import GraphedSite
from graph_cache.core.keys import (
    ABOVE_MAX,
    CAPTURE_FAILED,
    GRAPHS_OFF,
    NOT_CAPTURED,
    OTHER_MODES,
    REPEATED,
    STALE,
    UNCHECKED_ROWS,
    UNKNOWN_VARIANT,
    GraphKey,
    Plan,
    Variant,
    freeze_variant,
)
from graph_cache.core.manifest import Manifest
from graph_cache.core.pool import GraphPool
from graph_cache.core.runner import GraphRunner
from graph_cache.core.shadow import CheckedCall, Shadow, ShadowChecks
from graph_cache.core.site import Site
from graph_cache.core.stats import CacheStats
from graph_cache.errors import CaptureError, GraphConfigError
from graph_cache.guards.torch_settings import modes_active
from graph_cache.utils.digest import Digest
from graph_cache.utils.layout import replica_of
from graph_cache.utils.validation import names_arguments

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Ran(NamedTuple, Generic[T]):
    """Result of `GraphCache.run`: what ran, and the results.

    `reason` says why the run was eager; None if a graph was replayed. `value` holds the results. They alias static
    memory and are overwritten by the next run: call `copy()` to keep them.
    """

    key: GraphKey
    reason: str | None
    value: T

    @property
    def is_graph(self) -> bool:
        """Whether a graph was replayed."""
        return self.reason is None

    @property
    def bucket(self) -> int:
        """Number of rows that ran, padding included."""
        return self.key.bucket

    def copy(self) -> T:
        """Return the results in newly allocated memory."""
        if isinstance(self.value, torch.Tensor):
            return cast(T, self.value.clone())
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, self.value)


@dataclass
class CacheEntry:
    """The capture of a key and its graphs, one per part."""

    key: GraphKey
    state: CaptureState = field(default_factory=CaptureState)
    runners: list[GraphRunner] = field(default_factory=list)
    real_rows: int = 0
    nbytes: int = 0
    shadow: Shadow = field(default_factory=Shadow)

    def replay(self) -> None:
        """Run the graphs in order."""
        for runner in self.runners:
            runner.replay()

    def drop(self, cause: CaptureStatus) -> None:
        """Destroy the graphs, or forget the failure."""
        _close(self.runners)
        self.runners, self.real_rows, self.nbytes, self.shadow = [], 0, 0, Shadow()
        self.state.drop(cause)

    def row(self) -> dict[str, Any]:
        """Return the entry as a row of plain values."""
        key, runners, replays = self.key, self.runners, self.state.replays
        return {
            "site": key.site,
            "scope": key.scope,
            "phase": key.phase,
            "bucket": key.bucket,
            "statics": dict(key.variant),
            "padded_rows": replays * key.bucket - self.real_rows,
            "graphs": len(runners),
            **self.shadow.columns(),
        } | self.state.row(
            engine=runners[0].engine if runners else "",
            nbytes=self.nbytes,
            capture_seconds=sum(runner.capture_seconds for runner in runners),
            digest=Digest.combined(runner.digest for runner in runners),
        )


class GraphCache:
    """Captured graphs by key, with planning and replay.

    `capture_on_miss`: running a plan without a graph captures it first (warm-up mode `lazy`); otherwise it runs eager
    until `warm()` or `warm_next()` has captured it. Several caches on one device may share a `pool`.
    """

    @names_arguments
    def __init__(
        self,
        config: GraphConfig | None = None,
        device: torch.device | str = "cpu",
        *,
        pool: GraphPool | None = None,
        capture_on_miss: bool = True,
        manifest: Manifest | None = None,
    ):
        if not isinstance(config, GraphConfig | None):
            raise GraphConfigError(f"config is {config!r}: give a GraphConfig, and the device as device={config!r}")
        self.config = config or GraphConfig()
        self.pool = pool or GraphPool(backend_for(device))
        self.capture_on_miss = capture_on_miss
        self.must_capture = False  # raise on a failed capture: ranks must capture alike
        self.manifest = manifest
        self.stats = CacheStats()
        self.shadows = ShadowChecks(self.pool.backend, self.stats, self.config.shadow_check_share)
        self.enabled = self.config.captures_inference
        self._sites: dict[str, Site] = {}
        self._entries: dict[GraphKey, CacheEntry] = {}  # of keys whose capture was tried at least once
        self._plans: dict[tuple, Plan] = {}
        self._pending: list[GraphKey] | None = None  # computed on demand, as are the next two
        self._warm_ratio: float | None = None
        self._captured: dict[tuple[str, str], int] | None = None
        self._address_books: list[tuple[AddressBook, list[str]]] = []  # with the names of the sites that share it
        self._checks = 0  # address checks so far: they select the slices of partial checks
        self.pool_bytes = 0

    def __repr__(self) -> str:
        captured = sum(self.captured_graphs().values())
        sites = ", ".join(self._sites) or "none"
        return f"<GraphCache on {self.pool.backend.device}; sites: {sites}; graphs captured: {captured}>"

    # ---- sites -----------------------------------------------------------------------------------------------------

    @property
    def sites(self) -> Mapping[str, Site]:
        """The registered sites by name, as a read-only view."""
        return MappingProxyType(self._sites)

    def add_site(self, site: Site) -> Site:
        """Register a site. Names must be unique."""
        if site.name in self._sites:
            raise GraphConfigError(f"a site named {site.name!r} is registered already: give each site its own name")
        self._sites[site.name] = site
        for book in site.address_books:
            sharing = next((sites for known, sites in self._address_books if known is book), None)
            if sharing is None:
                self._address_books.append((book, [site.name]))
            else:
                sharing.append(site.name)
        self._clear_summaries()
        return site

    @names_arguments
    def graphed(
        self,
        name: str,
        fn: Callable[..., Any],
        inputs: Mapping[str, BufferSpec],
        *,
        buckets: Iterable[int],
        independent_rows: bool = False,
        watch: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Callable[..., Any]:
        """Return a function of the same inputs, [rows, …] each, that runs `fn(**inputs)` from graphs.

        Inputs are given by name, or by position in the order of `inputs`.

        Its results are copies without gradient history. Threads may call it at the same time; they replay one after
        another. `fn` must not wait for another thread's call. `independent_rows` declares that no row of a result
        depends on other rows or on their number: calls are then padded to the next bucket. Without it, only calls with
        the rows of a bucket replay. The declaration is checked with different padding, at the capture and by shadow
        checks. `watch` gives what `fn` reads besides its inputs, so that
        a moved tensor is detected. A call that does not replay runs `fn` eager on the inputs as given, without padding:

        - if no graph serves it: no bucket holds its rows, none is captured yet, or its capture failed;
        - if what a capture bakes in differs from the first call or capture: autocast (also Transformer Engine's), the
          settings in `torch_settings.py`, train or eval mode and hooks of modules, and Python state that `fn` reads;
        - if `fn` changes Python state, or writes to an input or a parameter;
        - if its rows are no bucket and not declared independent, or a result is found to depend on other rows, or has
          the batch in another dimension than the first;
        - within a TorchFunctionMode or TorchDispatchMode.

        The returned function raises SignatureMismatch if its inputs differ from `inputs` in more than the number of
        rows. A capture restores all memory that its runs write, such as the running statistics of a watched module.
        """
        site = GraphedSite(
            name,
            fn,
            inputs,
            Buckets(tuple(buckets)),
            self.pool.backend.device,
            self.pool.backend.default_generator,
            independent_rows=independent_rows,
            watch=watch,
            generators=generators,
        )
        self.add_site(site)

        def call(*values: torch.Tensor, **tensors: torch.Tensor) -> Any:
            return self._call(site, *site.inputs_of(values, tensors))

        return call

    def _call(self, site: GraphedSite, rows: int, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Replay a graph for a call of a function, and return copies of its results; else call it as it was written.

        Threads take turns: the lock is held from the copy of the inputs to that of the results, and in eager calls,
        since a capture in another thread restores what it writes. A function that is never captured needs no lock.
        """
        with self.pool.lock:
            self.pool.backend.order_streams()
            reason = None
            if modes_active():
                reason = OTHER_MODES
            elif len(set(map(id, tensors.values()))) < len(tensors):  # its buffers would be several
                reason = REPEATED
            elif self.enabled:
                self.check_addresses(site=site.name)  # other sites check theirs at their own calls
            plan = self.plan(site.name, rows)
            if reason is None and self.enabled:
                if site.needs_observation(plan.key):
                    copies = {label: replica_of(tensor) for label, tensor in tensors.items()}
                    kept, value = site.observe(plan.key, lambda: site.run_unpadded(plan, copies), copies, keeps=True)
                    if kept:  # what it changed stays: this was the call
                        self._count_unpadded(self._captured_on_miss(plan))
                        return value
                if plan.bucket is not None:
                    site.check_rows(plan.bucket, rows, [self.pool.backend.default_generator])
                if not site.refusal and site.in_other_modes():
                    reason = OTHER_MODES
                elif not site.refusal and (not rows or plan.bucket is not None and not site.can_pad(plan.bucket, rows)):
                    reason = UNCHECKED_ROWS
                else:
                    plan = plan if plan.is_graph else self._captured_on_miss(plan)
                    if site.refusal and plan.is_graph:  # found out after the capture, at another number of rows
                        reason = CAPTURE_FAILED
            if reason is None and plan.bucket is not None and plan.is_graph:
                site.buffers.copy_in(tensors, rows, plan.bucket)
                return self._run(plan).copy()
            self._count_unpadded(plan, reason)
            if not site.refusal:
                return site.run_unpadded(plan, tensors)
        return site.run_unpadded(plan, tensors)

    # ---- planning and running --------------------------------------------------------------------------------------

    def plan(self, site: str, rows: int, **variant: Any) -> Plan:
        """Return the plan for `rows` rows with these keyword values: a graph to replay, or eager with a reason.

        This is the only place where that decision is made.
        """
        memo = (site, rows, *variant.items(), *map(type, variant.values()))  # types, since 1 == 1.0 == True
        plan = self._plans.get(memo)
        if plan is None:
            plan = self._plans[memo] = self._make_plan(self._sites[site], rows, freeze_variant(variant))
        return plan

    def _make_plan(self, site: Site, rows: int, variant: Variant) -> Plan:
        bucket = site.buckets.round_up(rows)
        if bucket is None:
            return Plan(site.name, rows, None, None, ABOVE_MAX, variant)
        key = site.key(bucket, variant)
        reason = self._eager_reason(site, key)
        if reason in (None, NOT_CAPTURED) and rows != bucket and not site.independent_rows:
            reason = UNCHECKED_ROWS
        return Plan(site.name, rows, bucket, key, reason, variant)

    def _eager_reason(self, site: Site, key: GraphKey) -> str | None:
        """Return why a run of this key is eager now; None if it replays a graph."""
        if not self.enabled:
            return GRAPHS_OFF
        if not site.serves(key.variant):
            return UNKNOWN_VARIANT
        entry = self._entries.get(key)
        return NOT_CAPTURED if entry is None else entry.state.fallback_reason

    def _may_capture(self, key: GraphKey) -> bool:
        """Whether this key has neither a graph nor a failed capture."""
        entry = self._entries.get(key)
        return entry is None or entry.state.may_capture

    def run(self, plan: Plan) -> Ran[Any]:
        """Run a plan on its site's static buffers, which the caller has loaded, and count it.

        A plan may be kept and run again; it is re-evaluated if graphs were captured or dropped since. Returns what ran,
        with results cut to the plan's rows, which the next run overwrites. A failed capture is logged and counted, and
        the call runs eager.

        Raises GraphError if another thread uses these buffers: see ThreadOwner.
        """
        self._sites[plan.site].buffers.claim(self.pool.in_turn)
        return self._run(plan)

    def _run(self, plan: Plan) -> Ran[Any]:
        site = self._sites[plan.site]
        if plan.bucket is None or plan.key is None:
            raise GraphConfigError(f"{plan.rows} rows exceed every bucket of site {plan.site!r}: use run_unpadded")
        entry = self._entries.get(plan.key)
        if self.capture_on_miss and (entry is None or entry.state.may_capture):
            if self.enabled and site.serves(plan.key.variant):
                entry = self._capture_for(plan.key)
        self.shadows.settle()
        if entry is not None and entry.state.captured:
            if self.shadows.wants(site.name, entry.shadow):
                self._replay_beside_eager(site, entry, plan.rows)
            else:
                entry.replay()
        else:
            site.run_eager(plan.key)
        reason: str | None = None
        if entry is not None and entry.state.captured:
            entry.state.replays += 1
            entry.real_rows += plan.rows
            self.stats.replays[site.name, site.scope, site.phase, plan.bucket] += len(entry.runners)
            if self.manifest is not None:
                self.manifest.replayed(plan.key)
        else:
            reason = self._eager_reason(site, plan.key) or NOT_CAPTURED
            self.stats.fallbacks[site.name, site.phase, reason] += 1
        self._observe(site, plan.rows, plan.bucket - plan.rows, plan.key.variant)
        return Ran(plan.key, reason, site.outputs(plan.key, plan.rows))

    def _replay_beside_eager(self, site: Site, entry: CacheEntry, rows: int) -> None:
        """Make a shadow check of a key, which leaves the results of eager. Drops its graphs if they differ.

        Where results may not depend on padding, eager gets another one, and only its `rows` are compared.
        """
        key, generators = entry.key, dict.fromkeys((self.pool.backend.default_generator, *site.generators))
        written = [storage for runner in entry.runners for storage in runner.written or ()]
        compared = rows if site.compares_padding(key.bucket, rows) else None

        def eager() -> str:
            if compared is not None:
                site.change_padding(key.bucket, rows, entry.state.replays)
            return site.run_beside_replay(key)

        call = CheckedCall(
            key,
            entry.replay,
            eager,
            lambda: site.regions(key.bucket, written, compared),
            list(generators),
        )
        problem = ""
        try:
            with site.modes():
                problem = self.shadows.run(call, entry.shadow)
        except Exception as error:
            problem = f"eager raised {type(error).__name__} where it was replayed: {error}"
            raise
        finally:
            if problem:
                problem += "" if compared is None else ", with other padding"
                logger.error("%s runs eager from now on: %s", key, problem)
                self.stats.failures[site.name] = problem
                with self.pool.lock:
                    self.pool.backend.synchronize()
                    entry.drop(CaptureStatus.EVICTED)
                    entry.state.fail(problem)
                    self._graphs_changed()

    def run_unpadded(self, plan: Plan, tensors: Mapping[str, torch.Tensor], reason: str | None = None) -> Any:
        """Run a plan that fits no bucket eagerly on `tensors`, without padding, and count it, under `reason` if given.

        The caller owns the results. Buffers that the callable writes are allocated if `tensors` lacks them.
        """
        self._count_unpadded(plan, reason)
        return self._sites[plan.site].run_unpadded(plan, tensors)

    def _count_unpadded(self, plan: Plan, reason: str | None = None) -> None:
        site = self._sites[plan.site]
        self.stats.fallbacks[site.name, site.phase, reason or plan.reason or ABOVE_MAX] += 1
        self._observe(site, plan.rows, 0, plan.variant)

    def _captured_on_miss(self, plan: Plan) -> Plan:
        """Capture the key of a plan if it may be captured now, also to count a refusal, and return the plan then."""
        if self.capture_on_miss and plan.key is not None and self._may_capture(plan.key):
            self._capture_for(plan.key)
        return self.plan(plan.site, plan.rows, **dict(plan.variant))

    def count_eager(self, site: str, phase: str, tokens: int, reason: str) -> None:
        """Count a step that ran eager outside `run`, such as a prefill without a graph, in the same counters."""
        self.stats.fallbacks[site, phase, reason] += 1
        self.stats.real_tokens[phase] += tokens

    def _observe(self, site: Site, rows: int, padding: int, variant: Variant) -> None:
        self.stats.observe_batch(site.name, site.phase, rows, padding)
        if self.manifest is not None:
            self.manifest.observe(site.name, site.phase, rows, variant)

    # ---- capturing -------------------------------------------------------------------------------------------------

    def pending(self) -> list[GraphKey]:
        """Return the keys to capture ahead that have no graph yet.

        Each site's largest key comes first, then the others by use, then by size.
        """
        if self._pending is None:
            self._pending = self._order_captures() if self.enabled else []
        return self._pending

    def _order_captures(self) -> list[GraphKey]:
        order: list[GraphKey] = []
        for site in self._sites.values():
            first, *rest = site.warm_keys()
            used = [key for key in self._used_keys(site) if key != first and key not in rest]
            order += [first, *(self.manifest.order(rest + used) if self.manifest else rest)]
        return [key for key in order if self._may_capture(key)]

    def _used_keys(self, site: Site) -> list[GraphKey]:
        """Return keys beyond the warm ones that traffic of an earlier run used and that this site still serves."""
        if self.manifest is None:
            return []
        return [
            site.key(bucket, variant)
            for bucket in reversed(site.buckets.sizes)
            for variant in site.variants
            if self.manifest.replays(site.key(bucket, variant))
        ]

    def warm(
        self, progress: Callable[[int, int, GraphKey], None] | None = None, wanted: Sequence[GraphKey] | None = None
    ) -> None:
        """Capture everything pending, or the missing keys of `wanted`, in order.

        Calls `progress(done, total, key)` after each.
        """
        todo = list(self.pending() if wanted is None else wanted)
        with self.pool.session():
            for done, key in enumerate(todo, 1):
                if self._may_capture(key):
                    self._capture(key, "warmup")
                if progress is not None:
                    progress(done, len(todo), key)

    def warm_next(self, key: GraphKey | None = None) -> bool:
        """Capture `key`, or the next pending key, for a caller that serves between captures.

        Returns False if nothing was pending.
        """
        todo = self.pending() if key is None else [key]
        if todo and self._may_capture(todo[0]):
            self._capture(todo[0], "background")
        return bool(todo)

    def warm_ratio(self) -> float:
        """Return the share of the keys to capture ahead that are captured or failed; 1.0 if there are none."""
        if self._warm_ratio is None:
            keys = [key for site in self._sites.values() for key in site.warm_keys()] if self.enabled else []
            missing = sum(map(self._may_capture, keys))
            self._warm_ratio = 1.0 - missing / len(keys) if keys else 1.0
        return self._warm_ratio

    def _capture_for(self, key: GraphKey) -> CacheEntry:
        """Capture `key` on a miss, after the largest bucket of its variant.

        A pool that grows from small to large would hold both.
        """
        site = self._sites[key.site]
        largest = site.key(site.buckets.max, key.variant)
        if self._may_capture(largest):
            self._capture(largest, "miss")
        return self._capture(key, "miss") if self._may_capture(key) else self._entries[key]

    def _capture(self, key: GraphKey, reason: str) -> CacheEntry:
        """Capture a key's parts on dummy rows, and restore the buffers' contents. A failure is kept in the entry."""
        site, started = self._sites[key.site], time.perf_counter()
        site.buffers.owner.check(self.pool.in_turn)
        entry = self._entries.get(key) or CacheEntry(key)
        state, runners = entry.state, []
        with self.pool.session(), site.modes():
            saved = site.buffers.snapshot(site.buffers.max_rows)
            site.buffers.fill_dummy()
            try:
                site.before_capture(key, [self.pool.backend.default_generator])
                # A site's first capture loads modules lazily. A new shape then needs one run to select its kernels,
                # unless it has run; with several ranks all of them must make the same runs, so each makes one.
                known = any(one.key.site == key.site and one.state.captured for one in self._entries.values())
                has_run = key in site.ran and not self.pool.backend.capture_runs and not self.must_capture
                site.ran.discard(key)
                for body in site.bodies(key):
                    runner = GraphRunner(
                        body,
                        self.pool,
                        memory=self.pool.site_memory,
                        statics=lambda: site.static_tensors(key.bucket),
                        generators=site.generators,
                        warmup_runs=1 if known else None,
                        checked=not (known and has_run),
                        restores=site.restores,
                        inference=site.inference,
                    )
                    runners.append(runner)
                    site.capture(runner.capture)
            except CaptureError as error:
                logger.error("capture of %s failed; this key will run eager: %s", key, error)
                _close(runners)
                if self.must_capture:
                    raise
                state.fail(error)
                self.stats.capture_failed(site.name, site.scope, error)
            except BaseException:
                _close(runners)
                raise
            finally:
                site.buffers.restore(saved)
        if not state.failed:
            counted = reason if state.status is CaptureStatus.PENDING else state.status.value
            entry.runners = runners
            entry.nbytes = max((runner.nbytes for runner in runners), default=0)
            site.captured()
            state.succeed()
            self.stats.captures[site.name, site.scope, counted] += 1
            self.stats.observe_capture(time.perf_counter() - started)
            if self.manifest is not None:
                self.manifest.captured(site.name, site.phase, key.bucket)
        self._entries[key] = entry
        self._graphs_changed()
        return entry

    def _graphs_changed(self) -> None:
        """Clear the cached plans and measure the pool after graphs were added or dropped.

        Measuring the pool is too slow for every step.
        """
        self._plans.clear()
        self._clear_summaries()
        self.pool_bytes = self.pool.nbytes()

    def _clear_summaries(self) -> None:
        self._pending = self._warm_ratio = self._captured = None

    @property
    def capturing(self) -> bool:
        """Whether a capture is in progress."""
        return self.pool.capturing

    @property
    def warming(self) -> bool:
        """Whether warm-up runs are in progress."""
        return self.pool.warming

    # ---- dropping --------------------------------------------------------------------------------------------------

    def check_addresses(self, *, site: str | None = None, whole: bool = True, geometry: bool = True) -> list[Moved]:
        """Compare watched tensors with their state at capture, and drop the graphs of every site with a difference.

        With `site`, compare only what that site watches.

        Check everything after any event that can move storage. At step boundaries, pass `geometry=False` while the
        device is busy with a step: all addresses, and one of GEOMETRY_PARTS slices of the geometry in turn. Otherwise
        pass `whole=False`, which compares a quarter of everything: after a step the tensors are out of the CPU cache
        and an address costs 400 ns. Returns everything that moved.
        """
        moved: list[Moved] = []
        self._checks += 1
        part = None if whole else self._checks % PARTS
        geometry_part = None if geometry else self._checks % GEOMETRY_PARTS
        for book, sites in self._address_books:
            if site is not None and site not in sites:
                continue
            if not book.unchanged(part, geometry_part=geometry_part):
                moved += book.moved()
                book.accept()
                for reader in sites:
                    self.invalidate(STALE, reader)
        if moved:
            logger.error(
                "%d tensors moved under their graphs, which were dropped: %s", len(moved), "; ".join(map(str, moved))
            )
        return moved

    def invalidate(self, reason: str, site: str | None = None) -> int:
        """Drop all graphs (of one site) because the memory that they read may have moved.

        Keys whose capture failed are dropped too, so that they are tried again. Returns the number of dropped keys;
        only graphs are counted, under `reason`.
        """
        self._forget_runs(site)
        return self._drop_where(lambda key: site is None or key.site == site, CaptureStatus.STALE, reason)

    def evict(self, key: GraphKey) -> bool:
        """Drop one graph and free its memory. Returns False if there was none."""
        dropped = self._drop_where(lambda other: other == key, CaptureStatus.EVICTED, None)
        self._trim()
        return bool(dropped)

    def clear(self) -> None:
        """Drop every graph and free their memory. The pool stays, and the same keys can be captured again."""
        self._forget_runs()
        self._drop_where(lambda key: True, CaptureStatus.EVICTED, None)
        self._trim()

    def _forget_runs(self, site: str | None = None) -> None:
        """Forget which keys have run: they ran on memory that may have moved."""
        for name, one in self._sites.items():
            if site in (None, name):
                one.ran.clear()

    def _trim(self) -> None:
        self.pool.trim()
        self.pool_bytes = self.pool.nbytes()

    def _drop_where(self, matches: Callable[[GraphKey], bool], cause: CaptureStatus, counted_reason: str | None) -> int:
        with self.pool.lock:  # a function of `graphed` may be replaying in another thread
            return self._drop_locked(matches, cause, counted_reason)

    def _drop_locked(self, matches: Callable[[GraphKey], bool], cause: CaptureStatus, reason: str | None) -> int:
        found = [entry for key, entry in self._entries.items() if matches(key) and not entry.state.may_capture]
        graphs = sum(entry.state.captured for entry in found)
        self.pool.backend.synchronize()  # a graph may still be running
        for site in {entry.key.site for entry in found}:
            self._sites[site].forget()
        for entry in found:
            entry.drop(cause)
        if reason is not None:
            self.stats.invalidations[reason] += graphs
        self._graphs_changed()
        return len(found)

    # ---- reports ---------------------------------------------------------------------------------------------------

    def captured_graphs(self) -> dict[tuple[str, str], int]:
        """Return the number of captured keys by (site, scope). Cheaper than `table`."""
        if self._captured is None:
            captured = (key for key, entry in self._entries.items() if entry.state.captured)
            self._captured = dict(Counter((key.site, key.scope) for key in captured))
        return self._captured

    def table(self) -> list[dict[str, Any]]:
        """Return the cache as rows of plain values: one per key that is pending, captured or failed."""
        entries = {key: entry for key, entry in list(self._entries.items()) if not entry.state.may_capture}
        for key in self.pending():
            entries.setdefault(key, self._entries.get(key) or CacheEntry(key))
        rows = [entry.row() for entry in entries.values()]
        return sorted(rows, key=lambda row: (row["site"], row["phase"], row["bucket"], _sortable(row["statics"])))


def _sortable(statics: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """Return a variant's values so that they compare: numbers by value, then all others by name."""
    return [
        (name, float(value), "") if isinstance(value, int | float) else (name, math.inf, str(value))
        for name, value in statics.items()
    ]


def _close(runners: Iterable[GraphRunner]) -> None:
    for runner in runners:
        runner.close()
