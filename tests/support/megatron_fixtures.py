"""Fixtures for Megatron-Core tests on a CPU: a gloo process group of one rank, and one thread.

A conftest.py imports them for its folder. GPU tests create their own process groups.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing it warns of missing packages and of its own deprecated names
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer.cuda_graphs  # noqa: F401
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


@pytest.fixture(scope="module", autouse=True)
def one_process(request: pytest.FixtureRequest):
    if request.node.get_closest_marker("gpu"):
        yield
        return
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def experts_on_cpu(monkeypatch: pytest.MonkeyPatch):
    """Replace the GPU-only calls of megatron-core 0.16: a stream, a device number and Transformer Engine's GEMM."""
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none, as nothing is copied from a GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
