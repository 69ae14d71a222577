"""Find out= overloads of operations, so that a replay writes into given memory and allocates nothing.

Also verifies that an overload saves a copy and gives the same results as the operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from graph_cache.guards.values import same_bits

FACTORY_ARGUMENTS = {"dtype", "layout", "device", "pin_memory"}

# Operations that write into an argument without declaring it in their schema: a trial run would write twice.
UNDECLARED_WRITES = {
    "aten::native_batch_norm",
    "aten::batch_norm_with_update",
    "aten::_batch_norm_impl_index",
    "aten::native_instance_norm",
    "aten::rrelu_with_noise_functional",
}


@functools.cache
def out_overload(func: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """Return the overload of `func` that writes into given tensors, and the names of those; None if there is none."""
    if func._schema.is_mutable or func._schema.name in UNDECLARED_WRITES:
        return None
    if any(str(returned.type) != "Tensor" for returned in func._schema.returns):
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, name)
        outs = tuple(argument.name for argument in candidate._schema.arguments if argument.is_out)
        if len(outs) != len(func._schema.returns) or not outs:
            continue
        given = [(argument.name, str(argument.type)) for argument in candidate._schema.arguments if not argument.is_out]
        if [pair for pair in wanted if pair in given or pair[0] not in FACTORY_ARGUMENTS] == given:
            return candidate, outs
    return None


@functools.cache
def out_overload_copies(func: torch._ops.OpOverload) -> bool:
    """Return whether the out= overload of `func` runs it and copies each result, as those that torch generates do.

    Such an overload has no CPU kernel. It saves nothing, and copies also results that nothing
    reads: for layer_norm it takes twice as long as the operation. The overload must exist.
    """
    found = out_overload(func)
    assert found is not None
    return not torch._C._dispatch_has_kernel_for_dispatch_key(found[0].name(), "CPU")


def out_call(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], targets: Sequence[torch.Tensor]
) -> tuple[torch._ops.OpOverload, tuple, dict[str, Any]]:
    """Return `func(*args, **kwargs)` as a call that writes its results into `targets`. The overload must exist."""
    found = out_overload(func)
    assert found is not None
    out_func, out_names = found
    arguments = out_func._schema.arguments
    accepted = {argument.name for argument in arguments}
    positional = [argument.name for argument in func._schema.arguments if not argument.kwarg_only]
    named = dict(zip(positional, args, strict=False)) | kwargs
    out_args, out_kwargs = [], {name: value for name, value in named.items() if name in accepted}
    for argument in arguments:
        if argument.kwarg_only or argument.name not in out_kwargs:
            break
        out_args.append(out_kwargs.pop(argument.name))
    return out_func, tuple(out_args), out_kwargs | dict(zip(out_names, targets, strict=True))


def out_overload_matches(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], results: Any) -> bool:
    """Run the overload on scratch tensors: return whether it gives `results` and needs no more memory than they do.

    An overload that copies its results is not run, and does not match.

    Some overloads use their output as scratch space (`mse_loss` for all terms, before the sum): in an arena this would
    overwrite neighbouring buffers.
    """
    results = results if isinstance(results, (list, tuple)) else (results,)
    if out_overload(func) is None or out_overload_copies(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if not all(isinstance(result, torch.Tensor) for result in results):
        return False
    targets = [torch.empty(0, dtype=result.dtype, device="cpu") for result in results]
    call, out_args, out_kwargs = out_call(func, args, kwargs, targets)
    try:
        call(*out_args, **out_kwargs)
    except RuntimeError:  # unsupported target: results are copied instead
        return False
    return all(_matches(target, result) for target, result in zip(targets, results, strict=True))


def _matches(target: torch.Tensor, result: torch.Tensor) -> bool:
    uses_scratch = target.untyped_storage().nbytes() > target.numel() * target.itemsize
    return not uses_scratch and target.shape == result.shape and same_bits(target, result)
