"""Train as in grpo.py, with the model served by another process, which gets new weights over a process group.

    python examples/grpo_remote.py                                        # under a minute on a CPU; starts a server
    python examples/grpo_remote.py --url http://host:8000 --model FOLDER  # with the server that serves FOLDER

The trainer is rank 0 of a gloo group and the server rank 1. A step of the trainer:

    POST /inference/v1/generate    token ids in; token ids, log-probabilities and weight versions out
    POST /pause?mode=keep          running requests stay
    POST /update_weights           announces the tensors, which then come over the group
    POST /resume

The server keeps its graphs. `--dialect sglang` does the same with SGLang's routes, as slime and AReaL do. These routes
need an admin key, which is read from ENCORE_ADMIN_KEY; a server that was started with `--admin-without-key loopback`
needs none from the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from grpo import GROUP, WANTED, Sample, group_advantages, improve, questions, reward, save_tiny_model
from grpo_over_http import QUESTIONS, Client, Server
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.distributed.weight_group import WeightGroup

DIALECTS = {  # routes of: join, pause, update, resume
    "vllm": ("/init_weight_transfer_engine", "/pause?mode=keep", "/update_weights", "/resume"),
    "sglang": (
        "/init_weights_update_group", "/pause_generation", "/update_weights_from_distributed", "/continue_generation",
    ),
}  # fmt: skip


class Policy:
    """The served model, which generates rollouts and takes weights from the trainer's group.

    `address` is the trainer's, as the server's machine sees it.
    """

    def __init__(self, client: Client, dialect: str, address: str):
        self._client, self._dialect = client, dialect
        self._join, self._pause, self._update, self._resume = DIALECTS[dialect]
        self._threads = ThreadPoolExecutor(QUESTIONS)
        self.dtype = getattr(torch, client.get("/get_model_info")["dtype"])
        self._group = self._join_group(address)

    def _join_group(self, address: str) -> WeightGroup:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        size = 1 + self._client.get("/get_world_size")["world_size"]
        place: dict[str, Any] = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        if self._dialect == "vllm":
            name, body = "vllm", {"init_info": place | {"backend": "gloo", "packed": True}}
        else:
            name, body = "policy", place | {"backend": "gloo", "group_name": "policy"}
        joined = self._threads.submit(self._client.post, self._join, body)  # answers when both have joined
        group = WeightGroup.join(address, port, rank=0, world_size=size, name=name, timeout=60)
        joined.result()
        return group

    def rollouts(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Return `GROUP` choices per prompt, in the order of the prompts."""
        sampling = {"n": GROUP, "max_tokens": WANTED, "temperature": 1.0, "logprobs": 0}
        bodies = [{"token_ids": prompt, "sampling_params": sampling} for prompt in prompts]
        answers = self._threads.map(lambda body: self._client.post("/inference/v1/generate", body), bodies)
        return [choice for answer in answers for choice in answer["choices"]]

    def update_weights(self, weights: list[tuple[str, Tensor]], version: str) -> None:
        """Send the weights, and return when the server generates with them."""
        names, shapes = [name for name, _ in weights], [list(tensor.shape) for _, tensor in weights]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights]
        packed = self._dialect == "vllm"
        if packed:
            body: dict[str, Any] = {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
        else:
            body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": "policy"}
        self._client.post(self._pause, {} if packed else {"mode": "in_place"})
        written = self._threads.submit(self._client.post, self._update, body | {"weight_version": version})
        self._group.send(weights, packed=packed)
        written.result()
        self._client.post(self._resume, {})

    def holds(self, weights: list[tuple[str, Tensor]]) -> bool:
        """Return whether the server's weights equal these bit for bit."""
        found = self._client.post("/weight_checker", {"action": "checksum"})["checksums"]
        return all(found.get(name) == checksum(tensor) for name, tensor in weights)

    def close(self) -> None:
        """Leave the group on both sides."""
        name = "vllm" if self._dialect == "vllm" else "policy"
        self._client.post("/destroy_weights_update_group", {"group_name": name})
        self._group.close()
        self._threads.shutdown()


def checksum(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, as /weight_checker computes it."""
    return hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def samples_of(prompts: list[list[int]], choices: list[dict[str, Any]], version: str) -> list[Sample]:
    """Return the samples of all choices. Raises RuntimeError if other weights than `version` produced a token."""
    samples = []
    for index, choice in enumerate(choices):
        versions = [span["version"] for span in choice["weight_versions"]]
        if versions != [version]:
            raise RuntimeError(f"a rollout has tokens of the weights {versions}, expected {version}")
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        samples.append((prompts[index // GROUP], choice["token_ids"], log_probs))
    return samples


@contextlib.contextmanager
def served(url: str | None, folder: str, port: int) -> Iterator[Client]:
    """Return the server at `url`, or start one that serves `folder` and end it afterwards."""
    if url:
        yield Client(url, os.environ.get("ENCORE_ADMIN_KEY", ""))
        return
    server = Server(folder, port)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def main(options: argparse.Namespace, folder: str) -> None:
    """Train the model of `folder`, and print a row per 10 steps."""
    generator = random.Random(options.seed)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=options.learning_rate, weight_decay=0.0)
    with served(options.url, folder, options.port) as client:
        policy = Policy(client, options.dialect, options.address)

        def weights() -> list[tuple[str, Tensor]]:
            return [(name, value.detach().to(policy.dtype)) for name, value in trainer.named_parameters()]

        policy.update_weights(weights(), "step-0")
        captured, rewards, difference = client.captures(), [], 0.0
        for step in range(1, options.steps + 1):
            asked = questions(QUESTIONS, generator)
            prompts = tokenizer([question for question, _ in asked])["input_ids"]
            samples = samples_of(prompts, policy.rollouts(prompts), f"step-{step - 1}")
            texts = tokenizer.batch_decode([ids for _, ids, _ in samples], skip_special_tokens=True)
            answers = [answer for _, answer in asked for _ in range(GROUP)]
            found = [reward(text, answer) for text, answer in zip(texts, answers, strict=True)]
            advantages = group_advantages(torch.tensor(found).reshape(QUESTIONS, GROUP))
            difference = max(difference, improve(trainer, optimizer, samples, advantages))
            policy.update_weights(weights(), f"step-{step}")
            rewards.append(sum(found) / len(found))
            if step % 10 == 0 or step == options.steps:
                print(f"step {step:4}  reward {sum(rewards[-10:]) / len(rewards[-10:]):.3f}", flush=True)
        print(f"largest difference of log-probabilities: {difference:.1e}")
        print(f"the server holds the trainer's weights: {'yes' if policy.holds(weights()) else 'no'}")
        print(f"graphs captured: {captured} before the updates, {client.captures() - captured} after")
        policy.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="rollouts, each with an update (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and of a tiny model")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: %(default)s, for a tiny model")
    parser.add_argument("--dialect", choices=sorted(DIALECTS), default="vllm", help="default: %(default)s")
    parser.add_argument("--model", help="folder in Hugging Face layout; written with a tiny model if it doesn't exist")
    parser.add_argument("--url", help="of a server of that folder; default: start one")
    parser.add_argument("--address", default="127.0.0.1", help="of this machine, for the server (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8125, help="of the server to start (default: %(default)s)")
    given = parser.parse_args()
    if given.url and not given.model:
        parser.error("--url needs --model: the folder of the model that is served")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        model = given.model or os.path.join(place, "model")
        if not os.path.isdir(model):
            save_tiny_model(model, given.seed)
        main(given, model)
