"""A layer whose calls are taken over: what it was called with, its graphs, and the ends of a replay in autograd.

Knows which tensors a graph takes and returns; not which graph may run when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.adapters.transformer_engine.maker import Precision
from graph_cache.adapters.transformer_engine.preserved_state import FIRST
from graph_cache.adapters.transformer_engine.samples import Calls, CapturedLayer, Sample, names_of
from graph_cache.errors import GraphError
from graph_cache.training.attached import FORWARD, AttachedModule, Hook, ModuleState, Part, put_back

REPLAYED = "replayed_by_encore"  # on a node of autograd: (whose places, place) of the replay that it stands for


class Layer:
    """One part of a model chunk. `index`: its number among those of its chunk that were captured. `holder`: the module
    that is told the microbatch.
    """

    def __init__(self, part: Part, fired: Callable[[Hook], bool] | None, holder: nn.Module):
        self.attached = AttachedModule(part, fired)
        self.name = part.name
        self.chunk = part.chunk
        self.calls = Calls()
        self.index = 0
        self.sample: Sample | None = None
        self._alias: CapturedLayer | None = None
        self.added: list[Tensor] = []  # parameters whose gradients the graph adds to their main_grad itself
        self.graphs: list[tuple[Any, list[str]]] = []  # for each microbatch: the graph, its keywords
        self.label = (part.name, "", "", 0)  # under which its replays are counted
        self._flagged = [vars(one) for one in self.attached.submodules if FIRST in vars(one)]
        self._fired = fired
        self._holder = holder
        self._state: ModuleState = ()
        self._round = self._calls_in_round = 0
        # Called as a module, so that Transformer Engine, which hooks what is called, sees it.
        self._call = part.module if part.method == FORWARD else self.attached.eager

    def microbatch(self, this_round: int) -> int:
        """Whose forward this call is: by Megatron's attribute of layers, or where there is none, by the number of calls
        in this round.
        """
        if this_round != self._round:
            self._round, self._calls_in_round = this_round, 0
        self._calls_in_round += 1
        said = getattr(self._holder, "current_microbatch", None)
        return self._calls_in_round - 1 if said is None else said

    def take_calls(self) -> Calls:
        """What was noted, which is forgotten here."""
        noted, self.calls = self.calls, Calls()
        return noted

    def captured_layer(self, sample: Sample, index: int, without: int) -> CapturedLayer:
        """What is captured in its place; `without`: see there."""
        self.sample, self.index, self._state = sample, index, self.attached.state
        self._alias = CapturedLayer(self.attached, self._call, sample, without)
        return self._alias

    def captured(self, calls: Sequence[Callable[..., Any]], slots: Sequence[int], added: set[int], scope: str) -> None:
        """Take its graphs, one for each microbatch; `added`: see Kept."""
        self.graphs = [
            (call, names_of(self.chunk, self.index, slot, self.sample)) for call, slot in zip(calls, slots, strict=True)
        ]
        self.added = [parameter for parameter in self.attached.parameters if id(parameter) in added]
        tensors = self.sample.key.tensors
        self.label = (self.name, scope, "forward", tensors[0][0][0] if tensors and tensors[0][0] else 1)

    def forget(self) -> None:
        """Be as before the first call."""
        self.calls, self.sample, self.graphs, self.added, self._alias = Calls(), None, [], [], None

    def fits(self, args: tuple, kwargs: dict[str, Any], precision: Precision | None) -> Sequence[Tensor] | None:
        """The tensors of a call that its graphs serve; None for another, or if the layer has changed since."""
        if self.attached.state != self._state:
            self.attached.refresh()  # nobody tells that a hook was removed
        if self.attached.state != self._state or precision != self.sample.seen.precision:
            return None
        return self.sample.fits(args, kwargs, self.attached.module.training)

    @contextmanager
    def hooks_put_aside(self) -> Iterator[None]:
        """Leave hooks out of the block, which captures: those inside that run before replays, and the layer's own,
        which run around each call of it. The layer's own of the first kind are run now, as those inside are.
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

    def ran(self) -> None:
        """Its graph ran in place of modules that set this flag themselves: gradients of a call that runs eager later in
        the step would else take the place of those that are in `main_grad`.
        """
        for attributes in self._flagged:
            attributes[FIRST] = False

    def returned(self, outputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """What the layer would have returned, from what a graph did, and the node where its backward begins."""
        return self._alias.unflatten_call(outputs), outputs[0].grad_fn


class Arrival:
    """A hook before the backward of a replay: the gradients have arrived. Dropped with a history that never ran it."""

    __slots__ = ("_came", "_dropped", "_is_over", "_name", "_place")

    def __init__(self, name: str, place: int, came: Callable[[int], None], dropped: Callable[[int], None]):
        self._name = name
        self._place = place
        self._came = came
        self._dropped = dropped
        self._is_over = False

    def __call__(self, grads: Sequence[Tensor]) -> None:
        if self._is_over:
            raise GraphError(
                f"the backward of {self._name} was run twice: a graph's backward runs once, since later "
                "replays reuse its memory; close the graphs to retain it"
            )
        self._is_over = True
        self._came(self._place)

    def __del__(self) -> None:
        if not self._is_over:
            self._dropped(self._place)


class _OwnGradient(torch.autograd.Function):
    """The identity; the gradient that comes back is a copy."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.clone()


def own_gradient(tensor: Tensor, owner: object, next_place: int | None) -> Tensor:
    """An input whose gradient may be kept by whoever it belongs to (`.grad` of a leaf, what is sent to another stage).

    A graph leaves the gradient of an input in memory that the backward after the next overwrites: only one that the
    next backward reads, by which `next_place` of the same owner's replays gave the input, needs no copy.
    """
    if not tensor.requires_grad:
        return tensor
    origin = getattr(tensor.grad_fn, REPLAYED, None)
    if origin is not None and next_place is not None and origin == (id(owner), next_place):
        return tensor
    return _OwnGradient.apply(tensor)
