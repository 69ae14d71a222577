"""Turns a tape into something that replays: calls bound to arena memory, run by the TorchScript interpreter.

A plain Python loop over the calls costs as much as running the model eagerly; the interpreter dispatches the same
calls with the same arguments at half the cost. The loop stays as the way that always works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from graph_cache.backends.cpu_arena import Claim
from graph_cache.backends.cpu_tape import Op, Ref, Tape

FACTORY_ARGUMENTS = {"dtype", "layout", "device", "pin_memory"}
UNDEFINED_CONTENTS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided",
                      "aten::new_empty_strided"}


@dataclass(slots=True)
class Call:
    """One replayed call. `targets` receive copies of its results where the function can't write in place."""

    func: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    targets: tuple[torch.Tensor, ...] = ()


def bind(tape: Tape, claim: Claim, offsets: list[int]) -> list[Call]:
    """The tape's operations on real tensors: intermediates become views of the arena, outputs are written in place."""
    views: dict[Ref, torch.Tensor] = {}

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        if leaf not in views:
            start = offsets[leaf.buffer] + leaf.offset * leaf.dtype.itemsize
            views[leaf] = claim.tensor(leaf.dtype, leaf.size, leaf.stride, start)
        return views[leaf]

    calls = []
    for op in tape.ops:
        if op.func._schema.name in UNDEFINED_CONTENTS:
            continue
        args, kwargs = tree_map(tensor_of, op.args), tree_map(tensor_of, op.kwargs)
        if not op.fresh:
            calls.append(Call(op.func, args, kwargs))
            continue
        calls.append(_write_in_place(op, args, kwargs, tuple(tensor_of(ref) for ref in op.outs if ref is not None)))
    return calls


def _write_in_place(op: Op, args: tuple, kwargs: dict[str, Any], targets: tuple[torch.Tensor, ...]) -> Call:
    found = out_overload(op.func)
    if found is None or len(found[1]) != len(targets):
        return Call(op.func, args, kwargs, targets)
    out_func, out_names = found
    accepted = {argument.name for argument in out_func._schema.arguments}
    positional = [argument.name for argument in op.func._schema.arguments if not argument.kwarg_only]
    named = dict(zip(positional, args, strict=False)) | kwargs
    order = [argument for argument in out_func._schema.arguments if not argument.kwarg_only]
    out_args, out_kwargs = [], {name: value for name, value in named.items() if name in accepted}
    for argument in order:
        if argument.name not in out_kwargs:
            break
        out_args.append(out_kwargs.pop(argument.name))
    return Call(out_func, tuple(out_args), out_kwargs | dict(zip(out_names, targets, strict=True)))


@functools.cache
def out_overload(func: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The overload of `func` that writes into given tensors, with the names of those; None if there is none."""
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


def loop_program(calls: list[Call]) -> Callable[[], None]:
    """Replay by a plain Python loop: no faster than eager, always available."""

    def replay() -> None:
        with torch.inference_mode():
            for call in calls:
                result = call.func(*call.args, **call.kwargs)
                if call.targets:
                    results = (result,) if isinstance(result, torch.Tensor) else result
                    for target, value in zip(call.targets, results, strict=True):
                        target.copy_(value)

    return replay


def torchscript_program(calls: list[Call]) -> Callable[[], None]:
    """Replay by the TorchScript interpreter over a straight line of nodes with constant tensors.

    Raises RuntimeError where an argument has no form in its IR. The graph executor's optimisations stay off for every
    call: they assume that constants are not written to, and ours are.
    """
    graph = torch._C.Graph()
    constants: dict[tuple, torch._C.Value] = {}
    for call in calls:
        _append(graph, constants, call)
    graph.registerOutput(graph.insertConstant(None))
    run = torch._C._create_function_from_graph("encore_replay", graph)
    optimised, set_optimised = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize

    def replay() -> None:
        before = optimised()
        set_optimised(False)
        try:
            with torch.inference_mode():
                run()
        finally:
            set_optimised(before)

    return replay


def _append(graph: torch._C.Graph, constants: dict, call: Call) -> None:
    schema = call.func._schema
    given = dict(zip([argument.name for argument in schema.arguments], call.args, strict=False)) | call.kwargs
    inputs = [
        _value(graph, constants, given[argument.name] if argument.name in given else argument.default_value, argument.type)
        for argument in schema.arguments
    ]
    node = graph.create(schema.name, inputs, len(schema.returns))
    graph.insertNode(node)
    for target, output in zip(call.targets, node.outputs(), strict=False):
        copy = graph.create("aten::copy_", [_value(graph, constants, target, None), output,
                                            _value(graph, constants, False, None)], 1)
        graph.insertNode(copy)


MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


def _value(graph: torch._C.Graph, constants: dict, value: Any, kind: Any) -> torch._C.Value:
    """A constant in the graph, shared between calls; lists that hold tensors are built by a node of their own."""
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, (int, float)) for item in value) and not _wants_floats(kind, value):
            return _constant(graph, constants, ("list", tuple(value), str(kind)), list(value))
        return _list(graph, constants, value, kind)
    if isinstance(value, torch.memory_format):
        value = MEMORY_FORMATS.index(value)
    if kind is not None and "float" in str(kind) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, torch.Tensor):
        key = ("tensor", id(value))
    elif isinstance(value, torch.Generator):
        key = ("generator", value._cdata)
    else:
        key = (type(value).__name__, repr(value))
    return _constant(graph, constants, key, value)


def _wants_floats(kind: Any, value: list | tuple) -> bool:
    return "float" in str(kind) and any(isinstance(item, int) for item in value)


def _list(graph: torch._C.Graph, constants: dict, value: list | tuple, kind: Any) -> torch._C.Value:
    element = kind
    while hasattr(element, "getElementType") and not isinstance(element, torch._C.ListType):
        element = element.getElementType()  # through Optional to the list
    element = element.getElementType()
    node = graph.create("prim::ListConstruct", [_value(graph, constants, item, element) for item in value], 1)
    node.output().setType(torch._C.ListType(element))
    graph.insertNode(node)
    return node.output()


def _constant(graph: torch._C.Graph, constants: dict, key: tuple, value: Any) -> torch._C.Value:
    if key not in constants:
        constants[key] = graph.insertConstant(value)
    return constants[key]
