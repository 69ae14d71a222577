"""Timing on a device: CUDA events around graph replays, wall time around synchronised calls, memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

GIB = 1 << 30


def capture(*calls: Callable[[], Any], error_mode: str = "global") -> torch.cuda.CUDAGraph:
    """Capture the calls one after another in one CUDA graph, after an eager run of the first one.

    The eager run compiles kernels and makes workspaces, which a capture may not do.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=error_mode):
        for call in calls:
            call()
    return graph


def event_ms(run: Callable[[], Any], calls: int = 1) -> float:
    """Return the device's ms between events around `calls` calls, divided by `calls`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def replay_ms(
    graph: torch.cuda.CUDAGraph, repeats: int, replays: int = 1, before: Callable[[], Any] | None = None
) -> list[float]:
    """Return `repeats` times in ms of a replay, each the mean of `replays` replays; `before` runs ahead of each."""
    graph.replay()
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        times.append(event_ms(graph.replay, replays))
    return times


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int = 15) -> float:
    """Return the median µs of a call, all calls being in one graph."""
    return statistics.median(replay_ms(capture(*calls), repeats)) * 1e3 / len(calls)


def wall_ms(run: Callable[[], Any], repeats: int, warm: int = 3) -> float:
    """Return the median wall time in ms of a call until the device has done its work, after `warm` untimed calls."""
    for _ in range(warm):
        run()
    synchronize()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """Measure the memory bandwidth of the current GPU in GB/s: bytes read and written by a copy of 1 GiB."""
    source = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    event_ms(lambda: target.copy_(source), 3)
    times = [event_ms(lambda: target.copy_(source), 10) for _ in range(7)]
    return 2 * GIB / statistics.median(times) / 1e6


def matmul_rate() -> float:
    """Measure the rate of a large bfloat16 product on the current GPU in TFLOP/s."""
    size = 8192
    first, second = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(first)
    event_ms(lambda: torch.mm(first, second, out=out), 3)
    times = [event_ms(lambda: torch.mm(first, second, out=out), 10) for _ in range(7)]
    return 2 * size**3 / statistics.median(times) / 1e9
