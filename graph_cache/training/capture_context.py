"""What all captures of one training job share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graph_cache.pool import GraphPool
from graph_cache.stats import CacheStats


@dataclass(frozen=True)
class CaptureContext:
    """`generators`: those that captured draws use, registered with every graph.

    `state`: tensors outside of the captured modules that these write (Megatron's sums of auxiliary losses), by name,
    looked up anew each time; a capture leaves them as it found them, and graphs are dropped when one moves.
    """

    pool: GraphPool
    stats: CacheStats
    generators: Sequence[torch.Generator] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)
