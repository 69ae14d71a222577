"""Jobs: the prompts of requests, from tokens to the engine's outputs. Independent of HTTP formats."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.client.output_queue import LOGPROB_BYTES
from engine.errors import EngineError, PromptTooLong, RequestError
from engine.protocol.messages import ModelInfo
from engine.protocol.outputs import CompletionOutput, OutputDelta, RequestOutput
from engine.protocol.request import SamplingParams
from engine.protocol.sampling_params import ALL_TOKENS
from server.config import ServerConfig
from server.http.direct import DirectWriter
from server.http.json_text import encoded
from server.http.sender import REQUEST_ID, SENDER
from server.http.streaming import WriteEvent, event, large_event
from server.observability.metrics import RequestMetrics, RequestWatch
from server.schemas.truncation import Truncation
from server.serving.admission import Reservation
from server.serving.lifecycle import Lifecycle
from server.serving.output_budget import OutputBudget, size_of

INLINE_LOGPROB_BYTES = 256 * 1024  # of an answer that is written on the event loop, in some milliseconds
ARRAY_BYTES = INLINE_LOGPROB_BYTES + 1  # of an answer with hidden states: a thread writes it, whatever their number
MAX_HIDDEN_VALUES = 2**22  # of the hidden states of a prompt's sequences: 16 MiB
YIELD_CHARS = 8192  # of prompts between two turns of other tasks: tokenizing them takes some milliseconds


@dataclass(kw_only=True)
class Job:
    """One prompt of a request. `public_id` is the id that the client sees; `output` accumulates the deltas.

    `names`: further ids under which a client may abort it, besides `public_id` and the request's X-Request-Id.
    """

    public_id: str
    output: RequestOutput
    params: SamplingParams
    max_tokens: int  # of a sequence; without params.max_tokens, what the context holds after the prompt
    priority: int = 0
    started: float = field(default_factory=time.perf_counter)
    watch: RequestWatch | None = None  # set by Jobs.run
    names: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.output.prompt_token_ids)

    @property
    def choices(self) -> list[CompletionOutput]:
        """The output of each of the n sequences so far."""
        return self.output.outputs


class Jobs:
    """Makes jobs of prompts, and runs them on the engine client."""

    def __init__(self, lifecycle: Lifecycle, metrics: RequestMetrics, outputs: OutputBudget):
        self._lifecycle, self._metrics, self._outputs = lifecycle, metrics, outputs
        self._client, self._config = lifecycle.client, lifecycle.config
        self._unyielded = 0  # characters and token ids of prompts since the event loop last ran other tasks

    async def tokenize(
        self, public_id: str, prompt: str | list[int], param: str, params: SamplingParams, priority: int,
        add_special_tokens: bool = True, truncation: Truncation | None = None,
    ) -> Job:  # fmt: skip
        """Tokenize a prompt and return its job. `param` is the name of its field for errors.

        Raises RequestError, PromptTooLong.
        """
        await self._yield_after(len(prompt))
        if isinstance(prompt, str):
            ids = await self._lifecycle.tokens.encode(prompt, param, add_special_tokens)
            return self.of_ids(public_id, prompt, ids, param, params, priority, truncation)
        return self.of_ids(public_id, None, prompt, param, params, priority, truncation)

    async def _yield_after(self, size: int) -> None:
        """Let other tasks run if the prompts of this size and before it have taken some milliseconds."""
        self._unyielded += size
        if self._unyielded > YIELD_CHARS:
            self._unyielded = 0
            await asyncio.sleep(0)

    def of_ids(
        self, public_id: str, prompt: str | None, ids: list[int], param: str, params: SamplingParams, priority: int,
        truncation: Truncation | None = None,
    ) -> Job:  # fmt: skip
        """Return the job of a tokenized prompt, shortened by `truncation`.

        Checks here what the engine would refuse later, so that the error names the field `param`.
        """
        if truncation is not None:
            reserved = max(1, params.min_tokens if params.max_tokens is None else params.max_tokens)
            kept = truncation.apply(ids, self._client.info().max_model_len, reserved)
            ids, prompt = kept, prompt if len(kept) == len(ids) else None
        if params.structured_outputs is not None and self._config.close_objects == "all":
            params = dataclasses.replace(params, structured_outputs=params.structured_outputs.closed())
        info = self._client.info()
        default_limit = info.sampling_defaults.get("max_tokens")
        if params.max_tokens is None and default_limit is not None:
            room = max(1, info.max_model_len - len(ids))
            limit = max(min(default_limit, room), params.min_tokens)
            params = dataclasses.replace(params, max_tokens=limit)
        _check_logprobs(len(ids), params, info.vocab_size, self._config)
        params = params.for_vocab(info.vocab_size)
        self._lifecycle.tokens.check(ids, param)
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        if len(ids) + max_tokens > info.max_model_len:
            raise PromptTooLong(
                f"{len(ids)} prompt tokens and {max_tokens} to generate exceed the context of {info.max_model_len} "
                "tokens: shorten the prompt or ask for fewer",
                param=param if len(ids) >= info.max_model_len else "max_tokens",
            )
        if len(ids) + params.min_tokens > info.max_model_len:
            raise PromptTooLong(
                f"{len(ids)} prompt tokens and min_tokens={params.min_tokens} exceed the context of "
                f"{info.max_model_len} tokens: shorten the prompt or lower min_tokens",
                param="min_tokens",
            )
        params.check_hidden_states(info.hidden_state_size)
        params.check_routed_experts(info.routed_experts is not None)
        params.check_support(info.logprobs_mode)
        info.check_head(params)
        if params.return_hidden_states:
            _check_hidden_values(len(ids), params, info)
        output = RequestOutput.empty(public_id, prompt, ids, params.n)
        limit = info.max_model_len - len(ids) if params.max_tokens is None else params.max_tokens
        return Job(public_id=public_id, output=output, params=params, max_tokens=limit, priority=priority)

    async def run(
        self, job: Job, reservation: Reservation, direct: DirectWriter | None = None
    ) -> AsyncGenerator[list[OutputDelta], None]:
        """Run a job: yield its deltas as they arrive, after adding them to `job.output`.

        With `direct`, plain deltas that arrive while the caller waits are written and not yielded, if that is possible.
        Closing the iterator aborts the engine request. Capacity is released as the engine ends the job's sequences.
        Raises EngineError if a sequence failed in the engine.
        """
        if reservation.share.error is not None:
            raise reservation.share.error
        watch = job.watch = self._metrics.watch(job)
        request_id = self._client.new_id()  # HTTP clients may send the same id several times at once
        first_index = reservation.started
        reservation.started += job.params.n

        def written(delta: OutputDelta) -> bool:
            if direct is None or not delta.is_plain or not direct.is_ready:
                return False
            job.output.add(delta)
            watch.observe_deltas([delta])
            direct.write(delta)
            return True

        arrivals = self._client.stream(
            request_id,
            prompt_token_ids=job.output.prompt_token_ids,
            params=job.params,
            priority=job.priority,
            on_end=reservation.release,
            on_hidden_states=partial(self._outputs.add_hidden_states, reservation.share),
            on_delta=None if direct is None else written,
            first_index=first_index,
            sender=SENDER.get(),
            names=tuple(filter(None, (job.public_id, REQUEST_ID.get(), *job.names))),
        )
        reservation.share.running.add(request_id)
        try:
            async with aclosing(arrivals):
                async for deltas in arrivals:
                    self._outputs.add(reservation.share, deltas)
                    for delta in deltas:
                        if delta.finish_reason == "error":
                            raise EngineError(f"the engine failed to process request {job.public_id}: {delta.error}")
                        job.output.add(delta)
                    watch.observe_deltas(deltas)
                    yield deltas
        except EngineError:
            watch.close(failed=True)
            raise
        finally:
            reservation.share.running.discard(request_id)
            watch.close()

    async def write(
        self, jobs: list[Job], build: Callable[[Callable[[Any], Any]], Any], reservation: Reservation
    ) -> Any:
        """Return the JSON answer that `build` returns; Encoded by a thread if it is large, or has hidden states.

        `build(part)` passes each choice to `part`, which may encode it, so that not all are in memory as objects. The
        jobs have no log-probabilities and hidden states any more after it. Send the answer before the admission ends.
        """
        reservation.share.is_sent = True
        outputs = [job.output for job in jobs]
        size = sum(size_of(one.prompt_logprobs) for one in outputs)
        choices = [choice for one in outputs for choice in one.outputs]
        size += sum(size_of(choice.logprobs) + ARRAY_BYTES * bool(choice.hidden_state_parts) for choice in choices)
        if size <= INLINE_LOGPROB_BYTES:
            return build(lambda value: value)
        answer = await self._lifecycle.tokens.in_thread(lambda: encoded(build(encoded)))
        for one in outputs:
            one.prompt_logprobs = None
        for choice in choices:
            choice.logprobs, choice.hidden_state_parts = None, []
        return answer

    async def write_events(self, size: int, write: Callable[[WriteEvent], bytes]) -> bytes:
        """Return events of a stream with `size` bytes of log-probabilities; written by a thread if they are many."""
        if size <= INLINE_LOGPROB_BYTES:
            return write(event)
        return await self._lifecycle.tokens.in_thread(lambda: write(large_event))

    async def finish(self, jobs: list[Job], reservation: Reservation) -> None:
        """Run jobs concurrently until all have finished. If one fails, cancel the others."""

        async def run_one(job: Job) -> None:
            async with aclosing(self.run(job, reservation)) as arrivals:
                async for _ in arrivals:
                    pass

        if len(jobs) == 1:
            await run_one(jobs[0])
            return
        tasks = [asyncio.create_task(run_one(job)) for job in jobs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _check_hidden_values(prompt_tokens: int, params: SamplingParams, info: ModelInfo) -> None:
    """Raise RequestError if the sequences of a request may have more than MAX_HIDDEN_VALUES in all."""
    tokens = info.max_model_len - 1
    if params.max_tokens is not None:
        tokens = min(tokens, prompt_tokens + max(0, params.max_tokens - 1))
    if params.n * tokens * info.hidden_state_size > MAX_HIDDEN_VALUES:
        most = MAX_HIDDEN_VALUES // (params.n * info.hidden_state_size)
        raise RequestError(
            f"return_hidden_states: {params.n} sequences of {tokens} vectors of {info.hidden_state_size} values are "
            f"more than {MAX_HIDDEN_VALUES} values, the limit of a prompt: shorten it, lower max_tokens or lower n, "
            f"to {most} vectors of a sequence",
            param="return_hidden_states",
        )


def _check_logprobs(prompt_tokens: int, params: SamplingParams, vocab_size: int, config: ServerConfig) -> None:
    """Raise RequestError for more alternatives to a token than the server allows, or a prompt with too many in all."""
    most = vocab_size if config.max_logprobs == ALL_TOKENS else config.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        wanted = vocab_size if count == ALL_TOKENS else min(count or 0, vocab_size)
        if wanted > most:
            what = f" asks for all {vocab_size} tokens of the vocabulary" if count == ALL_TOKENS else ""
            raise RequestError(
                f"{name}={count}{what}: at most {most} alternatives to a token are allowed (--max-logprobs): ask for "
                "fewer",
                param=name,
            )
        if name == "prompt_logprobs" and wanted * prompt_tokens * LOGPROB_BYTES > config.max_total_logprob_bytes:
            raise RequestError(
                f"{name}={count}: {wanted} alternatives to each of {prompt_tokens} tokens of the prompt are more than "
                "the server holds (--max-total-logprob-bytes): ask for fewer, or shorten the prompt",
                param=name,
            )
