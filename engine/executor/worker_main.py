"""Entry point of a worker process (rank 1 and up): build a worker, then execute the calls that rank 0 sends.

The process exits when rank 0 tells it to, when rank 0 dies, or when its state differs from rank 0's.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError, WeightUpdateError
from engine.executor.reports import DeviceReady, RankFailed, Reply, Reports, WeightsLoaded, WorkerReady, describe_error
from engine.utils.onednn import limit_onednn_caches
from engine.utils.openmp import limit_openmp_spinning
from engine.utils.processes.log import set_up_child_log

if TYPE_CHECKING:  # they import torch, which must come after limit_openmp_spinning()
    from engine.executor.messages import Call
    from engine.worker.worker import Worker

logger = logging.getLogger(__name__)


def main(pipe: Connection, rendezvous: io.FileIO) -> None:
    """Run until rank 0 stops this worker or dies. `rendezvous` stays open because rank 0 sends its path."""
    limit_openmp_spinning()
    limit_onednn_caches()
    reports, exit_code = Reports(pipe), 1
    try:
        serve_rank(pipe, reports)
        exit_code = 0
    except EOFError:
        logger.debug("rank 0 has exited")
    except Exception as error:
        logger.exception("this rank failed")
        reports.send(RankFailed(describe_error(error), error if isinstance(error, EngineError) else None))
    finally:
        logging.shutdown()
        sys.stderr.flush()
        # Skip interpreter shutdown: exit handlers of libraries can hang, and there is nothing left to save.
        os._exit(exit_code)


def serve_rank(pipe: Connection, reports: Reports) -> None:
    """Build this rank's worker and execute calls until rank 0 sends None. Raises EOFError if rank 0 dies."""
    from engine.executor.messages import receive
    from engine.worker.startup import WorkerStart

    begin = receive(pipe)
    formatter, level = begin.log
    set_up_child_log(formatter, level, f"rank {begin.rank}: ")
    logger.debug("rank %d, process %d", begin.rank, os.getpid())
    start = WorkerStart(begin.plan, begin.rank)
    reports.send(DeviceReady())
    start.join(begin.rendezvous)
    reports.send(WeightsLoaded(start.load()))
    worker = start.build(receive(pipe).num_pages)
    reports.send(WorkerReady())
    reports.start_heartbeat()
    execute_calls(worker, pipe, reports, begin.rank)
    worker.close()


def execute_calls(worker: Worker, pipe: Connection, reports: Reports, rank: int) -> None:
    """Execute the calls that rank 0 sends until it sends None.

    Raises RuntimeError if a call is missing or this rank's state differs from rank 0's, and any error of a call except
    the refusal of a weight update.
    """
    from engine.executor.messages import receive
    from engine.executor.rank_state import StateTracker

    tracker, number, captures = StateTracker(worker), 0, None
    gc.collect()
    while (call := receive(pipe)) is not None:
        state = tracker.state_after(call.state.steps)
        if call.number != number or call.state != state:
            raise RuntimeError(
                f"before call {call.number} ({call.method}) the state of rank {rank} is call {number}, {state}, "
                f"of rank 0 {call.state}"
            )
        number += 1
        error = None
        try:
            result = _execute(worker, call)
            if call.method == "execute":
                tracker.add(result)
        except WeightUpdateError as refusal:
            error = refusal
        if call.has_reply:
            reports.send(Reply(call.number, error))
        elif error is not None:
            raise error
        if captures != (captures := worker.runner.cache.stats.captures.total()):
            gc.freeze()  # as on rank 0: a garbage collection during a step would delay all ranks


def _execute(worker: Worker, call: Call) -> Any:
    if call.method != "stage_weights":
        return getattr(worker, call.method)(*call.args)
    [weights] = call.args
    return worker.stage_weights([(name, tensor.open()) for name, tensor in weights])
