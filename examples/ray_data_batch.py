"""Generate for the prompts of a Parquet file with Ray Data, and write prompts and texts to a folder of Parquet files.

    pip install 'encore-serve[ray-data]'
    python examples/ray_data_batch.py prompts.parquet texts --model Qwen/Qwen3-0.6B --engines 4

`--by pool` gives each worker of Ray Data an engine in its process. `--by serve` starts replicas behind Ray Serve, whose
handle the workers call: other programs can use the same replicas, and prompts that begin alike share a prefix cache.
Ray Data streams the file, so it may be larger than memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from engine.integrations.local_ray import start_ray  # before Ray

import ray  # isort: skip
import ray.data  # isort: skip

import numpy as np

from engine import Engine, EngineConfig

APPLICATION = "encore"
MAX_IN_FLIGHT = 256  # requests of one batch

Batch = dict[str, np.ndarray]
Dataset = ray.data.Dataset


class Generate:
    """Adds texts to a batch with the worker's own engine."""

    def __init__(self, settings: dict[str, Any], params: dict[str, Any]):
        self._engine, self._params = Engine(EngineConfig(**settings)), params

    def __call__(self, batch: Batch) -> Batch:
        outputs = self._engine.generate(list(batch["prompt"]), self._params, use_tqdm=False)
        return batch | {"text": np.array([output.text for output in outputs], dtype=object)}


class Ask:
    """Adds texts to a batch by calling replicas through Serve's handle."""

    def __init__(self, params: dict[str, Any]):
        from ray import serve

        self._handle, self._params = serve.get_app_handle(APPLICATION), params
        self._key = os.environ.get("OPENAI_API_KEY", "")

    async def __call__(self, batch: Batch) -> Batch:
        texts = await asyncio.gather(*(self._text(prompt) for prompt in batch["prompt"]))
        return batch | {"text": np.array(texts, dtype=object)}

    async def _text(self, prompt: str) -> str:
        status, answer = await self._handle.post.remote(
            "/v1/completions", {"prompt": prompt, **self._params}, self._key
        )
        if status != 200:
            raise RuntimeError(f"status {status}: {answer}")
        return answer["choices"][0]["text"]


def by_pool(data: Dataset, settings: dict[str, Any], params: dict[str, Any], engines: int) -> Dataset:
    """Return the data with texts of `engines` workers, each with an engine, on a GPU if there is one for it."""
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= engines else 0
    return data.map_batches(
        Generate, fn_constructor_args=(settings, params), batch_size=MAX_IN_FLIGHT, num_cpus=1, num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(size=engines),
    )  # fmt: skip


def by_serve(data: Dataset, settings: dict[str, Any], params: dict[str, Any], engines: int) -> Dataset:
    """Return the data with texts of `engines` replicas, which are started."""
    from ray import serve

    from server.config import ServerConfig
    from server.replicas.application import serve_app

    serve.run(serve_app(ServerConfig.from_dict({**settings, "replicas": engines})), name=APPLICATION)
    return data.map_batches(
        Ask, fn_constructor_args=(params,), batch_size=MAX_IN_FLIGHT, num_cpus=0.5,
        compute=ray.data.ActorPoolStrategy(size=1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="Parquet file or folder with a column prompt")
    parser.add_argument("output", help="folder for Parquet files with the columns prompt and text")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--by", choices=("pool", "serve"), default="pool")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-threads", type=int, help="threads of each engine on a CPU")
    args = parser.parse_args()
    settings = {"model": args.model, "num_threads": args.num_threads}
    params = {"max_tokens": args.max_tokens, "temperature": 0.0}
    start_ray(args.engines * (args.num_threads or 1) + 3)
    try:
        data = ray.data.read_parquet(args.input)
        texts = (by_pool if args.by == "pool" else by_serve)(data, settings, params, args.engines)
        texts.write_parquet(args.output)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
