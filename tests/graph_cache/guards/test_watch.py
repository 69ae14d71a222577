"""Values that runs read: which changes another graph is needed for."""

from __future__ import annotations

import math
import types

import pytest

from graph_cache.guards.code import Reads
from graph_cache.guards.search import reachable
from graph_cache.guards.watch import ValueVersions


def watched(run, *roots):
    """Return the versions of what a run reads, after it was observed."""
    reads, versions = Reads(), ValueVersions()
    with versions.extended() as values:
        with reads.observing():
            run()
        values.add(reachable([("root", run), *[("root", one) for one in roots]], ran=reads), reads)
    return versions


def place_of(value):
    """Return an object with this value, and versions of a run that reads it."""
    box = types.SimpleNamespace(value=value)
    return box, watched(lambda: box.value)


@pytest.mark.parametrize("make", [lambda: [1.0, "a"], lambda: (1, 2.0), lambda: math.nan * 1, lambda: "ab" * 2, list])
def test_an_equal_value_in_its_place_is_the_same_version(make):
    box, versions = place_of(make())
    before = versions.current()
    box.value = make()
    assert versions.current() == before


def test_a_list_in_the_place_of_an_equal_one_is_watched_too():
    box, versions = place_of([1.0, 2.0])
    before = versions.current()
    box.value = [1.0, 2.0]
    assert versions.current() == before
    box.value[1] = 3.0
    changed = versions.current()
    assert changed != before
    box.value.append(4.0)
    assert versions.current() not in (before, changed)
    box.value = [1.0, 2.0]
    assert versions.current() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda box: setattr(box, "value", [0.0, -0.0]),
        lambda box: setattr(box, "value", [0.0, 0]),
        lambda box: setattr(box, "value", (0.0, 0.0)),
        lambda box: setattr(box, "value", [0.0]),
        lambda box: box.value.insert(0, 0.0),
        lambda box: box.value.append([]),
        lambda box: delattr(box, "value"),
    ],
)
def test_another_value_is_another_version(change):
    box, versions = place_of([0.0, 0.0])
    before = versions.current()
    change(box)
    assert versions.current() != before


def test_items_that_move_between_equal_lists_are_another_version():
    box = types.SimpleNamespace(first=[1, 2], second=[3])
    versions = watched(lambda: (box.first, box.second))
    box.first, box.second = [1, 2], [3]
    before = versions.current()
    box.second.insert(0, box.first.pop())
    assert versions.current() != before


def test_a_list_of_lists_counts_by_identity():
    """A list inside of an equal one would not be compared at each call."""
    box, versions = place_of([[1.0]])
    before = versions.current()
    box.value = [[1.0]]
    assert versions.current() != before


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("kind", [list, dict, set])
def test_a_change_inside_a_container_is_another_version(kind, size):
    value = dict.fromkeys(range(size), 0) if kind is dict else kind(range(size))
    box, versions = place_of(value)
    before = versions.current()
    if kind is set:
        value.remove(1)
        value.add(-1)
    else:
        value[1] = -1
    assert versions.current() != before


def test_what_the_run_changes_is_not_watched():
    box, log = types.SimpleNamespace(value=1), [0]
    versions = watched(lambda: (box.value, log[0]))
    versions.watch.exclude({(id(log), 0)})
    before = versions.current()
    log[0] += 1
    assert versions.current() == before
    box.value = 2
    assert versions.current() != before
