"""One call of a step as a forward and a backward graph, with the static tensors between them.

Captures both halves, and loads inputs and gradients before a replay. Saved tensors stay allocated as long as the entry
lives, so no other graph reuses their memory. Only saved tensors that a backward frees itself, as in Transformer Engine,
give their memory to later backwards of the same microbatch. The order of calls is handled by `replay_order.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.backends.base import Memory
from graph_cache.core.runner import GraphRunner
from graph_cache.core.shadow import Bytes, Whole, WrittenMemory
from graph_cache.errors import CaptureRefused
from graph_cache.guards.audit import StorageAudit, storage_of
from graph_cache.guards.code import Reads
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.search import objects_with_tensors
from graph_cache.guards.torch_settings import NO_AUTOCAST
from graph_cache.training.attached import AttachedModule, is_data_parallel
from graph_cache.training.call import (
    BackwardKey,
    CallKey,
    Result,
    as_kind,
    as_leaves,
    is_sparse,
    lacks_memory,
    modes_as,
    unflatten_call,
)
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.gradients import (
    MAX_USES,
    Copies,
    GradientMemory,
    UncopiedGradients,
    Uses,
    functions_of,
    leaves_of,
    saved_storages,
    storage_users,
)
from graph_cache.training.parameter_aliases import ADDED, MainGrads, ParameterAliases, trainable
from graph_cache.training.reasons import OTHER_BACKWARD
from graph_cache.training.side_effects import TensorHooks, made_objects, refuse_backward_changes, refuse_side_effects
from graph_cache.utils.digest import Digest
from graph_cache.utils.layout import copy_into, copy_of, distinct

BACKWARD_SEED = 0x5EED  # any seed other than the job's


class CallGraphs:
    """Forward and backward graphs for calls of an attached module with one key.

    - `inputs` are the static inputs: new tensors, or static outputs of another call, which then need no copy.
    - Parameters are captured through aliases on the same storage.
    - A capture restores the module's buffers (running statistics) and the parameters' `main_grad`.
    - With `returns_uncopied`, set before the capture of the backward, parameter gradients have separate memory and are
      returned without a copy; otherwise replays return copies.
    - Parameters that the call uses several times, and such inputs in `separate`, get a gradient for each use, which
      autograd adds in eager's order. `parameters` and `repeated_inputs` name these tensors several times.
    - `backward` is the key of the recorded backward; None if there was none. A backward with another key (gradients
      with other strides, other unused outputs, other settings) runs eager, on the tensors that the graph saved.
    """

    returns_uncopied = False
    _is_observed = True  # what the forward and backward use
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
        self.name = owner.name
        self.key = key
        self._stats = context.stats
        self._backward_key = backward
        self.inputs = list(inputs)
        # Trained parameters, after the capture of the forward those that its outputs depend on, and their aliases.
        self.parameters = trainable(owner.scope)
        self._leaves: list[Tensor] = []
        self._separate = separate
        self._given: list[Tensor] = []  # the inputs as the forward got them
        self.repeated_inputs: list[int] = []  # the index of an input for each use after the first
        self.repeated_grads: list[Tensor | None] = []
        self.most_uses = 0  # of a parameter
        # Storages that the forward uses besides its inputs, by address: kept alive, since graphs read them by address.
        self.used: dict[int, torch.UntypedStorage] = {}
        # Places in Python state in which the forward stores results without history.
        self.stored: list[tuple[Namespace, Any, Tensor]] = []
        self.namespaces: list[Namespace] = []  # the Python state that was searched, until the capture is complete
        self.result: Result | None = None
        self.outputs: list[Tensor] = []
        self.differentiable: list[int] = []  # indices of outputs with gradients
        self.undifferentiable: list[int] = []
        # Indices of inputs and parameters, and of outputs, that the history saves: eager's backward checks these.
        self.saved_arguments: list[int] = []
        self.saved_outputs: list[int] = []
        self.inputs_requiring_grad = [index for index, tensor in enumerate(self.inputs) if tensor.requires_grad]
        self.reads_saved_tensors = True  # whether the backward does; it may always run again if not
        self.grad_outputs: list[Tensor] = []
        self.input_grads: list[Tensor | None] = []
        self.cloned_outputs: set[int] = set()  # indices of outputs that are returned as copies
        # Indices of inputs with a gradient that another entry's backward reads from static memory.
        self.grads_read_in_place: set[int] = set()
        self.parameter_grads: list[Tensor | None] = []
        self._scope, self._aliases = owner.scope, ParameterAliases(owner.scope)
        self._backward_ran, self.backward_reads = owner.backward_ran, Reads()
        self._forward, self._recreate_ambient_state = owner.eager, owner.recreate_ambient_state
        self._state = [*owner.scope.buffers(), *context.state.values()]
        self._ignored, self._roots, self._ran = owner.ignored, owner.roots, owner.ran
        self._registered = tuple(context.generators)
        self._wrappers = sorted({type(module).__name__ for module in owner.submodules if is_data_parallel(module)})
        self._main_grads = list(MainGrads(owner.scope).values())
        # (storage, use count) of outputs while no output is referenced outside.
        self._baseline_users: list[tuple[int, int]] | None = None
        # Parameters with a main_grad that the backward adds to itself, and the dummy gradients (undefined contents)
        # that it returns for them.
        self._added_to_main_grad: list[nn.Parameter] = []
        self._dummy_grads: list[Tensor | None] = []
        self._uncopied_gradients: UncopiedGradients | None = None
        self._copies = Copies(())
        self._gradient_memory: GradientMemory | None = None  # for uncopied gradients
        self._forward_audit = StorageAudit()
        self._pool = pool = context.pool
        self._generators = list(context.generators) if pool.backend.capture_runs else []
        self._saved_states = pool.backend.saved_states()
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
        self._forward_graph = GraphRunner(self._run_forward, pool, statics=self._forward_statics, **options)
        self._backward_graph = GraphRunner(self._run_backward, pool, statics=self._backward_statics, **options)

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
        self._find_leaves()
        is_known = self._ran is not None and not self._ran.packs_saved_tensors
        saved = saved_storages(self.outputs) if is_known else set()
        self.reads_saved_tensors = bool(saved) or not is_known
        self.saved_arguments = _indices_in([*self.inputs, *self._leaves], saved)
        self.saved_outputs = _indices_in(self.outputs, saved)
        self._replay_forward = self._saved_states.around_forward(self._forward_graph.bare_replay)
        self._static_inputs = [(tensor.data_ptr(), tensor.data) for tensor in self.inputs]
        if self._backward_key is None or len(self._backward_key.strides) != len(self.differentiable):
            strides = tuple([torch.ones_like(self.outputs[index]).stride() for index in self.differentiable])
            self._backward_key = BackwardKey(strides, NO_AUTOCAST, self.key.settings)

    def _find_leaves(self) -> None:
        """Find out which outputs are differentiable, and which parameters and inputs get gradients."""
        self.differentiable = [index for index, output in enumerate(self.outputs) if output.requires_grad]
        self.undifferentiable = [index for index, output in enumerate(self.outputs) if not output.requires_grad]
        # The others get no gradient in eager: their hooks must not run, and data parallelism finds them unused.
        reached = set(map(id, leaves_of(self.outputs)))
        aliases = dict(zip(self.parameters, self._aliases.trainable, strict=True))
        self.parameters = [parameter for parameter, alias in aliases.items() if id(alias) in reached]
        self._leaves = [aliases[parameter] for parameter in self.parameters]
        self._repeat_tensors()

    def _repeat_tensors(self) -> None:
        """Name parameters and inputs with several gradients several times."""
        inputs = [index for index in self.inputs_requiring_grad if index in self._separate]
        counts = Uses(self.outputs, [*self._leaves, *[self._given[index] for index in inputs]]).counts
        self.most_uses = max(counts[: len(self._leaves)], default=0)
        counts = [count if count <= MAX_USES else 1 for count in counts]
        of_leaves = list(zip(self.parameters, self._leaves, counts, strict=False))
        self.parameters = [parameter for parameter, _, count in of_leaves for _ in range(count)]
        self._leaves = [leaf for _, leaf, count in of_leaves for _ in range(count)]
        of_inputs = zip(inputs, counts[len(of_leaves) :], strict=True)
        self.repeated_inputs = [index for index, count in of_inputs for _ in range(1, count)]

    def used_outputs(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the index of each output that gets a gradient in the captured backward, and the gradient's strides."""
        if self._backward_key is None:
            return []
        return [
            (index, strides)
            for index, strides in zip(self.differentiable, self._backward_key.strides, strict=True)
            if strides is not None
        ]

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

    def _run_forward(self) -> None:
        if self._wrappers:
            raise CaptureRefused(
                f"{self.name} contains {', '.join(self._wrappers)}, whose forward prepares the reduction of gradients, "
                "which a replay would skip: attach modules inside the wrapper"
            )
        self._given = inputs = as_leaves(self.key, self.inputs)
        args, kwargs = unflatten_call(self.key, inputs)
        hooks = TensorHooks([*inputs, *self._aliases.trainable])
        with (
            self._recreate_ambient_state(self.key.ambient_state),
            self._saved_states.forward(),
            modes_as(self.key.autocast, self.key.settings),
            self._aliases,
            refuse_side_effects(
                self.name,
                [*self._roots, ("arguments", (args, kwargs))],
                self._scope,
                self.inputs,
                self._pool.backend.device,
                ignored=self._ignored,
                ran=self._ran,
                generators=self._registered,
                audits=self._is_observed,
            ) as forward,
        ):
            self.result, self.outputs = Result.of(self._forward(*args, **kwargs))
        if hooks.have_changed():
            raise CaptureRefused(f"{self.name} {TensorHooks.REFUSAL}")
        self.stored = forward.results
        self.namespaces = forward.state.namespaces
        self._forward_audit = forward.audit
        own = {storage._cdata for tensor in self.inputs if (storage := storage_of(tensor)) is not None}
        self.used = {address: storage for address, storage in forward.audit.outside.items() if address not in own}
        if kinds := objects_with_tensors(self.result.leaves):
            raise CaptureRefused(
                f"{self.name} returns tensors inside {', '.join(kinds)}: return them in containers that "
                "torch.utils._pytree knows, or register the type (register_dataclass)"
            )
        if made := made_objects(self.result.leaves, (forward.state, args, kwargs)):
            raise CaptureRefused(f"{self.name} returns a new {', '.join(made)}, and replays would return the same one")
        if any(map(is_sparse, self.outputs)):
            raise CaptureRefused(
                f"{self.name} returns a sparse tensor, which has no static memory: return a dense tensor"
            )
        if any(output.is_quantized for output in self.outputs):
            raise CaptureRefused(f"{self.name} returns a quantized tensor, whose scale a replay would not update")
        self._refuse_undeclared_leaves()

    def _refuse_undeclared_leaves(self) -> None:
        """Refuse a trainable tensor that is neither a parameter of the module nor an argument: it gets no gradient.

        Also finds a computed tensor with a history from before the call, whose leaves are undeclared too.
        """
        declared = {id(tensor) for tensor in (*self.inputs, *self._aliases.trainable)}
        found = [leaf for leaf in leaves_of(self.outputs) if id(leaf) not in declared]
        if found:
            shapes = ", ".join(sorted({str(list(leaf.shape)) for leaf in found}))
            raise CaptureRefused(
                f"{self.name} depends on {len(found)} trainable tensors (of shape {shapes}) that are neither its "
                "parameters nor arguments of this call, and a replay would give them no gradient: register them as "
                "parameters, or pass them as arguments"
            )

    def _run_backward(self) -> None:
        leaves = self._leaves
        self.input_grads = self.parameter_grads = self.repeated_grads = []
        writing = self._gradient_memory.writing_in_place() if self._gradient_memory is not None else nullcontext()
        outputs = [self.outputs[index] for index, _ in self.used_outputs()]
        assert self._backward_key is not None
        modes = modes_as(self._backward_key.autocast, self._backward_key.settings)
        changes = refuse_backward_changes(
            self.name,
            self._roots,
            self._scope,
            self._forward_audit,
            self._pool.backend.device,
            ignored=self._ignored,
            ran=self._ran,
            backward_ran=self._backward_ran,
            functions=functions_of(outputs),
            audits=self._is_observed,
        )
        with self._refuse_nested_backward(), self._saved_states.backward(), changes as reads, modes, writing:
            self.input_grads, grads, self.repeated_grads = self._differentiate(outputs, self.grad_outputs)
        self.backward_reads = reads
        added = [getattr(leaf, ADDED, False) for leaf in leaves]
        self._added_to_main_grad = [
            parameter for parameter, is_added in zip(self.parameters, added, strict=True) if is_added
        ]
        self._dummy_grads = [grad if is_added else None for grad, is_added in zip(grads, added, strict=True)]
        grads = [None if is_added else grad for grad, is_added in zip(grads, added, strict=True)]
        if self._gradient_memory is not None:
            outside, grads = self._gradient_memory.assign([*self.input_grads, *self.repeated_grads], grads)
            self.input_grads, self.repeated_grads = outside[: len(self.inputs)], outside[len(self.inputs) :]
        self.parameter_grads = grads

    def _differentiate(
        self, outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs, of the parameters and of the repeated inputs, computed by autograd."""
        leaves = list({id(leaf): leaf for leaf in self._leaves}.values())
        wanted = [tensor for tensor in (*self.inputs, *leaves) if tensor.requires_grad]
        several = [leaf for leaf, count in Counter(map(id, self._leaves)).items() if count > 1]
        repeated = list(dict.fromkeys(self.repeated_inputs))
        uses = Uses(
            outputs, [*[leaf for leaf in leaves if id(leaf) in several], *[self._given[index] for index in repeated]]
        )
        with uses.gradients() as of_uses:
            grads: list[Tensor | None] = list(
                torch.autograd.grad(
                    outputs,
                    wanted,
                    grad_outputs,
                    retain_graph=True,
                    allow_unused=True,  # retain_graph: memory of saved tensors must never be reused by another graph
                )
            )
        found: dict[int, Iterator[Tensor | None]] = {
            id(tensor): iter([grad]) for tensor, grad in zip(wanted, grads, strict=True)
        }
        of_repeated = [*several, *[id(self.inputs[index]) for index in repeated]]
        found |= {tensor: iter(separate) for tensor, separate in zip(of_repeated, of_uses, strict=True)}

        def following(tensor: Tensor) -> Tensor | None:
            return next(found[id(tensor)], None) if id(tensor) in found else None

        of_inputs, of_parameters = list(map(following, self.inputs)), list(map(following, self._leaves))
        return of_inputs, of_parameters, [following(self.inputs[index]) for index in self.repeated_inputs]

    @contextmanager
    def _refuse_nested_backward(self) -> Iterator[None]:
        """Refuse a backward that runs a nested backward, as some checkpoints do, which adds to `.grad` itself.

        The nested one uses the parameters and not their aliases, so the graph would miss their gradients.
        """
        parameters = trainable(self._scope)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            if any(parameter.grad is not None for parameter in parameters):
                raise CaptureRefused(
                    f"the backward of {self.name} runs a nested backward, which adds to .grad outside the graph: "
                    "use torch.utils.checkpoint with use_reentrant=False, or leave this part out"
                )
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad

    def _forward_statics(self) -> list[Tensor]:
        # `.data`, not `.detach()`: rewinding a warm-up must not bump the version counter of saved tensors.
        return [distinct(tensor.data) for tensor in (*self.inputs, *self._state, *self.outputs)]

    def _backward_statics(self) -> list[Tensor]:
        grads = (*self.input_grads, *self.parameter_grads, *self.repeated_grads)
        computed = [grad for grad in grads if grad is not None]
        return [*self._main_grads, *map(distinct, self.grad_outputs), *computed]

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
            of_inputs, of_parameters, of_repeated = self._differentiate(
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

    def twin(self, owner: AttachedModule, tensors: Sequence[Tensor], context: CaptureContext) -> CallGraphs:
        """Return the same call without graphs on copies of these inputs, for `run_eager`."""
        inputs = [
            copy_of(tensor).requires_grad_(static.requires_grad)
            for tensor, static in zip(tensors, self.inputs, strict=False)
        ]
        if self.key.kinds:
            inputs = list(map(as_kind, inputs, self.key.kinds))
        twin = CallGraphs(owner, self.key, inputs, self._backward_key, context, context.pool.memory, self._separate)
        twin._is_observed = False
        return twin

    def run_eager(self, grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run what a capture would record, with gradients for `used_outputs`. Return outputs and all gradients."""
        self._run_forward()
        self._find_leaves()
        self.grad_outputs = list(grad_outputs)
        self._run_backward()
        return [*self.outputs, *self.input_grads, *self.parameter_grads, *self.repeated_grads]

    def run_graphs(self, tensors: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the forward on inputs and the backward right after it. Return copies of what `run_eager` returns."""
        self.replay_forward(tensors)
        found: list[Tensor | None] = [copy_of(output) for output in self.outputs]
        for (_, _, static), grad in zip(self._static_grad_outputs, grad_outputs, strict=True):
            copy_into(static, grad)
        self._replay_backward()
        grads = (*self.input_grads, *self.parameter_grads, *self.repeated_grads)
        return found + [None if grad is None else copy_of(grad) for grad in grads]

    def written(self) -> list[WrittenMemory]:
        """Return the memory outside of the call that its forward or backward writes."""
        found: list[WrittenMemory] = [
            Whole(f"main_grad {index}", grad.data) for index, grad in enumerate(self._main_grads)
        ]
        found += [Whole(f"buffer {index}", one.data) for index, one in enumerate(self._state) if not lacks_memory(one)]
        audit = self._forward_audit
        own = {storage._cdata for tensor in self._state if (storage := storage_of(tensor)) is not None}
        others = [audit.outside[address] for address in audit.written - own if address in audit.outside]
        return found + [Bytes(f"memory {index}", one) for index, one in enumerate(others)]

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


def _indices_in(tensors: Sequence[Tensor], storages: set[int]) -> list[int]:
    """Return the indices of tensors that have one of these storages."""
    found = [storage_of(tensor) for tensor in tensors]
    return [index for index, one in enumerate(found) if one is not None and one._cdata in storages]


def _ones(output: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient of ones for an output, with these strides."""
    ones = torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device)
    distinct(ones).fill_(1)
    return ones
