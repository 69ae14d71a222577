"""Why a run can't be replayed, by what its code reads and calls. Each function returns reasons, often at most one."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from graph_cache.guards.audit import storage_of
from graph_cache.guards.code import Reads
from graph_cache.guards.namespaces import MISSING, Cell, Contents, FunctionParts, Items, Namespace, position_of
from graph_cache.guards.ownership import COMPILED_HELPERS
from graph_cache.guards.watch import TENSORS, UNWATCHED

MAX_WATCHED_BYTES = 1 << 20  # of all buffers together; comparing these takes 200 µs
# Attributes and methods of tensors that tell where the memory or the history of an argument comes from: a capture runs
# on other tensors than its caller's.
TENSOR_FACTS = frozenset(
    ("is_leaf", "grad_fn", "_base", "_version", "storage_offset", "retains_grad", "is_inference", "_backward_hooks")
)
GENERATOR_STATE = frozenset(("getstate", "get_rng_state", "initial_seed", "bit_generator"))
SEEDING = frozenset(("seed", "manual_seed", "manual_seed_all"))


def refused_reads(ran: Reads | None, device: torch.device) -> list[str]:
    """Return why a run can't be captured on `device`, by what it reads and calls.

    On a CPU, code that reads addresses computes past the dispatcher, and so do the kernels of compiled functions, of
    which a capture would hold the uncompiled operations. Compiled modules that the caller knows of are captured
    nevertheless (see `training/compiled.py`).
    """
    if ran is None:
        return []
    is_cpu, reasons = device.type == "cpu", []
    if ran.outside:
        outside = ", ".join(sorted(ran.outside))
        reasons.append(f"reads {outside}, which a replay would not read again: pass values as arguments")
    if not ran.called.isdisjoint(SEEDING):
        reasons.append("calls seed or manual_seed, which a replay would not repeat: seed before the call")
    if states := GENERATOR_STATE & ran.own_names:
        reasons.append(f"reads the state of a random generator ({', '.join(sorted(states))}): pass the value")
    if facts := (TENSOR_FACTS | {"data_ptr"} if is_cpu else TENSOR_FACTS) & ran.own_names:
        names = ", ".join(sorted(facts))
        reasons.append(f"reads {names} of a tensor, which may be another in a capture: pass the value")
    if is_cpu and not all(name.startswith(COMPILED_HELPERS) for name in ran.compiled):
        reasons.append(
            "calls a function compiled by torch.compile, which a CPU can't record: call the uncompiled function"
        )
    return reasons


def iterators_read(namespaces: Sequence[Namespace], names: set[str]) -> list[str]:
    """Return the names of iterators that code may read and that do not tell their position, or what they read."""
    return [
        namespace.name_of(key)
        for namespace in namespaces
        if isinstance(namespace, (Cell, Items)) or namespace.named
        for key, value in namespace.read().items()
        if _is_iterator(cast(Any, type(value)))
        and (key in names or isinstance(namespace, Cell) or type(key) is not str)
        and (position_of(value) is MISSING or getattr(value, "gi_frame", None) is not None)
    ]


@functools.cache
def _is_iterator(kind: Any) -> bool:
    return issubclass(kind, Iterator)


def gradients_read(namespaces: Sequence[Namespace], used: Container[int]) -> list[str]:
    """Return why a run that used these storages, by address, can't be replayed: some are gradients of other tensors.

    Autograd and optimizers replace gradients, so that a graph would read former ones. `used` are without the gradients
    that the run computes itself.
    """
    names = [
        namespace.name_of(key)
        for namespace in namespaces
        for key, value in namespace.read().items()
        if isinstance(value, Tensor) and value.is_leaf and value.grad is not None and _address(value.grad) in used
    ]
    if not names:
        return []
    return [f"reads the gradient of {names[0]}, which others may replace: pass it as an argument"]


def _address(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else storage._cdata


def unknown_closures(namespaces: Sequence[Namespace], ran: Reads) -> list[str]:
    """Return why code can't be replayed that uses variables of closures which the search has not found.

    Such as of a function that only C refers to. Functions that the run itself makes need none.
    """
    own = [code for code, _ in ran.own]
    known = {id(one.container.__code__) for one in namespaces if isinstance(one, FunctionParts)}
    known |= {id(constant) for code in own for constant in code.co_consts}
    names = [code.co_qualname for code in own if id(code) not in known and set(code.co_freevars) - {"__class__"}]
    if not names:
        return []
    return [f"runs {names[0]}, of which no reference was found, so that a change of its closure would go unnoticed"]


def unwatched_reads(namespaces: Sequence[Namespace]) -> list[str]:
    """Return why code that may read these can't be replayed: they are too large to be compared at every call, or can't
    be compared.
    """
    found: dict[int, str] = {}
    nbytes, largest = 0, ""
    for namespace in namespaces:
        if namespace.is_library or namespace.path.rpartition(".")[2] in (*TENSORS, *UNWATCHED):
            continue
        if not namespace.is_comparable:
            size, unit = namespace.size()
            found[id(namespace.container)] = f"{namespace.path} ({type(namespace.container).__name__}, {size:,} {unit})"
        elif isinstance(namespace, Contents) and namespace.size()[1] == "bytes":
            nbytes += namespace.size()[0]
            largest = namespace.path
    if nbytes > MAX_WATCHED_BYTES:
        found[0] = f"{largest} and other arrays (together {nbytes:,} bytes)"
    if not found:
        return []
    names = list(found.values())
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [
        f"may read {', '.join(names[:3])}{others}, which is not compared at every call, so that a change would go "
        "unnoticed: pass what it reads as an argument, or keep it in a tensor"
    ]
