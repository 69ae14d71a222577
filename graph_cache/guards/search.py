"""Search the Python state that code may read or change: what is reachable from some objects, and from code that ran."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn

from graph_cache.guards.namespaces import (
    MAX_ITEMS,
    MISSING,
    PLAIN_CONTAINERS,
    Attributes,
    Cell,
    ClassAttributes,
    Contents,
    FunctionParts,
    Globals,
    Hidden,
    Items,
    Kind,
    Namespace,
    Slots,
    TensorAttributes,
    contents_of,
    slots_of,
)
from graph_cache.guards.ownership import PATCHED, Searched, is_adapted, searched, searched_class, searched_function
from graph_cache.guards.values import PLAIN

MAX_NAMESPACES = 200_000  # of a larger state, the rest is not searched, and no graph is captured
MAX_OF_ANY_CODE = 20_000  # before a run was observed: of all that its functions may reach, the nearest
_LOOKS_MODULES_UP = frozenset(("modules", "import_module", "__import__"))
REGISTRIES = ("_parameters", "_buffers", "_modules")
NOT_FOLLOWED = (Tensor, types.BuiltinFunctionType, types.MethodType, functools.partial)
FLAGS = frozenset(("main_grad", "grad_added_to_main_grad"))  # of parameters, which `parameter_aliases.py` takes care of
_WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
)
_CACHED = type(functools.cache(len))
_WRAPPED = ("__func__", "fget", "func", "__wrapped__", "args", "keywords", "dispatcher")  # what these refer to
_VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))


class RunCode(Protocol):
    """The code of an observed run. `own` is that outside of installed packages, with the globals that it ran with."""

    @property
    def names(self) -> set[str]: ...

    @property
    def own(self) -> Sequence[tuple[types.CodeType, dict[str, Any]]]: ...

    @property
    def own_names(self) -> set[str]: ...

    def __contains__(self, code: object) -> bool: ...


class _AnyCode:
    """Stands for all code, before a run was observed."""

    names: set[str] = set()
    own: tuple[tuple[types.CodeType, dict[str, Any]], ...] = ()
    own_names: set[str] = set()

    def __contains__(self, code: object) -> bool:
        return True


ANY_CODE = _AnyCode()


class Namespaces(list[Namespace]):
    """Namespaces that a search found. `is_complete`: there are no more than MAX_NAMESPACES."""

    is_complete = True


def reachable(
    roots: Sequence[tuple[str, Any]],
    without: tuple[type, ...] = (),
    ignored: Sequence[Any] = (),
    ran: RunCode | None = None,
    names: Container[Any] | None = None,
) -> Namespaces:
    """Return the namespaces reachable from these named values, each once.

    Objects of the types in `without` and those in `ignored` are not followed. With `ran`, only functions that ran are
    followed, and methods, class attributes and names of imported modules are searched too. With `names`, only these
    names of objects are followed, and those that Python itself looks up (`__len__`).
    """
    found, limit = Namespaces(), MAX_OF_ANY_CODE if ran is ANY_CODE else MAX_NAMESPACES
    seen = set(map(id, ignored))
    frontier = list(roots)
    if ran is not None:
        # Functions that ran without a reference from the roots that leads to them.
        found += [Globals("", variables, tuple(global_names(code)), code) for code, variables in ran.own]
        found.append(ClassAttributes("Tensor", Tensor, only=_patched_methods(Tensor, ran.own_names)))
        frontier += [item for namespace in found for item in namespace.read().items()]
    kinds: set[type] = set()
    while frontier:
        following: list[tuple[str, Any]] = []
        for path, value in frontier:
            kind: Any = type(value)
            if kind in PLAIN or id(value) in seen or (without and isinstance(value, without)):
                continue
            seen.add(id(value))
            if len(found) > limit:
                found.is_complete = ran is ANY_CODE  # a later search is
                return found
            if kind in PLAIN_CONTAINERS and not value:  # such as most registries of hooks
                found.append(Items(path, value))
            else:
                for namespace in _namespaces_of(path, value, ran):
                    found.append(namespace)
                    following += _values_in(namespace, names, seen)
                if _has_constants(kind):
                    following += _constants_of(path, value)
            if ran is not None and kind not in kinds:
                kinds.add(kind)
                following += [(one.__name__, one) for one in kind.__mro__]
        frontier = following
    return found


def objects_with_tensors(values: Sequence[Any], without: tuple[type, ...] = ()) -> list[str]:
    """Return the types of these values that are no tensors but refer to some. Functions are not followed."""
    unfollowed = (types.FunctionType, types.MethodType, *without)
    return [
        type(value).__name__
        for value in values
        if type(value) not in PLAIN
        and not isinstance(value, (Tensor, *unfollowed))
        and any(
            isinstance(item, Tensor)
            for namespace in reachable([("", value)], without=unfollowed)
            for held in namespace.read().values()
            for item in (held if isinstance(held, (tuple, frozenset)) else (held,))
        )
    ]


def _imported_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of imported modules that a function imports, or looks up by their names."""
    names = [*code.co_names]
    if not _LOOKS_MODULES_UP.isdisjoint(names):
        names += [value for value in code.co_consts if type(value) is str]
    return tuple([name for name in names if name in sys.modules])


def global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in functions nested in it."""
    yield from code.co_names
    uses_dictionary = "globals" in code.co_names
    for constant in code.co_consts:
        if uses_dictionary and type(constant) is str:
            yield constant
        if isinstance(constant, types.CodeType):  # a nested function or comprehension
            yield from global_names(constant)


def _patched_methods(kind: type, names: Container[str]) -> tuple[str, ...]:
    """Return the names, among `names`, under which other code has put functions on a class of PyTorch."""
    return tuple(
        [
            name
            for name, value in vars(kind).items()
            if name in names and isinstance(value, types.FunctionType) and searched_function(value) is Searched.ALL
        ]
    )


def _namespaces_of(path: str, value: Any, ran: RunCode | None) -> Iterator[Namespace]:
    if isinstance(value, types.FunctionType):
        if ran is None or (value.__code__ in ran and searched_function(value) is Searched.ALL):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield Cell(name, cell)
            yield Globals("", value.__globals__, tuple(global_names(value.__code__)), value.__code__)
            if imported := _imported_names(value.__code__):
                yield Globals("", sys.modules, imported)
            yield Attributes(path, value.__dict__)
            yield FunctionParts(path, value)
    elif (found := contents_of(path, value)) is not None:
        yield found
        module = type(value).__module__
        if module not in ("builtins", "collections") and (_is_followed(module) or module.startswith("numpy.ma")):
            yield from _attributes_of(path, value)  # of a subclass; a masked array has its mask there
    elif isinstance(value, types.ModuleType):
        if ran is not None and (value.__name__ in PATCHED or searched(value.__name__) is Searched.ALL):
            yield Globals(path, vars(value), tuple(ran.names & vars(value).keys()))
    elif isinstance(value, type):
        if ran is not None and issubclass(value, nn.Module) and value.__module__.startswith("torch.nn."):
            yield ClassAttributes(path, value, only=("forward",))
        elif ran is not None and searched_class(value) is Searched.ALL:
            yield ClassAttributes(path, value)
    elif isinstance(value, Tensor):
        if ran is ANY_CODE:
            yield Attributes(path, vars(value), is_library=True)
        elif ran is not None and ran.own_names:
            yield TensorAttributes(path, vars(value), ran.own_names - FLAGS)
    elif isinstance(value, functools.partial):
        yield Attributes(path, value.__dict__)
    elif not isinstance(value, NOT_FOLLOWED) and searched_class(type(value)) is not Searched.NOTHING:
        yield from _attributes_of(path, value)
    elif isinstance(value, nn.Module):  # such as the wrapper that torch.compile returns
        yield Items(f"{path}._modules", value._modules)


def _is_followed(module: str) -> bool:
    return searched(module) is not Searched.NOTHING


def _attributes_of(path: str, value: Any) -> Iterator[Namespace]:
    if searched_class(type(value)) is Searched.ALL and not isinstance(value, nn.Module):  # whose classes are compared
        yield Kind(path, value)
    attributes = _attributes_in(value)
    is_library = isinstance(value, nn.Module) and is_adapted(type(value).__module__)
    if isinstance(attributes, dict):
        yield Attributes(path, attributes, is_library=is_library)
        for name, item in attributes.items() if is_library else ():
            if name in REGISTRIES:
                yield Items(f"{path}.{name}", item)
            elif isinstance(item, (dict, list)):
                yield Items(f"{path}.{name}", item, is_library=True)
    if slots := slots_of(type(value)):
        yield Slots(path, value, slots)


def _attributes_in(value: Any) -> Any:
    """Return the dictionary of an object's attributes, or None. Runs no Python code of its class."""
    find: Any = type(value).__getattribute__  # in C, that of thread locals and weak proxies differs from object's
    try:
        return (object.__getattribute__ if isinstance(find, types.FunctionType) else find)(value, "__dict__")
    except (AttributeError, ReferenceError):
        return None


def _values_in(namespace: Namespace, names: Container[Any] | None, seen: Container[int]) -> list[tuple[str, Any]]:
    """Return the objects to follow, without those seen: the values, or those in a set or in a context variable."""
    if namespace.is_library or not namespace.is_comparable:
        return []
    if isinstance(namespace, Contents):
        sets = [one for one in namespace.read().values() if isinstance(one, frozenset)]
        return [(namespace.path, item) for one in sets for item in one]
    if isinstance(namespace, Hidden):
        value = namespace.value("value") if isinstance(namespace.container, ContextVar) else MISSING
        return [] if value is MISSING else [(namespace.path, value)]
    return [
        (namespace.name_of(key), item)
        for key, item in namespace.read().items()
        if (type(item) not in PLAIN and id(item) not in seen)
        and (names is None or not namespace.named or key in names or key in REGISTRIES or key[:2] == "__")
    ]


@functools.cache
def _has_constants(kind: Any) -> bool:
    """Whether `_constants_of` may find any for objects of this type."""
    references = (types.FunctionType, types.MethodType, functools.partial, weakref.ref, memoryview, _CACHED)
    return issubclass(kind, (*references, tuple, frozenset, dict, *_VIEWS, *_WRAPPERS))


def _constants_of(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values that an immutable object refers to, and what a dictionary holds besides its values."""
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [(f"a default of {path}", item) for item in defaults]
    if isinstance(value, types.MethodType):
        return [(f"{path}.__self__", value.__self__), (path, value.__func__)]
    if isinstance(value, functools.partial):
        return [(path, value.func), (f"{path}.keywords", value.keywords), *[(path, item) for item in value.args]]
    if isinstance(value, weakref.ref):
        return [(path, value())]
    if isinstance(value, memoryview):
        return [] if _is_released(value) else [(path, value.obj)]
    if isinstance(value, (tuple, frozenset)):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, _CACHED):
        return [(path, value.__wrapped__), *[(f"a result of {path}", one) for one in _cached_results(value)]]
    if isinstance(value, dict):
        if type(value) is dict and all([type(key) is str for key in value]):
            return []
        keys = [key for key in dict.keys(value) if type(key) not in PLAIN] if len(value) <= MAX_ITEMS else []
        factory = [value.default_factory] if isinstance(value, defaultdict) else []
        return [(path, item) for item in (*keys, *factory)]
    if isinstance(value, _VIEWS):
        return [(path, one) for one in gc.get_referents(value)]
    if isinstance(value, _WRAPPERS):
        return [(path, getattr(value, name)) for name in _WRAPPED if hasattr(value, name)]
    return []


def _cached_results(function: Any) -> list[Any]:
    """Return the results that `functools.lru_cache` keeps of a user's function, which code may change."""
    wrapped = function.__wrapped__
    is_own = isinstance(wrapped, types.FunctionType) and searched_function(wrapped) is Searched.ALL
    if not is_own or not function.cache_info().currsize:
        return []
    held = [one for one in gc.get_referents(function) if one is not vars(function)]
    if function.cache_info().maxsize is None:
        return [result for one in held if type(one) is dict for result in one.values()]
    return [one for one in held if not (type(one) is dict and one and all(map(_is_cache_link, one.values())))]


def _is_cache_link(value: Any) -> bool:
    return type(value).__name__ == "_lru_list_elem"


def _is_released(view: memoryview) -> bool:
    try:
        return view.nbytes < 0
    except ValueError:
        return True
