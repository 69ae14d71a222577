"""A module whose calls are taken over, and what of it a capture bakes in beside the arguments of a call.

Owns the seam: the attribute of the module that is replaced, and put back at the end. Knows no graphs.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter, getitem, is_
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from graph_cache.errors import GraphConfigError
from graph_cache.training.compiled import COMPILED_CALL, is_compiled
from graph_cache.training.side_effects import floats_of, numbers_of

logger = logging.getLogger(__name__)

FORWARD = "forward"
CHANGES_BEFORE_WARNING = 8
GLOBAL_HOOKS = [
    torch_hooks._global_forward_hooks,
    torch_hooks._global_forward_pre_hooks,
    torch_hooks._global_backward_hooks,
    torch_hooks._global_backward_pre_hooks,
]
Hook = Callable[..., Any]


class AmbientState(Protocol):
    """What surrounds the calls of modules and would be baked into a capture of them, beside their arguments: say, a
    precision that a context manager sets.
    """

    def of(self, modules: Sequence[nn.Module]) -> Hashable:
        """What surrounds a call of these now."""

    def recreate(self, modules: Sequence[nn.Module], seen: Hashable) -> AbstractContextManager:
        """Context for a capture, in which calls are surrounded as `of` saw it; all is as before afterwards."""

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        """After a capture: return a check that non-parameter state read by these modules' graphs has not moved."""

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        """A graph is about to replay in the place of these: pass on what it reads from a tensor."""

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        """A forward was replayed: change what a call would have changed."""


class SideOutput(Protocol):
    """Reproduce on replay the side outputs of a part: values that its forward leaves outside its result."""

    def gather(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call's result and what it left, as a tree; what is an argument stands there as a value that says so."""

    def put(self, gathered: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Leave what was gathered in a call like this one, and return its result."""

    def begin(self) -> None:
        """The part is taken over."""

    def end(self) -> None:
        """It is given back."""


class Part(NamedTuple):
    """What of a model is captured under `name`: a module's calls, or those of another of its methods.

    `submodules`: what the method uses of the module, whose parameters then take part; none: all of it. `chunk`: parts
    of different model chunks are never of one microbatch's forward, whatever runs between them. `carry`: what calls
    leave beside their results.
    """

    name: str
    module: nn.Module
    method: str = FORWARD
    submodules: tuple[nn.Module, ...] = ()
    chunk: int = 0
    carry: SideOutput | None = None


@dataclass(frozen=True)
class Attachment:
    """Which parts of a model are captured, and what that takes: see Job for `generators` and `state`.

    Forward-pre-hooks inside the parts for which `fired` is true run before each replay; others keep their part eager.
    """

    parts: Sequence[Part]
    generators: Sequence[torch.Generator] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)
    fired: Callable[[Hook], bool] | None = None
    surroundings: AmbientState | None = None


class InterceptedMethod:
    """What stands in the place of an attached module's method. A deep copy of the module has the method itself."""

    def __init__(self, attached: AttachedModule, call: Callable[[Any, tuple, dict[str, Any]], Any]):
        self._attached, self._call = attached, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        carry = self._attached.carry
        value = self._call(self._attached, args, kwargs)
        return value if carry is None else carry.put(value, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        attached = self._attached
        if attached.before is not None:
            return copy.deepcopy(attached.before, memo)
        owner = memo.get(id(attached.module), attached.module)
        return MethodType(getattr(type(owner), attached.method), owner)


class AttachedModule:
    """A part that is taken over; `eager` is what its calls did before: a method, or what `module.compile()` made of it.

    `scope` holds the submodules that take part. Forward-pre-hooks inside it for which `fired` is true run before each
    replay, in the order of the submodules, and outside of captures; any other hook inside keeps the part eager.
    Raises GraphConfigError where its calls are replaced already.
    """

    def __init__(
        self, part: Part, fired: Callable[[Hook], bool] | None = None, surroundings: AmbientState | None = None
    ):
        name, module = part.name, part.module
        self.name = name
        self.module = module
        self.chunk = part.chunk
        self.scope = nn.ModuleList(part.submodules) if part.submodules else module
        # module.compile() wraps hooks and forward together, so that call is taken over; torch.compile(module) makes a
        # module around it, whose forward is the compiled call.
        self.method = part.method
        compiled_in_place = part.method == FORWARD and getattr(module, COMPILED_CALL, None) is not None
        self._attribute = COMPILED_CALL if compiled_in_place else part.method
        self.before = vars(module).get(self._attribute)
        wraps_compiled = part.method == FORWARD and is_compiled(module)  # a compiled call of another module's
        if (
            self._attribute == part.method
            and self.before is not None
            and not (wraps_compiled or self._is_class_method(self.before))
        ):
            raise GraphConfigError(
                f"{name}: its {part.method} is replaced already ({self.before!r}); detach whatever did so first"
            )
        if isinstance(self.before, InterceptedMethod):
            raise GraphConfigError(f"{name}: it is attached already; detach it first")
        self.eager: Callable[..., Any] = getattr(module, self._attribute)
        self.carry = part.carry
        if part.carry is not None:
            self.eager = lambda *args, call=self.eager, **kwargs: part.carry.gather(call, args, kwargs)
        self.refused: set[Hashable] = set()  # kinds of calls whose capture failed
        self.uncopied_pair: Any = None  # the pair that hands out its gradients where they are; others copy
        self.reread_parameters()
        self.submodules = list(self.scope.modules())
        if part.submodules:
            self.submodules[0] = module  # of a list of submodules the mode says nothing
        self._inner = self.submodules if compiled_in_place else self.submodules[1:]
        self.hooks = [
            hooks
            for submodule in self._inner
            for hooks in (
                submodule._forward_hooks,
                submodule._forward_pre_hooks,
                submodule._backward_hooks,
                submodule._backward_pre_hooks,
            )
        ]
        self.hooks += GLOBAL_HOOKS
        floats = [(vars(module), name) for module in self.submodules for name in numbers_of(module, (float,))]
        self.float_owners, self.float_names = zip(*floats, strict=True) if floats else ((), ())
        self._fired = fired
        self.surroundings = surroundings
        self._hooks_to_run: list[tuple[nn.Module, Hook]] = []
        self.refresh()

    def _is_class_method(self, call: Any) -> bool:
        """Whether it is the method that the class has: so a deep copy of an attached module has it."""
        return (
            isinstance(call, MethodType)
            and call.__self__ is self.module
            and (call.__func__ is getattr(type(self.module), self.method, None))
        )

    def take_over(self, call: Callable[[Any, tuple, dict[str, Any]], Any]) -> None:
        """From here on calls of the module are calls of this, with this object, the arguments and the keywords."""
        setattr(self.module, self._attribute, InterceptedMethod(self, call))
        if self.carry is not None:
            self.carry.begin()

    def give_back(self) -> None:
        """The module as it was."""
        if self.carry is not None:
            self.carry.end()
        if self.before is None:
            delattr(self.module, self._attribute)
        else:
            setattr(self.module, self._attribute, self.before)

    def refresh(self) -> None:
        """Look again at what may change between two steps: which parameters are frozen, modes of submodules, hooks, and
        floating-point attributes of submodules, such as the rate of a dropout.
        """
        found = [hook for hooks in self.hooks if hooks for hook in hooks.values()]
        if found and self._fired is not None:
            self._hooks_to_run = [
                (submodule, hook) for submodule in self._inner for hook in self._pre_hooks(submodule).values()
            ]
            found = [hook for hook in found if not self._fired(hook)]
        else:
            self._hooks_to_run = []
        self.hooks_inside = bool(found)  # a replay would leave them out
        trained = [parameter.requires_grad for parameter in self.parameters]
        self.frozen = True not in trained
        self.state = (
            self.hooks_inside,
            *trained,
            *[module.training for module in self.submodules],
            *floats_of(self.float_owners, self.float_names),
        )

    def _pre_hooks(self, module: nn.Module) -> dict[int, Hook]:
        """Those hooks of a submodule that run before a replay."""
        return {key: hook for key, hook in module._forward_pre_hooks.items() if self._fired(hook)}

    def reread_parameters(self) -> None:
        """Take the parameters that the modules have now as their own."""
        self.parameters = list(self.scope.parameters())
        found = [
            (module._parameters, name, parameter)
            for module in self.scope.modules()
            for name, parameter in module._parameters.items()
        ]
        self._registries, self._parameter_names, self._registered = zip(*found, strict=True) if found else ((), (), ())

    def has_same_parameters(self) -> bool:
        """Whether the modules have the parameters that they had at the begin of this round: `functional_call` puts
        others in their place, for one call. Looked at in C loops, at every call."""
        try:
            return all(map(is_, map(getitem, self._registries, self._parameter_names), self._registered))
        except KeyError:  # one is gone
            return False

    def differs_only_in_modes(self, state: tuple[bool, ...]) -> bool:
        """Whether the module as it is now differs from this state in modes at most."""
        first, last = 1 + len(self.parameters), len(self.state) - len(self.float_owners)
        return (self.state[:first], self.state[last:]) == (state[:first], state[last:])

    @contextmanager
    def with_modes(self, state: tuple[bool, ...]) -> Iterator[None]:
        """The modes of this state within the block: a capture may come while a job evaluates."""
        before = [module.training for module in self.submodules]
        first = 1 + len(self.parameters)
        for module, training in zip(self.submodules, state[first : first + len(self.submodules)], strict=True):
            module.training = training
        try:
            yield
        finally:
            for module, training in zip(self.submodules, before, strict=True):
                module.training = training

    def ambient_state(self) -> Hashable:
        """What surrounds a call now."""
        return None if self.surroundings is None else self.surroundings.of(self.submodules)

    def recreate_ambient_state(self, seen: Hashable) -> AbstractContextManager:
        """The same surroundings again, for a capture."""
        return nullcontext() if self.surroundings is None else self.surroundings.recreate(self.submodules, seen)

    def fire_hooks(self) -> None:
        """Run the hooks that a replay leaves out."""
        for module, hook in self._hooks_to_run:
            hook(module, ())

    def before_replay(self) -> None:
        """What a call would do before its kernels."""
        self.fire_hooks()
        if self.surroundings is not None:
            self.surroundings.replaying(self.submodules)

    def after_replay(self) -> None:
        """What a call would leave behind on the host."""
        if self.surroundings is not None:
            self.surroundings.replayed(self.submodules)

    @contextmanager
    def hooks_put_aside(self) -> Iterator[None]:
        """Run those hooks now, and leave them out of the block, which captures."""
        self.fire_hooks()
        with put_back([module._forward_pre_hooks for module, _ in self._hooks_to_run]):
            for module, _ in self._hooks_to_run:
                for key in self._pre_hooks(module):
                    del module._forward_pre_hooks[key]
            yield

    def wants_gradients(self, tensors: list[Tensor]) -> bool:
        """Whether a call with these tensors has anything to differentiate."""
        return not self.frozen or any(tensor.requires_grad for tensor in tensors)


@contextmanager
def put_back(hooks: Sequence[dict[int, Hook]]) -> Iterator[None]:
    """What is taken out of these within the block is there again afterwards, in order."""
    saved = [(registry, dict(registry)) for registry in hooks]
    try:
        yield
    finally:
        for registry, before in saved:
            registry.clear()
            registry.update(before)


class Watched:
    """What may change of attached modules between two steps, looked at all at once: in C loops, at every step."""

    def __init__(self, modules: Sequence[AttachedModule]):
        self._modules = modules
        self._parameters = [parameter for attached in modules for parameter in attached.parameters]
        self._submodules = [module for attached in modules for module in attached.submodules]
        self._hooks = [hooks for attached in modules for hooks in attached.hooks]
        self._float_owners = [owner for attached in modules for owner in attached.float_owners]
        self._float_names = [name for attached in modules for name in attached.float_names]
        self._seen: tuple[list[Any], ...] = ()
        self._changes: Counter[int] = Counter()  # of each number, by its place

    def _count_changes(self, values: Sequence[Any]) -> None:
        """Tell who sets a number at every step why nothing replays."""
        for index, (before, now) in enumerate(zip(self._seen[-1] if self._seen else values, values, strict=True)):
            self._changes[index] += before != now
            if before != now and self._changes[index] == CHANGES_BEFORE_WARNING:
                logger.warning(
                    "the attribute %s of a graphed module changes again and again, and each value is a kind "
                    "of call of its own: keep it elsewhere, or in a tensor if its forward reads it",
                    self._float_names[index],
                )

    def refresh(self) -> None:
        """Bring the state of each module up to date."""
        now = (
            list(map(_requires_grad, self._parameters)),
            list(map(_training, self._submodules)),
            list(map(len, self._hooks)),
            floats_of(self._float_owners, self._float_names),
        )
        if now != self._seen:
            self._count_changes(now[-1])
            self._seen = now
            for attached in self._modules:
                attached.refresh()


_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
