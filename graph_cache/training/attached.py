"""Intercept the calls of a module, and track module state that a capture bakes in.

This file replaces the intercepted attribute of a module and restores it on detach. It does not handle graphs.
"""

from __future__ import annotations

import copy
import functools
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

from graph_cache.errors import GraphConfigError
from graph_cache.guards.changes import HostState
from graph_cache.guards.code import Reads
from graph_cache.guards.library_state import is_of_transformer_engine
from graph_cache.guards.observation import Observation, read_by
from graph_cache.guards.search import ANY_CODE, reachable
from graph_cache.guards.watch import GLOBAL_HOOKS, CombinedVersions, ValueVersions
from graph_cache.training.ambient_state import AmbientState
from graph_cache.training.compiled import COMPILED_CALL, at_compile_time, is_compiled
from graph_cache.training.side_effects import constant_numbers, current_numbers

logger = logging.getLogger(__name__)

FORWARD = "forward"
CHANGES_BEFORE_WARNING = 8
Hook = Callable[..., Any]


# Which hooks and parameters a module has, the modes of its submodules, and their float attributes.
ModuleState = tuple[float | type, ...]


class SideOutput(Protocol):
    """Reproduce on replay the side outputs of a part: values that its forward stores outside its result."""

    def take(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call, with values added that the forward reads elsewhere and `gather` removes."""

    def gather(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call, and return the result and the side outputs as a tree; arguments appear as placeholders."""

    def put(self, gathered: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Store the side outputs gathered from an equivalent call, and return its result."""

    def begin(self) -> None:
        """Called when the part's method is replaced."""

    def end(self) -> None:
        """Called when the part's method is restored."""


class Part(NamedTuple):
    """A captured unit of a model: the calls of a module, or of one of its methods.

    - `submodules`: the submodules that the method uses; their parameters take part. Empty: the whole module.
    - `chunk`: model chunk; parts of different chunks never belong to the same microbatch's forward.
    - `carry`: side outputs of the calls.
    """

    name: str
    module: nn.Module
    method: str = FORWARD
    submodules: tuple[nn.Module, ...] = ()
    chunk: int = 0
    carry: SideOutput | None = None


@dataclass(frozen=True)
class Attachment:
    """The parts of a model to capture; see CaptureContext for `generators` and `state`.

    Forward pre-hooks inside a part for which `fired` returns true run before each replay. Any other hook keeps its part
    eager.
    """

    parts: Sequence[Part]
    generators: Sequence[torch.Generator] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)
    fired: Callable[[Hook], bool] | None = None
    ambient: AmbientState | None = None


DATA_PARALLEL = frozenset(("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"))


def is_data_parallel(module: nn.Module) -> bool:
    """Whether the module is a wrapper whose forward prepares the reduction of gradients, which a replay would skip.

    By name, so that these packages are not imported. Megatron's wrapper has the same name as PyTorch's.
    """
    return any(base.__name__ in DATA_PARALLEL for base in type(module).__mro__)


def _nothing() -> None:
    """Do nothing."""


def _same(value: Any) -> Any:
    """Return the value. Pickles name this function."""
    return value


def _current_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method that is looked up at each call: other code may replace it on the class."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(module), name)(module, *args, **kwargs)

    return call


def _call_eager(attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
    return attached.eager(*args, **kwargs)


class InterceptedMethod:
    """Replacement for the method of an attached module. A deep copy of the module gets the original method."""

    def __init__(
        self,
        attached: AttachedModule,
        call: Callable[[Any, tuple, dict[str, Any]], Any],
        count_compiled: Callable[[], None],
    ):
        self._attached, self._call = attached, call
        self._count_compiled = at_compile_time(count_compiled)
        functools.update_wrapper(self, attached.original)  # its name and signature, which some libraries inspect

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a model around this is compiled: its code contains the original
            self._count_compiled()
            return self._attached.eager(*args, **kwargs)
        carry = self._attached.carry
        if carry is not None:
            args, kwargs = carry.take(args, kwargs)
        value = self._call(self._attached, args, kwargs)
        return value if carry is None else carry.put(value, args, kwargs)

    def __reduce__(self) -> Any:
        """Pickle as the original method: a loaded module is not attached."""
        attached = self._attached
        if attached.before is not None:
            return _same, (attached.before,)
        return getattr, (attached.module, attached.method)

    def release(self) -> None:
        """Call the original method from now on: a wrapper that was put over this one stays in place."""
        self._call = _call_eager

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        attached = self._attached
        if attached.before is not None:
            return copy.deepcopy(attached.before, memo)
        owner = memo.get(id(attached.module), attached.module)
        return MethodType(getattr(type(owner), attached.method), owner)


class AttachedModule:
    """A part with an intercepted method; `eager` is the original: a method, or the compiled call of `module.compile()`.

    `scope` holds the submodules that take part. Forward pre-hooks inside it for which `fired` returns true run before
    each replay, in the order of the submodules, and outside captures. Any other hook inside keeps the part eager.

    Raises GraphConfigError if the method is already replaced.
    """

    def __init__(self, part: Part, fired: Callable[[Hook], bool] | None = None, ambient: AmbientState | None = None):
        name, module = part.name, part.module
        self.name = name
        self.module = module
        self.chunk = part.chunk
        self.scope = nn.ModuleList(part.submodules) if part.submodules else module
        # module.compile() wraps hooks and forward together, so intercept that call. torch.compile(module) returns a
        # wrapper module with the compiled call as its forward.
        self.method = part.method
        compiled_in_place = part.method == FORWARD and getattr(module, COMPILED_CALL, None) is not None
        self._attribute = COMPILED_CALL if compiled_in_place else part.method
        self.before = vars(module).get(self._attribute)
        wraps_compiled = part.method == FORWARD and is_compiled(module)  # the compiled call of another module
        if isinstance(self.before, InterceptedMethod):
            raise GraphConfigError(f"{name} is already attached; detach it first")
        if (
            self._attribute == part.method
            and self.before is not None
            and not (wraps_compiled or is_compiled(self.before) or self._is_class_method(self.before))
        ):
            raise GraphConfigError(
                f"{name}: its {part.method} is already replaced ({self.before!r}); detach the replacement first"
            )
        self.original: Callable[..., Any] = getattr(module, self._attribute)
        self.eager = _current_method(module, self._attribute) if self._is_class_method(self.original) else self.original
        self._interception: InterceptedMethod | None = None
        self.carry = part.carry
        if part.carry is not None:
            self.eager = lambda *args, call=self.eager, **kwargs: part.carry.gather(call, args, kwargs)
        # Whether first replays are compared with eager: state of Transformer Engine is beside memory. False after one
        # could not be: captures are compared from then on.
        self.compares_replays = not any(map(is_of_transformer_engine, self.scope.modules()))
        self.uncopied: Any = None  # graphs that return their gradients uncopied; others copy
        self.reread_parameters()
        self.submodules = list(self.scope.modules())
        if part.submodules:
            self.submodules[0] = module  # the ModuleList is ours: its mode means nothing
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
        # State of others: hooks run outside captures, and adapters recreate what they set.
        self.ignored = [one for one in (ambient, part.carry, *self.hooks) if one is not None]
        self.ignored += [module._forward_hooks, module._forward_pre_hooks]
        floats = [(vars(module), name) for module in self.submodules for name in constant_numbers(module)]
        self.float_owners = [owner for owner, _ in floats]
        self.float_names = [name for _, name in floats]
        # Python state that calls read, watched once a recorded call has shown it.
        self.roots = [(type(module).__name__, self.scope)]
        if not part.submodules:
            self.roots.append((part.method, self.original))
        self.ran: Reads | None = None  # code that calls have executed
        self.backward_ran: Reads | None = None
        self.observed_calls = 0
        self.versions = ValueVersions(self.submodules)
        # Compiled code would be compiled anew under a profiler. A data-parallel wrapper is never captured.
        self._unobserved = compiled_in_place or any(map(is_compiled, self.submodules))
        self._unobserved |= any(map(is_data_parallel, self.submodules))
        self._fired = fired
        self.ambient = ambient
        self._hooks_to_run: list[tuple[nn.Module, Hook]] = []
        self.refresh()

    def _is_class_method(self, call: Any) -> bool:
        """Whether `call` is the method of the class. Deep copies of attached modules have it as an attribute."""
        return (
            isinstance(call, MethodType)
            and call.__self__ is self.module
            and (call.__func__ is getattr(type(self.module), self.method, None))
        )

    def take_over(
        self, call: Callable[[Any, tuple, dict[str, Any]], Any], count_compiled: Callable[[], None] = _nothing
    ) -> None:
        """Redirect calls of the module to `call(self, args, kwargs)`.

        In code compiled by torch.compile around it, the module is not redirected: `count_compiled` is called instead,
        once for each compilation.
        """
        self._interception = InterceptedMethod(self, call, count_compiled)
        setattr(self.module, self._attribute, self._interception)
        if self.carry is not None:
            self.carry.begin()

    def give_back(self) -> None:
        """Restore the module. A wrapper that was put over the interception stays, and calls the original."""
        if self.carry is not None:
            self.carry.end()
        if self._interception is not None:
            self._interception.release()
        if vars(self.module).get(self._attribute) is not self._interception:
            return
        if self.before is None:
            delattr(self.module, self._attribute)
        else:
            setattr(self.module, self._attribute, self.before)

    def refresh(self) -> None:
        """Reread state that may change between two steps: frozen parameters, modes of submodules, hooks, and
        floating-point attributes of submodules such as a dropout rate.
        """
        found = [hook for hooks in self.hooks if hooks for hook in hooks.values()]
        if found and self._fired is not None:
            self._hooks_to_run = [
                (submodule, hook) for submodule in self._inner for hook in self._pre_hooks(submodule).values()
            ]
            found = [hook for hook in found if not self._fired(hook)]
        else:
            self._hooks_to_run = []
        self.hooks_inside = bool(found)  # a replay would skip them
        trained = [parameter.requires_grad for parameter in self.parameters]
        self.frozen = True not in trained
        self.state = (
            self.hooks_inside,
            *trained,
            *[module.training for module in self.submodules],
            *map(type, self.submodules),
            *current_numbers(self.float_owners, self.float_names),
            self.versions.current(),
        )

    def _pre_hooks(self, module: nn.Module) -> dict[int, Hook]:
        """Return the hooks of a submodule that run before a replay."""
        fired = self._fired
        return {} if fired is None else {key: hook for key, hook in module._forward_pre_hooks.items() if fired(hook)}

    def reread_parameters(self) -> None:
        """Record the current parameters of the modules as their own."""
        self.parameters = list(self.scope.parameters())
        found = [
            (module._parameters, name, parameter)
            for module in self.scope.modules()
            for name, parameter in module._parameters.items()
        ]
        self._registries = [registry for registry, _, _ in found]
        self._parameter_names = [name for _, name, _ in found]
        self._registered = [parameter for _, _, parameter in found]

    def has_same_parameters(self) -> bool:
        """Whether the modules have the parameters recorded at the start of this step.

        `functional_call` replaces them for one call. Runs at every call, so it loops in C.
        """
        try:
            return all(map(is_, map(getitem, self._registries, self._parameter_names), self._registered))
        except KeyError:  # a parameter was removed
            return False

    def has_stand_ins(self) -> bool:
        """Whether plain tensors are in the place of parameters, as within a `functional_call`."""
        return any(
            parameter is not None and not isinstance(parameter, nn.Parameter)
            for module in self.scope.modules()
            for parameter in module._parameters.values()
        )

    def differs_only_in_flags(self, state: ModuleState) -> bool:
        """Whether the current state differs from this one in train/eval modes and frozen parameters at most."""
        last = len(self.state) - len(self.float_owners) - 1
        same_length = len(self.state) == len(state)
        return same_length and (self.state[:1], self.state[last:]) == (state[:1], state[last:])

    @contextmanager
    def with_flags(self, state: ModuleState) -> Iterator[None]:
        """Set the modes and the frozen parameters of this state within the block.

        A capture may run while the job evaluates, or trains other parameters.
        """
        modes = [module.training for module in self.submodules]
        first = 1 + len(self.parameters)
        wanted = [bool(flag) for flag in state[1 : first + len(self.submodules)]]
        frozen = [parameter for parameter, flag in zip(self.parameters, wanted, strict=False)
                  if parameter.requires_grad != flag]  # fmt: skip
        for parameter in frozen:
            parameter.requires_grad_(not parameter.requires_grad)
        for module, training in zip(self.submodules, wanted[len(self.parameters) :], strict=True):
            module.training = training
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(not parameter.requires_grad)
            for module, training in zip(self.submodules, modes, strict=True):
                module.training = training

    @contextmanager
    def observing(self, objects: Sequence[Any] = ()) -> Iterator[list[str]]:
        """Observe an eager call: watch the Python state that it reads from now on, also of `objects`, its arguments.

        Yields a list, filled after the block, of reasons why a replay could differ from it.
        """
        refusals: list[str] = []
        if self._unobserved:
            yield refusals
            reads = Reads.of_calls(self.submodules, self.original)
            with self.versions.extended() as versions:
                namespaces, unwatched = read_by(self.roots, reads, ignored=self.ignored)
                versions.add(namespaces, reads)
            refusals += unwatched
            return
        self.observed_calls += 1
        ran = ANY_CODE if self.ran is None else self.ran
        roots = [*self.roots, *[("argument", value) for value in objects]]
        reads, state = Reads((self.method,)), HostState(roots, ignored=self.ignored, ran=ran)
        seen = Observation(state, reads=reads)  # its effects stay: this is the call itself
        with self.versions.extended() as versions:
            with seen.running():
                yield refusals
            refusals += [
                f"advances {name}, which a replay would not: pass its values as arguments"
                for name in state.irreversible()
            ]
            self.ran = (self.ran or Reads()).merged(reads)
            seen.changes()
            versions.exclude(state.changed - state.created, made=bool(state.created))
            namespaces, unwatched = read_by(roots, self.ran, ignored=self.ignored)
            refusals += unwatched
            versions.add(namespaces, self.ran)

    def observed_backward(self, reads: Reads) -> None:
        """Watch the Python state that a captured backward has read, such as that of an autograd.Function."""
        self.backward_ran = (self.backward_ran or Reads()).merged(reads)
        if self._unobserved or self.ran is None or not reads.own:
            return
        ran = self.ran.merged(self.backward_ran)
        with self.versions.extended() as versions:
            versions.add(reachable(self.roots, ignored=self.ignored, ran=ran, names=ran.names_to_follow), ran)

    def ambient_state(self) -> Hashable:
        """Return the current ambient state of a call."""
        return None if self.ambient is None else self.ambient.of(self.submodules)

    def recreate_ambient_state(self, seen: Hashable) -> AbstractContextManager:
        """Return a context that recreates the observed ambient state for a capture."""
        return nullcontext() if self.ambient is None else self.ambient.recreate(self.submodules, seen)

    def fire_hooks(self) -> None:
        """Run the allowed pre-hooks, which a replay skips."""
        for module, hook in self._hooks_to_run:
            hook(module, ())

    @property
    def runs_hooks(self) -> bool:
        """Whether hooks run before each replay."""
        return bool(self._hooks_to_run)

    def before_replay(self) -> None:
        """Do the host-side work that an eager call does before its kernels."""
        self.fire_hooks()
        if self.ambient is not None:
            self.ambient.replaying(self.submodules)

    def after_replay(self) -> None:
        """Apply the host-side effects of an eager call."""
        if self.ambient is not None:
            self.ambient.replayed(self.submodules)

    @contextmanager
    def hooks_put_aside(self) -> Iterator[None]:
        """Run the allowed pre-hooks now, and remove them within the block, which captures."""
        self.fire_hooks()
        with put_back([module._forward_pre_hooks for module, _ in self._hooks_to_run]):
            for module, _ in self._hooks_to_run:
                for key in self._pre_hooks(module):
                    del module._forward_pre_hooks[key]
            yield

    def wants_gradients(self, tensors: list[Tensor]) -> bool:
        """Whether a call with these tensors needs a backward."""
        return not self.frozen or any(tensor.requires_grad for tensor in tensors)


@contextmanager
def put_back(hooks: Sequence[dict[int, Hook]]) -> Iterator[None]:
    """Restore the contents and order of these hook registries after the block."""
    saved = [(registry, dict(registry)) for registry in hooks]
    try:
        yield
    finally:
        for registry, before in saved:
            registry.clear()
            registry.update(before)


class Watched:
    """State of attached modules that may change between two steps. Checked at every step, so it loops in C."""

    def __init__(self, modules: Sequence[AttachedModule]):
        self._modules = modules
        self._parameters = [parameter for attached in modules for parameter in attached.parameters]
        self._submodules = [module for attached in modules for module in attached.submodules]
        self._hooks = [hooks for attached in modules for hooks in attached.hooks]
        self._float_owners = [owner for attached in modules for owner in attached.float_owners]
        self._float_names = [name for attached in modules for name in attached.float_names]
        self._versions = CombinedVersions([attached.versions for attached in modules])
        self._seen: tuple[list[Any], ...] = ()
        self._changes: Counter[int] = Counter()  # by index of the float attribute

    def _count_changes(self, values: Sequence[Any]) -> None:
        """Warn about a float attribute that changes every step, since nothing replays then."""
        for index, (before, now) in enumerate(zip(self._seen[-1] if self._seen else values, values, strict=True)):
            self._changes[index] += before != now
            if before != now and self._changes[index] == CHANGES_BEFORE_WARNING:
                logger.warning(
                    "the attribute %s of a graphed module changes repeatedly, and each value needs its own graphs: "
                    "keep it outside the module, or in a tensor if the forward reads it",
                    self._float_names[index],
                )

    def refresh(self) -> None:
        """Refresh all modules if anything changed."""
        now = (
            list(map(_requires_grad, self._parameters)),
            list(map(_training, self._submodules)),
            list(map(type, self._submodules)),
            list(map(len, self._hooks)),
            self._versions.current(),
            current_numbers(self._float_owners, self._float_names),
        )
        if now != self._seen:
            self._count_changes(now[-1])
            self._seen = now
            for attached in self._modules:
                attached.refresh()


_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
