"""One call of a step as a pair of graphs: forward and backward, with the static tensors between them.

Owns the capture of both halves and the loading of inputs and gradients before a replay. What the forward saves for its
backward is held for as long as the pair lives, so no other graph is ever given that memory. Knows no order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.backends.base import Memory
from graph_cache.pool import GraphPool
from graph_cache.runner import GraphRunner
from graph_cache.training.call import CallKey, Result, load, put_together
from graph_cache.training.stand_ins import StandIns, trainable

ELSEWHERE = 0x5EED  # any seed but the job's own


class GraphedCall:
    """Forward and backward graphs of `forward(*args, **kwargs)` for one key.

    `inputs` are the static inputs: fresh tensors, or another call's static outputs, which then need no copy. The
    module's parameters take part by stand-ins on the same storage; its buffers (running statistics) a capture leaves
    as it found them.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], key: CallKey,
                 inputs: Sequence[Tensor], pool: GraphPool, memory: Memory, generators: Sequence[torch.Generator]):
        self.name = name
        self.key = key
        self.inputs = list(inputs)
        self.parameters = trainable(module)
        self._stand_ins = StandIns(module)
        self.result: Result | None = None
        self.outputs: list[Tensor] = []
        self.differentiable: list[int] = []  # which outputs have gradients
        self.grad_outputs: list[Tensor] = []
        self.input_grads: list[Tensor | None] = []
        self.parameter_grads: list[Tensor | None] = []
        self._forward = forward
        self._state = list(module.buffers())
        self._pool = pool
        self._generators = list(generators) if pool.backend.capture_runs else []
        # Where a capture does not run, nothing may run between the halves either: what some kernels save under capture
        # (random states) only a captured backward can read. The eager rounds before have warmed everything up.
        options = {"generators": generators, "memory": memory, "grad": True, "checked": pool.backend.capture_runs}
        self._forward_graph = GraphRunner(self._run_forward, pool, statics=self._forward_statics, **options)
        self._backward_graph = GraphRunner(self._run_backward, pool, statics=self._backward_statics, **options)

    @property
    def nbytes(self) -> int:
        """Bytes that the two captures took of the pool."""
        return self._forward_graph.nbytes + self._backward_graph.nbytes

    @property
    def capture_seconds(self) -> float:
        return self._forward_graph.capture_seconds + self._backward_graph.capture_seconds

    @property
    def engine(self) -> str:
        """How it replays."""
        return self._forward_graph.engine

    # ---- capture ---------------------------------------------------------------------------------------------------

    def capture_forward(self) -> None:
        """Capture the forward; `outputs` are static from here on. Raises CaptureError."""
        self._forward_graph.capture()
        self.differentiable = [index for index, output in enumerate(self.outputs) if output.requires_grad]
        self.grad_outputs = [torch.ones_like(self.outputs[index]) for index in self.differentiable]

    def capture_backward(self, arriving: Mapping[int, Tensor]) -> None:
        """Capture the backward of the captured forward. Raises CaptureError.

        `arriving`: static tensors in which another call's backward leaves the gradient of an output, by its index; from
        there it needs no copy.
        """
        self.grad_outputs = [arriving.get(index, grad)
                             for index, grad in zip(self.differentiable, self.grad_outputs, strict=True)]
        # From another random state than the forward's: a backward that goes back to the forward's state by itself, as
        # checkpointing does, then differs from its replay, which can't, and is refused.
        states = [generator.get_state() for generator in self._generators]
        try:
            for generator in self._generators:
                generator.manual_seed(ELSEWHERE)
            self._backward_graph.capture()
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
        # Read right after each replay, before any other graph runs: their memory may serve other backwards.
        self.parameter_grads = [None if grad is None else self._pool.backend.borrow(grad)
                                for grad in self.parameter_grads]

    def _run_forward(self) -> None:
        args, kwargs = put_together(self.key, self.inputs)
        with self._stand_ins:
            self.result, self.outputs = Result.of(self._forward(*args, **kwargs))

    def _run_backward(self) -> None:
        leaves = self._stand_ins.trainable
        wanted = [tensor for tensor in (*self.inputs, *leaves) if tensor.requires_grad]
        grads = iter(torch.autograd.grad(
            [self.outputs[index] for index in self.differentiable], wanted, self.grad_outputs,
            retain_graph=True, allow_unused=True,  # retained: what was saved must never be lent to another graph
        ))
        self.input_grads = [next(grads) if tensor.requires_grad else None for tensor in self.inputs]
        self.parameter_grads = [next(grads) for _ in leaves]

    def _forward_statics(self) -> list[Tensor]:
        # `.data`, not `.detach()`: rewinding a warm-up must not look to autograd like a change of what was saved.
        return [tensor.data for tensor in (*self.inputs, *self._state, *self.outputs)]

    def _backward_statics(self) -> list[Tensor]:
        found = [grad for grad in (*self.input_grads, *self.parameter_grads) if grad is not None]
        return [*self.grad_outputs, *found]

    # ---- replay ----------------------------------------------------------------------------------------------------

    def replay_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Load the inputs that are elsewhere, replay, and return the static outputs: aliases without history."""
        load(self.inputs, tensors)
        self._forward_graph.replay()
        return [output.detach() for output in self.outputs]

    def replay_backward(self, grads: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of inputs and of parameters from those of the differentiable outputs.

        Input gradients are static: the next backward of this pair overwrites them. Parameter gradients are copies:
        autograd may keep them as `.grad` across steps.
        """
        load(self.grad_outputs, grads)
        self._backward_graph.replay()
        found = [grad for grad in self.parameter_grads if grad is not None]
        copies = iter(empty_like_all(found))
        kept = [None if grad is None else next(copies) for grad in self.parameter_grads]
        if found:
            torch._foreach_copy_([grad for grad in kept if grad is not None], found)
        return [None if grad is None else grad.detach() for grad in self.input_grads], kept

    def close(self) -> None:
        """Destroy both graphs and let go of everything static."""
        self._forward_graph.close()
        self._backward_graph.close()
        self.inputs = self.outputs = self.grad_outputs = []
        self.input_grads = self.parameter_grads = []


def empty_like_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """New contiguous memory for each tensor; those of one dtype share one allocation, which is what takes the time."""
    if not tensors or any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    whole = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    parts = whole.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
