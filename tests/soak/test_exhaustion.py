"""Short runs of exhaustion.py on a tiny model. `python -m tests.soak.exhaustion` does them at full size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.attacks import Campaign
from tests.soak.exhaustion import FLAGS, Exhaustion, Size
from tests.soak.test_attacks import faults

SMALL = Size(streams=60, tokens=16, exhausting=24, stopped_seconds=2.0, restarts=2, mounts=False)


SLOW = ("killed_in_full_warm_up", "killed_in_first_warm_up", "many_restarts")


@pytest.mark.parametrize("run", [
    "many_streams", "kv_exhaustion", "full_disk", "stopped_worker",
    *(pytest.param(run, marks=pytest.mark.slow) for run in SLOW),
])  # fmt: skip
def test_a_server_holds_under_exhaustion(tiny_model: Path, tmp_path: Path, run: str) -> None:
    campaign = Campaign(str(tiny_model), 0.0, tmp_path, FLAGS)
    (cell,) = Exhaustion(campaign, SMALL).cells([run])
    assert faults(cell) == [], cell.detail
