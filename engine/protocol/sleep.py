"""The levels and tags of a sleep, which clients name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.errors import RequestError
from graph_cache.utils.validation import did_you_mean

WEIGHTS, GRAPHS, KV_CACHE = "weights", "cuda_graph", "kv_cache"
MEMORY_PARTS = (WEIGHTS, GRAPHS, KV_CACHE)
"""The parts of an engine's memory, named as by vLLM and SGLang, in the order in which they are restored."""

SCHEDULING = "scheduling"
SLEEP_TAGS = (*MEMORY_PARTS, SCHEDULING)
"""The tags of `wake_up`. Scheduling has no memory: it goes on when all parts are there."""

PARTS_OF_LEVEL: dict[int, tuple[str, ...]] = {0: (), 1: MEMORY_PARTS, 2: MEMORY_PARTS}


def parts_of_level(level: object) -> tuple[str, ...]:
    """Return the parts that a sleep of this level releases. Raises RequestError for an unknown level."""
    if isinstance(level, bool) or not isinstance(level, int) or level not in PARTS_OF_LEVEL:
        raise RequestError(
            f"level={level!r:.40} must be 0 (pause only), 1 (keep the weights in host memory) or 2 (discard them)",
            param="level",
        )
    return PARTS_OF_LEVEL[level]


def check_tags(tags: Iterable[str], known: Sequence[str] = SLEEP_TAGS) -> tuple[str, ...]:
    """Return the tags. Raises RequestError for an unknown one."""
    found = tuple(tags)
    for tag in found:
        if tag not in known:
            name = str(tag)[:64]
            raise RequestError(f"tags={name!r} must be of {', '.join(known)}{did_you_mean(name, known)}", param="tags")
    return found
