"""Create and destroy the process group of the tensor-parallel ranks, which are processes of one host."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.distributed.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)

RENDEZVOUS_SECONDS = 300.0  # how much later than another a rank may reach the rendezvous
COLLECTIVE_SECONDS = 60.0  # how much later than another a rank may reach a collective of gloo
LEAVE_SECONDS = 2.0  # limit for destroying the group; after it, the group ends with the process
# All ranks are processes of this host, so only loopback connections are allowed. A lost rank is detected through its
# pipe; torch's own error handling would abort the process when a communicator breaks.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def join_ranks(rendezvous: str, rank: int, size: int, device: torch.device) -> TensorParallel:
    """Initialise torch.distributed over all ranks, NCCL on a GPU and gloo on a CPU, and connect them.

    `rendezvous` is the path of a file. It must be the same for all ranks, be empty or not exist yet, and stay until
    `leave_ranks`. `device` is this rank's. Blocks until all ranks have joined.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # set per thread, and this may run in another one than the device's first use
    store = dist.FileStore(rendezvous, size)
    store.set_timeout(timedelta(seconds=RENDEZVOUS_SECONDS))
    with _environment(_ENVIRONMENT):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
        group = dist.group.WORLD
        # The first collective connects the ranks. That can't be captured, and it takes memory that must be gone
        # before the KV cache is sized.
        dist.all_reduce(torch.ones(1, device=device), group=group)
    if device.type == "cpu" and group is not None:  # only now: joining may take longer
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_SECONDS), group)  # noqa: SLF001
    return TensorParallel(rank, size, group)


def leave_ranks(device: torch.device) -> None:
    """Destroy the process group. Drop the graphs first: a communicator waits for graphs that captured it.

    Gives up after LEAVE_SECONDS, with an error in the log. Does nothing if no group was made.
    """
    if not dist.is_initialized():
        return
    rank = dist.get_rank()
    thread = threading.Thread(target=_destroy, args=(device,), daemon=True, name="encore-leave")
    thread.start()
    thread.join(LEAVE_SECONDS)
    if thread.is_alive():
        logger.error(
            "rank %d: the process group was not destroyed within %.0f s; it ends with this process", rank, LEAVE_SECONDS
        )


def _destroy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread's default is GPU 0, where this rank must not allocate
    dist.destroy_process_group()


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables that are not set yet, for the duration of the block."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
