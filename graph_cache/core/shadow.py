"""Shadow checks: run a captured call eager as well, on the same padded buffers, and compare all that both write.

They find what the contract of captures misses, and never replace a refusal. The lifecycle of a key, in
`ShadowChecks.wants` and `run`:

    unchecked         the first replay after a capture is compared      ->  equal or suspect
    equal             replays are compared now and then                 ->  equal or suspect
    suspect           the next run replays once and runs eager twice    ->  not deterministic, or the graph is dropped
    not deterministic eager differs from itself: replays are not compared any more

Every compared run leaves the results of eager. The comparison is made on the device, and its flags are read at the
cache's next run. Training's checks, after captures only, are in `training/shadow_checks.py`.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graph_cache.backends.base import Backend
from graph_cache.config import DEFAULT_SHARE
from graph_cache.core.keys import GraphKey
from graph_cache.core.stats import CacheStats
from graph_cache.guards.values import raw_bits

logger = logging.getLogger(__name__)

MAX_COPIED_BYTES = 2 << 30  # of the memory that a run writes: more is not copied, and the key stays unchecked
EQUAL, DIFFERS, NOT_DETERMINISTIC, UNCHECKED = "equal", "differs", "not_deterministic", "unchecked"
OUTCOMES = (EQUAL, DIFFERS, NOT_DETERMINISTIC, UNCHECKED)


class WrittenMemory(Protocol):
    """Memory that a run writes."""

    @property
    def name(self) -> str:
        """What it is, for the log."""

    @property
    def nbytes(self) -> int:
        """Size of a copy."""

    def read(self) -> Tensor:
        """Return a copy."""

    def write(self, values: Tensor) -> None:
        """Restore a copy."""


class Whole(NamedTuple):
    """All elements of a tensor."""

    name: str
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self) -> Tensor:
        return self.tensor.clone()

    def write(self, values: Tensor) -> None:
        self.tensor.copy_(values)


class Rows(NamedTuple):
    """The rows `numbers` int64 [n] of a tensor along `dim`, such as the slots of a KV cache that a step writes.

    A row may be listed several times.
    """

    name: str
    tensor: Tensor
    numbers: Tensor
    dim: int = 0

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes // max(1, self.tensor.shape[self.dim]) * len(self.numbers)

    def read(self) -> Tensor:
        return self.tensor.index_select(self.dim, self.numbers)

    def write(self, values: Tensor) -> None:
        self.tensor.index_copy_(self.dim, self.numbers, values)


class Bytes(NamedTuple):
    """All bytes of a storage."""

    name: str
    storage: torch.UntypedStorage

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()

    def read(self) -> Tensor:
        return self._bytes().clone()

    def write(self, values: Tensor) -> None:
        self._bytes().copy_(values)

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class ShadowStatus(enum.Enum):
    """What is known of a key's graph. The values appear as `shadow` in the graph table."""

    UNCHECKED = UNCHECKED
    EQUAL = EQUAL
    SUSPECT = "suspect"
    NOT_DETERMINISTIC = NOT_DETERMINISTIC


@dataclass
class Shadow:
    """The shadow checks of one captured key.

    `first`: whether the replay that comes next is the first. `differing`: what differed in the last comparison.
    """

    status: ShadowStatus = ShadowStatus.UNCHECKED
    first: bool = True
    checks: int = 0
    differing: list[str] = field(default_factory=list)

    def columns(self) -> dict[str, str | int]:
        """Return the columns of the graph table."""
        return {"shadow": self.status.value, "shadow_checks": self.checks}


class CheckedCall(NamedTuple):
    """A captured call on loaded buffers.

    - replay, eager: Both write to `regions`, and draw from `generators`. `eager` returns what Python state it changed.
    - regions: Returns what the next run writes. Called before a run, since rows may depend on the inputs.
    """

    key: GraphKey
    replay: Callable[[], None]
    eager: Callable[[], str]
    regions: Callable[[], Sequence[WrittenMemory]]
    generators: Sequence[torch.Generator]


class Snapshot:
    """Values of regions, and the states of generators, at one time."""

    def __init__(self, regions: Sequence[WrittenMemory], generators: Sequence[torch.Generator], device: torch.device):
        self._regions, self._generators, self._device = regions, generators, device
        self.values = [region.read() for region in regions]
        self.states = [generator.get_state() for generator in generators]

    def restore(self) -> None:
        for region, values in zip(self._regions, self.values, strict=True):
            region.write(values)
        for generator, state in zip(self._generators, self.states, strict=True):
            generator.set_state(state)

    @property
    def names(self) -> list[str]:
        """What the flags of `differing` stand for."""
        return [*(region.name for region in self._regions), "the states of generators", "Python state"]

    def differing(self, changed: str) -> Tensor:
        """Return whether each region, then the generators, differ from now in any bit, and `changed`: int32 [n + 2]."""
        flags = [
            (raw_bits(region.read()) != raw_bits(values)).any()
            for region, values in zip(self._regions, self.values, strict=True)
        ]
        states = zip(self._generators, self.states, strict=True)
        has_drawn = any(not torch.equal(one.get_state(), state) for one, state in states)
        host = [torch.full((), flag, device=self._device) for flag in (has_drawn, bool(changed))]
        return torch.stack([*flags, *host]).to(torch.int32)


class _Unread(NamedTuple):
    """A comparison whose flags are on their way to the host."""

    key: GraphKey
    shadow: Shadow
    names: list[str]
    flags: Tensor
    wait: Callable[[], None]
    seconds: float


class ShadowChecks:
    """Decides when replays of one cache are checked, checks them, and counts what it finds.

    Args:
        backend: Where graphs run.
        stats: Where checks are counted.
        share: Share of the time that sampled checks may take, over all sites. 0: no checks at all.

    Attributes:
        agree: Combines int32 flags of all ranks, if several compute a step together: all of them must make the same
            checks, and drop the same graphs.
        chosen: Names of the sites whose next runs are checked, beside first runs. None: as `due_sites` says.
    """

    def __init__(self, backend: Backend, stats: CacheStats, share: float = DEFAULT_SHARE):
        self.share = share
        self.agree: Callable[[Tensor], Tensor] = lambda flags: flags
        self.chosen: frozenset[str] | None = None
        self._backend, self._stats = backend, stats
        self._next: dict[str, float] = {}  # by site: when its next sampled check may begin
        self._longest: dict[str, float] = {}  # by site: seconds of its longest check
        self._unread: list[_Unread] = []
        self._not_deterministic: set[str] = set()  # names of sites

    def due_sites(self) -> frozenset[str]:
        """Return the sites for which a sampled check fits into the share of the time."""
        now = time.perf_counter()
        return frozenset(site for site, begin in self._next.items() if now >= begin)

    def wants(self, site: str, shadow: Shadow) -> bool:
        """Whether the next run of a key, which is captured, must be checked."""
        if shadow.status is ShadowStatus.SUSPECT:
            return True
        if not self.share or site in self._not_deterministic:
            return False
        if shadow.first:
            return True
        if self.chosen is not None:
            return site in self.chosen
        return time.perf_counter() >= self._next.get(site, math.inf)

    def run(self, call: CheckedCall, shadow: Shadow) -> str:
        """Check a run of a key that `wants` one: replay and run eager.

        Returns why the graph must be dropped; empty if it need not. Raises what eager raises; all memory is then as
        before.
        """
        if shadow.status is ShadowStatus.SUSPECT:
            return self._judge(call, shadow)
        shadow.first = False
        self._compare(call, shadow)
        return ""

    def settle(self) -> None:
        """Read the flags of the comparisons so far."""
        while self._unread:
            key, shadow, names, flags, wait, seconds = self._unread.pop()
            begin = time.perf_counter()
            wait()
            self._pause(key.site, seconds + time.perf_counter() - begin)
            shadow.checks += 1
            shadow.differing = _named(names, flags)
            shadow.status = ShadowStatus.SUSPECT if shadow.differing else ShadowStatus.EQUAL
            if not shadow.differing:
                self._count(key, EQUAL)

    def _compare(self, call: CheckedCall, shadow: Shadow) -> None:
        """Replay and run eager, and enqueue the copy of what differs."""
        begin = time.perf_counter()
        try:
            regions = call.regions()
            if sum(region.nbytes for region in regions) > MAX_COPIED_BYTES:
                call.replay()
                self._count(call.key, UNCHECKED)
                return
            before = self._snapshot(call, regions)
            call.replay()
            replayed = self._snapshot(call, regions)
            before.restore()
            try:
                changed = call.eager()
            except torch.OutOfMemoryError as error:
                logger.info("%s is not checked: %s", call.key, error)
                replayed.restore()
                self._count(call.key, UNCHECKED)
                return
            except BaseException:
                before.restore()
                raise
            flags = self.agree(replayed.differing(changed))
            host = self._backend.host_tensor(tuple(flags.shape), flags.dtype)
            wait = self._backend.copy_to_host(host, flags)
            self._unread.append(_Unread(call.key, shadow, replayed.names, host, wait, time.perf_counter() - begin))
        finally:
            self._pause(call.key.site, time.perf_counter() - begin)

    def _judge(self, call: CheckedCall, shadow: Shadow) -> str:
        """Find out whether eager differs from itself, and return why the graph must be dropped if it doesn't."""
        site, regions = call.key.site, call.regions()
        before = self._snapshot(call, regions)
        call.replay()
        replayed = self._snapshot(call, regions)
        before.restore()
        changed = call.eager()
        found = _named(replayed.names, self.agree(replayed.differing(changed)))
        first = self._snapshot(call, regions)
        before.restore()
        call.eager()
        unstable = _named(first.names, self.agree(first.differing("")))
        if unstable:
            self._not_deterministic.add(site)
            shadow.status = ShadowStatus.NOT_DETERMINISTIC
            self._count(call.key, NOT_DETERMINISTIC)
            logger.warning(
                "%s is not deterministic: two eager runs on the same buffers differ in %s. Its graphs are not compared "
                "with eager any more",
                site,
                listed(unstable),
            )
            return ""
        self._count(call.key, DIFFERS)
        self._stats.shadow_mismatches[site, call.key.phase] += 1
        return f"its replay differed from an eager run on the same buffers in {listed([*shadow.differing, *found])}"

    def _snapshot(self, call: CheckedCall, regions: Sequence[WrittenMemory]) -> Snapshot:
        return Snapshot(regions, call.generators, self._backend.device)

    def _pause(self, site: str, seconds: float) -> None:
        """Let so much time pass before the next check of a site that checks as long as its longest keep to the share.

        Sites have equal shares, so that one that runs all the time doesn't take the others'.
        """
        longest = self._longest[site] = max(self._longest.get(site, 0.0), seconds)
        self._next[site] = time.perf_counter() + longest * len(self._longest) / self.share

    def _count(self, key: GraphKey, outcome: str) -> None:
        self._stats.shadow_checks[key.site, key.phase, outcome] += 1


def _named(names: Sequence[str], flags: Tensor) -> list[str]:
    return [name for name, flag in zip(names, flags.tolist(), strict=False) if flag]


def listed(names: Sequence[str], limit: int = 6) -> str:
    """Return names as text, the first of many."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
