"""Tensor parallelism over two gloo processes: tokens, weight updates, lost workers and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import Engine, EngineConfig, SamplingParams
from engine.client.async_client import EngineClient
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport
from engine.core.builder import build_loop
from engine.errors import ConfigError, EngineDead, ModelError, WeightUpdateError
from engine.executor.messages import Call, PackedMessage, RankState
from engine.executor.multiproc import _run_while_ranks_live
from engine.executor.reports import Reply, Reports
from engine.executor.worker_group import WorkerGroup
from engine.executor.worker_main import execute_calls
from engine.protocol.request import EngineRequest
from server.cli.flags import server_config
from server.cli.main import build_parser
from tests.support.waiting import PATIENCE, is_alive, until, wait_for_end

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9], [11] * 20, [40], [7, 8] * 9, [90, 3], [21, 22, 23]]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.3, top_p=0.9, seed=6, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=9, seed=7, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=25, temperature=0, seed=8),
]
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


def engine_config(model_folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(model_folder),
            "cpu_weight_format": "fp32",
            "num_threads": 1,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 16,
            "graph_manifest": "none",
        }
        | changes
    )


def reference_tokens(model_folder: Path) -> list[list[int]]:
    with Engine(engine_config(model_folder)) as engine:
        return [list(output.token_ids) for output in engine.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint with a vocabulary size that must be padded for two ranks."""
    return write_model(tmp_path_factory.mktemp("qwen3"))


def write_model(path: Path, **changes: Any) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes | changes))
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(path)
    return path


class TwoRankEngine:
    """A supervised engine of two ranks in separate processes, as in a server, and an event loop for its client."""

    def __init__(self, config: EngineConfig):
        self.runner = asyncio.Runner()
        self.supervisor = Supervisor(lambda: ProcessTransport(config), RestartPolicy(max_restarts=1, first_delay=0.05))
        self.client = EngineClient(config, self.supervisor)
        self.runner.run(self.client.start())

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()

    async def tokens(self, name: str, prompt: list[int], params: SamplingParams) -> list[int]:
        pieces = self.client.generate(name, prompt_token_ids=prompt, params=params)
        return [token async for delta in pieces for token in delta.token_ids]

    def generate(self) -> list[list[int]]:
        async def all_of_them() -> list[list[int]]:
            pairs = enumerate(zip(PROMPTS, PARAMS, strict=True))
            return await asyncio.gather(*(self.tokens(f"{number}", *pair) for number, pair in pairs))

        return self.runner.run(all_of_them())

    def ask(self, method: str, *args: Any) -> Any:
        return self.runner.run(self.client.ask(method, *args))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        self.runner.run(until(condition, what))

    @property
    def worker_pid(self) -> int:
        [found] = [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if is_alive(pid) and process_stat(pid)[1] == str(self.supervisor.pid)
        ]
        return found


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[TwoRankEngine]:
    server = TwoRankEngine(engine_config(model_folder, tensor_parallel_size=2))
    yield server
    ranks = server.supervisor.pid, server.worker_pid
    server.close()
    wait_for_end(ranks)


def test_two_ranks_generate_the_same_tokens_as_one_process(server, model_folder):
    assert server.generate() == reference_tokens(model_folder)


def test_aborting_a_request_does_not_affect_the_others(server, model_folder):
    async def leave() -> int:
        taken = 0
        pieces = server.client.generate("left", prompt_token_ids=[4, 5], params=LONG)
        async for delta in pieces:
            taken += len(delta.token_ids)
            if taken > 5:
                break
        await pieces.aclose()
        return taken

    async def both() -> tuple[int, list[int]]:
        return await asyncio.gather(leave(), server.tokens("beside", PROMPTS[3], PARAMS[3]))

    taken, beside = server.runner.run(both())
    assert taken < LONG.max_tokens and beside == reference_tokens(model_folder)[3]
    server.until(lambda: server.client.stats().num_running == 0, "the end of the aborted request")


def test_weights_load_from_files_and_a_rejected_update_keeps_the_old_ones(server, model_folder, tmp_path):
    old = reference_tokens(model_folder)
    other = write_model(tmp_path / "other", rms_norm_eps=1e-5)
    for file in other.glob("*.safetensors"):
        scale_weights(file)
    with pytest.raises(WeightUpdateError, match="does not exist"):
        server.ask("load_weights", str(tmp_path / "nowhere"), "v2")
    misfit = write_model(tmp_path / "misfit", hidden_size=64)
    with pytest.raises(WeightUpdateError, match="shape"):
        server.ask("load_weights", str(misfit), "v2")
    assert server.generate() == old
    server.ask("load_weights", str(other), "v2")
    assert server.generate() == reference_tokens(other) != old
    server.ask("load_weights", str(model_folder), "v3")
    assert server.generate() == old


def scale_weights(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: tensor * -1.5 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def test_losing_a_rank_fails_running_requests_and_restarts_all_ranks(server, model_folder):
    client, leader, worker_pid = server.client, server.supervisor.pid, server.worker_pid

    async def fail() -> Any:
        running = asyncio.create_task(server.tokens("lost", [4, 5], LONG))
        while client.stats().num_running == 0:
            await asyncio.sleep(0.01)
        os.kill(worker_pid, signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), PATIENCE)
        return ended[0]

    error = server.runner.run(fail())
    assert isinstance(error, EngineDead) and "rank 1 ended with exit code -9" in str(error)
    server.until(lambda: client.health().ready, "the restart")
    wait_for_end([leader])
    assert server.generate() == reference_tokens(model_folder)


SCRIPT = """
import json, sys, time
from engine import Engine, EngineConfig, SamplingParams
from engine.errors import EngineDead, WeightUpdateError
from engine.loader.weights import iterate_safetensors

settings, prompts, other = json.loads(sys.argv[1])
greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
found = {}

def generate():
    return [list(one.token_ids) for one in engine.generate(prompt_token_ids=prompts, sampling_params=greedy)]

engine = Engine(EngineConfig(**settings))
found["pids"] = list(engine.loop.executor.pids)
found["first"] = generate()
weights = dict(iterate_safetensors(other))
try:
    engine.update_weights([*weights.items(), ("nothing.weight", weights["model.norm.weight"])], version="v1")
except WeightUpdateError as error:
    found["refusal"] = str(error)
found["refused"] = generate()
engine.update_weights(weights.items(), version="v2")
found["updated"] = generate()
try:
    engine.share_weights(None, version="v3")
except WeightUpdateError as error:
    found["sharing"] = str(error)


def interrupted(batch):
    raise KeyboardInterrupt

engine.loop.executor.worker.runner.execute = interrupted
try:
    generate()
except KeyboardInterrupt:
    try:
        generate()
    except EngineDead as error:
        found["dead"] = str(error)
print(json.dumps(found), flush=True)
time.sleep(60)
"""


def test_an_embedded_engine_accepts_whole_tensors_and_its_workers_end_with_it(model_folder):
    """Start with random weights, which do not depend on the number of ranks; interrupt a step, then kill rank 0 while
    the worker waits for it in a step.
    """
    values = {
        "model": str(model_folder),
        "load_format": "dummy",
        "seed": 3,
        "cpu_weight_format": "fp32",
        "num_threads": 1,
        "tensor_parallel_size": 2,
        "graph_manifest": "none",
    }
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps([values, PROMPTS, str(model_folder)])],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        found = json.loads(process.stdout.readline() or "{}")
        assert is_alive(found["pids"][0])
        process.kill()
    wait_for_end(found["pids"])
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def single_process(engine: Engine) -> list[list[int]]:
        with engine:
            return [list(one.token_ids) for one in engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy)]

    assert found["updated"] == single_process(Engine(engine_config(model_folder))) != found["first"]
    assert "nothing.weight" in found["refusal"] and found["refused"] == found["first"]
    assert "update_weights" in found["sharing"] and "failed in execute: KeyboardInterrupt" in found["dead"]
    assert found["first"] == single_process(Engine(EngineConfig(**values | {"tensor_parallel_size": 1})))


def test_all_ranks_sleep_and_wake_up(model_folder):
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    config = engine_config(model_folder, tensor_parallel_size=2, enable_sleep_mode=True)

    def generated(engine: Engine) -> list[list[int]]:
        return [list(one.token_ids) for one in engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy)]

    with Engine(config) as engine:
        expected = generated(engine)
        engine.sleep()
        engine.wake_up()
        assert generated(engine) == expected
        engine.sleep(2)
        with pytest.raises(WeightUpdateError, match="the weights sleep"):
            engine.loop.load_weights(str(model_folder), "same")
        engine.wake_up(["weights"])
        engine.loop.load_weights(str(model_folder), "same")
        engine.wake_up()
        assert generated(engine) == expected and engine.weight_version == "same"
        engine.idle_check()


WITHOUT_MEGATRON = """
import json, sys
from engine import Engine, EngineConfig, SamplingParams

settings, prompts = json.loads(sys.argv[1])
greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
with Engine(EngineConfig(**settings)) as engine:
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=greedy)
    print(json.dumps([list(output.token_ids) for output in outputs]))
assert "megatron" not in sys.modules
"""


def test_all_ranks_sample_constrained_requests_from_the_same_masks(lively_model):
    grammars = ({"regex": "[a-z]{9}"}, None, {"choice": ["red fox", "blue"]}, {"json": {"enum": [1, "a", None]}})
    params = [
        SamplingParams(max_tokens=20, seed=seed, structured_outputs=one, logprobs=seed % 2 or None)
        for seed, one in enumerate(grammars)
    ]
    outputs = []
    for ranks in (1, 2):
        with Engine(engine_config(lively_model, tensor_parallel_size=ranks, async_scheduling=True)) as engine:
            outputs.append(engine.generate(prompt_token_ids=PROMPTS[:4], sampling_params=params))
            engine.idle_check()
    assert [one.token_ids for one in outputs[0]] == [one.token_ids for one in outputs[1]]
    assert outputs[1][2].text in ("red fox", "blue") and outputs[1][3].text in ("1", '"a"', "null")


def test_no_rank_imports_megatron(model_folder, tmp_path):
    """Shadow megatron by a package that can't be imported; the workers inherit the path of rank 0."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise RuntimeError('megatron was imported')")
    values = {"model": str(model_folder), "cpu_weight_format": "fp32", "num_threads": 1, "graph_manifest": "none"}
    found = []
    for ranks in (1, 2):
        arguments = json.dumps([values | {"tensor_parallel_size": ranks}, PROMPTS])
        path = os.pathsep.join((str(tmp_path), str(ROOT)))
        process = subprocess.run(
            [sys.executable, "-c", WITHOUT_MEGATRON, arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            timeout=600,
        )
        assert process.returncode == 0, process.stderr
        found.append(json.loads(process.stdout))
    assert found[0] == found[1]


def send(pipe: Connection, *calls: Call | None) -> None:
    for call in calls:
        with PackedMessage(call) as packed:
            packed.send(pipe)


@pytest.mark.parametrize(
    ("number", "state", "found"),
    [
        (2, RankState(0, 0, (0, 0, 0, 0)), "before call 2"),
        (1, RankState(0, 0, (0, 0, 0, 5)), "before call 1"),
        (1, RankState(0, 0, (1, 0, 0, 0)), "before call 1"),
    ],
    ids=["a call is missing", "other replays", "other weights"],
)
def test_a_worker_in_another_state_than_rank_0_stops(model_folder, number, state, found):
    worker = build_loop(engine_config(model_folder, inference_cuda_graph_scope="none")).executor.worker
    leader_end, worker_end = Pipe()
    send(leader_end, Call(0, RankState(0, 0, (0, 0, 0, 0)), "check_addresses", ()), Call(number, state, "zero", ()))
    with pytest.raises(RuntimeError, match=rf"{found} \(zero\) the state of rank 3"):
        execute_calls(worker, worker_end, Reports(worker_end), 3)


def test_a_worker_compares_the_tokens_that_rank_0_has_read(model_folder):
    loop = build_loop(engine_config(model_folder, inference_cuda_graph_scope="none"))
    loop.add(EngineRequest(request_id="a", prompt_token_ids=[1, 2], params=LONG, seed=0))
    step = loop.executor.worker.prepare(loop.scheduler.schedule())
    leader_end, worker_end = Pipe()
    unread = RankState(0, 0, (0, 0, 0, 0))
    send(leader_end, Call(0, unread, "execute", (step,)), Call(1, unread._replace(steps=1), "check_addresses", ()))
    with pytest.raises(RuntimeError, match="before call 1"):
        execute_calls(loop.executor.worker, worker_end, Reports(worker_end), 1)


def test_a_worker_answers_a_refused_update_and_ends_on_any_other_error(model_folder):
    worker = build_loop(engine_config(model_folder, inference_cuda_graph_scope="none")).executor.worker
    leader_end, worker_end = Pipe()
    state = RankState(0, 0, worker.state())
    send(
        leader_end,
        Call(0, state, "stage_files", ("/nowhere",), has_reply=True),
        Call(1, state, "discard_weights", (), has_reply=True),
        Call(2, state, "capture", ("no key",)),
    )
    with pytest.raises(AttributeError):
        execute_calls(worker, worker_end, Reports(worker_end), 1)
    refused, discarded = leader_end.recv(), leader_end.recv()
    assert refused.number == 0 and "does not exist" in str(refused.error) and discarded == Reply(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 0}, "whole number of at least 1"),
        ({"tensor_parallel_size": None}, "whole number of at least 1"),
        ({"mode": "training"}, "Megatron-Core splits"),
    ],
)
def test_settings_incompatible_with_tensor_parallelism_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"tensor_parallel_size": 2} | changes)


def test_a_model_that_cannot_be_split_is_rejected_before_a_process_starts(model_folder, tmp_path):
    indivisible = write_model(tmp_path / "odd", num_attention_heads=6, num_key_value_heads=3, intermediate_size=45)
    with pytest.raises(ModelError, match=r"3 key and value heads are not a multiple of 2; its 45 MLP columns"):
        Engine(engine_config(indivisible, tensor_parallel_size=2))
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises((ModelError), match="folder in Hugging Face layout"):
        build_loop(engine_config(gguf, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="leave it out"):
        Engine(EngineConfig(tensor_parallel_size=2), model=torch.nn.Linear(1, 1))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(ConfigError, match="initialised torch.distributed"):
            Engine(engine_config(model_folder, tensor_parallel_size=2))
    finally:
        dist.destroy_process_group()


def test_serve_has_a_tensor_parallel_size_flag():
    args = build_parser("serve").parse_args(["serve", "--tensor-parallel-size", "2"])
    assert server_config(args, {}).engine.tensor_parallel_size == 2


def test_the_rendezvous_does_not_wait_for_a_rank_that_ended():
    workers, none, ended = WorkerGroup(1), WorkerGroup(0), []
    try:
        os.kill(workers.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDead, match="rank 1 ended"):
            _run_while_ranks_live(workers, lambda: ended.append(time.sleep(PATIENCE)))
        assert not ended
        with pytest.raises(ValueError, match="not here"):
            _run_while_ranks_live(none, lambda: int("not here"))
    finally:
        workers.kill()
        none.kill()
