"""Checks of the capture core that can be broken on purpose, to show that the fuzzer finds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from graph_cache.core import addresses, function
from graph_cache.guards import changes, watch
from graph_cache.training import call, side_effects

MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "addresses": lambda: mock.patch.object(addresses.AddressBook, "unchanged", lambda *args, **kwargs: True),
    "geometry": lambda: mock.patch.object(addresses, "_GEOMETRY", ()),
    "python_state": lambda: mock.patch.object(changes.HostState, "changes", lambda *args, **options: []),
    "watched_values": lambda: mock.patch.object(watch.Watch, "signature", lambda self: ()),
    "numbers": lambda: mock.patch.object(side_effects, "constant_numbers", lambda module: []),
    "autocast": lambda: mock.patch.object(call, "autocast_state", lambda: (None, None)),
    "modes": lambda: mock.patch.object(function.FunctionState, "current", lambda self: None),
}


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Break one check within the block; None breaks none."""
    if name is None:
        yield
        return
    with MUTATIONS[name]():
        yield
