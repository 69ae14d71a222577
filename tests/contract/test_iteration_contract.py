"""A whole training iteration as one graph, on every backend."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from graph_cache.core.stats import CacheStats
from tests.contract.training_models import (
    MODELS,
    WIDTH,
    assert_same,
    batches,
    iterate,
    iteration_of,
    mlp,
    twins,
)


@pytest.mark.parametrize(
    "options",
    [{}, {"inside": True}, {"inside": True, "step_inside": True}],
    ids=["accumulating", "clearing", "with_optimizer"],
)
@pytest.mark.parametrize("name", ["mlp", "encoder", "batch_norm"])
def test_a_whole_iteration_equals_eager_bit_for_bit(pool, device, name, options):
    eager, graphed = twins(MODELS[name][0], device)
    data, stats = batches(12, device), CacheStats()
    expected = iterate(eager, data, lambda step: step, **options)
    assert_same(iterate(graphed, data, lambda step: iteration_of(pool, stats, step), **options), expected)
    assert sum(stats.replays.values()) >= 5
    for key, value in eager.state_dict().items():
        assert torch.equal(graphed.state_dict()[key], value), key


def test_a_changed_number_of_microbatches_or_shape_never_replays_a_stale_graph(pool, device):
    eager, graphed = twins(mlp, device)
    stats = CacheStats()
    data = batches(5, device) + batches(4, device, micro=3) + batches(4, device, rows=3) + batches(2, device)
    expected = iterate(eager, data, lambda step: step, inside=True)
    holder = []

    def wrap(step):
        holder.append(iteration_of(pool, stats, step))
        return holder[0]

    assert_same(iterate(graphed, data, wrap, inside=True), expected)
    assert len(holder[0].table()) == 3
    holder[0].clear()
    assert holder[0].table() == []


def test_clearing_tries_a_failed_capture_again_without_another_warm_up(pool, device):
    _, graphed = twins(mlp, device)
    stats, reads = CacheStats(), threading.Lock()  # no Python state holds whether it is locked
    reads.acquire()

    def step(x):
        loss = graphed(x).pow(2).mean()
        return loss * (2.0 if reads.locked() and loss.item() > 1e9 else 1.0)

    run, x = iteration_of(pool, stats, step), batches(1, device)[0][0]
    for _ in range(6):
        run(x)
    reads.release()
    run(x)
    assert stats.failed_captures.total() == 1 and run.table() == []
    warmed = stats.fallbacks["iteration", "full_iteration", "warming_up"]
    run.clear()
    for _ in range(3):
        run(x)
    row = run.table()[0]
    assert (row["state"], row["replays"], row["failure"]) == ("captured", 2, None)
    assert stats.fallbacks["iteration", "full_iteration", "warming_up"] == warmed


def test_a_step_that_reads_on_the_host_runs_eager(pool, device):
    eager, graphed = twins(mlp, device)
    stats = CacheStats()

    def make(model):
        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            return torch.tensor(loss.item())

        return step

    torch.manual_seed(1)
    ours, run = [], iteration_of(pool, stats, make(graphed))
    x = batches(1, device)[0][0]
    for _ in range(6):
        ours.append([run(x), *(p.grad.clone() for p in graphed.parameters())])
    torch.manual_seed(1)
    step = make(eager)
    theirs = [[step(x), *(p.grad.clone() for p in eager.parameters())] for _ in range(6)]
    assert stats.failed_captures
    assert not stats.replays
    assert len(ours) == len(theirs)


SEEDS = {
    "manual_seed": lambda generator, state: generator.manual_seed(11),
    "set_state": lambda generator, state: generator.set_state(state),
    "set_rng_state": lambda generator, state: (torch.cuda if generator.device.type == "cuda" else torch).set_rng_state(
        state
    ),
}


@pytest.mark.parametrize("how", SEEDS)
def test_a_step_that_sets_the_seed_that_a_generator_has_already_runs_eager(pool, device, how):
    """Its state is the same before and after, so only the call itself shows that each step begins there."""
    generator = pool.backend.default_generator
    generator.manual_seed(11)
    state = generator.get_state()

    def step(x):
        SEEDS[how](generator, state)
        return x + torch.rand_like(x)

    stats = CacheStats()
    run, x = iteration_of(pool, stats, step), torch.zeros(4, WIDTH, device=device)
    expected = step(x)
    for _ in range(6):
        generator.set_state(state)
        assert torch.equal(run(x), expected)
    assert stats.failed_captures and not stats.replays


# ---- ten steps of a job, with two microbatches outstanding -----------------------------------------------------------

RATE = 0.05
FIRST = 1  # the first call runs eager and registers the modules, so later calls have another signature


def outstanding_step(model, *, clear=False):
    """Return a step that runs all forwards before the first backward; without gradients it has no backward."""

    def step(micro):
        if clear:
            model.zero_grad()
        losses = [model(x).pow(2).mean() for x in micro]
        if torch.is_grad_enabled():
            for loss in losses:
                loss.backward()
        return [loss.detach() for loss in losses]

    return step


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def descend(model):
    """Minimal SGD that looks the parameters up at each call, so that they may be replaced."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.sub_(RATE * parameter.grad)


def counted(stats):
    """Return the numbers of captured, replayed and eager calls."""
    return sum(stats.captures.values()), sum(stats.replays.values()), sum(stats.fallbacks.values())


@pytest.mark.parametrize("clearing", ["before", "inside", "never"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "encoder", "lstm"])
def test_ten_steps_with_two_microbatches_outstanding_equal_eager(pool, device, name, clearing):
    """Gradients are set to None before each call, by the step itself, or never, so that they accumulate."""
    eager, graphed = twins(MODELS[name][0], device)
    data, stats = batches(10, device), CacheStats()

    def job(model, run):
        torch.manual_seed(1)
        optimizer, log = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), []
        for micro in data:
            if clearing == "before":
                optimizer.zero_grad()
            log.append([*(loss.clone() for loss in run(micro)), *gradients(model)])
            optimizer.step()
        return log

    expected = job(eager, outstanding_step(eager, clear=clearing == "inside"))
    run = iteration_of(pool, stats, outstanding_step(graphed, clear=clearing == "inside"))
    assert_same(job(graphed, run), expected)
    assert len(expected[0]) == 2 + len(list(eager.parameters()))
    assert counted(stats) == (1, 6, FIRST + 2)
    assert all(torch.equal(graphed.state_dict()[key], value) for key, value in eager.state_dict().items())


@pytest.mark.parametrize(
    ("evaluates", "without_gradients"),
    [(True, True), (True, False), (False, True)],
    ids=["eval_under_no_grad", "eval_alone", "no_grad_alone"],
)
@pytest.mark.parametrize("name", ["gpt", "batch_norm"])
def test_validation_and_training_use_separate_graphs(pool, device, name, evaluates, without_gradients):
    eager, graphed = twins(MODELS[name][0], device)
    data, others, stats = batches(10, device), batches(20, device)[10:], CacheStats()
    holder = iteration_of(pool, stats, outstanding_step(graphed))

    def job(model, run):
        torch.manual_seed(1)
        log = []
        for micro, other in zip(data, others, strict=True):
            model.zero_grad()
            log.append([*run(micro), *gradients(model)])
            model.train(not evaluates)
            with torch.set_grad_enabled(not without_gradients):
                log.append([*run(other), *gradients(model), *(buffer.clone() for buffer in model.buffers())])
            model.train()
            descend(model)
        return log

    assert_same(job(graphed, holder), job(eager, outstanding_step(eager)))
    assert len(holder.table()) == 2
    assert counted(stats) == (2, 13, FIRST + 4)
    assert not stats.invalidations


# ---- calls that differ from the capture ------------------------------------------------------------------------------


def differing(model, device):
    """Return a step with a result that depends on its argument's dtype and on a keyword's value and type."""

    def step(x, *, factor=None, reduce="mean"):
        counting = torch.arange(WIDTH, device=device)
        weights = counting if factor is None else counting * factor  # the dtype differs for 2 and 2.0
        out = model((x / 3).float()).pow(2) * (weights / 7)
        loss = out.mean() if reduce == "mean" else out.sum() * 1e-3
        loss.backward()
        return loss.detach(), weights

    return step


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"factor": 3},
        {"factor": 2.0},
        {"factor": True},
        {"factor": None},
        {"reduce": "sum"},
        {"left_out": True},
    ],
    ids=lambda changed: "_".join(map(str, next(iter(changed.items())))),
)
def test_a_changed_dtype_or_keyword_is_never_served_by_another_signatures_graph(pool, device, changed):
    eager, graphed = twins(mlp, device)
    stats, data = CacheStats(), [micro[0] for micro in batches(15, device, micro=1)]
    plain = {
        "dtype": torch.float32,
        "factor": 2 if changed.get("factor") is not True else 1,
        "reduce": "mean",
        "left_out": False,
    }

    def job(model, run):
        torch.manual_seed(1)
        log = []
        for index, x in enumerate(data):
            settings = dict(plain | changed if index // 5 == 1 else plain)
            x = x.to(settings.pop("dtype"))
            if settings.pop("left_out"):
                settings.pop("factor")
            model.zero_grad()
            loss, weights = run(x, **settings)
            log.append([loss, weights, *gradients(model)])
            assert weights.dtype is (torch.float32 if isinstance(settings.get("factor"), float) else torch.int64)
            descend(model)
        return log

    run = iteration_of(pool, stats, differing(graphed, device))
    assert_same(job(graphed, run), job(eager, differing(eager, device)))
    assert len(run.table()) == 2
    assert counted(stats) == (2, 8, FIRST + 4)  # the first signature replays again at the end
    assert stats.fallbacks == {("iteration", "full_iteration", "warming_up"): FIRST + 4}


def moved_storage(model):
    model.linear.weight.data = model.linear.weight.data * 2


def replaced_parameter(model):
    model.linear.weight = torch.nn.Parameter(model.linear.weight.detach() * 2)


def replaced_buffer(model):
    model.norm.running_mean = model.norm.running_mean * 2


def frozen_parameter_moved(model):
    model.norm.bias.data = model.norm.bias.data + 1


@pytest.mark.parametrize(
    "move", [moved_storage, replaced_parameter, replaced_buffer, frozen_parameter_moved], ids=lambda move: move.__name__
)
def test_tensors_moved_to_other_storage_are_noticed_and_recaptured(pool, device, move):
    eager, graphed = twins(MODELS["batch_norm"][0], device)
    data, stats = batches(12, device), CacheStats()
    for model in (eager, graphed):
        model.norm.bias.requires_grad_(False)

    def job(model, run):
        log = []
        for index, micro in enumerate(data):
            if index == 6:
                move(model)
            model.zero_grad()
            log.append([*run(micro), *gradients(model), *(buffer.clone() for buffer in model.buffers())])
            descend(model)
        return log

    run = iteration_of(pool, stats, outstanding_step(graphed))
    assert_same(job(graphed, run), job(eager, outstanding_step(eager)))
    assert stats.invalidations == {"stale_address": 1}
    if move is replaced_parameter:  # it may still be trained while anything holds it, so that steps warm up again
        assert counted(stats)[1] >= 4
    else:
        assert counted(stats) == (2, 7, FIRST + 2)
        assert len(run.table()) == 1


@pytest.mark.parametrize("is_kept", [False, True], ids=["old_gone", "old_kept"])
def test_a_replaced_submodule_is_noticed(pool, device, is_kept):
    eager, graphed = twins(MODELS["mlp"][0], device)
    data, stats, kept = batches(14, device), CacheStats(), []

    def job(model, run):
        torch.manual_seed(1)
        log = []
        for index, micro in enumerate(data):
            if index == 6:
                kept.extend([model[1]] if is_kept else [])
                model[1] = copy.deepcopy(model[2])
            log.append([*run(micro), *gradients(model)])
        return log

    run = iteration_of(pool, stats, outstanding_step(graphed, clear=True))
    assert_same(job(graphed, run), job(eager, outstanding_step(eager, clear=True)))
    if is_kept:  # otherwise a module is missing, which changes the signature
        assert stats.invalidations == {"stale_address": 1}
    assert sum(stats.replays.values()) > 3


@pytest.mark.parametrize("name", ["mlp", "batch_norm"])
def test_a_step_refused_at_its_end_is_not_applied_twice(pool, device, name):
    """A capture on a CPU executes the step: its writes and random draws are undone before the step runs eager."""
    eager, graphed = twins(MODELS[name][0], device)
    data, stats, logs = batches(6, device, micro=1), CacheStats(), []
    for model in (eager, graphed):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), loss.item()

        run = step if model is eager else iteration_of(pool, stats, step)
        logs.append([[run(x)[0], *[value.clone() for value in model.state_dict().values()]] for (x,) in data])
    assert_same(*logs)
    assert sum(stats.failed_captures.values()) == 1 and not stats.replays
