"""The engines of cpu_peers.py and cpu_cells.py, each in a process that loads its model once and waits for commands.

`python peer_workers.py KIND SETTINGS` reads JSON commands, one a line, and answers each with a line. A worker without a
command blocks on its pipe. Heavy imports happen inside the chosen kind: llama.cpp's Python need not have PyTorch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]


class Encore:
    """This engine with its defaults. Settings: model, threads, load_format for random weights, spin, max_num_seqs.

    spin: how OpenMP's threads wait for each other. None: as the command `encore` has them; "default": as OpenMP does;
    else a value of GOMP_SPINCOUNT.
    """

    def __init__(self, settings: Mapping[str, Any]):
        spin = settings.get("spin")
        if spin is None:
            from engine.utils.openmp import limit_openmp_spinning

            limit_openmp_spinning()
        elif spin != "default":
            os.environ["GOMP_SPINCOUNT"] = spin  # read when torch loads OpenMP, below
        from engine import Engine, EngineConfig

        self.engine = Engine(
            EngineConfig(
                model=settings["model"],
                num_threads=settings["threads"],
                load_format=settings.get("load_format", "auto"),
                max_num_seqs=settings.get("max_num_seqs"),
                device="cpu",
                warmup="lazy",
                graph_manifest="none",
                enable_prefix_caching=False,
            )
        )
        info = self.engine.info
        self.about = {
            "weights": info.weight_format,
            "attention": self.engine.loop.executor.worker.runner.attention.name,
        }

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations of exactly `tokens` tokens each."""
        from engine import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return [list(out.token_ids) for out in self.engine.generate(prompt_token_ids=prompts, sampling_params=params)]

    def replay(self, batch: int, context: int, repeats: int) -> dict[str, Any]:
        """A decode step replayed against the same step run eagerly."""
        from engine.bench.measure import replay_against_eager

        return replay_against_eager(self.engine, batch, context, repeats)

    def steps(self) -> dict[str, Any]:
        """How the decode steps so far ran."""
        from engine.bench.measure import decode_shares

        nothing = {"batch_rows": [], "fallbacks": [], "real_tokens": [], "padded_tokens": []}
        return decode_shares(self.engine.stats().graphs, nothing)


class Transformers:
    """transformers' `generate` on the weights of the same GGUF file, dequantised. Settings: model, threads, dtype."""

    def __init__(self, settings: Mapping[str, Any]):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers import __version__ as version

        from engine.checkpoint.gguf_file import GGUFFile
        from engine.checkpoint.gguf_model import GGUFModel

        torch.set_num_threads(settings["threads"])
        weights = GGUFModel(GGUFFile(settings["model"]))
        config = {name: value for name, value in weights.config.items() if name not in ("architectures", "model_type")}
        theta = config.pop("rope_theta")
        model = LlamaForCausalLM(
            LlamaConfig(**config, rope_parameters={"rope_type": "default", "rope_theta": theta}, pad_token_id=2)
        )
        missing = model.load_state_dict(dict(weights.weights()), strict=False).missing_keys
        if missing != ["lm_head.weight"]:
            raise SystemExit(f"the file lacks weights that transformers' model has: {missing}")
        model.tie_weights()
        self.model = model.to(getattr(torch, settings["dtype"])).eval()
        self.about = {
            "weights": settings["dtype"],
            "attention": self.model.config._attn_implementation,
            "version": version,
        }

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations of exactly `tokens` tokens each; all prompts must be of one length."""
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
        return out[:, ids.shape[1] :].tolist()


class LlamaCpp:
    """llama.cpp on the same file through its C interface, one sequence a row. Settings: model, threads.

    Its own loop, not llama-cpp-python's `generate`: that has no batches and does more in Python for each token.
    """

    def __init__(self, settings: Mapping[str, Any]):
        import ctypes

        import llama_cpp

        self.api, self.threads = llama_cpp, settings["threads"]
        self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must outlive the library's use
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        extra = hasattr(params, "use_extra_bufts")
        if extra:
            params.use_extra_bufts = False  # with its repacked weights it crashes on some processors
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {settings['model']}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.contexts: dict[tuple[int, int], Any] = {}
        self.about = {
            "weights": "Q4_1, as in the file",
            "version": llama_cpp.__version__,
            "use_extra_bufts": False if extra else "no such setting",
        }

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations of exactly `tokens` tokens each."""
        api, context = self.api, self._context(len(prompts), max(map(len, prompts)) + tokens)
        api.llama_memory_clear(api.llama_get_memory(context), True)
        ends, items = [], []
        for row, prompt in enumerate(prompts):
            items += [(token, place, row, place == len(prompt) - 1) for place, token in enumerate(prompt)]
            ends.append(len(items) - 1)
        outputs = [[token] for token in self._decode(context, items, ends)]
        for step in range(tokens - 1):
            items = [
                (out[-1], len(prompt) + step, row, True)
                for row, (out, prompt) in enumerate(zip(outputs, prompts, strict=True))
            ]
            for out, token in zip(outputs, self._decode(context, items, range(len(items))), strict=True):
                out.append(token)
        return outputs

    def _context(self, rows: int, length: int) -> Any:
        """A context for `rows` sequences of up to `length` tokens, rounded up to a multiple of 1,024."""
        key = (rows, -(-length // 1024) * 1024)
        if key not in self.contexts:
            params = self.api.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = rows * key[1], rows * key[1], 512, rows
            params.n_threads = params.n_threads_batch = self.threads
            self.contexts[key] = self.api.llama_init_from_model(self.model, params)
            if not self.contexts[key]:
                raise SystemExit(f"llama.cpp could not make a context for {rows} sequences of {key[1]} tokens")
        return self.contexts[key]

    def _decode(self, context: Any, items: Sequence[tuple[int, int, int, bool]], wanted: Sequence[int]) -> list[int]:
        """Run (token, position, sequence, with logits) items as one batch; the best token at each wanted place."""
        import numpy

        batch = self.api.llama_batch_init(len(items), 0, 1)
        try:
            batch.n_tokens = len(items)
            for place, (token, position, row, logits) in enumerate(items):
                batch.token[place], batch.pos[place], batch.logits[place] = token, position, logits
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = row
            if code := self.api.llama_decode(context, batch):
                raise SystemExit(f"llama_decode failed with {code}")
            rows = (self.api.llama_get_logits_ith(context, place) for place in wanted)
            return [int(numpy.ctypeslib.as_array(row, (self.vocab,)).argmax()) for row in rows]
        finally:
            self.api.llama_batch_free(batch)


KINDS = {"encore": Encore, "transformers": Transformers, "llama.cpp": LlamaCpp}


class Worker:
    """The parent's handle of an engine in a separate process. Raises RuntimeError where that process ends.

    `root`: the source tree from which the engine "encore" is imported.
    """

    def __init__(self, kind: str, settings: Mapping[str, Any], python: str = sys.executable, root: Path = ROOT):
        threads = str(settings["threads"])
        # Teams of threads may spin for moments after their work, not for as long as other engines take their turns.
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "KMP_BLOCKTIME": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root.resolve()), os.environ.get("PYTHONPATH")])),
        }
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), kind, json.dumps(dict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment,
        )
        self.about = self._answer()

    def call(self, method: str, **arguments: Any) -> tuple[Any, float]:
        """Have the worker run a method and return (its value, the seconds it took there)."""
        value, seconds, _ = self.measure(method, **arguments)
        return value, seconds

    def measure(self, method: str, **arguments: Any) -> tuple[Any, float, float]:
        """As `call`, and the processor time of all threads of the worker, which other processes disturb less."""
        self.process.stdin.write(json.dumps({"do": method, "with": arguments}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["value"], answer["seconds"], answer["cpu_seconds"]

    def cpu_seconds(self) -> float:
        """Processor time that the process has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the worker and wait for it."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with status {self.process.wait()}; its messages are above")
        return json.loads(line)


def main(kind: str, settings: Mapping[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Load, then obey commands until their end."""
    engine = KINDS[kind](settings)
    print(json.dumps(engine.about), file=answers, flush=True)
    for line in commands:
        command = json.loads(line)
        started, cpu_started = time.perf_counter(), time.process_time()
        value = getattr(engine, command["do"])(**command["with"])
        spent = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
        print(json.dumps({"value": value} | spent), file=answers, flush=True)


if __name__ == "__main__":
    # Libraries print: their standard output becomes standard error, and the pipe keeps to the protocol.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1], json.loads(sys.argv[2]), sys.stdin, channel)
