"""Compile, in parallel, the kernels that warm-up needs, before the first capture."""

from __future__ import annotations

import logging

import torch

from engine.worker.model_runner import ModelRunner
from graph_cache.core.keys import GraphKey

logger = logging.getLogger(__name__)


def compile_kernels(runner: ModelRunner, rank: int = 0, num_ranks: int = 1) -> None:
    """Compile, in parallel, the kernels of every graph that warm-up captures; under `lazy` only sampling's kernels.

    Does nothing on a CPU. With several ranks all of them must call it, since the steps hold collectives.
    """
    if runner.device.type != "cuda":
        return
    from engine.kernels.compile_ahead import compile_ahead  # triton is installed only with CUDA

    ran: list[GraphKey] = []
    compiled = compile_ahead(
        lambda: ran.extend(_run_without_launches(runner)), runner.device, rank=rank, num_ranks=num_ranks
    )
    with torch.inference_mode():  # nothing computed what the run stored in the entries of padding: it may be NaN
        runner.zero_pages([])
        runner.model_state.reset_padding()
        is_right = runner.attention.verify(runner.model.config.num_heads // max(1, runner.model.config.num_kv_heads))
    if not is_right:  # steps run other kernels from here on
        runner.builder.max_mixed_decodes = 0
    elif compiled is not None and not compiled.failed:  # all kernels are loaded
        for key in ran:
            runner.cache.sites[key.site].ran.add(key)
    runner.sampling_step.warm_up()


def _run_without_launches(runner: ModelRunner) -> list[GraphKey]:
    """Run the steps of warm-up on padding, where `compile_ahead` skips the launches. Returns the keys that ran.

    All indices of the steps are static inputs or results of torch, so they are valid also then. Kernels and
    libraries' choices depend on shapes only, so one layer of each kind runs, and captures need no further run.
    """
    if runner.config.warmup == "lazy" or not runner.cache.enabled:
        runner.sampling_step.warm_up()
        return []
    ran: list[GraphKey] = []
    pool, sites = runner.cache.pool, list(runner.cache.sites.values())
    with (
        pool.session(),
        pool.backend.on_capture_stream(),
        torch.inference_mode(),
        runner.step_model.one_layer_of_each_kind(runner.kv.group_of),
    ):
        for site in reversed(sites):  # sampling first: its kernels take longest to compile
            saved = site.buffers.snapshot(site.buffers.max_rows)
            site.buffers.fill_dummy()
            keys = site.warm_keys()
            if site is runner.site:  # its variants differ only in the width that torch's attention reads
                keys = list({key.bucket: key for key in keys}.values())
            for key in keys:
                try:
                    site.run_bodies(key)
                    ran.append(key)
                except Exception as error:
                    if runner.cache.must_capture:  # other ranks wait for the rest of its collectives
                        raise
                    logger.warning("the kernels of %s are not compiled ahead: %s", key, error)
            site.buffers.restore(saved)
    return ran
