"""State shared by all captures of one training job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from graph_cache.utils.cpu_threads import ThreadTuner


@dataclass
class Running:
    """Whether an attached module runs eager or is captured now: modules inside it run eager, as part of it."""

    active: bool = False


@dataclass(frozen=True)
class CaptureContext:
    """Pool, counters, generators and external state shared by all captures.

    `generators` are the random generators used inside captures; every graph registers them.

    `state` maps names to tensors outside the captured modules that the modules write, such as Megatron's sums of
    auxiliary losses. The mapping is read again each time. A capture restores these tensors, and graphs are dropped when
    one of them moves.

    `running` is shared by all attached modules of an engine. With `checks`, the first replays are compared with eager.

    `threads` chooses the number of threads of each step on a CPU; None if it stays.
    """

    pool: GraphPool
    stats: CacheStats
    generators: Sequence[torch.Generator] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)
    running: Running = field(default_factory=Running)
    threads: ThreadTuner | None = None
    checks: bool = True
