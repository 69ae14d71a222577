"""One observed run: what it changed is named and undone, in Python, in memory and in the process."""

from __future__ import annotations

import contextlib
import contextvars
import os
import random
import types

import numpy
import pytest
import torch

from graph_cache.guards.audit import StorageAudit
from graph_cache.guards.changes import HostState
from graph_cache.guards.code import Reads
from graph_cache.guards.observation import Observation

VARIABLE = contextvars.ContextVar("test_variable", default=None)


@contextlib.contextmanager
def observed(**roots):
    state = HostState(list(roots.items()), process=True)
    with Observation(state, reads=Reads(), audit=StorageAudit(saves=True)) as seen:
        yield seen


def scaled(box):
    return box.tensor * box.number


def box_of(**values):
    return types.SimpleNamespace(**values)


CHANGES = {
    "attribute": (lambda box: setattr(box, "number", 2.0), "box.number"),
    "sign of zero": (lambda box: setattr(box, "zero", -0.0), "box.zero"),
    "new attribute": (lambda box: setattr(box, "other", 1), "box.other"),
    "no attribute": (lambda box: delattr(box, "number"), "box.number"),
    "list": (lambda box: box.items.append(1), "box.items[2]"),
    "equal list": (lambda box: setattr(box, "items", [1, 2]), "box.items"),
    "dict": (lambda box: box.table.update(a=2), "box.table['a']"),
    "set": (lambda box: box.names.add("b"), "box.names"),
    "array": (lambda box: box.array.fill(3), "box.array"),
    "memory of a tensor": (lambda box: setattr(box.tensor, "data", torch.ones(2)), "the memory of box.tensor"),
    "random": (lambda box: random.random(), "the state of random"),
    "numpy.random": (lambda box: numpy.random.rand(), "the state of numpy.random"),
    "generator": (lambda box: torch.rand(1), "the state of PyTorch's generator of the host"),
    "environment": (lambda box: os.environ.update(ENCORE_TEST="1"), "the environment"),
    "setting": (lambda box: torch.set_default_dtype(torch.float64), "default dtype"),
    "gradient mode": (lambda box: torch.set_grad_enabled(False), "the gradient mode"),
    "context variable": (lambda box: VARIABLE.set("other"), "the context variable test_variable"),
}


def everything(box):
    return (
        dict(vars(box)),
        [list(box.items), dict(box.table), set(box.names), box.array.tolist(), box.tensor.tolist()],
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        dict(os.environ),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        VARIABLE.get(),
    )


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_undone(name):
    change, expected = CHANGES[name]
    VARIABLE.set("before")
    box = box_of(
        number=1.0, zero=0.0, items=[1, 2], table={"a": 1}, names={"a"}, array=numpy.zeros(2), tensor=torch.zeros(2)
    )
    before = everything(box)
    with observed(box=box) as seen:
        with seen.running():
            change(box)
        found = seen.changes()
    assert found == [expected] and repr(everything(box)) == repr(before)
    assert box.items is before[0]["items"]


def test_a_run_without_changes_has_none_and_is_not_disturbed():
    box = box_of(number=1.0, tensor=torch.ones(2))
    with observed(box=box) as seen, seen.running():
        result = scaled(box)
    assert not seen.changes() and torch.equal(result, torch.ones(2))
    assert "tensor" in seen.reads.own_names


@pytest.mark.parametrize("kept", [False, True])
def test_memory_and_generators_are_restored_unless_kept(kept):
    tensor, generator = torch.zeros(2), torch.Generator().manual_seed(3)
    state = generator.get_state()
    audit = StorageAudit(saves=True)
    with Observation(HostState(), audit=audit, generators=[generator]) as seen:
        with seen.running():
            tensor.add_(torch.rand(2, generator=generator) + 1)
        seen.kept = kept
    assert bool(tensor.any()) is kept and torch.equal(generator.get_state(), state) is not kept


def test_an_exception_leaves_no_trace():
    box = box_of(items=[1])
    with pytest.raises(ValueError, match="why"), observed(box=box) as seen, seen.running():
        box.items.append(2)
        raise ValueError("why")
    assert box.items == [1]
