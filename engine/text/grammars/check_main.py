"""Entry point of the process that checks constraints, which its parent kills if one takes too long.

Imports no torch. A constraint that takes too much memory ends the process.
"""

from __future__ import annotations

import ctypes
import resource
from multiprocessing.connection import Connection

from llguidance import LLTokenizer

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.checks import Refusal, check
from engine.text.grammars.vocabulary import VocabularySource

PEAK_BYTES = 256 << 20  # while a constraint is compiled, beyond what the vocabulary takes; several may be at a time
HELD_BYTES = 32 << 20  # by a compiled constraint: every sequence that follows it takes as much


def main(pipe: Connection, source: VocabularySource) -> None:
    """Send None once ready, then answer each StructuredOutputs with `_check` of it. Runs until the pipe ends."""
    tokenizer = source.load()
    _limit_memory()
    pipe.send(None)
    while True:
        try:
            outputs = pipe.recv()
        except EOFError:
            return
        pipe.send(_check(outputs, tokenizer))


def _check(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> tuple[str, int, Refusal | None]:
    """Return the grammar, the bytes that it takes when compiled, and why it is refused."""
    _trim_memory()  # what an earlier constraint left free would hide what this one takes
    before = _memory_bytes(1)
    matcher, grammar, refusal = check(outputs, tokenizer)
    held = max(len(grammar), _memory_bytes(1) - before) if matcher is not None else 0
    del matcher
    _trim_memory()  # the engine's process compiles it next
    if held > HELD_BYTES:
        most = HELD_BYTES >> 20
        refusal = Refusal(f": takes {held >> 20} MiB when compiled, and at most {most} are allowed; simplify it")
    return ("", 0, refusal) if refusal else (grammar, held, None)


def _trim_memory() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _limit_memory() -> None:
    limit = _memory_bytes(0) + PEAK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _memory_bytes(column: int) -> int:
    """Return this process's address space (column 0) or resident memory (column 1)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column]) * resource.getpagesize()
