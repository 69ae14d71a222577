"""Build a replayable program from a tape: calls bound to arena memory, run by the TorchScript interpreter.

A Python loop over the calls costs as much as running the model eagerly; the interpreter dispatches the same calls with
the same arguments at half the cost. The loop remains as a fallback that always works.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from graph_cache.backends.cpu_arena import Claim
from graph_cache.backends.cpu_out import out_call
from graph_cache.backends.cpu_tape import UNDEFINED_CONTENTS, Ref, Tape
from graph_cache.guards.call_values import OTHERS, map_leaves

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@dataclass(slots=True)
class Call:
    """One replayed call. `targets` receive copies of its results if the function cannot write in place.

    `targets` has one entry for each of the schema's returns, or is empty. An entry is a tensor, a list of tensors, or
    None to drop the result. `fallback` is the same call with copied results, for a program that does not support this
    one.
    """

    func: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    targets: tuple[Any, ...] = ()
    grad: bool = False  # the gradient mode to run under
    fallback: Call | None = None


def bind(tape: Tape, claim: Claim, offsets: list[int]) -> list[Call]:
    """Bind the tape's operations to tensors: intermediates become views of the arena, outputs are written in place."""
    views: dict[Ref, torch.Tensor] = {}

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        if (found := views.get(leaf)) is not None:
            return found
        if leaf.buffer in tape.kept:
            storage = tape.kept[leaf.buffer]
            view = torch.empty(0, dtype=leaf.dtype, device="cpu").set_(storage, leaf.offset, leaf.size, leaf.stride)
        else:
            start = offsets[leaf.buffer] + leaf.offset * leaf.dtype.itemsize
            view = claim.tensor(leaf.dtype, leaf.size, leaf.stride, start)
        view = torch._conj(view) if leaf.conjugated else view
        views[leaf] = view = torch._neg_view(view) if leaf.negated else view
        return view

    def bound(value: Any) -> Any:
        return value if type(value) in OTHERS else map_leaves(tensor_of, value)

    calls = []
    for index, op in enumerate(tape.ops):
        if _schema_of(op.func).name in UNDEFINED_CONTENTS:
            continue
        args = tuple([bound(one) for one in op.args])
        kwargs = {name: bound(one) for name, one in op.kwargs.items()}
        if not op.fresh:
            calls.append(Call(op.func, args, kwargs, grad=op.grad))
            continue
        copy_call = Call(op.func, args, kwargs, map_leaves(tensor_of, tape.read_outs(index)), op.grad)
        if op.in_place:
            targets = map_leaves(tensor_of, op.outs)
            calls.append(Call(*out_call(op.func, args, kwargs, targets), grad=op.grad, fallback=copy_call))
        else:
            calls.append(copy_call)
    return calls


def loop_program(calls: list[Call]) -> Callable[[], None]:
    """Return a replay as a plain Python loop: no faster than eager, but always available."""

    def replay() -> None:
        for grad, segment in _by_grad_mode(calls):
            with _without_autocast(), _mode(grad):
                for call in segment:
                    result = call.func(*call.args, **call.kwargs)
                    if call.targets:
                        _copy_results(call.targets, result if len(call.func._schema.returns) > 1 else (result,))

    return replay


def _by_grad_mode(calls: list[Call]) -> list[tuple[bool, list[Call]]]:
    """Group consecutive calls by gradient mode."""
    return [(grad, list(segment)) for grad, segment in itertools.groupby(calls, key=lambda call: call.grad)]


def _without_autocast() -> AbstractContextManager:
    """Return a context without autocast, whose casts are among the calls: a replay may run inside any region."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def _mode(grad: bool) -> AbstractContextManager:
    """Return the recorded gradient mode. No input requires grad, so autograd records nothing either way."""
    return torch.enable_grad() if grad else torch.inference_mode()


def _copy_results(targets: Sequence[Any], results: Sequence[Any]) -> None:
    for target, value in zip(targets, results, strict=True):
        if isinstance(target, (list, tuple)):
            _copy_results(target, value)
        elif target is not None:
            target.copy_(value)


def torchscript_program(calls: list[Call]) -> Callable[[], None]:
    """Return a replay by the TorchScript interpreter over a linear graph of nodes with constant tensors.

    Raises RuntimeError if its IR cannot represent an argument. The graph executor's optimisations are disabled for
    every call: they assume that constants are never written, and here they are.
    """
    segments = [(grad, _script(segment)) for grad, segment in _by_grad_mode(calls)]
    get_optimize, set_optimize = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize

    def replay() -> None:
        before = get_optimize()
        set_optimize(False)
        try:
            with _without_autocast():
                for grad, run in segments:
                    with _mode(grad):
                        run()
        finally:
            set_optimize(before)

    return replay


def _script(calls: list[Call]) -> Callable[[], None]:
    graph: Any = torch._C.Graph()  # Any: torch's stubs lack some of its methods
    constants: dict[tuple, torch._C.Value] = {}
    for call in calls:
        _append(graph, constants, call)
    graph.registerOutput(graph.insertConstant(None))
    return torch._C._create_function_from_graph("encore_replay", graph)


class _Schema:
    """The parts of an operation's schema that a node needs; PyTorch makes new objects at each access."""

    def __init__(self, func: torch._ops.OpOverload):
        schema = func._schema
        self.name, self.returns = schema.name, len(schema.returns)
        self.overload = str(schema).split("(")[0]
        self.defaults = {argument.name: argument.default_value for argument in schema.arguments}
        self.types = {argument.name: _Type(argument.type) for argument in schema.arguments}
        self.resolved: dict[tuple[Any, ...], bool] = {}  # by types of arguments; see `_resolves_to_overload`


class _Type:
    """The type of an argument in the IR, and what its name says."""

    def __init__(self, ir_type: Any):
        self.ir_type, self.name = ir_type, str(ir_type)
        self.is_number, self.is_float = "number" in self.name, "float" in self.name
        self.holds_tensors = "Tensor" in self.name


_schema_of = functools.cache(_Schema)
_ANY_TYPE = _Type(None)


def _append(graph: torch._C.Graph, constants: dict, call: Call) -> None:
    schema = _schema_of(call.func)
    given = schema.defaults | dict(zip(schema.defaults, call.args, strict=False)) | call.kwargs
    inputs = [_value(graph, constants, given[name], kind) for name, kind in schema.types.items()]
    node = graph.create(schema.name, inputs, schema.returns)
    graph.insertNode(node)
    kinds = tuple(
        [(type(one), *map(type, one)) if isinstance(one, (tuple, list)) else type(one) for one in given.values()]
    )
    if (resolves := schema.resolved.get(kinds)) is None:
        resolves = schema.resolved[kinds] = _resolves_to_overload(node, schema, given)
    if not resolves:
        if call.fallback is None:
            raise RuntimeError(f"{call.func} would be replayed as {node.schema()}")
        node.destroy()
        return _append(graph, constants, call.fallback)
    for target, output in zip(call.targets, node.outputs(), strict=False):
        if isinstance(target, (list, tuple)):
            output.setType(torch._C.ListType.ofTensors())
            unpacked = graph.insertNode(graph.create("prim::ListUnpack", [output], len(target)))
            pairs = list(zip(target, unpacked.outputs(), strict=True))
        else:
            pairs = [(target, output)]
        for destination, value in pairs:
            if destination is not None:
                graph.insertNode(
                    graph.create(
                        "aten::copy_",
                        [
                            _value(graph, constants, destination, _ANY_TYPE),
                            value,
                            _value(graph, constants, False, _ANY_TYPE),
                        ],
                        1,
                    )
                )


def _resolves_to_overload(node: torch._C.Node, schema: _Schema, given: dict[str, Any]) -> bool:
    """Return whether the interpreter resolves the node to the call's overload.

    A node carries no overload name: the interpreter selects one by input types. If a number is passed for a tensor, it
    selects the overload for numbers, which is equivalent.
    """
    found, wanted = node.schema().partition("(")[0], schema.overload
    if found == wanted:
        return True
    numbers = any(
        isinstance(given.get(name), (bool, int, float, complex)) and kind.holds_tensors
        for name, kind in schema.types.items()
    )
    return numbers and found.partition(".")[0] == wanted.partition(".")[0]


MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


def _value(graph: torch._C.Graph, constants: dict, value: Any, kind: _Type) -> torch._C.Value:
    """Return `value` as a graph constant, shared between calls. Lists of tensors are built by a node."""
    if type(value) is torch.Tensor:
        return _constant(graph, constants, ("tensor", id(value)), value)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, (int, float)) for item in value) and not _wants_floats(kind, value):
            return _constant(graph, constants, ("list", tuple(value), kind.name), list(value))
        return _list(graph, constants, value, kind.ir_type)
    if isinstance(value, torch.memory_format):
        value = MEMORY_FORMATS.index(value)
    if isinstance(value, bool) and kind.is_number:
        value = int(value)  # in the IR, a bool is not a number
    if kind.is_float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    key: tuple[str, Any]
    if isinstance(value, torch.Tensor):
        key = ("tensor", id(value))
    elif isinstance(value, torch.Generator):
        generator: Any = value
        key = ("generator", generator._cdata)
    else:
        key = (type(value).__name__, repr(value))
    return _constant(graph, constants, key, value)


def _wants_floats(kind: _Type, value: list | tuple) -> bool:
    return kind.is_float and any(isinstance(item, int) for item in value)


def _list(graph: torch._C.Graph, constants: dict, value: list | tuple, ir_type: Any) -> torch._C.Value:
    element = ir_type
    while hasattr(element, "getElementType") and not isinstance(element, torch._C.ListType):
        element = element.getElementType()  # unwrap Optional
    element = element.getElementType()
    kind = _Type(element)
    node = graph.create("prim::ListConstruct", [_value(graph, constants, item, kind) for item in value], 1)
    node.output().setType(torch._C.ListType(element))
    graph.insertNode(node)
    return node.output()


def _constant(graph: Any, constants: dict, key: tuple, value: Any) -> torch._C.Value:
    if key not in constants:
        constants[key] = graph.insertConstant(value)
    return constants[key]
