"""Detect, undo and refuse side effects of a forward at capture, since a replay would not repeat them.

Checks a module's attributes, buffers and inputs. Parameters are handled by `parameter_aliases.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from graph_cache.errors import CaptureRefused


@contextmanager
def refuse_side_effects(name: str, scope: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Check the block, which is the forward of `scope` on `inputs`, for side effects that a replay would skip.

    Restores the modules and raises CaptureRefused after the block if the forward

    - leaves a tensor with autograd history on a module: its gradient would go to the parameter aliases;
    - replaces a buffer by another tensor, or changes a number in an attribute;
    - writes to an input: the write would change the graph's static input, not the caller's tensor;
    - reads a tensor that a pre-hook computes and stores on the module: a graph would always read the first one.
    """
    modules = list(scope.modules())
    hook_computed = _with_history(scope) if scope._forward_pre_hooks else {}
    before = [(module, _with_history(module), numbers_of(module, (int, float))) for module in modules]
    versions = [None if tensor.is_inference() else tensor._version for tensor in inputs]
    found: list[str] = []
    try:
        with refuse_replaced_buffers(name, modules):
            yield
    finally:
        for module, histories, numbers in before:
            type_name = type(module).__name__
            found += [
                f"leaves a tensor with autograd history in {type_name}.{attribute}: return it"
                for attribute in _restore_histories(module, histories)
            ]
            found += [
                f"changes {type_name}.{attribute}: keep it in a buffer that is written in place"
                for attribute, number in numbers.items()
                if not _unchanged(vars(module).get(attribute), number)
            ]
            vars(module).update(numbers)
    found += [f"reads {attribute}, which a hook computes before each call" for attribute in hook_computed]
    found += [
        f"writes to its argument {index} in place: return the result"
        for index, (tensor, version) in enumerate(zip(inputs, versions, strict=True))
        if version is not None and tensor._version != version
    ]
    if found:
        raise CaptureRefused(f"{name} {'; '.join(found)}. A replay would not repeat this")


@contextmanager
def refuse_replaced_buffers(name: str, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the buffers and raise CaptureRefused if the block replaces a buffer by another tensor."""
    before = [(module, dict(module._buffers)) for module in modules]
    found: list[str] = []
    try:
        yield
    finally:
        for module, buffers in before:
            found += [
                f"{type(module).__name__}.{buffer}"
                for buffer, value in buffers.items()
                if module._buffers.get(buffer) is not value
            ]
            module._buffers.update(buffers)
    if found:
        raise CaptureRefused(
            f"{name} replaces {', '.join(found)} by another tensor, which a replay would not repeat: "
            "write to the buffer in place (copy_, add_)"
        )


def numbers_of(module: nn.Module, types: tuple[type, ...]) -> dict[str, int | float]:
    """Return the module's attributes of exactly these types."""
    return {attribute: value for attribute, value in vars(module).items() if type(value) in types}


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT_NAMES = frozenset({"dropout", "dropout_p", "dropout_rate", "dropout_prob", "drop_prob"})


def constant_numbers(module: nn.Module) -> list[str]:
    """Return the names of number attributes that a graph of the module bakes in: floats, and dropout rates.

    A dropout rate may be an int (`nn.Dropout(0)`). Other ints are sizes, which modules keep, or counters, which change
    at every step without an effect on the forward.
    """
    rates = {"p", *DROPOUT_NAMES} if isinstance(module, DROPOUTS) else DROPOUT_NAMES
    numbers = numbers_of(module, (int, float))
    return [name for name, value in numbers.items() if type(value) is float or name in rates]


def current_numbers(owners: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Any]:
    """Return the current values of these attributes; for one that is no longer a number, its type."""
    return [value if type(value) in (float, int) else type(value) for value in map(dict.get, owners, names)]


def _unchanged(value: Any, number: float) -> bool:
    return value is number or (type(value) is type(number) and value == number)  # `is` covers NaN


def _with_history(module: nn.Module) -> dict[str, Any]:
    """Return attributes that are tensors with history (same object), or lists and dicts of such (copies)."""
    found: dict[str, Any] = {}
    for attribute, value in vars(module).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            found[attribute] = value
        elif isinstance(value, (list, dict)) and any(
            isinstance(item, Tensor) and item.grad_fn is not None
            for item in (value.values() if isinstance(value, dict) else value)
        ):
            found[attribute] = value.copy()
    return found


def _restore_histories(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Restore attributes that hold another tensor with history than before, and return their names."""
    now = _with_history(module)
    changed = [attribute for attribute, value in now.items() if not _same(value, before.get(attribute))]
    for attribute in changed:
        value, previous = vars(module)[attribute], before.get(attribute)
        if isinstance(value, list):
            value[:] = previous or []
        elif isinstance(value, dict):
            value.clear()
            value.update(previous or {})
        elif previous is not None:
            vars(module)[attribute] = previous
        else:
            del vars(module)[attribute]
    return changed


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return value is other
    if type(value) is not type(other) or len(value) != len(other):
        return False
    if isinstance(value, list):
        return all(item is other_item for item, other_item in zip(value, other, strict=True))
    return all(key in other and other[key] is item for key, item in value.items())
