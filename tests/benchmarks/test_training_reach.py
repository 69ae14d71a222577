"""Ordinary training programs equal eager bit for bit, and most of them replay."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.training import reach
from benchmarks.training.programs import registry

# One program of each kind that replays in every step, and of the kinds that never do.
REPLAYING = (
    "supervised.gradient_accumulation",
    "supervised.sharpness_aware",
    "architectures.checkpointed_blocks",
    "architectures.result_as_dataclass",
    "generative.several_critics",
    "reinforcement.dpo_concatenated",
    "contrastive.metric_with_margin",
    "optimizers.step_in_the_backward",
    "iterations.gradient_penalty",
    "distributed.ddp_with_accumulation",
)
EAGER = {"architectures.layer_drop": "host read", "architectures.counter_in_the_forward": "Python state"}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", REPLAYING)
def test_a_program_replays_in_every_step_and_equals_eager(name):
    row = reach.measured(name, registry.programs()[name])
    assert not row["difference"], row
    assert row["steps"][reach.SETTLED :] == "RRRR", row


@pytest.mark.parametrize("name", EAGER)
def test_a_program_that_can_not_replay_says_why_and_equals_eager(name):
    row = reach.measured(name, registry.programs()[name])
    assert (row["difference"], row["kind"]) == ("", EAGER[name])


def test_a_difference_is_reported():
    def differs(run):
        run.log(torch.ones(()) * (2.0 if run.has_graphs else 1.0))

    def raises(run):
        if run.has_graphs:
            raise ValueError("only with graphs")

    assert reach.measured("differs", differs)["difference"] == "step 0"
    assert "only with graphs" in reach.measured("raises", raises)["difference"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_most_programs_replay_and_none_differs(tmp_path):
    assert reach.main(["--json", str(tmp_path / "reach.json")]) == 0
    found = json.loads((tmp_path / "reach.json").read_text())
    assert found["programs"] >= 200 and not found["differences"]
    assert found["replaying_share"] >= 0.8 and found["every_step_share"] >= 0.8
