"""Random workloads on a real scheduler, page pool and prefix cache, with simulated page contents.

Like a model, the simulation writes a value into every page that depends on the token, the weights and all values before
it. A page that is shared wrongly, allocated twice, left unwritten, or reused across weight versions then shows up as a
wrong value, and a preempted request must still produce the tokens it produces alone. Each cache group writes its own
values, and a query reads those of its group's window through the page tables.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import PromptTooLong
from engine.protocol.request import EngineRequest, SamplingParams
from engine.scheduling.admission import TURN_SECONDS
from engine.scheduling.batch import Batch
from engine.scheduling.kv_events import KVEventRecorder
from engine.scheduling.page_pool import SCRATCH_PAGE, PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.kv_view import View

VOCAB = 3  # few tokens, so that prompts often begin alike
MAX_WAITING = 8


def value_after(value: int, token: int, weights: int) -> int:
    """Return the simulated KV of a token, given the KV before it."""
    return hash((value, token, weights))


def sampled(value: int) -> int:
    return value % VOCAB


def most_pages(groups: tuple[int | None, ...], page_size: int, max_chunk: int, num_tokens: int) -> int:
    """Return the most pages that a request needs at once on its way to `num_tokens` stored tokens."""
    total = 0
    for window in groups:
        read = num_tokens if window is None else min(num_tokens, window - 1 + max_chunk)
        touched = max(len({(first + k) // page_size for k in range(read)}) for first in range(page_size))
        total += min(touched, -(-num_tokens // page_size))
    return total


def tokens_of(batch: Batch) -> int:
    """Return the number of tokens the step computes, without padding."""
    return len(batch.decodes) + sum(chunk.length for chunk in batch.prefills)


def cost_of(batch: Batch) -> int:
    """Return how much of the budget the step takes: prompt tokens with log-probabilities count twice."""
    scored = [chunk.length for chunk in batch.prefills if chunk.request.params.prompt_logprobs is not None]
    return tokens_of(batch) + sum(scored)


class Simulation:
    """Drives a scheduler like the engine loop, over simulated page contents.

    `async_scheduling`: each step is scheduled before the scheduler gets the tokens of the previous one.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        config: SchedulerConfig,
        cached: bool = True,
        async_scheduling: bool = False,
    ):
        self.async_scheduling = async_scheduling
        self.groups = config.groups
        self.in_flight: list[tuple[Batch, list[Request], list[int]]] = []
        self.last_sampled: dict[Request, int] = {}  # the token that the device sampled last
        self.pool = PagePool(num_pages, page_size)
        self.events = KVEventRecorder(self.pool.page_size, config.groups)
        self.view = View()  # of a router that reads the events
        self.cache = PrefixCache(self.pool, config.groups, self.events) if cached else None
        self.scheduler = Scheduler(config, self.pool, self.cache, weight_version="0")
        self.weights = 0
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (group, value)
        self.uploaded: dict[Request, tuple[int, list[list[int]], list[int]]] = {}  # lease, page tables, num_freed
        self.values: dict[Request, list[int]] = {}  # expected page contents of each running request
        self.first_weights: dict[Request, int] = {}
        self.accepted: list[Request] = []
        self.order: dict[Request, tuple[int, float, int]] = {}

    def add(self, prompt: list[int], priority: int, params: SamplingParams, arrival: float, index: int = 0) -> Request:
        number = len(self.accepted)
        engine_request = EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            params=params,
            priority=priority,
            arrival_time=arrival,
            index=index,
            seed=0,
        )
        request = Request(engine_request)
        self.scheduler.add(request)
        self.accepted.append(request)
        self.order[request] = (priority, arrival + TURN_SECONDS * index, number)
        return request

    def step(self, abort_mid_step: Request | None = None, fails: bool = False) -> None:
        """Schedule, run, complete and finish one step; with `fails`, fail the step and its requests."""
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        work = [(request, request.num_computed, 1, True) for request in batch.decodes]
        work += [(chunk.request, chunk.start, chunk.length, chunk.is_last) for chunk in batch.prefills]
        self.upload()
        self.write(batch.admitted, work)
        new_tokens = [sampled(self.values[request][-1]) for request, _, _, is_last in work if is_last]
        self.last_sampled |= zip((request for request, _, _, is_last in work if is_last), new_tokens, strict=True)
        if fails:
            self.wait()
            for request, *_ in work:
                if not request.state.is_final:
                    self.scheduler.finish(request, RequestState.FAILED)
            return
        if abort_mid_step is not None:
            self.scheduler.abort(abort_mid_step.request_id)
        self.scheduler.dispatch(batch)
        self.in_flight.append((batch, [request for request, *_ in work], new_tokens))
        self.wait(1 if self.async_scheduling and batch else 0)

    def wait(self, behind: int = 0) -> None:
        """Complete all steps in flight but the last `behind`, and finish requests at their maximum length."""
        while len(self.in_flight) > behind:
            batch, requests, new_tokens = self.in_flight.pop(0)
            self.scheduler.complete(batch, new_tokens)
            for request in requests:
                if request.slot is not None and len(request.token_ids) >= self.scheduler.token_limit(request):
                    self.scheduler.finish(request, RequestState.FINISHED)

    def upload(self) -> None:
        """Send the changes of page tables that `num_freed` and the tables' lengths announce."""
        for request in self.scheduler.requests():
            if request.slot is None:
                continue
            lease, tables, freed = self.uploaded.get(request, (0, [], []))
            if lease != request.lease:
                tables, freed = [[] for _ in self.groups], [0 for _ in self.groups]
            for group, table in enumerate(tables):
                table += request.page_tables[group][len(table) :]
                now = request.num_freed[group]
                table[freed[group] : now] = [0] * (now - freed[group])
            assert tables == request.page_tables
            self.uploaded[request] = request.lease, tables, list(request.num_freed)

    def write(self, admitted: list[Request], work: list[tuple[Request, int, int, bool]]) -> None:
        size = self.pool.page_size
        for request in admitted:
            assert request.weight_version == str(self.weights)
            values = [0]
            for token in request.token_ids[: request.num_computed]:
                values.append(value_after(values[-1], token, self.weights))
            self.values[request] = values
            self.first_weights.setdefault(request, self.weights)
        for request, start, length, _ in work:
            values = self.values[request]
            assert len(values) == start + 1
            for position in range(start, start + length):
                known = position < len(request.token_ids)
                token = request.token_ids[position] if known else self.last_sampled[request]
                values.append(value_after(values[-1], token, self.weights))
                for group, table in enumerate(request.page_tables):
                    assert table[position // size] != SCRATCH_PAGE
                    self.cells[table[position // size], position % size] = group, values[-1]
        # After all writes: a layer stores KV for the whole batch before attention.
        for request, start, length, _ in work:
            for group, (window, table) in enumerate(zip(self.groups, request.page_tables, strict=True)):
                for position in range(0 if window is None else max(0, start - window + 1), start + length):
                    cell = self.cells.get((table[position // size], position % size))
                    expected = group, self.values[request][position + 1]
                    assert cell == expected, f"{request!r} reads wrong KV at {position} in group {group}"

    def check_batch(self, batch) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        scheduler.check()
        if not self.in_flight:
            assert bool(batch) == scheduler.has_work, "a step with live requests computes something"
        assert tokens_of(batch) <= config.max_num_batched_tokens
        listed = batch.decodes + [chunk.request for chunk in batch.prefills]
        assert len(set(listed)) == len(listed)
        assert all(request.state is RequestState.RUNNING for request in [*listed, *batch.admitted])
        assert all(request.state is RequestState.PREEMPTED for request in batch.preempted)
        assert len(set(batch.preempted)) == len(batch.preempted)
        assert not set(batch.preempted) & set(batch.admitted)
        assert all(request.num_computed == request.length - 1 for request in batch.decodes)
        size = self.pool.page_size
        assert all(r.num_computed < len(table) * size for r in batch.decodes for table in r.page_tables)
        for chunk in batch.prefills:
            left = len(chunk.request.token_ids) - chunk.start
            assert chunk.start == chunk.request.num_computed and 1 <= chunk.length <= left
            assert chunk.is_last == (chunk.length == left)
        running = [request for request in scheduler.requests() if request.slot is not None]
        decoding = [r for r in running if r.num_computed == r.length - 1 < r.max_length - 1 and r not in batch.admitted]
        assert set(decoding) <= set(batch.decodes), "a running decode never misses a step"
        self.check_order(batch, running)

    def check_order(self, batch, running: list[Request]) -> None:
        waiting = sorted((r for r in self.scheduler.requests() if r.slot is None), key=self.order.__getitem__)
        if not waiting:
            return
        skipped = 0  # requests at the head that wait for pages of this step, each with a slot kept for it
        while skipped < len(waiting) and self.waits_for_pages(waiting[skipped], batch):
            skipped += 1
        if skipped and any(self.order[r] > self.order[waiting[0]] and not self.is_short(r) for r in batch.admitted):
            assert len(running) < self.scheduler.config.max_num_seqs, "a slot is kept"
        waiting = waiting[skipped:]
        if not waiting:
            return
        overtaking = [request for request in batch.admitted if self.order[request] > self.order[waiting[0]]]
        assert all(self.is_short(r) and r.priority <= waiting[0].priority for r in overtaking), "no other overtakes"
        assert not overtaking or sum(map(self.is_short, running)) <= self.short_slots
        first = min(running, key=self.order.__getitem__)
        assert first not in batch.preempted
        self.check_fairness(batch, running, waiting)
        budget = self.scheduler.config.max_num_batched_tokens
        idle_budget = cost_of(batch) < (budget // 4 if any(map(self.is_short, running)) else budget)
        if idle_budget and waiting[0] not in batch.preempted and len(running) < self.scheduler.config.max_num_seqs:
            # A request is preempted at most num_preemptions times, so with more free pages the head must be admitted.
            share = 1 << min(self.scheduler.num_preemptions, 16)
            need = self.pool.pages_for(len(waiting[0].token_ids) + 1) + (len(running) + 1) * share
            need *= len(self.groups)
            if len(running) + skipped < self.scheduler.config.max_num_seqs:
                assert need > self.pool.num_free, f"{waiting[0]!r} waits though it would fit"

    def waits_for_pages(self, request: Request, batch) -> bool:
        """Whether a step with a prefix cache computes a page of a prompt that this request has, too."""
        if self.scheduler.prefix_cache is None or request.params.needs_whole_prompt:
            return False
        size, tokens = self.pool.page_size, request.token_ids
        for chunk in batch.prefills:
            ends = range((chunk.start // size + 1) * size, chunk.start + chunk.length + 1, size)
            if any(end < len(tokens) and chunk.request.token_ids[:end] == tokens[:end] for end in ends):
                return True
        return False

    @property
    def short_slots(self) -> int:
        """How many short requests may overtake others at a time."""
        seqs = self.scheduler.config.max_num_seqs
        return 0 if seqs == 1 else max(1, seqs // 16)

    def is_short(self, request: Request) -> bool:
        """Whether a request asks for little: one sequence of few tokens."""
        asked, limit = request.params.max_tokens, self.scheduler.config.max_num_batched_tokens
        cost = request.prompt_len * (1 if request.params.prompt_logprobs is None else 2)
        return request.request.index == 0 and asked is not None and asked <= 16 and cost <= limit // 2

    def check_fairness(self, batch, running: list[Request], waiting: list[Request]) -> None:
        """A large request holds up no other one: neither by its further sequences nor, for a short one, by its length.

        Only where pages are plenty, so that slots and tokens are what is short.
        """
        size, groups = self.pool.page_size, len(self.groups)
        longest = max(len(request.token_ids) for request in [*waiting, *running])
        share = 1 << min(self.scheduler.num_preemptions, 16)
        plenty = groups * (longest // size + 2 + (len(running) + 1) * share)
        if self.pool.num_free < plenty or batch.preempted or batch.admitted:
            return
        config, head = self.scheduler.config, waiting[0]
        if head.request.index == 0 and self.tokens_before(head, running) < config.max_num_batched_tokens:
            later = [r for r in running if r.request.index and self.order[r] > self.order[head]]
            assert not later, f"{head!r} waits for a further sequence"
        short = [r for r in waiting if self.is_short(r) and r.priority == head.priority]
        if short and len(running) == config.max_num_seqs:
            count = sum(map(self.is_short, running))
            long = [r for r in running[:] if not self.is_short(r) and r.priority >= short[0].priority]
            first = min(running, key=self.order.__getitem__)
            assert count >= self.short_slots or not set(long) - {first}, f"{short[0]!r} waits for a long request"

    def tokens_before(self, head: Request, running: list[Request]) -> int:
        """Return how many tokens the prompts before `head` and the decodes need, less the one whose slot it would take.

        A step may compute fewer of them: beside short requests, or if log-probabilities leave a token of the budget.
        """
        if len(running) == self.scheduler.config.max_num_seqs:
            running = sorted(running, key=self.order.__getitem__)[:-1]
        left = {request: request.length - request.num_computed for request in running}
        prompts = [r for r in running if left[r] > 1 and self.order[r] < self.order[head]]
        decodes = sum(1 for count in left.values() if count == 1)
        return decodes + sum(left[request] * request.prompt_token_cost for request in prompts)

    def drain(self) -> None:
        """Run until all requests have ended, within a step limit that depends only on the live requests."""
        live = self.scheduler.requests()
        longest = max((self.scheduler.token_limit(request) for request in live), default=0)
        for _ in range(len(live) * (2 * longest + 4)):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.step()
        self.scheduler.idle_check()
        assert all(request.state.is_final for request in self.accepted)

    def check_outputs(self) -> None:
        """Check that a request that saw only one set of weights has a prefix of the tokens it generates alone."""
        for request in self.accepted:
            if self.first_weights.get(request) != self.weights:
                continue
            value = 0
            for position, token in enumerate(request.token_ids):
                if position >= request.prompt_len:
                    assert token == sampled(value), f"{request!r} went astray at {position}"
                value = value_after(value, token, self.weights)


GROUPS = st.one_of(
    st.just((None,)), st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3).map(tuple), st.just((None, 5))
)
SHARED = [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
REQUESTS = st.fixed_dictionaries(
    {
        "tail": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        "shared": st.sampled_from([0, 4, 8, 12]),
        "priority": st.sampled_from([1, 1, 1, 0, 2]),
        "max_tokens": st.sampled_from([24, 12, 5, 30, 2, 1, 0, None]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "arrival": st.integers(0, 3),
        "index": st.sampled_from([0, 0, 1, 2]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, failures, aborts, finishes and new weights in any order, with all invariants checked after each."""

    @initialize(
        num_pages=st.integers(4, 24) | st.just(200),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 24),
        max_model_len=st.integers(12, 60),
        cached=st.booleans(),
        async_scheduling=st.booleans(),
        groups=GROUPS,
    )
    def start(self, num_pages, page_size, max_num_seqs, spare_tokens, max_model_len, cached, async_scheduling, groups):
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_model_len=max_model_len,
            groups=groups,
        )
        self.sim = Simulation(num_pages, page_size, config, cached, async_scheduling)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def add(self, requests):
        for fields in requests:
            self.add_one(**fields)

    def add_one(self, tail, shared, priority, max_tokens, prompt_logprobs, arrival, index):
        sim, prompt = self.sim, SHARED[:shared] + tail
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        total = len(prompt) + (1 if max_tokens is None else max_tokens)
        stored = max(len(prompt), total - 1)
        config = sim.scheduler.config
        pages = most_pages(config.groups, sim.pool.page_size, config.max_num_batched_tokens, stored)
        fits = total <= config.max_model_len and pages <= sim.pool.capacity
        if not fits:
            with pytest.raises(PromptTooLong):
                sim.add(prompt, priority, params, float(arrival), index)
        elif sim.scheduler.num_waiting < MAX_WAITING:  # as a server bounds the queue
            sim.add(prompt, priority, params, float(arrival), index)

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self.sim.step()

    @precondition(lambda self: self.sim.scheduler.num_running)
    @rule()
    def step_fails(self):
        self.sim.step(fails=True)

    @precondition(lambda self: len(self.sim.scheduler.requests()) > 2)
    @rule(data=st.data(), mid_step=st.booleans())
    def abort(self, data, mid_step):
        request = data.draw(st.sampled_from(self.sim.scheduler.requests()))
        if mid_step:
            self.sim.step(abort_mid_step=request)
        else:
            assert self.sim.scheduler.abort(request.request_id)
        assert request.state.is_final and not request.page_tables and request.slot is None
        assert not self.sim.scheduler.abort(request.request_id)

    @precondition(lambda self: self.sim.scheduler.num_running)
    @rule(data=st.data())
    def stop(self, data):
        running = [request for request in self.sim.scheduler.requests() if request.slot is not None]
        self.sim.scheduler.finish(data.draw(st.sampled_from(running)), RequestState.FINISHED)

    @rule(recompute=st.booleans())
    def new_weights(self, recompute):
        self.sim.wait()
        if recompute:
            self.sim.scheduler.preempt_all()
            assert self.sim.scheduler.num_running == 0 and self.sim.pool.num_in_use == 0
        self.sim.weights += 1
        self.sim.scheduler.set_weight_version(str(self.sim.weights))

    @precondition(lambda self: self.sim.cache)
    @rule()
    def drop_cache(self):
        self.sim.cache.reset()
        assert len(self.sim.cache) == 0

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "sim"):
            self.sim.scheduler.check()
            self.sim.view.apply(self.sim.events.take())
            assert len(self.sim.view.blocks) == (0 if self.sim.cache is None else len(self.sim.cache))
            live = self.sim.scheduler.requests()
            assert len(live) == self.sim.scheduler.num_running + self.sim.scheduler.num_waiting
            assert {r for r in self.sim.accepted if not r.state.is_final} == set(live)

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.drain()
            self.sim.check_outputs()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def long_prompt_beside_a_short_request() -> Simulation:
    """A step has tokens left that the long prompt may not take, and a slot is free."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=29)
    sim = Simulation(200, 1, config, cached=False)
    sim.add([0] * 5, 1, SamplingParams(max_tokens=12), arrival=0.0, index=1)
    sim.add([0], 1, SamplingParams(max_tokens=16), arrival=0.0)
    sim.step()
    sim.step()
    sim.add([0] * 14, 1, SamplingParams(max_tokens=12), arrival=0.0)
    return sim


def long_prompt_with_logprobs() -> Simulation:
    """A step has one token left, and a prompt token with log-probabilities takes two."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=29)
    sim = Simulation(200, 1, config, cached=False)
    sim.add([0], 1, SamplingParams(max_tokens=24), arrival=0.0, index=1)
    sim.step()
    sim.add([0] * 12, 1, SamplingParams(max_tokens=12, prompt_logprobs=1), arrival=0.0)
    return sim


@pytest.mark.parametrize("workload", [long_prompt_beside_a_short_request, long_prompt_with_logprobs])
def test_a_request_waits_for_a_long_prompt_before_it_while_a_further_sequence_runs(workload):
    sim = workload()
    sim.step()
    further, long = sim.accepted[0], sim.accepted[-1]
    head = sim.add([0] * 12, 1, SamplingParams(max_tokens=12), arrival=1.0)
    sim.step()
    assert further.slot is not None and head.slot is None
    while head.slot is None:
        sim.step()
    assert long.num_computed >= long.prompt_len - 1
    sim.drain()
    sim.check_outputs()


def overload(num_requests: int, num_pages: int, cached: bool, groups: tuple[int | None, ...] = (None,)) -> Simulation:
    """Add requests at once that fit alone but not together."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, groups=groups)
    sim = Simulation(num_pages, 4, config, cached)
    for number in range(num_requests):
        prompt = [(number * 7 + k * k) % VOCAB for k in range(4 + number % 9)]
        sim.add(prompt, number % 2, SamplingParams(max_tokens=40), arrival=float(number))
    return sim


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("groups", "num_pages"), [((None,), 31), ((None, 9), 45), ((30,), 28), ((20, None, 5), 80)])
def test_overload_ends_with_the_same_tokens_and_little_recomputation(cached, groups, num_pages):
    sim = overload(24, num_pages, cached, groups)
    sim.drain()
    sim.check_outputs()
    assert all(request.output_len == 40 for request in sim.accepted)
    assert 0 < sim.scheduler.num_preemptions <= 2 * len(sim.accepted), "requests are preempted again and again"
