"""Detect, undo and refuse side effects of a forward at capture, since a replay would not repeat them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from graph_cache.audit import StorageAudit, storage_of
from graph_cache.errors import CaptureRefused
from graph_cache.training.compiled import is_compiled
from graph_cache.training.host_state import HostState


@contextmanager
def refuse_side_effects(
    name: str, scope: nn.Module, inputs: Sequence[Tensor], arguments: Any, ignored: Sequence[Any] = ()
) -> Iterator[StorageAudit]:
    """Check the block, which is the forward of `scope` on `inputs`, for side effects that a replay would skip.

    Restores Python state and raises CaptureRefused after the block if the forward

    - changes an attribute, a buffer, a parameter, a list or a dictionary of the modules or the arguments. A result
      without history may replace a tensor that the forward does not read;
    - writes to an input: the write would change the graph's static input, not the caller's tensor;
    - reads a tensor that a pre-hook computes and stores on the module: a graph would always read the first one.

    Objects in `ignored` may change: their state is recreated in other ways. Yields the audit of the forward. Compiled
    code bypasses the dispatcher, so the audit stays empty for it.
    """
    hook_computed = _with_history(scope) if scope._forward_pre_hooks else []
    state = HostState([(type(scope).__name__, scope), ("arguments", arguments)], ignored=ignored)
    versions = [None if tensor.is_inference() else tensor._version for tensor in inputs]
    audit, compiled = StorageAudit(), any(map(is_compiled, scope.modules()))
    try:
        with nullcontext() if compiled else audit:
            yield audit
        found = state.changes(lambda tensor: compiled or _was_used(tensor, audit.outside))
    finally:
        state.restore_changed()
    reasons = (
        [f"changes {', '.join(found)}: return it, or keep it in a buffer that is written in place"] if found else []
    )
    reasons += [f"reads {attribute}, which a hook computes before each call" for attribute in hook_computed]
    reasons += [
        f"writes to its argument {index} in place: return the result"
        for index, (tensor, version) in enumerate(zip(inputs, versions, strict=True))
        if (version is not None and tensor._version != version) or _was_used(tensor, audit.written, unknown=False)
    ]
    if reasons:
        raise CaptureRefused(f"{name} {'; '.join(reasons)}. A replay would not repeat this")


def _was_used(tensor: Tensor, addresses: Container[int], unknown: bool = True) -> bool:
    """Whether the tensor's storage is among these; `unknown` for a tensor without a storage of its own."""
    storage = storage_of(tensor)
    return unknown if storage is None else storage._cdata in addresses


class ReadAttributes(Mapping[str, Tensor]):
    """Tensors in plain attributes of modules that a forward used, by name, looked up on each access."""

    def __init__(self, scope: nn.Module, used: Container[int]):
        self._places = {
            f"{path}.{attribute}" if path else attribute: (vars(module), attribute)
            for path, module in scope.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor) and _was_used(value, used, unknown=False)
        }

    def __getitem__(self, name: str) -> Tensor:
        attributes, attribute = self._places[name]
        value = attributes[attribute]
        if not isinstance(value, Tensor):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
