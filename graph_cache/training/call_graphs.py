"""One call of a step as a forward and a backward graph, with the static tensors between them.

Captures both halves, and loads inputs and gradients before a replay. Saved tensors stay allocated as long as the entry
lives, so no other graph reuses their memory. Only saved tensors that a backward frees itself, as in Transformer Engine,
give their memory to later backwards of the same microbatch. The order of calls is handled by `replay_order.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch import Tensor

from graph_cache.backends.base import Memory
from graph_cache.core.runner import GraphRunner
from graph_cache.guards.audit import StorageAudit, storage_of, storages_of
from graph_cache.guards.code import Reads
from graph_cache.guards.torch_settings import NO_AUTOCAST
from graph_cache.training.attached import AttachedModule
from graph_cache.training.call import BackwardKey, CallKey, lacks_memory
from graph_cache.training.call_function import CallFunction
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.gradients import Copies, GradientMemory, UncopiedGradients, saved_storages, storage_users
from graph_cache.training.parameter_aliases import ADDED
from graph_cache.training.reasons import OTHER_BACKWARD
from graph_cache.utils.digest import Digest
from graph_cache.utils.layout import copy_into, copy_of, distinct

BACKWARD_SEED = 0x5EED  # any seed other than the job's


class CallGraphs(CallFunction):
    """Forward and backward graphs for calls of an attached module with one key.

    - A capture restores the module's buffers (running statistics) and the parameters' `main_grad`.
    - With `returns_uncopied`, set before the capture of the backward, parameter gradients have separate memory and are
      returned without a copy; otherwise replays return copies.
    - A backward with another key than the recorded one (gradients with other strides, other unused outputs, other
      settings) runs eager, on the tensors that the graph saved.
    """

    returns_uncopied = False
    refuse_double_backward: Callable[[], None]  # set after the capture

    def __init__(
        self,
        owner: AttachedModule,
        key: CallKey,
        inputs: Sequence[Tensor],
        backward: BackwardKey | None,
        context: CaptureContext,
        memory: Memory,
        separate: Container[int] = (),
    ):
        super().__init__(owner, key, inputs, backward, context, separate)
        self._stats, self._pool = context.stats, context.pool
        # Indices of inputs and parameters, and of outputs, that the history saves: eager's backward checks these.
        self.saved_arguments: list[int] = []
        self.saved_outputs: list[int] = []
        self.reads_saved_tensors = True  # whether the backward does; it may always run again if not
        self.cloned_outputs: set[int] = set()  # indices of outputs that are returned as copies
        # Indices of inputs with a gradient that another entry's backward reads from static memory.
        self.grads_read_in_place: set[int] = set()
        # (storage, use count) of outputs while no output is referenced outside.
        self._baseline_users: list[tuple[int, int]] | None = None
        self._uncopied_gradients: UncopiedGradients | None = None
        self._copies = Copies(())
        pool = context.pool
        # A first replay that is compared with eager on real inputs shows more than a comparison at the capture.
        compares_replays = context.checks and owner.compares_replays and not owner.runs_hooks
        self.was_compared = pool.backend.capture_runs and not compares_replays
        # If a capture does not execute, nothing may execute between the halves either: some kernels save state under
        # capture (RNG state) that only a captured backward can read. The eager warm-up steps have warmed everything up.
        options = {
            "generators": context.generators,
            "memory": memory,
            "grad": True,
            "checked": self.was_compared,
            "restores": True,
        }
        self._forward_graph = GraphRunner(self.run_forward, pool, statics=self.forward_statics, **options)
        self._backward_graph = GraphRunner(self.run_backward, pool, statics=self.backward_statics, **options)

    @property
    def nbytes(self) -> int:
        """Bytes of pool memory that the two captures took."""
        return self._forward_graph.nbytes + self._backward_graph.nbytes

    @property
    def forward_nbytes(self) -> int:
        """Approximate bytes that the forward keeps. On a CPU, outputs and saved tensors are outside the pool."""
        outside = sum(output.nbytes for output in self.outputs) if self._pool.backend.capture_runs else 0
        return self._forward_graph.nbytes + outside

    @property
    def capture_seconds(self) -> float:
        return self._forward_graph.capture_seconds + self._backward_graph.capture_seconds

    @property
    def digest(self) -> Digest:
        """Hash of what the two replays run. On a GPU, libraries may choose other kernels for a recapture."""
        return Digest.combined((self._forward_graph.digest, self._backward_graph.digest))

    @property
    def engine(self) -> str:
        """Name of the replay engine."""
        return self._forward_graph.engine

    # ---- capture ---------------------------------------------------------------------------------------------------

    def capture_forward(self) -> None:
        """Capture the forward and set the static `outputs`. Raises CaptureError."""
        self._forward_graph.capture()
        self.find_leaves()
        ran = self._owner.ran
        is_known = ran is not None and not ran.packs_saved_tensors
        saved = saved_storages(self.outputs) if is_known else set()
        self.reads_saved_tensors = bool(saved) or not is_known
        self.saved_arguments = _indices_in([*self.inputs, *self._leaves], saved)
        self.saved_outputs = _indices_in(self.outputs, saved)
        self._replay_forward = self._saved_states.around_forward(self._forward_graph.bare_replay)
        self._static_inputs = [(tensor.data_ptr(), tensor.data) for tensor in self.inputs]
        if self._backward_key is None or len(self._backward_key.strides) != len(self.differentiable):
            strides = tuple([torch.ones_like(self.outputs[index]).stride() for index in self.differentiable])
            self._backward_key = BackwardKey(strides, NO_AUTOCAST, self.key.settings)

    def capture_backward(self, static_grads: Mapping[int, Tensor]) -> None:
        """Capture the backward of the captured forward. Raises CaptureError.

        `static_grads` maps an output index to the static tensor in which another call's backward leaves its gradient;
        such a gradient needs no copy.
        """
        self.grad_outputs = [
            static_grads[index] if index in static_grads else _ones(self.outputs[index], strides)
            for index, strides in self.used_outputs()
        ]
        if self.returns_uncopied:
            self._gradient_memory = GradientMemory(self.parameters)
        # Use a different RNG state than the forward. A backward that restores the forward's state itself, as
        # checkpointing does, then differs from its replay, which can't restore it, and is refused.
        generators = self._registered if self._pool.backend.capture_runs else ()
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(BACKWARD_SEED)
            self._backward_graph.capture()
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        if self._gradient_memory is not None:
            self._gradient_memory.release_unused()
            self._uncopied_gradients = UncopiedGradients([grad for grad in self.parameter_grads if grad is not None])
        else:  # copied right after each replay, before other graphs run, so other backwards may reuse their memory
            self.parameter_grads = [
                None if grad is None else self._pool.backend.borrow(grad) for grad in self.parameter_grads
            ]
        self._copies = Copies(self.parameter_grads)
        self._static_grads = [
            *self.input_grads,
            *self._with_dummy_grads(self.parameter_grads),
            *self.repeated_grads,
        ]
        self._replay_backward = self._saved_states.around_backward(self._backward_graph.bare_replay)
        self._static_grad_outputs = [
            (index, static.data_ptr(), static)
            for (index, _), static in zip(self.used_outputs(), self.grad_outputs, strict=True)
        ]

    # ---- replay ----------------------------------------------------------------------------------------------------

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy inputs that are not already in place, replay, and return aliases of the static outputs without history.

        `tensors` begins with the inputs. Must run with gradients disabled.
        """
        for (address, static), tensor in zip(self._static_inputs, tensors, strict=False):
            if tensor.data_ptr() != address:
                copy_into(static, tensor)
        if self._baseline_users is None:
            self._baseline_users = self._output_storage_users()
        self._replay_forward()
        for namespace, key, tensor in self.stored:
            namespace.set(key, copy_of(tensor))
        if self.cloned_outputs:
            return tuple(
                [
                    copy_of(output) if index in self.cloned_outputs else output.detach()
                    for index, output in enumerate(self.outputs)
                ]
            )
        return tuple([output.detach() for output in self.outputs])

    def is_from_outside(self, output: Tensor) -> bool:
        """Whether an output is memory from before the call, other than an input: a parameter, a buffer, or a view."""
        known = {*storages_of([*self._owner.scope.parameters(), *self._state]), *self.used}
        return not known.isdisjoint(storages_of([output]))

    def is_held(self) -> bool:
        """Whether an output of the last forward is still referenced."""
        return any(
            now > baseline
            for (_, now), (_, baseline) in zip(self._output_storage_users(), self._baseline_users, strict=True)
        )

    def _output_storage_users(self) -> list[tuple[int, int]]:
        """Return (storage, use count) of output storages that no input, parameter or buffer shares."""
        others = {tensor.untyped_storage()._cdata for tensor in (*self.inputs, *self.parameters, *self._state)}
        storages = {output.untyped_storage()._cdata for output in self.outputs if not lacks_memory(output)} - others
        return [(storage, storage_users(storage)) for storage in sorted(storages)]

    def replay_backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward, and return gradients of inputs, then of parameters, then of repeated inputs.

        `grads` holds the gradient of each output, or None. Returned input gradients are static: the next graph in this
        memory may overwrite them. Parameter gradients keep their values while referenced.
        """
        differentiable = [grads[index] for index in self.differentiable] if self.undifferentiable else grads
        if not self._backward_key.matches(differentiable):
            return self._eager_backward(grads)
        saved = self._uncopied_gradients.save() if self._uncopied_gradients is not None else None
        for index, address, static in self._static_grad_outputs:
            grad = grads[index]
            if grad.data_ptr() != address:
                copy_into(static, grad)
        self._replay_backward()
        for parameter in self._added_to_main_grad:
            setattr(parameter, ADDED, True)
        if self._uncopied_gradients is not None and saved is None:
            return [None if grad is None else grad.detach() for grad in self._static_grads]
        results = [None if grad is None else grad.detach() for grad in self.input_grads]
        results += self._with_dummy_grads(self._copies())
        results += [None if grad is None else grad.detach() for grad in self.repeated_grads]
        if saved is not None:
            self._uncopied_gradients.restore(saved)
        return results

    def _eager_backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward eager, on the history of the captured forward, whose saved tensors the replay has filled."""
        self._stats.fallbacks[self.name, "backward", OTHER_BACKWARD] += 1
        leaves = self._leaves
        for leaf in leaves:
            if hasattr(leaf, ADDED):
                setattr(leaf, ADDED, False)
        used = [index for index in self.differentiable if grads[index] is not None]
        with self._saved_states.eager_backward():
            of_inputs, of_parameters, of_repeated = self.differentiate(
                [self.outputs[index] for index in used], [grad for grad in grads if grad is not None]
            )
        for parameter, leaf in zip(self.parameters, leaves, strict=True):
            if getattr(leaf, ADDED, False):
                setattr(parameter, ADDED, True)
        # Copies: a gradient may be a saved tensor, which the next replay overwrites.
        return [None if grad is None else copy_of(grad) for grad in (*of_inputs, *of_parameters, *of_repeated)]

    def _with_dummy_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return parameter gradients, with the backward's dummies for those that were added to a main_grad."""
        return [
            dummy if grad is None and dummy is not None else grad
            for grad, dummy in zip(grads, self._dummy_grads, strict=True)
        ]

    # ---- shadow check ----------------------------------------------------------------------------------------------

    def run_graphs(self, tensors: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the forward on inputs and the backward right after it. Return copies of what `run_eager` returns."""
        self.replay_forward(tensors)
        found: list[Tensor | None] = [copy_of(output) for output in self.outputs]
        for (_, _, static), grad in zip(self._static_grad_outputs, grad_outputs, strict=True):
            copy_into(static, grad)
        self._replay_backward()
        grads = (*self.input_grads, *self.parameter_grads, *self.repeated_grads)
        return found + [None if grad is None else copy_of(grad) for grad in grads]

    def close(self) -> None:
        """Destroy both graphs and release all static tensors."""
        self._replay_forward = self._forward_graph.replay  # raises GraphClosed from now on
        self._replay_backward = self._backward_graph.replay
        self._forward_graph.close()
        self._backward_graph.close()
        self.inputs = self.outputs = self.grad_outputs = self._given = []
        self.repeated_grads = []
        self.used, self.stored, self.namespaces, self._forward_audit = {}, [], [], StorageAudit()
        self.backward_reads = Reads()
        self.input_grads = self.parameter_grads = self._dummy_grads = self._static_grads = []
        (
            self._static_inputs,
            self._static_grad_outputs,
            self._gradient_memory,
            self._uncopied_gradients,
            self._copies,
        ) = [], [], None, None, Copies(())


def _ones(output: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient of ones for an output, with these strides."""
    ones = torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device)
    distinct(ones).fill_(1)
    return ones


def _indices_in(tensors: Sequence[Tensor], storages: set[int]) -> list[int]:
    """Return the indices of tensors that have one of these storages."""
    found = [storage_of(tensor) for tensor in tensors]
    return [index for index, one in enumerate(found) if one is not None and one._cdata in storages]
