"""One call of a step as functions over static tensors: its forward, and the backward of that.

Captures run both, and a shadow check runs them eager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.core.shadow import Bytes, Whole, WrittenMemory
from graph_cache.errors import CaptureRefused
from graph_cache.guards.audit import StorageAudit, storages_of
from graph_cache.guards.code import Reads
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.search import objects_with_tensors
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
from graph_cache.training.gradients import MAX_USES, GradientMemory, Uses, functions_of, leaves_of
from graph_cache.training.parameter_aliases import ADDED, MainGrads, ParameterAliases, trainable
from graph_cache.training.side_effects import TensorHooks, made_objects, refuse_backward_changes, refuse_side_effects
from graph_cache.utils.layout import copy_of, distinct


class CallFunction:
    """Forward and backward of calls of an attached module with one key.

    - `inputs` are the static inputs: new tensors, or static outputs of another call, which then need no copy.
    - Parameters are used through aliases on the same storage.
    - Parameters that the call uses several times, and such inputs in `separate`, get a gradient for each use, which
      autograd adds in eager's order. `parameters` and `repeated_inputs` name these tensors several times.
    - `backward` is the key of the recorded backward; None if there was none.
    - `is_observed`: whether code and operations are observed; not in a run that repeats another.
    """

    def __init__(
        self,
        owner: AttachedModule,
        key: CallKey,
        inputs: Sequence[Tensor],
        backward: BackwardKey | None,
        context: CaptureContext,
        separate: Container[int] = (),
        is_observed: bool = True,
    ):
        self.name, self.key = owner.name, key
        self._owner = owner
        self._backward_key = backward
        self.inputs = list(inputs)
        # Trained parameters, after the forward those that its outputs depend on, and their aliases.
        self.parameters = trainable(owner.scope)
        self._aliases = ParameterAliases(owner.scope)
        self._leaves: list[Tensor] = []
        self._separate, self._is_observed = separate, is_observed
        self._given: list[Tensor] = []  # the inputs as the forward got them
        self.repeated_inputs: list[int] = []  # the index of an input for each use after the first
        self.most_uses = 0  # of a parameter
        # Storages that the forward uses besides its inputs, by address: kept alive, since graphs read them by address.
        self.used: dict[int, torch.UntypedStorage] = {}
        # Places in Python state in which the forward stores results without history.
        self.stored: list[tuple[Namespace, Any, Tensor]] = []
        self.namespaces: list[Namespace] = []  # the Python state that was searched, until the capture is complete
        self.backward_reads = Reads()
        self.result: Result | None = None
        self.outputs: list[Tensor] = []
        self.differentiable: list[int] = []  # indices of outputs with gradients
        self.undifferentiable: list[int] = []
        self.inputs_requiring_grad = [index for index, tensor in enumerate(self.inputs) if tensor.requires_grad]
        self.grad_outputs: list[Tensor] = []
        self.input_grads: list[Tensor | None] = []
        self.parameter_grads: list[Tensor | None] = []
        self.repeated_grads: list[Tensor | None] = []
        # Parameters with a main_grad that the backward adds to itself, and the dummy gradients (undefined contents)
        # that it returns for them.
        self._added_to_main_grad: list[nn.Parameter] = []
        self._dummy_grads: list[Tensor | None] = []
        self._gradient_memory: GradientMemory | None = None  # for uncopied gradients
        self._state = [*owner.scope.buffers(), *context.state.values()]
        self._main_grads = list(MainGrads(owner.scope).values())
        self._forward_audit = StorageAudit()
        self._registered = tuple(context.generators)
        self._device = context.pool.backend.device
        self._saved_states = context.pool.backend.saved_states()

    # ---- forward ---------------------------------------------------------------------------------------------------

    def run_forward(self) -> None:
        """Run the forward on the static inputs. Raises CaptureRefused for what a replay would not repeat."""
        wrappers = sorted({type(module).__name__ for module in self._owner.submodules if is_data_parallel(module)})
        if wrappers:
            raise CaptureRefused(
                f"{self.name} contains {', '.join(wrappers)}, whose forward prepares the reduction of gradients, "
                "which a replay would skip: attach modules inside the wrapper"
            )
        self._given = inputs = as_leaves(self.key, self.inputs)
        args, kwargs = unflatten_call(self.key, inputs)
        hooks = TensorHooks([*inputs, *self._aliases.trainable])
        with (
            self._owner.recreate_ambient_state(self.key.ambient_state),
            self._saved_states.forward(),
            modes_as(self.key.autocast, self.key.settings),
            self._aliases,
            refuse_side_effects(
                self.name,
                [*self._owner.roots, ("arguments", (args, kwargs))],
                self._owner.scope,
                self.inputs,
                self._device,
                ignored=self._owner.ignored,
                ran=self._owner.ran,
                generators=self._registered,
                audits=self._is_observed,
            ) as forward,
        ):
            self.result, self.outputs = Result.of(self._owner.eager(*args, **kwargs))
        if hooks.have_changed():
            raise CaptureRefused(f"{self.name} {TensorHooks.REFUSAL}")
        self.stored = forward.results
        self.namespaces = forward.state.namespaces
        self._forward_audit = forward.audit
        own = set(storages_of(self.inputs))
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

    def find_leaves(self) -> None:
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

    # ---- backward --------------------------------------------------------------------------------------------------

    def used_outputs(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the index of each output that gets a gradient in the captured backward, and the gradient's strides."""
        if self._backward_key is None:
            return []
        return [
            (index, strides)
            for index, strides in zip(self.differentiable, self._backward_key.strides, strict=True)
            if strides is not None
        ]

    def run_backward(self) -> None:
        """Run the backward of the last forward, with `grad_outputs`. Raises CaptureRefused, as `run_forward` does."""
        leaves = self._leaves
        self.input_grads = self.parameter_grads = self.repeated_grads = []
        writing = self._gradient_memory.writing_in_place() if self._gradient_memory is not None else nullcontext()
        outputs = [self.outputs[index] for index, _ in self.used_outputs()]
        assert self._backward_key is not None
        modes = modes_as(self._backward_key.autocast, self._backward_key.settings)
        changes = refuse_backward_changes(
            self.name,
            self._owner.roots,
            self._owner.scope,
            self._forward_audit,
            self._device,
            ignored=self._owner.ignored,
            ran=self._owner.ran,
            backward_ran=self._owner.backward_ran,
            functions=functions_of(outputs),
            audits=self._is_observed,
        )
        with self._refuse_nested_backward(), self._saved_states.backward(), changes as reads, modes, writing:
            self.input_grads, grads, self.repeated_grads = self.differentiate(outputs, self.grad_outputs)
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

    def differentiate(
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
        parameters = trainable(self._owner.scope)
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

    # ---- memory ----------------------------------------------------------------------------------------------------

    def forward_statics(self) -> list[Tensor]:
        """Return the static tensors that the forward reads and writes."""
        # `.data`, not `.detach()`: rewinding a warm-up must not bump the version counter of saved tensors.
        return [distinct(tensor.data) for tensor in (*self.inputs, *self._state, *self.outputs)]

    def backward_statics(self) -> list[Tensor]:
        """Return the static tensors that the backward reads and writes."""
        grads = (*self.input_grads, *self.parameter_grads, *self.repeated_grads)
        computed = [grad for grad in grads if grad is not None]
        return [*self._main_grads, *map(distinct, self.grad_outputs), *computed]

    def written(self) -> list[WrittenMemory]:
        """Return the memory outside of the call that its forward or backward writes."""
        found: list[WrittenMemory] = [
            Whole(f"main_grad {index}", grad.data) for index, grad in enumerate(self._main_grads)
        ]
        found += [Whole(f"buffer {index}", one.data) for index, one in enumerate(self._state) if not lacks_memory(one)]
        audit = self._forward_audit
        own = set(storages_of(self._state))
        others = [audit.outside[address] for address in audit.written - own if address in audit.outside]
        return found + [Bytes(f"memory {index}", one) for index, one in enumerate(others)]

    # ---- shadow check ----------------------------------------------------------------------------------------------

    def twin(self, owner: AttachedModule, tensors: Sequence[Tensor], context: CaptureContext) -> CallFunction:
        """Return the same call on copies of these inputs, for `run_eager`."""
        inputs = [
            copy_of(tensor).requires_grad_(static.requires_grad)
            for tensor, static in zip(tensors, self.inputs, strict=False)
        ]
        if self.key.kinds:
            inputs = list(map(as_kind, inputs, self.key.kinds))
        return CallFunction(owner, self.key, inputs, self._backward_key, context, self._separate, is_observed=False)

    def run_eager(self, grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run what a capture would record, with gradients for `used_outputs`. Return outputs and all gradients."""
        self.run_forward()
        self.find_leaves()
        self.grad_outputs = list(grad_outputs)
        self.run_backward()
        return [*self.outputs, *self.input_grads, *self.parameter_grads, *self.repeated_grads]
