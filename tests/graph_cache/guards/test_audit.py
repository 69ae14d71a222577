"""Audits of runs: alone, and as followers of another mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph_cache.backends.cpu_tape import TapeRecorder
from graph_cache.guards.audit import StorageAudit


@pytest.fixture
def run():
    torch.manual_seed(0)
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    x, total = torch.randn(3, 4), torch.zeros(())

    def step() -> None:
        loss = norm(linear(x)).square().mean()
        torch.autograd.grad(loss, linear.weight)
        total.add_(loss.detach())

    return step


def facts(audit: StorageAudit) -> tuple[object, ...]:
    return set(audit.outside), audit.written, set(audit.leaves), audit.computed, audit.dtypes, audit.host


@pytest.mark.parametrize("mode", (StorageAudit, TapeRecorder))
def test_a_follower_observes_what_an_audit_alone_does(run, mode):
    alone, follower, nested = StorageAudit(), StorageAudit(), StorageAudit()
    with alone.observing():
        run()
    with mode(), follower.observing(), nested.observing():
        run()
    assert facts(follower) == facts(nested) == facts(alone)
    assert alone.written and alone.leaves


def test_a_follower_leaves_with_its_block(run):
    outer, inner = StorageAudit(), StorageAudit()
    with outer.observing():
        with inner.observing():
            pass
        run()
    assert outer.outside and not inner.outside


def test_followers_undo_writes(run):
    outer, inner, memory = StorageAudit(), StorageAudit(saves=True), torch.zeros(3)
    with outer.observing(), inner.observing():
        memory.add_(1)
    inner.undo()
    assert torch.equal(memory, torch.zeros(3))
