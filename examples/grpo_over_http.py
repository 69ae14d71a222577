"""Train as in grpo.py, with the model served by another process: rollouts and new weights go over HTTP.

    python examples/grpo_over_http.py                        # under a minute on a CPU
    python examples/grpo_over_http.py --steps 200

The trainer reads token ids and log-probabilities from /v1/completions (`return_token_ids`), writes a safetensors file
after each step, and lets the server load it in place with /weights/update. The server keeps its graphs. Weight updates
need an admin key, which the server reads from its environment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

import torch
from grpo import GROUP, WANTED, group_advantages, improve, questions, reward, save_tiny_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = 10  # per step


class Client:
    """The calls that a trainer makes to an Encore server."""

    def __init__(self, url: str, admin_key: str = ""):
        self.url, self._admin_key = url.rstrip("/"), admin_key

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer. Raises RuntimeError with the server's message."""
        return self._send(path, json.dumps(body).encode())

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer of a path. Raises RuntimeError with the server's message."""
        return self._send(path, None)

    def _send(self, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        if self._admin_key:
            headers["authorization"] = f"Bearer {self._admin_key}"
        request = urllib.request.Request(f"{self.url}{path}", body, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from error

    def rollouts(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Return `GROUP` choices per prompt, in the order of the prompts."""
        sampling = {"n": GROUP, "max_tokens": WANTED, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
        answer = self.post("/v1/completions", {"model": "policy", "prompt": prompts} | sampling)
        return answer["choices"]

    def update_weights(self, file: str, version: str) -> None:
        """Load a safetensors file in place."""
        self.post("/weights/update", {"path": file, "version": version})

    def captures(self) -> int:
        """Return how many graphs the server has captured so far."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            rows = re.findall(r"^encore_graph_captures_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        return sum(int(float(count)) for count in rows)


class Server(Client):
    """An Encore server in a separate process."""

    def __init__(self, folder: str, port: int):
        super().__init__(f"http://127.0.0.1:{port}", secrets.token_hex(16))
        settings = ["--dtype", "float32", "--warmup", "full", "--graph-manifest", "none", "--num-threads", "1"]
        sizes = ["--max-num-seqs", str(QUESTIONS * GROUP), "--max-model-len", "64"]
        command = [sys.executable, "-m", "server.cli", "serve", "--model", folder, "--served-model-name", "policy"]
        self._process = subprocess.Popen(
            [*command, "--port", str(port), *settings, *sizes], env=os.environ | {"ENCORE_ADMIN_KEYS": self._admin_key}
        )

    def wait_until_ready(self) -> None:
        """Return when all graphs are captured. Raises RuntimeError if the server ends first."""
        while self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/ready").close()
                return
            except urllib.error.URLError:  # not listening yet, or 503: not ready yet
                time.sleep(0.2)
        raise RuntimeError(f"the server ended with status {self._process.returncode}")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def main(steps: int, port: int) -> None:
    """Train, and print a row per 10 steps."""
    generator = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder, seed=0)
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=2e-3, weight_decay=0.0)
        server = Server(folder, port)
        try:
            server.wait_until_ready()
            captured, rewards, difference = server.captures(), [], 0.0
            for step in range(1, steps + 1):
                asked = questions(QUESTIONS, generator)
                prompts = tokenizer([question for question, _ in asked])["input_ids"]
                choices = server.rollouts(prompts)
                answers = [answer for _, answer in asked for _ in range(GROUP)]
                found = [reward(choice["text"], answer) for choice, answer in zip(choices, answers, strict=True)]
                samples = [
                    (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
                    for choice in choices
                ]
                advantages = group_advantages(torch.tensor(found).reshape(QUESTIONS, GROUP))
                difference = max(difference, improve(trainer, optimizer, samples, advantages))
                file = os.path.join(folder, f"step-{step}.safetensors")
                save_file({name: value.detach() for name, value in trainer.named_parameters()}, file)
                server.update_weights(file, f"step-{step}")
                os.remove(file)
                rewards.append(sum(found) / len(found))
                if step % 10 == 0 or step == steps:
                    print(f"step {step:4}  reward {sum(rewards[-10:]) / len(rewards[-10:]):.3f}", flush=True)
            print(f"largest difference of log-probabilities: {difference:.1e}")
            print(f"graphs captured: {captured} before the updates, {server.captures() - captured} after")
        finally:
            server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="rollouts, each with an update (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8124, help="of the server (default: %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    main(given.steps, given.port)
