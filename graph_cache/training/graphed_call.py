"""One call of a step as a pair of graphs: forward and backward, with the static tensors between them.

Owns the capture of both halves and the loading of inputs and gradients before a replay. What the forward saves for its
backward is held for as long as the pair lives, so no other graph is ever given that memory; only what a backward frees
by itself, as Transformer Engine's do, goes to the backwards after it in the chain. Knows no order of calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from graph_cache.backends.base import Memory
from graph_cache.errors import CaptureRefused
from graph_cache.runner import GraphRunner
from graph_cache.training.attached import AttachedModule
from graph_cache.training.call import CallKey, Result, autocast_as, is_sparse, lacks_memory, no_autocast, unflatten_call
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.gradients import Copies, GradientMemory, UncopiedGradients, reachable_leaves, storage_users
from graph_cache.training.parameter_aliases import ADDED, MainGrads, ParameterAliases, trainable
from graph_cache.training.side_effects import refuse_side_effects

BACKWARD_SEED = 0x5EED  # any seed but the job's own


class GraphedCall:
    """Forward and backward graphs of an attached module's calls of one key.

    `inputs` are the static inputs: fresh tensors, or another call's static outputs, which then need no copy. The
    module's parameters take part by stand-ins on the same storage; its buffers (running statistics) and the parameters'
    `main_grad` a capture leaves as it found them. With `hands_out`, set before the capture of the backward, parameter
    gradients are handed out where the graph leaves them, in memory of their own, else as copies.
    """

    returns_uncopied = False

    def __init__(
        self, owner: AttachedModule, key: CallKey, inputs: Sequence[Tensor], context: CaptureContext, memory: Memory
    ):
        self.name = owner.name
        self.key = key
        self.inputs = list(inputs)
        self.parameters = trainable(owner.scope)
        self.result: Result | None = None
        self.outputs: list[Tensor] = []
        self.differentiable: list[int] = []  # which outputs have gradients
        self.undifferentiable: list[int] = []
        self.inputs_requiring_grad = [index for index, tensor in enumerate(self.inputs) if tensor.requires_grad]
        self.grad_outputs: list[Tensor] = []
        self.input_grads: list[Tensor | None] = []
        self.cloned_outputs: set[int] = set()  # outputs that are handed out as copies
        self.grads_read_in_place: set[int] = (
            set()
        )  # inputs whose gradients another pair's backward reads where they are
        self.parameter_grads: list[Tensor | None] = []
        self._scope, self._aliases = owner.scope, ParameterAliases(owner.scope)
        self._forward, self._recreate_ambient_state = owner.eager, owner.recreate_ambient_state
        self._state = [*owner.scope.buffers(), *context.state.values()]
        self._main_grads = list(MainGrads(owner.scope).values())
        self._baseline_users: list[tuple[int, int]] | None = (
            None  # storages of outputs, and users of each if nobody holds one
        )
        self._reachable: dict[
            int, set[int]
        ] = {}  # by the differentiable output: inputs and parameters with a part in it
        self._added_to_main_grad: list[nn.Parameter] = []  # whose gradient the backward itself adds to their main_grad
        self._dummy_grads: list[Tensor | None] = []  # what it returns for those, of undefined contents
        self._uncopied_gradients: UncopiedGradients | None = None
        self._copies = Copies(())
        self._gradient_memory: GradientMemory | None = None  # for the gradients that are handed out
        self._pool = pool = context.pool
        self._generators = list(context.generators) if pool.backend.capture_runs else []
        # Where a capture does not run, nothing may run between the halves either: what some kernels save under capture
        # (random states) only a captured backward can read. The eager rounds before have warmed everything up.
        options = {
            "generators": context.generators,
            "memory": memory,
            "grad": True,
            "checked": pool.backend.capture_runs,
        }
        self._forward_graph = GraphRunner(self._run_forward, pool, statics=self._forward_statics, **options)
        self._backward_graph = GraphRunner(self._run_backward, pool, statics=self._backward_statics, **options)

    @property
    def nbytes(self) -> int:
        """Bytes that the two captures took of the pool."""
        return self._forward_graph.nbytes + self._backward_graph.nbytes

    @property
    def forward_nbytes(self) -> int:
        """Bytes that the forward leaves, about: on a CPU its outputs lie outside of the pool, and what it saves too."""
        outside = sum(output.nbytes for output in self.outputs) if self._pool.backend.capture_runs else 0
        return self._forward_graph.nbytes + outside

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
        self.undifferentiable = [index for index, output in enumerate(self.outputs) if not output.requires_grad]
        self._replay_forward = self._forward_graph.bare_replay
        self._static_inputs = [(tensor.data_ptr(), tensor.data) for tensor in self.inputs]
        if len(self.differentiable) > 1:
            leaves = [*self.inputs, *self._aliases.trainable]
            self._reachable = {index: reachable_leaves(self.outputs[index], leaves) for index in self.differentiable}

    def capture_backward(self, static_grads: Mapping[int, Tensor]) -> None:
        """Capture the backward of the captured forward. Raises CaptureError.

        `arriving`: static tensors in which another call's backward leaves the gradient of an output, by its index; from
        there it needs no copy.
        """
        self.grad_outputs = [
            static_grads[index] if index in static_grads else torch.ones_like(self.outputs[index])
            for index in self.differentiable
        ]
        if self.returns_uncopied:
            self._gradient_memory = GradientMemory(self.parameters)
        # From another random state than the forward's: a backward that goes back to the forward's state by itself, as
        # checkpointing does, then differs from its replay, which can't, and is refused.
        states = [generator.get_state() for generator in self._generators]
        try:
            for generator in self._generators:
                generator.manual_seed(BACKWARD_SEED)
            self._backward_graph.capture()
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
        if self._gradient_memory is not None:
            self._gradient_memory.release_unused()
            self._uncopied_gradients = UncopiedGradients([grad for grad in self.parameter_grads if grad is not None])
        else:  # read right after each replay, before any other graph runs: their memory may serve other backwards
            self.parameter_grads = [
                None if grad is None else self._pool.backend.borrow(grad) for grad in self.parameter_grads
            ]
        self._copies = Copies(self.parameter_grads)
        self._static_grads = [*self.input_grads, *self._with_dummy_grads(self.parameter_grads)]
        self._replay_backward = self._backward_graph.bare_replay
        self._static_grad_outputs = [
            (index, static.data_ptr(), static)
            for index, static in zip(self.differentiable, self.grad_outputs, strict=True)
        ]

    def _run_forward(self) -> None:
        args, kwargs = unflatten_call(self.key, self.inputs)
        with (
            self._recreate_ambient_state(self.key.ambient_state),
            autocast_as(self.key),
            self._aliases,
            refuse_side_effects(self.name, self._scope, self.inputs),
        ):
            self.result, self.outputs = Result.of(self._forward(*args, **kwargs))
        if any(map(is_sparse, self.outputs)):
            raise CaptureRefused(f"{self.name} returns a sparse tensor, which has no memory of its own to find it in")

    def _run_backward(self) -> None:
        leaves = self._aliases.trainable
        wanted = [tensor for tensor in (*self.inputs, *leaves) if tensor.requires_grad]
        self.input_grads = self.parameter_grads = []
        writing = self._gradient_memory.writing_in_place() if self._gradient_memory is not None else nullcontext()
        with self._refuse_nested_backward(), no_autocast(self.key), writing:
            grads = list(
                torch.autograd.grad(
                    [self.outputs[index] for index in self.differentiable],
                    wanted,
                    self.grad_outputs,
                    retain_graph=True,
                    allow_unused=True,  # retained: what was saved must never be lent to another graph
                )
            )
        input_grads = iter(grads[: len(self.inputs_requiring_grad)])
        self.input_grads = [next(input_grads) if tensor.requires_grad else None for tensor in self.inputs]
        del input_grads, grads[: len(self.inputs_requiring_grad)]
        added = [getattr(leaf, ADDED, False) for leaf in leaves]
        self._added_to_main_grad = [
            parameter for parameter, is_added in zip(self.parameters, added, strict=True) if is_added
        ]
        self._dummy_grads = [grad if is_added else None for grad, is_added in zip(grads, added, strict=True)]
        grads = [None if is_added else grad for grad, is_added in zip(grads, added, strict=True)]
        if self._gradient_memory is not None:
            self.input_grads, grads = self._gradient_memory.assign(self.input_grads, grads)
        self.parameter_grads = grads

    @contextmanager
    def _refuse_nested_backward(self) -> Iterator[None]:
        """Refuse a capture in whose backward another one runs, as some checkpoints do, and adds to `.grad` itself.

        It looks the parameters up anew, so that a graph would leave their gradients out.
        """
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
            if any(parameter.grad is not None for parameter in self.parameters):
                raise CaptureRefused(
                    f"the backward of {self.name} runs another one inside, which adds to gradients "
                    "out of a graph's sight: use torch.utils.checkpoint, or leave this part out"
                )
        finally:
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad

    def _forward_statics(self) -> list[Tensor]:
        # `.data`, not `.detach()`: rewinding a warm-up must not look to autograd like a change of what was saved.
        return [tensor.data for tensor in (*self.inputs, *self._state, *self.outputs)]

    def _backward_statics(self) -> list[Tensor]:
        grads = [grad for grad in (*self.input_grads, *self.parameter_grads) if grad is not None]
        return [*self._main_grads, *self.grad_outputs, *grads]

    # ---- replay ----------------------------------------------------------------------------------------------------

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Load the inputs that are elsewhere, replay, and return the static outputs: aliases without history.

        `tensors` begin with the inputs. Gradients are off.
        """
        for (address, static), tensor in zip(self._static_inputs, tensors, strict=False):
            if tensor.data_ptr() != address:
                static.copy_(tensor)
        if self._baseline_users is None:
            self._baseline_users = self._output_storage_users()
        self._replay_forward()
        if self.cloned_outputs:
            return tuple(
                [
                    output.detach().clone() if index in self.cloned_outputs else output.detach()
                    for index, output in enumerate(self.outputs)
                ]
            )
        return tuple([output.detach() for output in self.outputs])

    def is_held(self) -> bool:
        """Whether anybody still has an output of the last forward."""
        return any(
            now > baseline
            for (_, now), (_, baseline) in zip(self._output_storage_users(), self._baseline_users, strict=True)
        )

    def _output_storage_users(self) -> list[tuple[int, int]]:
        """Of the memory of outputs that is no input's and no parameter's."""
        others = {tensor.untyped_storage()._cdata for tensor in (*self.inputs, *self.parameters, *self._state)}
        storages = {output.untyped_storage()._cdata for output in self.outputs if not lacks_memory(output)} - others
        return [(storage, storage_users(storage)) for storage in sorted(storages)]

    def replay_backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of inputs, then of parameters, from those of all outputs, None where an output has none.

        Input gradients are static: the next graph of this memory may overwrite them. Parameter gradients stay as they
        are for as long as somebody holds them.
        """
        saved = self._uncopied_gradients.save() if self._uncopied_gradients is not None else None
        unused = []
        for index, address, static in self._static_grad_outputs:
            grad = grads[index]
            if grad is None:
                unused.append(index)
                static.zero_()
            elif grad.data_ptr() != address:
                static.copy_(grad)
        self._replay_backward()
        for parameter in self._added_to_main_grad:
            setattr(parameter, ADDED, True)
        if self._uncopied_gradients is not None and saved is None:
            results = [None if grad is None else grad.detach() for grad in self._static_grads]
            return self._drop_unreachable(unused, results) if unused else results
        results = [None if grad is None else grad.detach() for grad in self.input_grads]
        results += self._with_dummy_grads(self._copies())
        if saved is not None:
            self._uncopied_gradients.restore(saved)
        return self._drop_unreachable(unused, results) if unused else results

    def _drop_unreachable(self, unused: Sequence[int], results: Sequence[Tensor | None]) -> list[Tensor | None]:
        """None, as eager has it, for whatever has a part in outputs without a gradient alone."""
        used = set().union(*(self._reachable[index] for index in self.differentiable if index not in unused))
        return [grad if index in used else None for index, grad in enumerate(results)]

    def _with_dummy_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of parameters, and for those that were added to a main_grad what the backward returned."""
        return [
            dummy if grad is None and dummy is not None else grad
            for grad, dummy in zip(grads, self._dummy_grads, strict=True)
        ]

    def close(self) -> None:
        """Destroy both graphs and let go of everything static."""
        self._replay_forward = self._forward_graph.replay  # which raises GraphClosed from here on
        self._replay_backward = self._backward_graph.replay
        self._forward_graph.close()
        self._backward_graph.close()
        self.inputs = self.outputs = self.grad_outputs = []
        self.input_grads = self.parameter_grads = self._dummy_grads = self._static_grads = []
        (
            self._static_inputs,
            self._static_grad_outputs,
            self._gradient_memory,
            self._uncopied_gradients,
            self._copies,
        ) = [], [], None, None, Copies(())
