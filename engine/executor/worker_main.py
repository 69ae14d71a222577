"""Entry point of a worker process (rank 1 and up): load one shard, then replicate the calls of rank 0.

The process exits when rank 0 tells it to, when rank 0 dies, or when its loop state differs from rank 0's.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.executor.worker_group import DeviceReady, LoopReady, RankFailed, WeightsLoaded
from engine.utils.openmp import limit_openmp_spinning
from engine.utils.processes.log import set_up_child_log

if TYPE_CHECKING:  # they import torch, which must come after limit_openmp_spinning()
    from engine.core.loop import EngineLoop
    from engine.executor.leader import LoopCall

logger = logging.getLogger(__name__)


def main(pipe: Connection, rendezvous: io.FileIO) -> None:
    """Run until rank 0 stops this worker or dies. `rendezvous` stays open because rank 0 sends its path."""
    limit_openmp_spinning()
    exit_code = 1
    try:
        serve_rank(pipe)
        exit_code = 0
    except EOFError:
        logger.debug("rank 0 has exited")
    except Exception as error:
        logger.exception("this rank failed")
        pipe.send(RankFailed(f"{type(error).__name__}: {error}", error if isinstance(error, EngineError) else None))
    finally:
        logging.shutdown()
        sys.stderr.flush()
        # Skip interpreter shutdown: exit handlers of libraries can hang, and there is nothing left to save.
        os._exit(exit_code)


def serve_rank(pipe: Connection) -> None:
    """Build this rank's loop and execute calls until rank 0 sends None. Raises EOFError if rank 0 dies."""
    start = pipe.recv()  # unpickling imports torch
    formatter, level = start.log
    set_up_child_log(formatter, level, f"rank {start.rank}: ")
    logger.debug("rank %d, process %d", start.rank, os.getpid())
    from engine.core.loop import EngineLoop
    from engine.executor.shard import Shard

    shard = Shard(start.plan, start.rank)
    pipe.send(DeviceReady())
    shard.join(start.rendezvous)
    pipe.send(WeightsLoaded(shard.load()))
    begin = pipe.recv()
    loop = shard.loop(begin.num_pages, begin.manifest, EngineLoop)
    loop.fatal_failures = 1  # a step that fails here may succeed on other ranks
    pipe.send(LoopReady())
    execute_calls(loop, pipe, start.rank)
    loop.close()
    shard.leave()


def execute_calls(loop: EngineLoop, pipe: Connection, rank: int) -> None:
    """Execute the calls that rank 0 sends until it sends None.

    Raises RuntimeError if this loop's fingerprint differs from rank 0's, and any error of a call that is not
    recoverable.
    """
    from engine.executor.leader import RECOVERABLE_CALLS, LoopFingerprint

    fingerprint, captures = LoopFingerprint(loop), None
    gc.collect()
    while (call := pipe.recv()) is not None:
        if call.fingerprint != fingerprint.read():
            raise RuntimeError(
                f"before {call.method} the state of rank {rank} is {fingerprint.read()}, of rank 0 {call.fingerprint}"
            )
        try:
            result = _call(loop, call, pipe)
            if call.method == "step":
                fingerprint.note(result)
        except EngineError as error:
            if call.method not in RECOVERABLE_CALLS:
                raise
            logger.debug("%s failed on this rank as on rank 0: %s", call.method, error)
        if captures != (captures := loop.runner.cache.stats.captures.total()):
            gc.freeze()  # as on rank 0: a garbage collection during a step would delay all ranks


def _call(loop: EngineLoop, call: LoopCall, pipe: Connection) -> Any:
    if call.method == "update_weights":
        count, version = call.args
        return loop.update_weights([pipe.recv() for _ in range(count)], version)
    return attrgetter(call.method)(loop)(*call.args)
