"""Detect, undo and refuse side effects of a captured call, since a replay would not repeat them."""

from __future__ import annotations

import enum
import numbers
import types
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graph_cache.errors import CaptureRefused
from graph_cache.guards.audit import StorageAudit, storage_of
from graph_cache.guards.changes import HostState
from graph_cache.guards.code import Reads
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.observation import Observation, read_by
from graph_cache.guards.ownership import is_own_class
from graph_cache.guards.refusals import iterators_read, refused_reads
from graph_cache.guards.search import ANY_CODE, RunCode
from graph_cache.guards.watch import gradient_hooks_of
from graph_cache.training.call import TENSOR
from graph_cache.training.compiled import is_compiled


class TensorHooks:
    """The hooks on the gradients of some tensors, to find out whether a call adds any."""

    REFUSAL = (
        "adds a hook to the gradient of an argument or parameter, or retains it, which a replay would not: add it to "
        "a tensor that the call computes, or once before the calls"
    )

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = tensors
        self._before = self._now()

    def _now(self) -> tuple[Any, ...]:
        return gradient_hooks_of(self._tensors), [tensor.retains_grad for tensor in self._tensors]

    def have_changed(self) -> bool:
        """Whether a hook was added or removed since."""
        return self._now() != self._before


class Forward:
    """What the forward of a capture used and left beside its results.

    Attributes:
        audit: The storages that it used.
        results: Places of results without history that it stored: namespace, key and tensor.
        state: The Python state that was searched.
    """

    def __init__(self, audit: StorageAudit, state: HostState):
        self.audit, self.state = audit, state

    @property
    def results(self) -> list[tuple[Namespace, Any, Tensor]]:
        return self.state.results


@contextmanager
def refuse_side_effects(
    name: str,
    roots: Sequence[tuple[str, Any]],
    scope: nn.Module,
    inputs: Sequence[Tensor],
    device: torch.device,
    *,
    ignored: Sequence[Any] = (),
    ran: Reads | None = None,
    generators: Sequence[torch.Generator] = (),
    audits: bool = True,
) -> Iterator[Forward]:
    """Check the block, the forward of `scope` on `inputs` on `device`, for side effects that a replay would skip.

    Restores Python state and raises CaptureRefused after the block if the forward

    - changes Python state that is reachable from `roots`, or state of the process. A result without history may replace
      a tensor that the forward does not read;
    - writes to an input: the write would change the graph's static input, not the caller's tensor;
    - uses tensors in the host's memory, on another device;
    - reads a tensor that a pre-hook computes and stores on the module: a graph would always read the first one.

    Objects in `ignored` may change: their state is recreated in other ways. `ran` is the code that an earlier call
    executed; `generators` are advanced by replays. On a GPU, compiled code bypasses the dispatcher, so the audit stays
    empty.
    Without `audits`, operations are not observed either: the block repeats a run that was.
    """
    hook_computed = _with_history(scope) if scope._forward_pre_hooks else []
    known = Reads.of_calls(scope.modules()) if ran is None else ran  # compiled code was not observed
    state = HostState(roots, ignored=(*ignored, *generators), gradients=True, ran=known, process=True)
    versions = [None if tensor.is_inference() else tensor._version for tensor in inputs]
    audit, compiled = _audit(device), _is_compiled(scope, ran)
    if ran is not None and (iterators := iterators_read(state.namespaces, ran.names)):
        raise CaptureRefused(f"{name} may read the iterator {', '.join(iterators)}, which a replay would not advance")
    if ran is not None and "grad" in ran.own_names and "grad" not in ran.called:
        raise CaptureRefused(f"{name} reads the gradient of a tensor, which a replay would not read again")
    if found := refused_reads(ran, device):
        raise CaptureRefused(f"{name} {found[0]}")
    sees_operations = not compiled or device.type == "cpu"  # where a capture runs compiled code uncompiled
    with Observation(state, audit=audit if audits and sees_operations else None) as seen:
        with seen.running():
            yield Forward(audit, state)
        found = seen.changes(lambda tensor: compiled or _was_used(tensor, audit.outside))
    reasons = (
        [f"changes {', '.join(found)}: return it, or keep it in a buffer that is written in place"] if found else []
    )
    reasons += [f"reads {attribute}, which a hook computes before each call" for attribute in hook_computed]
    reasons += [
        f"writes to its argument {index} in place: return the result"
        for index, (tensor, version) in enumerate(zip(inputs, versions, strict=True))
        if (version is not None and tensor._version != version) or _was_used(tensor, audit.written, unknown=False)
    ]
    reasons += audit.refusals(device)
    if reasons:
        raise CaptureRefused(f"{name} {'; '.join(reasons)}. A replay would not repeat this")


# Types of results that no code changes, and of objects that calls rarely make.
IMMUTABLE: tuple[Any, ...] = (
    *(type(None), numbers.Number, str, bytes, tuple, frozenset, range, enum.Enum, type),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def made_objects(leaves: Sequence[Any], known: tuple[HostState, tuple, dict[str, Any]]) -> list[str]:
    """Return the types of the results, other than tensors and constants, that a run has made.

    `known`: the state before the run, and its arguments, of which results may be objects.
    """
    state, args, kwargs = known
    given = set(map(id, tree_leaves((args, kwargs))))
    return [
        type(leaf).__name__
        for leaf in leaves
        if not isinstance(leaf, IMMUTABLE) and id(leaf) not in given and leaf is not TENSOR and not state.knows(leaf)
    ]


def _audit(device: torch.device) -> StorageAudit:
    """Return an audit of a capture on a device. A capture on another than the host runs what the host does."""
    return StorageAudit(saves_host=device.type != "cpu")


def _is_compiled(scope: nn.Module, ran: Reads | None) -> bool:
    """Whether the forward is compiled code, or calls some."""
    return any(map(is_compiled, scope.modules())) or (ran is not None and bool(ran.compiled))


@contextmanager
def refuse_backward_changes(
    name: str,
    roots: Sequence[tuple[str, Any]],
    scope: nn.Module,
    forward: StorageAudit,
    device: torch.device,
    *,
    ignored: Sequence[Any] = (),
    ran: Reads | None = None,
    backward_ran: Reads | None = None,
    functions: Collection[type] = (),
    audits: bool = True,
) -> Iterator[Reads]:
    """Check the block, which is a captured backward, for side effects, such as the effects of a tensor's hooks.

    Yields the code that it runs. Restores Python state and raises CaptureRefused after the block if the backward
    changes such state, reads what a replay would not read again, or uses tensors in the host's memory that its forward
    has not. `forward` is the audit of that, `backward_ran` the code that an earlier backward executed, `functions` the
    autograd.Functions in it; other arguments as in `refuse_side_effects`. Without `audits`, the code is not observed.
    """
    reads, compiled = Reads(), _is_compiled(scope, ran)
    known: RunCode = Reads.of_calls(scope.modules()) if ran is None else ran
    if not compiled and ran is not None:
        if backward_ran is not None:
            known = ran.merged(backward_ran)
        elif any(map(is_own_class, functions)):
            known = ANY_CODE
    state = HostState(roots, ignored=ignored, ran=known)
    observes = audits and not compiled
    seen = Observation(state, reads=reads, audit=_audit(device)) if observes else Observation(state)
    # In this thread, where the code is observed. By itself, autograd uses a thread for each GPU.
    one_thread = nullcontext() if compiled else torch.autograd.set_multithreading_enabled(False)
    with seen:
        with one_thread, seen.running():
            yield reads
        found = seen.changes()
    reasons = [f"changes {', '.join(found)}"] if found else []
    reasons += seen.refusals(reads, device, earlier=forward)
    if ran is not None and reads.own:
        reasons += read_by(roots, ran.merged(reads), ignored=ignored)[1]
    if reasons:
        backward = f"the backward of {name}"
        raise CaptureRefused(f"{backward} {'; '.join(reasons)}. A replay would not repeat this")


def _was_used(tensor: Tensor, addresses: Container[int], unknown: bool = True) -> bool:
    """Whether the tensor's storage is among these; `unknown` if `storage_of` finds none."""
    storage = storage_of(tensor)
    return unknown if storage is None else storage._cdata in addresses


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT_NAMES = frozenset({"dropout", "dropout_p", "dropout_rate", "dropout_prob", "drop_prob"})


def constant_numbers(module: nn.Module) -> list[str]:
    """Return the names of number attributes that a graph of the module bakes in: floats, and dropout rates.

    A dropout rate may be an int (`nn.Dropout(0)`). Other ints are sizes, which modules keep, or counters, which change
    at every step without an effect on the forward.
    """
    rates = {"p", *DROPOUT_NAMES} if isinstance(module, DROPOUTS) else DROPOUT_NAMES
    numbers = {name: value for name, value in vars(module).items() if type(value) in (int, float)}
    return [name for name, value in numbers.items() if type(value) is float or name in rates]


def current_numbers(owners: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Any]:
    """Return the current values of these attributes; for one that is no longer a number, its type."""
    return [value if type(value) in (float, int) else type(value) for value in map(dict.get, owners, names)]


def _with_history(module: nn.Module) -> list[str]:
    """Return the names of attributes that are tensors with history."""
    return [
        attribute
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]
