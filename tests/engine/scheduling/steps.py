"""A small scheduler, requests for it, and steps without a device."""

from engine.protocol.request import EngineRequest, SamplingParams
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler, SchedulerConfig

PAGE = 4


def make(pages=64, seqs=8, budget=64, context=256, cached=True, groups=(None,), **kwargs) -> Scheduler:
    """Create a scheduler over a pool of `pages` usable pages of 4 tokens."""
    pool = PagePool(pages + 1, PAGE)
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=context,
        groups=groups,
    )
    return Scheduler(config, pool, PrefixCache(pool, groups) if cached else None, **kwargs)


def add(
    scheduler: Scheduler, name: str, prompt: int | list[int], max_tokens=8, priority=0, arrival=0.0, index=0, **params
):
    """Add a request. A prompt given as a length consists of tokens that no other prompt has."""
    ids = [hash(name) % 10**6 + k for k in range(prompt)] if isinstance(prompt, int) else prompt
    asked = EngineRequest(
        request_id=name,
        prompt_token_ids=ids,
        params=SamplingParams(max_tokens=max_tokens, **params),
        priority=priority,
        arrival_time=arrival,
        index=index,
        seed=0,
    )
    request = Request(asked)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, finish: bool = True):
    """Run one step like the loop; every request that samples gets token 7."""
    batch = scheduler.schedule()
    done = batch.decodes + [chunk.request for chunk in batch.prefills if chunk.is_last]
    scheduler.dispatch(batch)
    scheduler.complete(batch, [7] * len(done))
    for request in done:
        if finish and len(request.token_ids) >= scheduler.token_limit(request):
            scheduler.finish(request, RequestState.FINISHED)
    scheduler.check()
    return batch


def chunks(batch) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request.request_id, chunk.start, chunk.length, chunk.is_last) for chunk in batch.prefills]


def names(requests) -> list[str]:
    return [request.request_id for request in requests]
