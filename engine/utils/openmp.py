"""Limit how long idle OpenMP threads spin, through the environment, before torch loads the library.

By default they spin for milliseconds. On a shared machine a spinning thread occupies the core of the thread that it
waits for: a 20 ms step was seen to take 800 ms. Sleeping at once costs a third of the speed on an otherwise idle
machine. SPIN_COUNT was within a tenth of the default's speed there, and the fastest setting on a loaded machine.
"""

from __future__ import annotations

import os

SPIN_COUNT = "5000"


def limit_openmp_spinning() -> None:
    """Make idle OpenMP threads sleep soon, unless OMP_WAIT_POLICY is set. Call before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
