"""Use the embedded engine for TRL's AsyncGRPOTrainer: its two protocols, `rollout_worker` and `weight_transfer`.

    worker = RolloutWorker(engine, dataset, reward_funcs, tokenizer, args)
    AsyncGRPOTrainer(..., rollout_worker=worker, weight_transfer=WeightTransfer(worker))

A thread generates and scores while the trainer trains, with a copy of the weights. Written for the protocols of TRL
1.16 (`trl.experimental.async_grpo`). Imports nothing of TRL.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.integrations.trl import check_finished, encode, logprobs_of, sampling_params
from engine.protocol.outputs import RequestOutput

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between two looks at a full queue, and at a request to stop
STOP_SECONDS = 60.0  # for the batch in progress


@dataclass(slots=True)
class RolloutSample:
    """A scored completion, with the fields that TRL's trainer reads.

    `input_ids` int64 [t] are the token ids of the prompt and the completion; `completion_mask` int64 [t] and
    `old_log_probs` float32 [t] are 0 at the prompt's tokens.
    """

    prompt: Any
    completion: Any
    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int  # the trainer's number of the weights that produced the completion
    group_id: int  # the same for all completions of a prompt
    metrics: dict[str, float]
    enqueued_at: float | None = None  # time.time()


class RolloutWorker:
    """TRL's RolloutWorkerProtocol: fills `rollout_buffer` with scored completions of `dataset`'s prompts, in a thread.

    - `dataset`: rows with a "prompt", a text or a list of messages. It is repeated without end, in its order. Further
      columns go to the reward functions.
    - `reward_funcs`: called, as by TRL, with `prompts`, `completions`, `completion_ids` and the columns, for the
      completions of one prompt; they return a number, or None for no score, for each. Coroutine functions are awaited.
    - `args`: the trainer's AsyncGRPOConfig, for the sampling parameters, `num_generations` and `queue_maxsize`.
    - `prompts_per_batch`: prompts that are generated together. Weights change only between batches, so that one version
      produces all tokens of a completion.

    An advantage is the reward's distance from the mean of its prompt's completions, in standard deviations.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        processing_class: Any,
        args: Any,
        *,
        prompts_per_batch: int = 4,
    ):
        if prompts_per_batch < 1:
            raise ConfigError(f"prompts_per_batch={prompts_per_batch}: give a positive number")
        self.engine, self.dataset, self.processing_class = engine, dataset, processing_class
        self.reward_funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(max(0, args.queue_maxsize))
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.engine_lock = threading.Lock()  # held while the engine generates, and from pause to resume
        self._params = sampling_params(args, engine)
        self._chat_options = dict(getattr(args, "chat_template_kwargs", None) or {})
        self._num_generations, self._per_batch = args.num_generations, prompts_per_batch
        self._version = 0  # of the weights, by the trainer's count
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._last_sign = time.monotonic()

    def start(self) -> None:
        """Begin to generate. Does nothing if the worker runs already."""
        if self._thread is not None:
            return
        self._stopping.clear()
        self._last_sign = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the batch in progress. Raises EngineError if that takes longer than STOP_SECONDS."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive():
                raise EngineError(f"the rollout thread still runs after {STOP_SECONDS:g} s: don't close the engine yet")
            self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Set the trainer's number of the weights that the engine has now."""
        self._version = model_version

    @property
    def model_version(self) -> int:
        """The trainer's number of the weights that the engine has now."""
        return self._version

    def check_health(self, stale_after_s: float) -> None:
        """Raise EngineError if the thread failed, or if a batch takes longer than `stale_after_s` seconds."""
        if self._error is not None:
            raise EngineError(f"the rollout thread failed: {self._error}") from self._error
        silent = time.monotonic() - self._last_sign
        if self._thread is not None and silent > stale_after_s:
            raise EngineError(f"the rollout thread has given no sign of life for {silent:.0f} s")

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            rows = self._rows()
            groups = itertools.count()
            while not self._stopping.is_set():
                batch = list(itertools.islice(rows, self._per_batch))
                for samples in self._generate(batch, groups):
                    for sample in samples:
                        self._put(sample)
        except BaseException as error:  # check_health raises it in the trainer's thread
            logger.exception("the rollout thread failed")
            self._error = error

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of the dataset, again and again."""
        while True:
            is_empty = True
            for row in self.dataset:
                is_empty = False
                yield row
            if is_empty:
                raise ConfigError("the dataset has no rows")

    def _generate(self, rows: Sequence[Mapping[str, Any]], groups: Iterator[int]) -> Iterator[list[RolloutSample]]:
        ids = [encode(row["prompt"], self.processing_class, self._chat_options) for row in rows]
        params = dataclasses.replace(self._params, n=self._num_generations)
        while not self.engine_lock.acquire(timeout=POLL_SECONDS):  # paused
            self._last_sign = time.monotonic()
            if self._stopping.is_set():
                return
        try:
            self._last_sign = started = time.monotonic()
            version = self._version
            outputs = self.engine.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
        finally:
            self.engine_lock.release()
        check_finished(outputs)
        self._last_sign = time.monotonic()
        num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        self.metrics_queue.put({"rollout/generated_tok_s": (float(num_tokens), self._last_sign - started)})
        for row, output in zip(rows, outputs, strict=True):
            yield self._score(row, output, version, next(groups))

    def _score(self, row: Mapping[str, Any], output: RequestOutput, version: int, group: int) -> list[RolloutSample]:
        prompt, sequences = row["prompt"], output.outputs
        texts = [self.processing_class.decode(one.token_ids, skip_special_tokens=True) for one in sequences]
        completions = texts if isinstance(prompt, str) else [[{"role": "assistant", "content": one}] for one in texts]
        count = len(sequences)
        columns = {name: [value] * count for name, value in row.items() if name != "prompt"}
        given = {"prompts": [prompt] * count, "completions": completions} | columns
        given["completion_ids"] = [list(one.token_ids) for one in sequences]
        scores = np.array([_call(function, given, count) for function in self.reward_funcs], dtype=float)
        is_scored = ~np.isnan(scores).all(0)
        rewards = np.where(is_scored, np.nansum(scores, 0), np.nan)
        advantages = np.zeros(count)
        mean = spread = float("nan")
        if is_scored.any():
            mean, spread = float(rewards[is_scored].mean()), float(rewards[is_scored].std())
            advantages[is_scored] = (rewards[is_scored] - mean) / (spread + 1e-8)
        names = [getattr(function, "__name__", type(function).__name__) for function in self.reward_funcs]
        start = len(output.prompt_token_ids)
        samples = []
        for index, one in enumerate(sequences):
            metrics = {"reward": float(rewards[index]), "reward_std": spread}
            metrics |= {f"rewards/{name}": float(scores[number, index]) for number, name in enumerate(names)}
            mask = np.zeros(start + len(one.token_ids), dtype=np.int64)
            mask[start:] = 1
            log_probs = np.zeros(len(mask), dtype=np.float32)
            log_probs[start:] = logprobs_of(one)
            samples.append(
                RolloutSample(
                    prompt=prompt,
                    completion=completions[index],
                    input_ids=np.array([*output.prompt_token_ids, *one.token_ids], dtype=np.int64),
                    completion_mask=mask,
                    old_log_probs=log_probs,
                    advantage=float(advantages[index]),
                    model_version=version,
                    group_id=group,
                    metrics=metrics,
                )
            )
        return samples

    def _put(self, sample: RolloutSample) -> None:
        """Queue a sample, and wait while the queue is full."""
        sample.enqueued_at = time.time()
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self.rollout_buffer.put(sample, timeout=POLL_SECONDS)
                break
            self._last_sign = time.monotonic()


class WeightTransfer:
    """TRL's WeightTransferProtocol: writes the trainer's weights into the worker's engine, in place.

    `pause` waits for the batch in progress, so that no completion mixes two versions. All graphs stay valid.
    """

    def __init__(self, worker: RolloutWorker):
        self._worker, self._is_paused, self._numbers = worker, False, itertools.count(1)

    def init_weight_transfer(self) -> None:
        """Do nothing: trainer and engine share a process."""

    def pause(self) -> None:
        """Wait for the batch in progress and hold the next one back. Raises EngineError if the rollouts have failed."""
        if self._is_paused:
            return
        while not self._worker.engine_lock.acquire(timeout=POLL_SECONDS):
            self._worker.check_health(float("inf"))
        self._is_paused = True

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write (name, tensor) pairs, all or none. Raises WeightUpdateError, and EngineError outside of a pause."""
        if not self._is_paused:
            raise EngineError("call pause() before send_weights()")
        self._worker.engine.update_weights(iterator, version=f"sync-{next(self._numbers)}")
        # The trainer sets the same number, but only after resume(), when the next batch may have begun.
        self._worker.update_model_version(self._worker.model_version + 1)

    def resume(self) -> None:
        """Let the worker generate again, with the new weights."""
        if self._is_paused:
            self._is_paused = False
            self._worker.engine_lock.release()

    def destroy(self) -> None:
        """End a pause that an error left behind."""
        self.resume()


def _call(function: Callable[..., Any], given: Mapping[str, Any], count: int) -> list[float]:
    """Return a reward function's values, with NaN in place of None. Raises ConfigError for a wrong number of them."""
    found = function(**given)
    values = list(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)
    if len(values) != count:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"reward function {name} returned {len(values)} values for {count} completions")
    return [float("nan") if value is None else float(value) for value in values]


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found
