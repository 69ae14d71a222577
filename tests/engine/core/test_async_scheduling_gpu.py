"""Async scheduling on a GPU: the same tokens as without it, and enqueuing a step never waits for the device."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)

from engine import Engine, EngineConfig, SamplingParams
from engine.protocol.request import EngineRequest
from tests.engine.lively import MANY, write_lively_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # from Triton: Python's ast, numpy scalars
]

# float32, so that rounding differences between batch compositions hardly ever change a token.
SETTINGS = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "num_pages": 200,
            "graph_buckets": (8,), "graph_manifest": "none", "warmup": "full"}  # fmt: skip
SAMPLING_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.6, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=4, max_tokens=40, logprobs=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lively")
    write_lively_model(tiny_model, folder, seed=0)
    return str(folder)


def answers(model: str, **options) -> list:
    params = [SAMPLING_PARAMS[i % len(SAMPLING_PARAMS)] for i in range(len(MANY))]
    with Engine(EngineConfig(model=model, **(SETTINGS | options))) as engine:
        outputs = engine.generate(prompt_token_ids=MANY, sampling_params=params)
        engine.idle_check()
        return [(output.token_ids, output.finish_reason, len(output.logprobs or ())) for output in outputs]


def test_gpu_async_scheduling_gives_the_same_answers(model):
    waiting = answers(model, async_scheduling=False)
    assert answers(model) == waiting
    assert answers(model, num_pages=20) == waiting  # some requests are preempted with a token in flight
    assert all(len(tokens) == 40 for tokens, _, _ in waiting)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", range(len(SAMPLING_PARAMS)))
def test_gpu_decode_is_enqueued_without_waiting_for_the_device(model, kind):
    with Engine(EngineConfig(model=model, **SETTINGS)) as engine:
        loop = engine.loop
        for i, prompt in enumerate(MANY):
            loop.add(EngineRequest(request_id=f"{i}", prompt_token_ids=prompt, params=SAMPLING_PARAMS[kind]))
        for _ in range(4):
            loop.step()
        execute, outputs = loop.executor.worker.runner.execute, []

        def watched(step):
            assert step.decode and not step.prefill
            torch.cuda.set_sync_debug_mode("error")  # raises at any call that waits for the device
            try:
                outputs.append(execute(step))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return outputs[-1]

        loop.executor.worker.runner.execute = watched
        for _ in range(20):  # beyond the first page
            loop.step()
        assert len(outputs) == 20 and not outputs[-1].is_read and outputs[-2].is_read
        assert not loop.stats().last_error
        loop.abort([f"{i}" for i in range(len(MANY))])
        loop.step()
