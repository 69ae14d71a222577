"""Program of test_scaling.py: replace all replicas under load, and print the statuses of the responses as JSON.

python -m tests.server.replicas.upgrade MODEL PORT
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from server.config import ServerConfig
from server.replicas.application import serve_app
from tests.support.waiting import PATIENCE


def main(model: str, port: int) -> None:
    """Deploy two replicas of model "one", then two of model "two"."""
    ray.init(num_cpus=8, include_dashboard=False)
    serve.start(http_options=HTTPOptions(port=port))
    config = ServerConfig.from_dict({
        "model": model, "replicas": 2, "served_model_name": ("one",), "in_process": True, "dtype": "float32",
        "num_threads": 1, "warmup": "lazy", "max_num_seqs": 8, "max_model_len": 1024, "graph_manifest": "none",
    })  # fmt: skip
    serve.run(serve_app(config), name="encore")
    outcomes: Counter[str] = Counter()
    stop = threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            body = {"prompt": f"fox {number}", "max_tokens": 100, "ignore_eos": True}
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE)
                outcomes[
                    answer.json()["model"] if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
                ] += 1
            except httpx.TransportError as error:
                outcomes[repr(error)] += 1

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(ask, number) for number in range(4)]
        while outcomes["one"] < 10:
            time.sleep(0.1)
        serve.run(serve_app(dataclasses.replace(config, served_model_name=("two",))), name="encore")
        end = time.monotonic() + 60
        while outcomes["two"] < 20 and time.monotonic() < end:
            time.sleep(0.1)
        stop.set()
        for task in tasks:
            task.result()
    serve.shutdown()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
