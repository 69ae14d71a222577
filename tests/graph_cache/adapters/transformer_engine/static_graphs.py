"""A `Maker` for a CPU with the memory hazards of Transformer Engine's graphs.

Each "graph" runs its module on static inputs. Its saved activations become invalid when a graph runs that was not
captured while it was outstanding, and input gradients are overwritten when the backward after the next begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from graph_cache.adapters.transformer_engine.installed import new_accumulators
from graph_cache.adapters.transformer_engine.maker import CapturePlan, Precision
from graph_cache.errors import CaptureError
from graph_cache.training.call import Result


class StaticMaker:
    """Records its calls: `plan`, `weights` (each `update_weights` argument) and `made`."""

    def __init__(self, fails: bool = False):
        self.fails = fails
        self.current_precision: Precision | None = Precision()
        self.plan: CapturePlan | None = None
        self.weights: list[bool] = []
        self.made: list[StaticGraphs] = []

    def precision(self) -> Precision | None:
        return self.current_precision

    def accumulators(self, parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
        return new_accumulators(parameters)

    def update_weights(self, are_new: bool) -> None:
        self.weights.append(are_new)

    def make(self, plan: CapturePlan) -> StaticGraphs:
        self.plan = plan
        graphs = StaticGraphs(plan)
        for call in graphs.calls:  # like a warm-up, this changes gradients, buffers and main_grads
            out = Result.of(call.module(**call.statics))[1]
            torch.autograd.backward([tensor.sum() for tensor in out if tensor.requires_grad])
        if self.fails:
            raise CaptureError("this maker fails")
        self.made.append(graphs)
        return graphs


class StaticGraphs:
    engine = "static"
    nbytes = 1200

    def __init__(self, plan: CapturePlan):
        self.valid: set[StaticCall] = set()  # calls with intact activations
        self.recent_gradients: list[list[Tensor]] = []  # intact input gradients of backwards, oldest first
        self.closed = 0
        self.current = True
        microbatches = len(plan.samples) // max(1, len(plan.modules))
        first_index, module_indices = 0, []
        for count in plan.layers_per_chunk:
            module_indices += [first_index + layer for _ in range(microbatches) for layer in range(count)]
            first_index += count
        self.calls = [
            StaticCall(self, plan.modules[module], statics)
            for module, statics in zip(module_indices, plan.samples, strict=True)
        ]
        self._record_alive_calls(plan, microbatches)

    def _record_alive_calls(self, plan: CapturePlan, microbatches: int) -> None:
        """Record which calls were outstanding when each forward, backward and weight gradient was captured."""
        alive: set[StaticCall] = set()
        done: dict[tuple[str, int], int] = {}
        delayed = {abs(ceil(entry)) for entry in plan.order if ceil(entry) != entry}
        for entry in plan.order:
            chunk = abs(ceil(entry)) - 1
            kind = "forward" if entry > 0 else "backward" if ceil(entry) == entry else "weights"
            microbatch = done[kind, chunk] = done.get((kind, chunk), -1) + 1
            begin = microbatches * sum(plan.layers_per_chunk[:chunk]) + microbatch * plan.layers_per_chunk[chunk]
            calls = self.calls[begin : begin + plan.layers_per_chunk[chunk]]
            for call in calls if kind == "forward" else reversed(calls):
                call.alive_at_capture[kind] = set(alive)
                if kind == "forward":
                    alive.add(call)
                elif kind == "weights" or abs(entry) not in delayed:
                    alive.discard(call)

    def overwrite_memory(self, call: StaticCall, kind: str) -> None:
        """Invalidate the memory that this graph overwrites."""
        self.valid &= call.alive_at_capture[kind] | {call}
        for older in self.recent_gradients[:-1]:
            for grad in older:
                grad.fill_(float("nan"))
        self.recent_gradients = self.recent_gradients[-1:]

    def are_current(self) -> bool:
        return self.current

    def close(self) -> None:
        self.closed += 1


class StaticCall:
    """One "graph" with forward, backward, and weight gradients."""

    def __init__(self, graphs: StaticGraphs, module: torch.nn.Module, statics: dict[str, Tensor]):
        self.graphs = graphs
        self.module = module
        self.statics = statics
        self.alive_at_capture: dict[str, set[StaticCall]] = {}
        self.outputs: list[Tensor] = []
        self.weight_gradients = 0

    def __call__(self, is_first_microbatch: bool | None = None, **inputs: Tensor):
        assert list(inputs) == list(self.statics)
        return _Run.apply(self, *inputs.values(), *self.module.parameters())

    def backward_dw(self) -> None:
        self.graphs.overwrite_memory(self, "weights")
        assert self in self.graphs.valid
        self.weight_gradients += 1

    def forward(self, inputs) -> list[Tensor]:
        self.graphs.overwrite_memory(self, "forward")
        for static, tensor in zip(self.statics.values(), inputs, strict=True):
            if static.data_ptr() != tensor.data_ptr():
                static.copy_(tensor)  # raises later if an outstanding backward saved it
        # Like a replay, bypass the layer's hooks and intercepted forward.
        call = self.module.call.func
        layer = call if isinstance(call, torch.nn.Module) else self.module.scope  # a part may be a method of the layer
        if call is layer:
            call = functools.partial(type(layer).forward, layer)
        args, kwargs = self.module.sample.arguments(list(self.statics.values()))
        hooks = [(module._forward_pre_hooks, dict(module._forward_pre_hooks)) for module in layer.modules()]
        for registered, _ in hooks:
            registered.clear()
        flag = vars(layer).get("is_first_microbatch")
        with torch.enable_grad():
            outputs = self.module.flatten_result(call(*args, **kwargs))
        self.outputs = [tensor for tensor in outputs if tensor is not None]
        if flag is not None:
            layer.is_first_microbatch = flag
        for registered, before in hooks:
            registered.update(before)
        self.graphs.valid.add(self)
        return [tensor.detach() for tensor in self.outputs]

    def backward(self, grads) -> list[Tensor | None]:
        self.graphs.overwrite_memory(self, "backward")
        wanted = [tensor for tensor in (*self.statics.values(), *self.module.parameters()) if tensor.requires_grad]
        ends = [index for index, tensor in enumerate(self.outputs) if tensor.requires_grad]
        flags = {
            parameter: parameter.grad_added_to_main_grad
            for parameter in self.module.parameters()
            if hasattr(parameter, "grad_added_to_main_grad")
        }
        found = torch.autograd.grad(
            [self.outputs[index] for index in ends], wanted, [grads[index] for index in ends], allow_unused=True
        )
        for parameter, flag in flags.items():  # a replay runs no Python that could set the flag
            parameter.grad_added_to_main_grad = flag
        if self not in self.graphs.valid:
            found = [torch.full_like(tensor, float("nan")) for tensor in wanted]
        inputs = sum(tensor.requires_grad for tensor in self.statics.values())
        # A list per run, not per call: the same call may run its backward twice in a row.
        input_grads = [grad.clone() for grad in found[:inputs] if grad is not None]
        self.graphs.recent_gradients.append(input_grads)
        rest = iter([*input_grads, *found[inputs:]])
        tensors = (*self.statics.values(), *self.module.parameters())
        return [next(rest) if tensor.requires_grad else None for tensor in tensors]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: StaticCall, *tensors: Tensor):
        ctx.call = call
        return tuple(call.forward(tensors[: len(call.statics)]))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return (None, *[None if grad is None else grad.detach() for grad in ctx.call.backward(grads)])
