"""A pool of engines on Ray with the interface of one engine, for rollouts on several GPUs or machines.

    with RolloutPool(EngineConfig(model="..."), engines=4) as pool:
        for sample in pool.generate_as_completed(prompts=prompts, sampling_params={"n": 8}):
            ...
        pool.update_weights(trainer.state_dict(), version="step-1")

Each engine is a Ray actor. An engine without work takes some from the one with the most left. An engine that dies is
replaced, and what it had not finished runs again with the same seeds. Needs Ray: `pip install 'encore-serve[ray]'`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.arguments import expected_lengths, params_of_prompts, prompt_ids
from engine.checkpoint.source import resolve_model
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineDead, EnginePaused, RequestError, WeightUpdateError
from engine.models.registry import config_from_folder
from engine.protocol.messages import ModelInfo
from engine.protocol.outputs import CompletionOutput, RequestOutput, Sample
from engine.protocol.request import SamplingParams, check_prompt_ids, mix64, split_n
from engine.text.tokenizer import Tokenizer
from graph_cache.utils.validation import is_whole_number

try:
    from engine.integrations.local_ray import start_ray  # before Ray

    import ray  # isort: skip
    from ray.exceptions import RayActorError, RayTaskError
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError(
        "a pool runs on Ray, which is not installed: pip install 'encore-serve[ray]'", name="ray"
    ) from error

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.05  # between two looks whether a pause has ended
MAX_REPLACEMENTS = 8  # of engines, one after the other without a finished sample


@dataclass(frozen=True)
class _Work:
    """One sequence: its place among the samples of a call, and its request. `budget`: tokens that it may take."""

    number: int
    prompt: int
    index: int
    token_ids: list[int]
    params: SamplingParams
    budget: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor in Ray's object store, where engines of one machine map the same memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: Any  # numpy uint8 [bytes]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        return cls(tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy())

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.content).view(self.dtype).reshape(self.shape)


class EngineActor:
    """An engine in its own process. Ray runs each call in a thread; they share the engine's batches."""

    def __init__(self, config: EngineConfig):
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # weights are only read
        self._engine = Engine(config)

    def start(self, weights: Any, version: str | None, pause_mode: str | None) -> ModelInfo:
        """Bring a new engine to the state of the others, and return its model and sizes."""
        if version is not None:
            self.update_weights(weights, version)
        if pause_mode is not None:
            self._engine.pause(pause_mode)
        return self._engine.info

    def run(self, works: list[_Work]) -> Iterator[tuple[int, CompletionOutput]]:
        """Yield (number, output) of each sequence as it finishes."""
        samples = self._engine.generate_as_completed(
            prompt_token_ids=[work.token_ids for work in works],
            sampling_params=[work.params for work in works],
            use_tqdm=False,
        )
        for sample in samples:
            yield works[sample.prompt_index].number, sample.output

    def update_weights(self, weights: dict[str, _Tensor], version: str) -> int:
        """Write tensors in place."""
        return self._engine.update_weights({name: one.tensor() for name, one in weights.items()}, version=version)

    def pause(self, mode: str) -> None:
        """Pause as Engine.pause does."""
        self._engine.pause(mode)

    def resume(self) -> None:
        """End the pause."""
        self._engine.resume()


@dataclass
class _Member:
    """One place of the pool: its actor, and what is known of it."""

    actor: Any
    starting: Any  # the reference of `start`; None once that has ended
    number: int


@dataclass
class _Stream:
    """The sequences, by number, that `actor` was sent at once and has not finished."""

    actor: Any
    numbers: list[int]


@dataclass
class _Lane:
    """The work of one call on one place: what has not begun, and what runs."""

    member: _Member
    queue: deque[_Work] = field(default_factory=deque)
    running: dict[int, _Work] = field(default_factory=dict)  # by number
    streams: dict[Any, _Stream] = field(default_factory=dict)  # by Ray's generator of samples

    @property
    def waiting_budget(self) -> int:
        """Tokens that the sequences that have not begun may take."""
        return sum(work.budget for work in self.queue)

    @property
    def budget(self) -> int:
        """Tokens that all its sequences may take."""
        return self.waiting_budget + sum(work.budget for work in self.running.values())


class RolloutPool:
    """Several engines of one configuration, used as one Engine: `generate`, `generate_as_completed`, `update_weights`.

    - `config`: of each engine. Ray gives each its GPUs (`tensor_parallel_size` of them), or `num_threads` processors.
    - `engines`: how many. They must fit into the cluster's resources.

    Connects to the Ray cluster of RAY_ADDRESS, or to the one that the program has connected to; else starts Ray on this
    machine. Samples have the seeds that one engine would give them. Raises ConfigError, and EngineDead if engines end
    MAX_REPLACEMENTS times one after the other.
    """

    def __init__(self, config: EngineConfig | None = None, *, engines: int):
        self.config = config or EngineConfig()
        if not is_whole_number(engines, 1):
            raise ConfigError(f"engines={engines!r}: give a positive number")
        if not isinstance(self.config, EngineConfig):  # but a TrainingConfig
            raise ConfigError(f"mode={self.config.mode!r}: a pool generates; use mode='inference'")
        if self.config.device.startswith("cuda:"):
            raise ConfigError(f"device={self.config.device!r}: Ray gives each engine its GPUs: set device='cuda'")
        events = self.config.kv_events_config
        if engines > 1 and events is not None and events.is_on:
            raise ConfigError(
                f"kv_events_config is for one engine, found engines={engines}: they would share its address and its "
                "topic: leave it out"
            )
        if engines > 1 and self.config.kv_offloading_disk_path is not None:
            raise ConfigError(
                f"kv_offloading_disk_path={self.config.kv_offloading_disk_path!r} is for one engine, found "
                f"engines={engines}: leave it out, or use kv_offloading_size alone"
            )
        source = resolve_model(self.config.model, config_from_folder, self.config.progress)
        self.tokenizer = Tokenizer.try_load(source)
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            start_ray(engines * (self.config.num_threads or 1) + 1)  # they fit, however few processors there are
        self._lock = threading.Lock()  # held while members, weights or the pause change
        self._weights: Any = None  # the reference of the latest weights
        self._version: str | None = None
        self._pause_mode: str | None = None
        self._seeds, self._names = itertools.count(1), itertools.count()
        self._failures = 0  # of engines, since the last finished sample
        self._num_calls = 0
        self._closed = False
        self._members = [self._start(number) for number in range(engines)]
        try:
            infos = [ray.get(member.starting) for member in self._members]
        except (RayActorError, RayTaskError) as error:
            self.close()
            raise _cause(error) from error
        for member in self._members:
            member.starting = None
        self.info: ModelInfo = infos[0]
        self._first_version = infos[0].weight_version

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engines, and Ray if the pool has started it. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            for member in getattr(self, "_members", ()):
                ray.kill(member.actor)
            if self._owns_ray:
                ray.shutdown()

    @property
    def weight_version(self) -> str:
        """The version name of the current weights."""
        return self._first_version if self._version is None else self._version

    # ---- generate --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | Sequence[int] | None = None,
        expected_tokens: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate as Engine.generate does, and return one output per prompt, in order."""
        outputs, works = self._works(prompts, sampling_params, prompt_token_ids, expected_tokens)
        for sample in self._samples(works):
            outputs[sample.prompt_index].outputs[sample.output.index] = sample.output
        return outputs

    def generate_as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | Sequence[int] | None = None,
        expected_tokens: Sequence[int] | None = None,
    ) -> Iterator[Sample]:
        """As `generate`, but yield each sample as soon as it has finished, once each.

        The engines run on while the iterator is not advanced. Between two samples, weights may be updated. Closing it
        aborts what is left.
        """
        return self._samples(self._works(prompts, sampling_params, prompt_token_ids, expected_tokens)[1])

    def _works(
        self, prompts: Any, sampling_params: Any, prompt_token_ids: Any, expected_tokens: Any
    ) -> tuple[list[RequestOutput], list[_Work]]:
        """Check the arguments, and return the empty outputs and the sequences."""
        self._require_open()
        texts, ids = prompt_ids(self.tokenizer, self.info.name, prompts, prompt_token_ids)
        ids = [check_prompt_ids(one, self.info.vocab_size) for one in ids]
        params = [one.for_vocab(self.info.vocab_size) for one in params_of_prompts(sampling_params, len(ids))]
        lengths = expected_lengths(expected_tokens, len(ids))
        if any(one.prompt_logprobs is not None for one in params):
            raise RequestError("prompt_logprobs: a pool returns samples only; use an Engine", param="prompt_logprobs")
        outputs: list[RequestOutput] = []
        works: list[_Work] = []
        for prompt, (text, token_ids, wanted) in enumerate(zip(texts, ids, params, strict=True)):
            name = f"pool-{next(self._names)}"
            outputs.append(RequestOutput.empty(name, text, token_ids, wanted.n))
            budget = lengths[prompt] if lengths is not None else wanted.max_tokens
            if budget is None:
                budget = max(1, self.info.max_model_len - len(token_ids))
            # As Engine does, so that a sample doesn't depend on the engine that it runs on, nor on their number.
            seed = wanted.seed if wanted.seed is not None else mix64(self.config.seed + next(self._seeds))
            for child in split_n(name, wanted, seed):
                one = dataclasses.replace(child.params, seed=child.seed)
                works.append(_Work(len(works), prompt, child.index, token_ids, one, budget))
        if lengths is not None:
            works.sort(key=lambda work: -work.budget)
        return outputs, works

    def _samples(self, works: list[_Work]) -> Iterator[Sample]:
        """Run sequences on the engines and yield the samples as they finish."""
        lanes = [_Lane(member) for member in self._members]
        _deal(works, lanes)
        by_number = {work.number: work for work in works}
        self._num_calls += 1
        try:
            while any(lane.queue or lane.running for lane in lanes):
                self._feed(lanes)
                for lane in self._arrived(lanes):
                    for number, output in self._take(lane):
                        work = by_number.pop(number)
                        output.index = work.index
                        self._failures = 0
                        yield Sample(work.prompt, output)
        finally:
            self._num_calls -= 1
            if by_number and self._num_calls == 0 and not self._closed and self._pause_mode is None:
                self._abort_all()

    def _feed(self, lanes: list[_Lane]) -> None:
        """Send sequences to engines with free seats, one at a time to the engine with the smallest budget."""
        if self._pause_mode is not None:
            return
        batches: dict[int, list[_Work]] = {}
        while True:
            free = [
                lane for lane in lanes if lane.member.starting is None and len(lane.running) < self.info.max_num_seqs
            ]
            if not free:
                break
            lane = min(free, key=lambda one: sum(work.budget for work in one.running.values()))
            work = _next_work(lane, lanes)
            if work is None:
                break
            lane.running[work.number] = work
            batches.setdefault(lane.member.number, []).append(work)
        for lane in lanes:
            if batch := batches.get(lane.member.number):
                stream = lane.member.actor.run.options(num_returns="streaming").remote(batch)
                lane.streams[stream] = _Stream(lane.member.actor, [work.number for work in batch])

    def _arrived(self, lanes: list[_Lane]) -> list[_Lane]:
        """Wait until a sample, the end of a stream, or a started engine is there, and return the lanes concerned."""
        owners: dict[Any, _Lane] = {stream: lane for lane in lanes for stream in lane.streams}
        owners |= {lane.member.starting: lane for lane in lanes if lane.member.starting is not None}
        if not owners:  # paused before anything ran
            time.sleep(POLL_SECONDS)
            return []
        timeout = POLL_SECONDS if self._pause_mode is not None or any(lane.queue for lane in lanes) else None
        ready, _ = ray.wait(list(owners), num_returns=1, timeout=timeout, fetch_local=False)
        return [owners[one] for one in ready]

    def _take(self, lane: _Lane) -> Iterator[tuple[int, CompletionOutput]]:
        """Yield the samples of a lane that are there. Replaces its engine if that has ended."""
        member = lane.member
        if member.starting is not None and _is_ready(member.starting):
            actor, starting = member.actor, member.starting
            try:
                ray.get(starting)
                member.starting = None
            except RayActorError as error:
                self._replace(member, actor, error)
            except RayTaskError as error:
                raise _cause(error) from error
        for stream in list(lane.streams):
            while stream in lane.streams and _is_ready(stream):
                try:
                    number, output = ray.get(next(stream))
                except StopIteration:
                    self._requeue(lane, stream)
                except RayActorError as error:
                    actor = lane.streams[stream].actor
                    self._requeue(lane, stream)
                    self._replace(member, actor, error)
                except RayTaskError as error:
                    if not isinstance(_cause(error), EnginePaused):
                        raise _cause(error) from error
                    self._requeue(lane, stream)  # paused before they began: they begin after it
                else:
                    lane.streams[stream].numbers.remove(number)
                    del lane.running[number]
                    yield number, output

    def _requeue(self, lane: _Lane, stream: Any) -> None:
        """Drop a stream that has ended. What it has not finished runs again, first."""
        for number in reversed(lane.streams.pop(stream).numbers):
            lane.queue.appendleft(lane.running.pop(number))

    def _abort_all(self) -> None:
        """End the sequences of a call that its caller has left."""
        for name, arguments in (("pause", ("abort",)), ("resume", ())):
            self._ask_all(name, *arguments)

    # ---- engines ---------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> _Member:
        """Start an engine with the state of the others."""
        options = _actor_options(self.config)
        config = dataclasses.replace(self.config, progress=False)
        actor = ray.remote(EngineActor).options(max_concurrency=1024, **options).remote(config)
        starting = actor.start.remote(self._weights, self._version, self._pause_mode)
        return _Member(actor, starting, number)

    def _replace(self, member: _Member, actor: Any, error: Exception) -> None:
        """Start an engine in the place of one that has ended. Raises EngineDead if that happens again and again."""
        with self._lock:
            if member.actor is not actor:
                return  # it has been replaced
            self._failures += 1
            if self._failures > MAX_REPLACEMENTS:
                raise EngineDead(
                    f"engines of the pool have ended {self._failures} times in a row: {_first_line(error)}"
                ) from error
            logger.warning("engine %d of the pool has ended and is replaced: %s", member.number, _first_line(error))
            ray.kill(member.actor)
            fresh = self._start(member.number)
            member.actor, member.starting = fresh.actor, fresh.starting

    def update_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], *, version: str
    ) -> int:
        """Write tensors by Hugging Face names into every engine, and return how many were written.

        The tensors go into Ray's object store once: to each machine once, and the engines of one machine map the same
        memory. Sequences that run are computed again with the new weights; samples say which tokens came of which.
        Raises WeightUpdateError, and keeps the old weights, as Engine.update_weights does.
        """
        self._require_open()
        if not isinstance(weights, Iterable):
            raise WeightUpdateError(
                f"found weights of type {type(weights).__name__}: give a mapping or (name, tensor) pairs"
            )
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        reference = ray.put({name: _Tensor.of(tensor) for name, tensor in pairs})
        with self._lock:
            members = sorted(self._members, key=lambda member: member.starting is not None)
            asked = [(member, self._started(member).update_weights.remote(reference, version)) for member in members]
            written, refused, ended = 0, None, []
            for member, answer in asked:
                actor = member.actor
                try:
                    written = ray.get(answer)
                except RayTaskError as error:
                    refused = _cause(error)
                except RayActorError as error:
                    ended.append((member, actor, error))
            if refused is not None:
                if written:  # an engine that has other weights than the rest must not go on
                    refused = EngineDead(f"some engines have the weights {version!r} and others not: {refused}")
                raise refused
            self._weights, self._version = reference, version
        for one in ended:
            self._replace(*one)  # it starts with the new weights
        return written

    def pause(self, mode: str = "abort") -> None:
        """Pause every engine, as Engine.pause does. A call of `generate_as_completed` waits for `resume`."""
        self._require_open()
        self._pause_mode = mode
        try:
            self._ask_all("pause", mode)
        except BaseException:
            self._pause_mode = None
            raise

    def resume(self) -> None:
        """End the pause."""
        self._require_open()
        self._ask_all("resume")
        self._pause_mode = None

    @property
    def is_paused(self) -> bool:
        """Whether the pool is paused."""
        return self._pause_mode is not None

    def _ask_all(self, method: str, *arguments: Any) -> None:
        """Call a method of every engine. Those that have ended are left to `_take`, which replaces them."""
        answers = [getattr(self._started(member), method).remote(*arguments) for member in self._members]
        for answer in answers:
            try:
                ray.get(answer)
            except RayTaskError as error:
                raise _cause(error) from error
            except RayActorError as error:
                logger.warning("an engine of the pool has ended before %s: %s", method, error)

    def _started(self, member: _Member) -> Any:
        """Return a member's actor once it has started: a call that overtook its start would be undone by it."""
        if member.starting is not None:
            ray.wait([member.starting], fetch_local=False)
        return member.actor

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDead("this pool was closed; create a new one")


def _deal(works: Sequence[_Work], lanes: Sequence[_Lane]) -> None:
    """Give all samples of a prompt to one lane, which computes the prompt once: the lane with the smallest budget."""
    groups: dict[int, list[_Work]] = {}
    for work in works:
        groups.setdefault(work.prompt, []).append(work)
    budgets = [0] * len(lanes)
    for group in groups.values():
        place = budgets.index(min(budgets))
        lanes[place].queue.extend(group)
        budgets[place] += sum(work.budget for work in group)


def _next_work(lane: _Lane, lanes: Sequence[_Lane]) -> _Work | None:
    """Return the lane's next sequence; without any, the last one of the lane with the most left to begin."""
    if lane.queue:
        return lane.queue.popleft()
    richest = max(lanes, key=lambda one: one.waiting_budget)
    return richest.queue.pop() if richest.queue else None


def _is_ready(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0, fetch_local=False)[0])


def _cause(error: Exception) -> Exception:
    """Return the error of an engine that Ray has wrapped."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else EngineDead(str(error))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _on_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def _actor_options(config: EngineConfig) -> dict[str, float]:
    if _on_gpu(config):
        return {"num_cpus": 1, "num_gpus": config.tensor_parallel_size}
    return {"num_cpus": config.num_threads or 1}
