"""What an iteration reads and changes besides its arguments: modules, trained tensors, optimizers, Python state.

Observed eager calls find it. It is one half of a call signature, and what captures watch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graph_cache.guards.audit import storages_of
from graph_cache.guards.changes import HostState
from graph_cache.guards.code import Reads
from graph_cache.guards.library_state import is_of_transformer_engine
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.observation import read_by
from graph_cache.guards.search import ANY_CODE
from graph_cache.guards.watch import Place, Watch, gradient_hook_functions, gradient_hooks_of, hooks_of
from graph_cache.training.compiled import is_compiled, reached_from
from graph_cache.training.optimizers import OptimizerState, parts_of, settings_of
from graph_cache.training.parameter_aliases import MainGrads


class StepState:
    """The state of a step function, as far as it is known.

    - `extra_state`: tensors that the step reads or writes besides modules and optimizers, by name.
    - `checks_attributes`: False if only replaced buffers count as changes of Python state.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        generators: Sequence[torch.Generator],
        extra_state: Mapping[str, Tensor],
        checks_attributes: bool,
    ):
        self.function, self.extra_state, self.checks_attributes = function, extra_state, checks_attributes
        self._generators = tuple(generators)
        # Weak: a step may create new modules at every call.
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Leaf tensors that the step trains and that no module has.
        self.leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._owned: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # when last observed
        # Optimizers that step inside, in order of their first step.
        self.optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._watch = Watch()
        self.ran: Reads | None = None  # code that observed calls executed
        self.compiled = self._inspected = False

    # ---- signature -------------------------------------------------------------------------------------------------

    def current(self) -> tuple[Any, ...]:
        """Return the model state that a graph bakes in.

        Modes and classes of modules, requires_grad, which parameters have a gradient or share one, Python state that
        the step reads, and optimizer settings.
        """
        parameters, ids = self.all_parameters(), {id(None): 0}
        grads = [ids.setdefault(id(parameter.grad), len(ids)) for parameter in parameters]
        known = self.modules()
        return (
            tuple(zip([module.training for module in known], map(type, known), strict=True)),
            tuple([parameter.requires_grad for parameter in parameters]),
            tuple(grads),
            (self._watch.signature(), hooks_of(known), gradient_hooks_of(parameters)),
            tuple(map(settings_of, self.optimizers.values())),
        )

    def with_watched(self, state: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return `state`, of before an eager call, with the Python state that is watched now.

        None if nothing else is watched, or if the call revealed modules, parameters or optimizers too.
        """
        now = (*state[:3], (self._watch.signature(), *state[3][1:]), *state[4:])
        counts = len(self.modules()), len(self.all_parameters()), len(now[3][0]), len(self.optimizers)
        return now if now != state and counts == known_counts(now) else None

    def exclude(self, changed: set[Place]) -> None:
        """Stop watching what the step changes. The first run may create state that later runs only read."""
        if self._watch.signature():
            self._watch.exclude(changed)

    def watch_reads(self, objects: Sequence[Any], ran: Reads) -> tuple[Sequence[Namespace], list[str]]:
        """Watch what code may read of Python state. Return the state, and why some values can't be watched.

        The signature holds the settings of optimizers that step inside separately.
        """
        settings = [one for optimizer in self.optimizers.values() for one in parts_of(optimizer)]
        namespaces, unwatched = read_by(self._host_roots(objects), ran, ignored=settings)
        self._watch.leave_out(self.modules())
        self._watch.add(namespaces, ran)
        return namespaces, unwatched if self.checks_attributes else []

    # ---- what is known ---------------------------------------------------------------------------------------------

    def discover(self, modules: Sequence[nn.Module]) -> None:
        """Register the modules among the arguments, and detect compiled code.

        Observed eager calls find the other modules. Compiled code can't be observed, so with compiled code, modules
        reachable from the step function are registered instead.
        """
        new = [module for module in modules if id(module) not in self._modules]
        if not self._inspected:
            self._inspected = True
            reached = reached_from(self.function)
            self.compiled = any(map(is_compiled, reached))
            if self.compiled:
                new += [value for value in reached if isinstance(value, nn.Module)]
        for module in new:
            self.register_module(module)
            self.compiled |= any(map(is_compiled, module.modules()))

    def register_module(self, module: nn.Module) -> None:
        if id(module) not in self._modules:
            self.roots.add(module)
            for inner in module.modules():
                self._modules[id(inner)] = inner

    def register_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.setdefault(id(optimizer), optimizer)

    def modules(self) -> list[nn.Module]:
        return [module for reference in self._modules.valuerefs() if (module := reference()) is not None]

    def quantized_modules(self) -> list[nn.Module]:
        return list(filter(is_of_transformer_engine, self.modules()))

    def all_parameters(self) -> list[Tensor]:
        """Return the parameters of all known modules, once per module that has them, and other trained tensors."""
        parameters: list[Tensor] = [
            parameter for module in self.modules() for parameter in module._parameters.values() if parameter is not None
        ]
        return parameters + list(self.leaves.values())

    def parameters(self) -> list[Tensor]:
        """Return the parameters that require a gradient or have one, without duplicates."""
        found = {id(parameter): parameter for parameter in self.all_parameters()}
        return [parameter for parameter in found.values() if parameter.requires_grad or parameter.grad is not None]

    def note_owned(self) -> set[int]:
        """Remember the parameters of all known modules, and those that a module had before as other trained tensors.

        A step may still train a parameter that was replaced, such as one in a list. Return the ids of the parameters.
        """
        owned = {
            id(parameter): parameter
            for module in self.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        for identity, parameter in self._owned.items():
            if identity not in owned:
                self.leaves[identity] = parameter
        self._owned = weakref.WeakValueDictionary(owned)
        return set(owned)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.all_parameters() if parameter.grad is not None]

    def declared(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages that a graph watches or copies, by address."""
        modules = self.modules()
        tensors = [
            *self.all_parameters(),
            *self.gradients(),
            *[buffer for module in modules for buffer in module._buffers.values()],
            *[tensor for optimizer in self.optimizers.values() for tensor in OptimizerState(optimizer).values()],
            *[main_grad for root in self.roots for main_grad in MainGrads(root).values()],
            *self.extra_state.values(),
        ]
        return storages_of(tensor for tensor in tensors if tensor is not None)

    def optimizers_on_host(self, device: torch.device) -> list[str]:
        """Return which optimizers a graph can't step, since they keep state in host memory."""
        return [
            f"steps {type(optimizer).__name__}, which keeps state in host memory: step it outside, or create it with "
            "capturable=True"
            for optimizer in self.optimizers.values()
            if any(tensor.device.type != device.type for tensor in OptimizerState(optimizer).values())
        ]

    # ---- Python state ----------------------------------------------------------------------------------------------

    def host_state(self) -> HostState:
        """Return the current Python state, of the process too, that a step must not change."""
        if self.checks_attributes:
            return self.whole_state(process=True)
        buffers = [(f"{type(module).__name__}._buffers", module._buffers) for module in self.modules()]
        return HostState(buffers, ignored=self._generators, process=True)

    def whole_state(self, objects: Sequence[Any] = (), process: bool = False) -> HostState:
        """Return the current Python state that is reachable, also from these arguments."""
        ran = ANY_CODE if self.ran is None else self.ran
        roots = self._host_roots(objects)
        return HostState(roots, libraries=False, ignored=self._generators, ran=ran, process=process)

    def _host_roots(self, objects: Sequence[Any] = ()) -> list[tuple[str, Any]]:
        """Return the objects from which Python state is searched that the step reads or changes."""
        modules = [(type(module).__name__, module) for module in self.roots]
        optimizers = [(type(optimizer).__name__, optimizer) for optimizer in self.optimizers.values()]
        hooks = [("a hook of a gradient", hook) for hook in gradient_hook_functions(self.all_parameters())]
        # Numbers beside the state's tensors; the signature holds the settings.
        numbers = [
            ("the state of an optimizer", values)
            for optimizer in self.optimizers.values()
            for values in optimizer.state.values()
            if not values or not all(isinstance(value, Tensor) for value in values.values())
        ]
        others = [("argument", value) for value in objects]
        return [("step", self.function), *modules, *optimizers, *hooks, *numbers, *others]


def known_counts(state: tuple) -> tuple[int, ...]:
    """Return the numbers of known modules, trainable tensors, watched values and optimizers."""
    return len(state[0]), len(state[1]), len(state[3][0]), len(state[4])
