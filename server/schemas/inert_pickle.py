"""Read a pickle as plain values, without `pickle`: nothing is imported and nothing is called.

Trainers send handles of GPU memory as pickles. A name in one becomes a `Name`, and a call a `Call`, both of them data.
Only the opcodes that such a pickle consists of are known.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_NAME = 200


class Name(NamedTuple):
    """What a pickle would import."""

    module: str
    name: str


@dataclass
class Call:
    """What a pickle would call, and the state that it would then set."""

    function: Name
    args: tuple[Any, ...]
    state: Any = None


_MARK = object()
_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES")
    + ("SHORT_BINBYTES", "BINBYTES8")
)
_NEW = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes) -> Any:
    """Return the value of a pickle. Raises ValueError for one that is cut off or has another opcode or structure."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                [value] = stack
                if (position or 0) + 1 != len(data):
                    raise ValueError("data follows the end of the pickle")
                return value
            _step(opcode.name, argument, stack, memo)
    except (IndexError, KeyError, AttributeError) as error:
        raise ValueError("its opcodes don't fit each other") from error
    raise ValueError("it has no end")


def _step(opcode: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Apply one opcode to the stack and the memo."""
    if opcode in ("PROTO", "FRAME"):
        return
    if opcode in _ARGUMENTS:
        stack.append(argument)
    elif opcode in _VALUES:
        stack.append(_VALUES[opcode])
    elif opcode in _NEW:
        stack.append(_NEW[opcode]())
    elif opcode == "MARK":
        stack.append(_MARK)
    elif opcode == "TUPLE":
        stack.append(tuple(_to_mark(stack)))
    elif opcode in _TUPLES:
        stack.append(tuple(_pop(stack, _TUPLES[opcode])))
    elif opcode in ("APPEND", "APPENDS"):
        values = _pop(stack, 1) if opcode == "APPEND" else _to_mark(stack)
        _expect(stack[-1], list).extend(values)
    elif opcode in ("SETITEM", "SETITEMS"):
        values = _pop(stack, 2) if opcode == "SETITEM" else _to_mark(stack)
        keys = [_expect(key, str) for key in values[::2]]
        _expect(stack[-1], dict).update(zip(keys, values[1::2], strict=True))
    elif opcode == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif opcode in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif opcode in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif opcode == "GLOBAL":
        module, _, name = argument.partition(" ")
        stack.append(Name(module[:MAX_NAME], name[:MAX_NAME]))
    elif opcode == "STACK_GLOBAL":
        module, name = _pop(stack, 2)
        stack.append(Name(_expect(module, str)[:MAX_NAME], _expect(name, str)[:MAX_NAME]))
    elif opcode in ("REDUCE", "NEWOBJ"):
        function, args = _pop(stack, 2)
        stack.append(Call(_expect(function, Name), _expect(args, tuple)))
    elif opcode == "BUILD":
        [state] = _pop(stack, 1)
        _expect(stack[-1], Call).state = state
    else:
        raise ValueError(f"the opcode {opcode} is not read")


def _pop(stack: list[Any], count: int) -> list[Any]:
    values = stack[-count:]
    if len(values) < count or any(value is _MARK for value in values):
        raise IndexError
    del stack[-count:]
    return values


def _to_mark(stack: list[Any]) -> list[Any]:
    """Pop the values above the last mark, and the mark."""
    values: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__} where {kind.__name__} is due")
    return value
