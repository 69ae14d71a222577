"""Engine: the embeddable, synchronous interface, for offline inference and RL rollouts.

Everything runs in the caller's thread: no server, no event loop, no signal handlers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine.arguments import expected_lengths, params_of_prompts, prompt_ids
from engine.checkpoint.pooling_config import read_pooling_config
from engine.checkpoint.source import resolve_model
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.core.builder import build_loop, build_megatron_loop
from engine.core.kv_blocks import KVBlockStore
from engine.core.loop import EngineLoop
from engine.errors import ConfigError, EngineDead, EngineError, RequestError, WeightUpdateError
from engine.generation import PAUSED_SECONDS, Generation, SharedLoop
from engine.models.registry import config_from_folder
from engine.protocol.kv_blocks import pack, unpack
from engine.protocol.messages import EngineStats, ModelInfo
from engine.protocol.outputs import RequestOutput, Sample
from engine.protocol.pooling import PoolingConfig, finish_embedding
from engine.protocol.request import EngineRequest, SamplingParams, check_prompt_ids, mix64, split_n
from engine.protocol.sleep import KV_CACHE, parts_of_level
from engine.text.bad_words import bad_word_ids
from engine.text.scoring import Scoring, cosine, pairs_of
from engine.text.tokenizer import Tokenizer
from engine.training.engine import TrainingEngine
from engine.training_config import TrainingConfig
from engine.utils.progress import Progress
from graph_cache.core.pool import GraphPool
from graph_cache.utils.validation import names_arguments

PROGRESS_DELAY = 2.0  # seconds of generation before its progress is shown
_EXAMPLE = "Engine(EngineConfig(model='smollm2-135m-instruct'))"


class Engine:
    """A model, its KV cache and its graphs.

    Threads may call it at the same time: their requests run in the same batches.

    `Engine(config)` loads the model; use it in a `with` block or call `close()`. Raises ConfigError or ModelError. With
    `mode="training"` it returns a TrainingEngine instead (`engine/training/engine.py`), which may share the `pool` of
    an inference engine.

    `model`: a Megatron-Core GPTModel to serve on its own parameters, instead of loading one. `config.model`, if set,
    then only gives the tokenizer and the size of the unpadded vocabulary.
    """

    @names_arguments
    def __new__(
        cls,
        config: EngineConfig | TrainingConfig | None = None,
        *,
        pool: GraphPool | None = None,
        model: torch.nn.Module | None = None,
    ) -> Any:
        if not isinstance(config, EngineConfig | TrainingConfig | None):
            raise ConfigError(f"found config of type {type(config).__name__}: give an EngineConfig, as in {_EXAMPLE}")
        if isinstance(model, str):
            raise ConfigError(f"model is the name {model!r}: give it in the configuration, as in {_EXAMPLE}")
        if isinstance(config, TrainingConfig):
            if model is not None:
                raise ConfigError("model is for inference; pass the model to a training engine with attach(model)")
            return TrainingEngine(config, pool)
        return super().__new__(cls)

    def __init__(
        self, config: EngineConfig | None = None, *, pool: GraphPool | None = None, model: torch.nn.Module | None = None
    ):
        if pool is not None:
            raise ConfigError("pool is for mode='training'; an inference engine creates its own (engine.pool)")
        self.config = config or EngineConfig()
        has_source = model is None or self.config.model != DEFAULT_MODEL
        source = resolve_model(self.config.model, config_from_folder, self.config.progress) if has_source else None
        pooling = read_pooling_config(self.config, source) if source else PoolingConfig()
        self.tokenizer = Tokenizer.try_load(source) if source else None
        self._loop = (
            build_loop(self.config, source, self.tokenizer)
            if model is None
            else build_megatron_loop(self.config, model, self.tokenizer, source)
        )
        self._blocks = KVBlockStore(self._loop)
        self._shared = SharedLoop(self._loop)
        self._pooling = pooling
        self._info = dataclasses.replace(self._loop.info, pooling=pooling)
        self._scoring: Scoring | None = None
        self._numbers = itertools.count()
        self._seeds = itertools.count(1)
        self._closed = False
        if self.config.warmup == "full":
            try:
                self._warm()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo:
        """The loaded model and the chosen sizes."""
        return self._info

    @property
    def weight_version(self) -> str:
        """The version name of the current weights."""
        return self._loop.weight_version

    def pause(self, mode: str = "abort") -> None:
        """Pause until `resume`, for requests of `loop` and of a `generate` that runs in another thread.

        "abort" ends the requests that run, which keep what they have; "wait" runs them to their end; "keep" freezes
        them with their KV, which is computed again if the weights change meanwhile. New requests of `loop` are refused
        with EnginePaused ("abort"), or held until `resume`; a new `generate` raises EnginePaused in every mode.
        """
        self._require_open()
        with self.pool.turn():
            self._loop.pause(mode)

    def resume(self) -> None:
        """End the pause: frozen and held requests go on. Without a pause it does nothing."""
        self._require_open()
        with self.pool.turn():
            self._loop.resume()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._loop.pause_mode is not None

    @names_arguments
    def sleep(self, level: int = 1, *, mode: str | None = None) -> None:
        """Release the memory of weights, KV cache and graphs until `wake_up`; addresses and graphs stay.

        `level` 1 keeps the weights in host memory, 2 discards them: after `wake_up`, they must be updated. 0 only
        pauses. `mode` is one of `pause`, "abort" if there is no pause; with "wait" this returns when all requests have
        ended. KV is lost: requests that were frozen compute it again. New requests are refused or held, as in a pause,
        which ends with `wake_up`, unless it began before.

        Raises RequestError without `EngineConfig.enable_sleep_mode`, or while weights are shared with a trainer.
        """
        self._release(parts_of_level(level), discards=level == 2, mode=mode)

    @names_arguments
    def release_kv_cache_memory(self, *, mode: str | None = None) -> None:
        """Release the memory of the KV cache alone, also while weights are shared with a trainer. See `sleep`."""
        self._release((KV_CACHE,), discards=False, mode=mode)

    def _release(self, parts: tuple[str, ...], discards: bool, mode: str | None) -> None:
        self._require_open()
        with self.pool.turn():
            waits = self._loop.sleep.begin(parts, discards, mode) == "wait"
        while waits:
            with self.pool.turn():
                waits = self._loop.num_awaited() > 0
                if waits:
                    self._shared.advance()
            time.sleep(PAUSED_SECONDS)  # another thread may have the requests
        with self.pool.turn():
            self._loop.sleep.release(parts, discards)

    @names_arguments
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore the memory with these tags: "weights", "kv_cache" (with it that of graphs), or all without tags.

        Without a sleep it does nothing. Raises EngineError if there is no room; what was restored before stays.
        """
        self._require_open()
        if isinstance(tags, str):
            raise RequestError(f"tags={tags!r}: give a list of tags", param="tags")
        with self.pool.turn():
            self._loop.sleep.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether any memory is released, or a sleep of level 0 goes on."""
        return self._loop.sleep.is_sleeping

    @functools.partial(names_arguments, fields_of={"sampling_params": SamplingParams})
    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams
        | Mapping[str, Any]
        | Sequence[SamplingParams | Mapping[str, Any]]
        | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate from prompts given as texts or token ids, and return one output per prompt, in order.

        `sampling_params` is one object, or mapping of its fields, for all prompts, or one per prompt. An output has
        `text`, `token_ids`, `logprobs`, `finish_reason` and `weight_version` of its first sequence, and all sequences
        in `outputs`. `use_tqdm`: whether to show the progress on standard error; None: if it takes longer than 2
        seconds and `EngineConfig.progress` is on. Raises RequestError, before anything runs, if any prompt or parameter
        is invalid; a request that fails later has finish_reason "error".
        """
        generation = self._generation(prompts, sampling_params, prompt_token_ids, None)
        for _ in self._samples(generation, use_tqdm):
            pass
        return generation.outputs

    @functools.partial(names_arguments, fields_of={"sampling_params": SamplingParams})
    def generate_as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams
        | Mapping[str, Any]
        | Sequence[SamplingParams | Mapping[str, Any]]
        | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | Sequence[int] | None = None,
        expected_tokens: Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> Iterator[Sample]:
        """As `generate`, but yield each sample (`prompt_index`, `output`) as soon as it has finished.

        The engine runs while the iterator is advanced. Between two samples, weights may be updated, and other calls may
        generate: their requests share the batches. During a pause the iterator waits for `resume`, by another thread.
        Closing it aborts what is left. `expected_tokens`: how many tokens the samples of each prompt may take; the
        longest start first, so that the batch stays full.
        """
        generation = self._generation(prompts, sampling_params, prompt_token_ids, expected_tokens)
        return self._samples(generation, use_tqdm)

    def _generation(
        self, prompts: Any, sampling_params: Any, prompt_token_ids: Any, expected_tokens: Any
    ) -> Generation:
        """Check the arguments of `generate`, and return their requests."""
        self._require_open()
        texts, ids = prompt_ids(self.tokenizer, self.info.name, prompts, prompt_token_ids)
        ids = [check_prompt_ids(one, self.info.vocab_size) for one in ids]
        params = [one.for_vocab(self.info.vocab_size) for one in params_of_prompts(sampling_params, len(ids))]
        lengths = expected_lengths(expected_tokens, len(ids))
        generation, now = Generation(self.tokenizer), time.monotonic()
        for text, prompt, wanted in zip(texts, ids, params, strict=True):
            name = f"generate-{next(self._numbers)}"
            banned = bad_word_ids(self.tokenizer, wanted.bad_words)
            sequences = [
                EngineRequest(
                    request_id=child.request_id,
                    prompt_token_ids=prompt,
                    params=child.params,
                    seed=child.seed,
                    arrival_time=now,
                    bad_word_ids=banned,
                )
                for child in split_n(name, wanted, self._seed(wanted))
            ]
            generation.add(RequestOutput.empty(name, text, prompt, wanted.n), sequences)
        if lengths is not None:
            generation.start_longest_first(lengths)
        for future in [self._loop.constraints.compile(one) for one in params if one.structured_outputs is not None]:
            future.result()  # an invalid grammar is refused before anything runs
        return generation

    def _samples(self, generation: Generation, use_tqdm: bool | None) -> Iterator[Sample]:
        """Check `use_tqdm`, and return an iterator that runs the requests and yields the finished samples."""
        if not isinstance(use_tqdm, bool | None):
            raise RequestError(f"use_tqdm={use_tqdm!r}: give True, False or None", param="use_tqdm")
        is_shown = self.config.progress if use_tqdm is None else use_tqdm
        return self._show(generation, is_shown, PROGRESS_DELAY if use_tqdm is None else 0.0)

    def _show(self, generation: Generation, is_shown: bool, delay: float) -> Iterator[Sample]:
        total, started = len(generation.requests), time.monotonic()
        with Progress("generating", "sequences", enabled=is_shown, delay=delay) as progress:
            progress(0, total)
            for sample in self._shared.run(generation):
                rate = generation.num_tokens / (time.monotonic() - started)
                progress(total - generation.num_running, total, f"{rate:.0f} tokens/s")
                yield sample

    @names_arguments
    def embed(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | Sequence[int] | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool | None = None,
    ) -> list[np.ndarray]:
        """Return one vector, float32 [h], per prompt, in order.

        `pooling` is "last" or "mean"; `normalize`: divide by the Euclidean norm. None: as the model's folder says, else
        the last token, normalised. `dimensions` keeps the first ones, before normalisation. `prompt_name`: which of the
        folder's prompts to write before texts. Raises RequestError, before anything runs, if an argument is invalid,
        and EngineError if a prompt fails later.
        """
        self._require_open()
        config = self._pooling
        config.check_dimensions(dimensions, self.info.hidden_size)
        if pooling not in (None, "last", "mean"):
            raise RequestError(f"pooling={pooling!r}: give 'last', 'mean' or None", param="pooling")
        before = config.prompt(prompt_name)
        texts, ids = prompt_ids(self.tokenizer, self.info.name, prompts, prompt_token_ids)
        if before:
            ids = [
                prompt_ids(self.tokenizer, self.info.name, before + text, None)[1][0] if text else one
                for text, one in zip(texts, ids, strict=True)
            ]
        given = "prompts" if prompt_token_ids is None else "prompt_token_ids"
        for index, one in enumerate(ids):
            config.check_length(len(one), self.info.max_model_len, f"{given}[{index}]")
        params = SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling or config.mode)
        outputs = self.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=use_tqdm) if ids else []
        wanted = config.normalize if normalize is None else normalize
        return [finish_embedding(_vector(output), dimensions, wanted) for output in outputs]

    @names_arguments
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
    ) -> list[float]:
        """Return how well each document matches its query: one query for all, or as many queries as documents.

        By the model's classification head, by `EngineConfig.score_tokens`, or else by the cosine of two embeddings; see
        docs/embeddings.md. Raises RequestError as `embed` does.
        """
        self._require_open()
        if self._scoring is None:
            self._scoring = Scoring(self.tokenizer, self.info)
        scoring = self._scoring
        scoring.check(instruction)
        first, second = ([texts] if isinstance(texts, str) else list(texts) for texts in (queries, documents))
        pairs = pairs_of(first, second, ("queries", "documents"))
        if scoring.kind == "cosine":
            vectors = self.embed([*first, *second])
            return [cosine(vectors[query], vectors[len(first) + document]) for query, document in pairs]
        ids = [scoring.pair_ids(first[query], second[document], instruction) for query, document in pairs]
        outputs = self.generate(prompt_token_ids=ids, sampling_params=scoring.params)
        return [scoring.score(_succeeded(output).outputs[0], use_activation) for output in outputs]

    def _seed(self, params: SamplingParams) -> int:
        """Return the request's seed, or the next of the engine's sequence, which makes offline runs reproducible."""
        return params.seed if params.seed is not None else mix64(self.config.seed + next(self._seeds))

    @names_arguments
    def update_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], *, version: str
    ) -> int:
        """Write tensors by Hugging Face names in place, all or nothing, and return how many were written.

        `weights` is a mapping, such as a state_dict, or an iterable of (name, tensor) pairs. Graphs stay valid; prefix
        KV of older versions is dropped. On any problem raises WeightUpdateError, which lists all of them, and keeps the
        old weights.
        """
        self._require_open()
        if not isinstance(weights, Iterable):
            raise WeightUpdateError(
                f"found weights of type {type(weights).__name__}: give a mapping or (name, tensor) pairs"
            )
        # The iterator may use the device or wait for another turn, so exhaust it first.
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        with self.pool.turn():
            return self._loop.update_weights(pairs, version)

    @names_arguments
    def share_weights(self, trainer: torch.nn.Module, *, version: str) -> int:
        """Make a trainer's parameters (by Hugging Face names) views of this engine's storage; return their number.

        The engine takes over the trainer's values. Afterwards it serves whatever the optimizer writes, without copies
        or recapture; call `weights_changed` after each step. All or nothing; raises WeightUpdateError.
        """
        self._require_open()
        if self.config.tensor_parallel_size > 1:
            raise WeightUpdateError(
                "this engine's weights are split over several processes, so a trainer's parameters can't "
                "be views of them; use update_weights"
            )
        with self.pool.turn():
            self._loop.sleep.check_weights()
            shared = self._loop.executor.call("share_weights", trainer)
            self._loop.weights_changed(version)
        return shared

    def weights_changed(self, version: str) -> None:
        """Record that the weights were changed in place: drop the KV of the old ones and keep the graphs."""
        self._require_open()
        with self.pool.turn():
            self._loop.weights_changed(version)

    def list_kv_blocks(self, limit: int = 1000) -> dict[str, Any]:
        """Return up to `limit` blocks of the KV cache and its tiers, and how many each holds (docs/kv-cache.md)."""
        with self._between_steps():
            return self._blocks.list_(limit)

    def lookup_kv_blocks(self, block_hashes: Sequence[int]) -> dict[str, Any]:
        """Return which blocks with these hashes are held, and where. KV events publish the hashes."""
        with self._between_steps():
            return self._blocks.lookup(list(block_hashes))

    def export_kv_blocks(self, block_hashes: Sequence[int]) -> bytes:
        """Return the blocks with these hashes as a safetensors file with checksums, for `import_kv_blocks`.

        Needs `kv_offloading_size`. Raises RequestError if one is not held.
        """
        with self._between_steps():
            found = self._blocks.export(list(block_hashes))
        return pack(found)

    def import_kv_blocks(self, data: bytes) -> dict[str, int]:
        """Take the blocks of an export into host memory, for prompts that begin alike.

        Returns how many were "imported", and how many were "present" already. Raises RequestError, and takes none, if a
        checksum differs, or if the blocks are of other weights or of another form.
        """
        given = unpack(data)
        with self._between_steps():
            return self._blocks.import_(given)

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the loop, with no step in flight."""
        self._require_open()
        with self.pool.turn():
            self._loop.steps.drain()
            yield

    @property
    def loop(self) -> EngineLoop:
        """The step loop, for callers that add requests and step themselves. It is closed with the engine."""
        return self._loop

    @property
    def pool(self) -> GraphPool:
        """The pool of this engine's graphs, for a training engine to share."""
        return self._loop.executor.graphs.pool

    def warm(self) -> None:
        """Capture all graphs of the warm-up now, and show the progress."""
        self._require_open()
        with self.pool.turn():
            self._loop.sleep.check_graphs()
            self._warm()

    def _warm(self) -> None:
        with Progress("capturing", "graphs", enabled=self.config.progress) as progress:
            self._loop.captures.warm(progress)

    def graphs(self) -> list[dict[str, Any]]:
        """Return the graph cache as rows of plain values: site, bucket, state, replays, padding, bytes, seconds."""
        return self._loop.graphs()

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters and gauges."""
        return self._loop.stats()

    def idle_check(self) -> None:
        """Raise, listing every leak, unless all pages, slots and request maps are released."""
        with self.pool.turn():
            self._loop.idle_check()

    def close(self) -> None:
        """Drop the graphs, release the model and stop the worker processes. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.save_manifest()
            with self.pool.turn():
                self._loop.save_prefixes()
                self._loop.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDead("this engine was closed; create a new one")


def _succeeded(output: RequestOutput) -> RequestOutput:
    """Return an output; raise EngineError if its request failed."""
    if output.finish_reason == "error":
        raise EngineError(f"the engine failed to process {output.request_id}: {output.outputs[0].error}")
    return output


def _vector(output: RequestOutput) -> np.ndarray:
    """Return the only vector of an output. Raises EngineError if its request failed."""
    rows = _succeeded(output).hidden_states
    assert rows is not None
    return rows[0]
