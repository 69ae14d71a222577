"""Name what keeps a call from being captured when it changes at every call: an argument, or an optimizer's setting."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

from torch.utils._pytree import tree_leaves, tree_unflatten

from graph_cache.core.stats import CacheStats
from graph_cache.training.call import CallKey

logger = logging.getLogger(__name__)

MIN_CHANGES = 3


class ChangingValues:
    """Compares the keys of successive calls that ran eager, by the name of a module or iteration.

    After MIN_CHANGES calls that differ from the one before in the same argument alone, it is logged once and stands as
    `failure` in the table of graphs, unless a capture failed.
    """

    def __init__(self, stats: CacheStats):
        self._stats = stats
        self._last: dict[str, tuple[CallKey, Hashable]] = {}
        self._calls: Counter[str] = Counter()
        self._changes: Counter[tuple[str, str]] = Counter()

    def observe(self, name: str, key: CallKey, settings: Hashable = (), *, is_new: bool) -> None:
        """Compare a call that runs eager with the one before.

        `settings`: of optimizers inside an iteration. `is_new`: no call like it is known; others don't count, since
        values that come again are captured.
        """
        self._calls[name] += 1
        before, self._last[name] = self._last.get(name), (key, settings)
        if before is None or not is_new:
            return
        what = _changed_argument(before[0], key)
        if before[0] == key and before[1] != settings:
            what = "a setting of an optimizer inside, such as its learning rate,"
        if not what:
            return
        self._changes[name, what] += 1
        if self._changes[name, what] == MIN_CHANGES:
            remedy = (
                "step the optimizer outside, or keep the rate in a tensor (lr=torch.tensor(…), fused=True)"
                if before[0] == key
                else "pass a tensor (torch.tensor(…)), or use it outside of the call"
            )
            problem = (
                f"{what} changed in {MIN_CHANGES} of {self._calls[name]} calls, and each value needs its own graphs: "
                f"{remedy}"
            )
            logger.warning("%s runs eager: %s", name, problem)
            self._stats.failures.setdefault(name, problem)


def _changed_argument(before: CallKey, now: CallKey) -> str:
    """Return the name of the only argument in which two calls differ; empty if there is none or more than one."""
    if before.structure != now.structure or len(before.values) != len(now.values):
        return ""
    if replace(before, values=now.values, types=now.types) != now:
        return ""
    differing = [
        index
        for index, (one, other) in enumerate(zip(before.values, now.values, strict=True))
        if one is not other and (before.types[index] != now.types[index] or one != other)
    ]
    if len(differing) != 1:
        return ""
    args, kwargs = tree_unflatten(list(range(len(now.values))), now.structure)
    (index,) = differing
    named = [*((f"argument {place}", value) for place, value in enumerate(args)), *kwargs.items()]
    name = next((name for name, value in named if index in tree_leaves(value)), "an argument")
    return f"{name} ({type(now.values[index]).__name__})"
