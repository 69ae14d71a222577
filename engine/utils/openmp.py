"""How OpenMP's threads wait for work: decided by the environment, before torch loads the library.

By default they spin for milliseconds. On a machine whose cores others use too, a spinning thread keeps the core from
the one it waits for, and a step of 20 ms was seen to take 800. Sleeping at once costs a third of the speed where nobody
else is. This many spins were as fast as the default to a tenth, and cost the least where others work.
"""

from __future__ import annotations

import os

SPIN_COUNT = "5000"


def limit_openmp_spinning() -> None:
    """Have idle OpenMP threads sleep soon, unless the environment says how they wait. Call before torch loads."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
