"""An intercepted layer: its recorded calls, its graphs, and the autograd hooks of a replay.

Maps calls to graph inputs and outputs. `GraphSlots` decides which graph may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.adapters.transformer_engine.maker import Precision
from graph_cache.adapters.transformer_engine.preserved_state import FIRST_MICROBATCH
from graph_cache.adapters.transformer_engine.samples import CallLog, CapturedLayer, Sample
from graph_cache.errors import GraphError
from graph_cache.training.attached import FORWARD, AttachedModule, Hook, ModuleState, Part, put_back

REPLAY_ATTRIBUTE = "replayed_by_encore"  # on a replay's autograd node: (id of GraphSlots, graph index)


class Layer:
    """One part of a model chunk. `index`: its number among the captured parts of its chunk. `holder`: the module with
    the `current_microbatch` attribute.
    """

    def __init__(self, part: Part, fired: Callable[[Hook], bool] | None, holder: nn.Module):
        self.attached = AttachedModule(part, fired)
        self.name = part.name
        self.chunk = part.chunk
        self.calls = CallLog()
        self.index = 0
        self.sample: Sample | None = None
        self._alias: CapturedLayer | None = None
        self.added: list[Tensor] = []  # parameters whose gradients the graph adds to their main_grad itself
        self.graphs: list[tuple[Any, list[str]]] = []  # per microbatch: the graph and its keywords
        self.label = (part.name, "", "", 0)  # labels of the replay metric
        self._first_microbatch_flags = [vars(one) for one in self.attached.submodules if FIRST_MICROBATCH in vars(one)]
        self._fired = fired
        self._holder = holder
        self._state: ModuleState = ()
        self._step = self._calls_in_step = 0
        # Call the module, not its forward: Transformer Engine registers hooks on called modules.
        self._call = part.module if part.method == FORWARD else self.attached.eager

    def microbatch(self, step: int) -> int:
        """Return the microbatch of this call: Megatron's `current_microbatch`, else the number of this step's previous
        calls.
        """
        if step != self._step:
            self._step, self._calls_in_step = step, 0
        self._calls_in_step += 1
        current = getattr(self._holder, "current_microbatch", None)
        return self._calls_in_step - 1 if current is None else current

    def take_call_log(self) -> CallLog:
        """Return the recorded calls and start a new log."""
        call_log, self.calls = self.calls, CallLog()
        return call_log

    def captured_layer(self, sample: Sample, index: int, nondiff_outputs: int) -> CapturedLayer:
        """Return the module to capture in place of the layer. `nondiff_outputs`: see CapturedLayer."""
        self.sample, self.index, self._state = sample, index, self.attached.state
        self._alias = CapturedLayer(self.attached, self._call, sample, nondiff_outputs)
        return self._alias

    def set_graphs(self, graphs: Iterable[tuple[Callable[..., Any], list[str]]], added: set[int], scope: str) -> None:
        """Set the graphs and their keywords, one pair per microbatch. `added`: see PreservedState."""
        self.graphs = list(graphs)
        self.added = [parameter for parameter in self.attached.parameters if id(parameter) in added]
        tensors = self.sample.key.tensors
        self.label = (self.name, scope, "forward", tensors[0][0][0] if tensors and tensors[0][0] else 1)

    def forget(self) -> None:
        """Reset to the state before the first call."""
        self.calls, self.sample, self.graphs, self.added, self._alias = CallLog(), None, [], [], None

    def fits(self, args: tuple, kwargs: dict[str, Any], precision: Precision | None) -> Sequence[Tensor] | None:
        """Return the tensors of a call that the graphs serve; None for any other call or if the layer has changed."""
        if self.attached.state != self._state:
            self.attached.refresh()  # removing a hook does not notify
        if self.attached.state != self._state or precision != self.sample.record.precision:
            return None
        return self.sample.fits(args, kwargs, self.attached.module.training)

    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """Remove hooks during a capture: hooks inside that run before replays, and the layer's own hooks, which run
        around each call. Hooks of the first kind, inside and on the layer, are run once on entry.
        """
        module = self.attached.module
        own = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        for hook in list(module._forward_pre_hooks.values()):
            if self._fired is not None and self._fired(hook):
                hook(module, ())
        with self.attached.hooks_put_aside(), put_back(own):
            for hooks in own:
                hooks.clear()
            yield

    def clear_first_microbatch(self) -> None:
        """Clear `is_first_microbatch` after a replay, as the replaced modules do. Otherwise gradients of a later eager
        call in the step would overwrite those in `main_grad`.
        """
        for attributes in self._first_microbatch_flags:
            attributes[FIRST_MICROBATCH] = False

    def rebuild_result(self, outputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the layer's result built from a graph's outputs, and the autograd node where its backward starts."""
        return self._alias.rebuild_result(outputs), outputs[0].grad_fn


class BackwardHook:
    """Prehook of a replay's backward. If autograd frees the graph without a backward, calls `on_dropped` instead."""

    __slots__ = ("_graph_index", "_has_run", "_name", "_on_backward", "_on_dropped")

    def __init__(
        self, name: str, graph_index: int, on_backward: Callable[[int], None], on_dropped: Callable[[int], None]
    ):
        self._name = name
        self._graph_index = graph_index
        self._on_backward = on_backward
        self._on_dropped = on_dropped
        self._has_run = False

    def __call__(self, grads: Sequence[Tensor]) -> None:
        if self._has_run:
            raise GraphError(
                f"the backward of {self._name} was run twice: a graph's backward can run only once, since later "
                "replays reuse its memory; detach the graphs to use retain_graph"
            )
        self._has_run = True
        self._on_backward(self._graph_index)

    def __del__(self) -> None:
        if not self._has_run:
            self._on_dropped(self._graph_index)


class _CopyGradient(torch.autograd.Function):
    """Identity whose backward copies the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.clone()


def protect_gradient(tensor: Tensor, owner: object, next_backward: int | None) -> Tensor:
    """Return the input, wrapped so that its gradient is copied and may be kept (`.grad` of a leaf, a p2p send buffer).

    A graph writes input gradients to memory that the backward after the next overwrites. No copy is needed if the input
    came from the replay with index `next_backward` of the same `owner`, since the next backward reads the gradient.
    """
    if not tensor.requires_grad:
        return tensor
    origin = getattr(tensor.grad_fn, REPLAY_ATTRIBUTE, None)
    if origin is not None and next_backward is not None and origin == (id(owner), next_backward):
        return tensor
    return _CopyGradient.apply(tensor)
