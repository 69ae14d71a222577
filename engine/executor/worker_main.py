"""A process of rank 1 or up: builds its part of the model, then makes every call that rank 0 makes.

Owns the life of such a process: that it ends when rank 0 says so, when rank 0 is gone, and when it is not where rank 0
is. Decides nothing else. worker_group.py runs it as `python -m engine.executor.worker_main FD FOLDER`: the pipe to
rank 0, and the folder of the rendezvous.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import select
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.executor.worker_group import DeviceReady, LoopReady, RankFailed, WeightsLoaded
from engine.utils.openmp import limit_openmp_spinning
from engine.utils.processes import ignore_stop_signals, set_up_child_log

if TYPE_CHECKING:  # they import torch, which must find the environment in order
    from engine.core.loop import EngineLoop
    from engine.executor.leader import LoopCall

logger = logging.getLogger(__name__)

ORPHAN_SECONDS = 1.0  # without rank 0 a step may wait for ever: what is under way gets this long
POLL_SECONDS = 1.0


def main() -> None:
    """Run until rank 0 ends it or is gone."""
    ignore_stop_signals()
    limit_openmp_spinning()
    pipe, folder = Connection(int(sys.argv[1])), sys.argv[2]
    threading.Thread(target=_exit_with_parent, args=(pipe.fileno(), os.getppid(), folder), daemon=True).start()
    exit_code = 1
    try:
        serve_rank(pipe)
        exit_code = 0
    except EOFError:
        logger.debug("rank 0 is gone")
    except Exception as error:
        logger.exception("this rank ends")
        pipe.send(RankFailed(f"{type(error).__name__}: {error}", error if isinstance(error, EngineError) else None))
    finally:
        if _has_hung_up(pipe.fileno()):
            shutil.rmtree(folder, ignore_errors=True)  # rank 0 can't any more
        logging.shutdown()
        sys.stderr.flush()
        # Not by the interpreter's way out: what libraries do there can hang, and nothing is left to be saved.
        os._exit(exit_code)


def serve_rank(pipe: Connection) -> None:
    """Build this rank, and obey until told to end. Raises EOFError when rank 0 is gone."""
    start = pipe.recv()  # brings torch with it
    _set_up_log(start.rank, *start.log)
    from engine.executor.shard import Shard

    shard = Shard(start.plan, start.rank)
    pipe.send(DeviceReady())
    shard.join(start.rendezvous)
    pipe.send(WeightsLoaded(shard.load()))
    begin = pipe.recv()
    loop = shard.loop(begin.num_pages, begin.manifest)
    loop.fatal_failures = 1  # a step that failed here may have gone well elsewhere
    pipe.send(LoopReady())
    execute_calls(loop, pipe, start.rank)
    loop.close()
    shard.leave()


def execute_calls(loop: EngineLoop, pipe: Connection, rank: int) -> None:
    """Make the calls that come, until a None. Raises what no rank may survive."""
    from engine.executor.leader import RECOVERABLE_CALLS, LoopFingerprint

    fingerprint, captures = LoopFingerprint(loop), None
    gc.collect()
    while (call := pipe.recv()) is not None:
        if call.fingerprint != fingerprint.read():
            raise RuntimeError(
                f"before {call.method} rank {rank} is at {fingerprint.read()}, and rank 0 at {call.fingerprint}"
            )
        try:
            result = _call(loop, call, pipe)
            if call.method == "step":
                fingerprint.note(result)
        except EngineError as error:
            if call.method not in RECOVERABLE_CALLS:
                raise
            logger.debug("%s was refused, as on rank 0: %s", call.method, error)
        if captures != (captures := loop.runner.cache.stats.captures.total()):
            gc.freeze()  # as rank 0 does: a collection amid a step would hold all ranks up


def _call(loop: EngineLoop, call: LoopCall, pipe: Connection) -> object:
    if call.method == "update_weights":
        count, version = call.args
        return loop.update_weights([pipe.recv() for _ in range(count)], version)
    return attrgetter(call.method)(loop)(*call.args)


def _exit_with_parent(fd: int, parent: int, folder: str) -> None:
    """End this process some time after rank 0 hung up or died, whatever this process is at."""
    while os.getppid() == parent and not _has_hung_up(fd, POLL_SECONDS):
        pass
    time.sleep(ORPHAN_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _has_hung_up(fd: int, seconds: float = 0.0) -> bool:
    """Whether the other side of this pipe is closed, or closes within so many seconds."""
    poll = select.poll()
    poll.register(fd, 0)  # for that alone, which is always told
    return bool(poll.poll(seconds * 1000))


def _set_up_log(rank: int, pickled_formatter: bytes, level: int) -> None:
    """As rank 0 logs, into the same stream; records say which rank's they are."""
    formatter = None
    with contextlib.suppress(AttributeError, ImportError):  # of a class that only rank 0's program has
        formatter = pickle.loads(pickled_formatter)
    set_up_child_log(formatter, level, prefix=f"rank {rank}: ")
    logger.debug("rank %d, process %d", rank, os.getpid())


if __name__ == "__main__":
    main()
