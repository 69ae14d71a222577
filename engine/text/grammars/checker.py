"""Check constraints in a child process that is killed if one takes too long or too much memory."""

from __future__ import annotations

import logging
import time

from engine.errors import EngineError
from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.vocabulary import VocabularySource
from engine.utils.processes.child import ChildProcess

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0  # of processor time: what a constraint takes does not depend on what else the machine runs
POLL_SECONDS = 0.05  # between two looks at it
HANG_FACTOR = 20  # of its processor time, after which a check is given up: its process got less than a twentieth
START_SECONDS = 60.0


class GrammarChecker:
    """One checking process, started for the first check and again after one that was killed.

    A check may take `seconds` of processor time.

    Only `stop` may be called from another thread.
    """

    def __init__(self, source: VocabularySource, seconds: float = CHECK_SECONDS):
        self._source, self._seconds = source, seconds
        self._child: ChildProcess | None = None
        self._stopped = False

    def check(self, outputs: StructuredOutputs) -> tuple[str, int]:
        """Return the constraint's grammar for llguidance, and the bytes that it takes when it is compiled.

        Raises RequestError if the constraint is invalid, unsupported, too large or too slow, and EngineError if no
        process starts.
        """
        child = self._child or self._start()
        try:
            used, deadline = child.cpu_seconds(), time.monotonic() + HANG_FACTOR * self._seconds
            child.pipe.send(outputs)
            while not child.pipe.poll(POLL_SECONDS):
                if child.cpu_seconds() - used >= self._seconds or time.monotonic() > deadline:
                    self.close()
                    raise outputs.error(f": takes more than {self._seconds:g} s to compile; simplify it")
            grammar, nbytes, refusal = child.pipe.recv()
        except (EOFError, OSError) as error:
            logger.warning("a structured output was refused: %s while compiling it", child.exit_reason())
            self.close()
            raise outputs.error(": takes too much memory to compile; simplify it") from error
        if refusal is not None:
            raise outputs.error(*refusal)
        return grammar, nbytes

    def stop(self) -> None:
        """Kill the process, for good. A check that runs fails; `close` must follow."""
        self._stopped = True
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the process. A later check starts another."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child.pipe.close()
            self._child = None

    def _start(self) -> ChildProcess:
        child = self._child = ChildProcess(
            "the grammar checker", "engine.text.grammars.check_main:main", self._source
        )  # named, not imported: this process needs none of its modules
        if self._stopped:  # before this thread had a child to kill
            child.kill()
        try:
            if not child.pipe.poll(START_SECONDS):
                raise EngineError(f"the grammar checker did not start within {START_SECONDS:g} s")
            child.pipe.recv()
        except (EOFError, OSError) as error:
            reason = child.exit_reason()
            self.close()
            raise EngineError(f"the grammar checker did not start: {reason}") from error
        except EngineError:
            self.close()
            raise
        return child
