"""One observed eager call of an iteration: what it uses, and why a replay could differ from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graph_cache.guards.audit import StorageAudit, storage_of, storages_of
from graph_cache.guards.changes import ProcessState
from graph_cache.guards.code import Reads
from graph_cache.guards.observation import Observation
from graph_cache.guards.refusals import gradients_read, iterators_read, refused_reads
from graph_cache.guards.watch import ReadTensors
from graph_cache.training.gradients import storage_users
from graph_cache.training.side_effects import TensorHooks
from graph_cache.training.step_state import StepState


@dataclass
class ObservedCall:
    """What the last observed eager call of one key showed.

    - `refusals`: why it can't be replayed.
    - `outside`: memory that it used besides that of modules and arguments.
    - `read_tensors`: tensors in Python state with such memory.
    """

    refusals: list[str] = field(default_factory=list)
    outside: list[torch.UntypedStorage] = field(default_factory=list)
    read_tensors: Mapping[str, Tensor] = field(default_factory=dict)


@contextmanager
def observing(
    step: StepState,
    tensors: Sequence[Tensor],
    objects: Sequence[Any],
    generators: Sequence[torch.Generator],
    device: torch.device,
) -> Iterator[ObservedCall]:
    """Observe an eager run with these tensors and objects as arguments.

    Registers what it uses, and yields what it showed, complete at the end of the block.
    """
    seen = ObservedCall()
    state, process = step.whole_state(objects), ProcessState(generators)
    hooks = TensorHooks(tensors)
    if step.compiled:  # compiled code bypasses the dispatcher, and profiling would compile it anew
        yield seen
        changes = state.changes() if step.checks_attributes else []
        seen.refusals = describe_changes(changes + process.changes())
        seen.refusals += step.optimizers_on_host(device)
        if hooks.have_changed():
            seen.refusals.append(TensorHooks.REFUSAL)
        seen.refusals += step.watch_reads(objects, Reads.of_calls(step.modules(), step.function))[1]
        return
    reads, audit = Reads(), StorageAudit()
    # Backwards run in this thread, where their code is observed. By itself, autograd uses a thread for each GPU.
    observed = Observation(state, reads=reads, audit=audit)  # its effects stay: this is the call itself
    with torch.autograd.set_multithreading_enabled(False), observed.running():
        yield seen
    step.ran = (step.ran or Reads()).merged(reads)
    for module in reads.modules.values():
        step.register_module(module)
    arguments = set(storages_of(tensors))
    owned = step.note_owned()
    for leaf in audit.leaves.values():
        storage = storage_of(leaf)
        if id(leaf) not in owned and (storage is None or storage._cdata not in arguments):
            step.leaves[id(leaf)] = leaf
    is_whole = not step.ran.compiled  # compiled functions bypass the dispatcher
    changes = state.changes(
        lambda tensor: not is_whole or (storage := storage_of(tensor)) is None or storage._cdata in audit.outside
    )
    seen.refusals = describe_changes((changes if step.checks_attributes else []) + process.changes())
    if iterators := iterators_read(state.namespaces, step.ran.names) if step.checks_attributes else []:
        seen.refusals.append(f"may read the iterator {', '.join(iterators)}, which a replay would not advance")
    seen.refusals += refused_reads(step.ran, device)
    seen.refusals += step.optimizers_on_host(device) or audit.refusals(device)
    if hooks.have_changed():
        seen.refusals.append(TensorHooks.REFUSAL)
    declared = set(step.declared())
    for index, tensor in enumerate(tensors):
        address = None if (storage := storage_of(tensor)) is None else storage._cdata
        if address in audit.written:
            seen.refusals.append(f"writes to its argument {index} in place: return the result")
        if address in declared:
            seen.refusals.append(f"takes memory of a module as argument {index}, of which a graph reads a copy")
    declared |= arguments
    other = [address for address in audit.outside if address not in declared]
    if not is_whole:
        # What compiled code has made looks like memory from before the run. Some of it is freed by now.
        other = [address for address in other if address not in reads.made and storage_users(address) > 1]
    seen.outside = [audit.outside[address] for address in other]
    if any(address in audit.computed for address in other):
        seen.refusals.append("uses a tensor that was computed from trainable tensors before the call")
    casts = {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
    if any(audit.dtypes[address] & casts for address in other):
        seen.refusals.append("runs in an autocast region that holds casts of weights from before the call")
    step.exclude(state.changed)
    namespaces, unwatched = step.watch_reads(objects, step.ran)
    seen.refusals += unwatched + gradients_read(namespaces, other)
    gradients = set(storages_of(step.gradients()))
    seen.read_tensors = ReadTensors(namespaces, audit.outside.keys() - arguments - gradients)


def describe_changes(names: Sequence[str]) -> list[str]:
    """Return why changed Python state can't be replayed, as a list of at most one reason."""
    if not names:
        return []
    return [
        f"changes {', '.join(names)}: keep it outside the step, or in a tensor that is written in place (add_, copy_)"
    ]
