"""Megatron's `forward_backward_func` from a graph equals eager on real GPTModels and never replays stale values."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

from tests.graph_cache.adapters.megatron.loops import (
    MICRO,
    assert_same,
    batches,
    counts,
    doubled_loss,
    forward_step_with,
    graphed,
    iterate,
    loss_and_tokens,
    mean_loss,
    no_pipelining,
    train,
    two_stages,
)
from tests.support.megatron_models import gpt


def test_loss_and_all_gradients_of_ten_steps_equal_eager():
    run, stats = graphed()
    assert_same(train(run, gpt()), train(no_pipelining, gpt()))
    assert counts(stats) == (1, 7, {"warming_up": 2})
    assert [(row["module"], row["engine"]) for row in run.table()] == [("iteration", "torchscript")]
    run.clear()
    assert run.table() == []


def test_gradients_that_accumulate_over_iterations_equal_eager():
    def twice(run, model, step):
        return [iterate(run, model, 2 * step), iterate(run, model, 2 * step + 1)]

    run, stats = graphed()
    assert_same(train(run, gpt(), each=twice, steps=6), train(no_pipelining, gpt(), each=twice, steps=6))
    assert counts(stats) == (2, 6, {"warming_up": 4})


def test_finalize_no_sync_and_changing_loss_scale_equal_eager():
    def prepared():
        model = gpt(calculate_per_token_loss=True)
        last = []

        @contextlib.contextmanager
        def no_sync():
            yield
            last.append(True)

        def reduce(parameter):  # like DDP, with the last microbatch only
            if last:
                parameter.grad.mul_(0.75)

        def finalize(models, num_tokens, **groups):
            last.clear()
            for parameter in models[0].parameters():
                parameter.grad.div_(num_tokens)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        model.config.no_sync_func, model.config.finalize_model_grads_func = no_sync, finalize
        return model

    def rescale(model, step):  # a dynamic scale is a new tensor after each change
        scale = torch.tensor([2.0 ** (step // 2)])
        model.config.grad_scale_func = lambda loss: scale * loss

    each = functools.partial(iterate, forward_step_func=forward_step_with(loss_and_tokens))
    run, stats = graphed()
    ours, theirs = prepared(), prepared()
    assert_same(train(run, ours, each=each, before=rescale), train(no_pipelining, theirs, each=each, before=rescale))
    assert counts(stats) == (1, 7, {"warming_up": 2})
    assert ours.config.grad_scale_func(torch.ones(1)).item() == 16.0  # the original function is restored


def test_megatrons_own_loss_equals_eager():
    def forward_step(data_iterator, model):
        given = next(data_iterator)
        return model(given["tokens"], given["positions"], None, labels=given["labels"]), loss

    def loss(each):
        return each.mean(), {"lm loss": each.detach().mean()}

    each = functools.partial(iterate, forward_step_func=forward_step)
    run, stats = graphed()
    assert_same(train(run, gpt(), each=each), train(no_pipelining, gpt(), each=each))
    assert counts(stats) == (1, 7, {"warming_up": 2})


def test_dropout_equals_eager_from_the_same_generator_state():
    run, stats = graphed()
    assert_same(train(run, gpt(hidden_dropout=0.1)), train(no_pipelining, gpt(hidden_dropout=0.1)))
    assert counts(stats)[1] == 7


def test_validation_has_its_own_graph_and_keeps_gradients():
    untouched = []

    def each(run, model, step):
        losses = iterate(run, model, step)
        grads = [(one.grad, one.grad.clone()) for one in model.parameters()]
        model.eval()
        with torch.no_grad():
            validated = iterate(run, model, 50 + step, count=2, forward_only=True)
        model.train()
        untouched.extend(
            one.grad is grad and torch.equal(grad, copy)
            for one, (grad, copy) in zip(model.parameters(), grads, strict=True)
        )
        return losses, validated

    run, stats = graphed()
    ours = train(run, gpt(hidden_dropout=0.1), each=each)
    assert_same(ours, train(no_pipelining, gpt(hidden_dropout=0.1), each=each))
    assert all(untouched)
    assert counts(stats) == (2, 14, {"warming_up": 4})


@pytest.mark.parametrize(
    "modes",
    [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)],
    ids=["inference_mode_first", "no_grad_first"],
)
def test_a_graph_serves_calls_under_no_grad_and_in_inference_mode(modes):
    def validate(run, model):
        found = []
        for step in range(8):
            with modes[step >= 5]():
                found += iterate(run, model, step, forward_only=True)
        return [one["lm loss"].clone() for one in found]

    model = gpt()
    run, stats = graphed()
    assert_same(validate(run, model), validate(no_pipelining, model))
    assert counts(stats) == (1, 5, {"warming_up": 2})


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_mode_is_kept_in_captures_and_after_failed_ones(mode):
    seen = []

    def function(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
        seen.append(torch.is_grad_enabled())
        return [model(next(data_iterator)).sum() for _ in range(num_microbatches)]

    def reading(**keywords):
        return [one.item() for one in function(**keywords)]

    captured = []
    for one in (function, functools.wraps(function)(reading)):
        (run, stats), model = graphed(one), nn.Linear(2, 2)
        for seed in range(4):
            with mode():
                run(
                    forward_step_func=None,
                    data_iterator=iter([torch.full((2,), float(seed))]),
                    model=model,
                    num_microbatches=1,
                    forward_only=True,
                )
        captured.append(counts(stats)[0])
    assert captured == [1, 0]
    assert set(seen) == {mode is torch.enable_grad}


def other_config(run, model, step):
    model.config.calculate_per_token_loss = bool(step % 2)
    return iterate(run, model, step, forward_step_func=STEPS[2])


STEPS = [forward_step_with(mean_loss), forward_step_with(doubled_loss), forward_step_with(loss_and_tokens)]
CHANGES = {
    "microbatches": lambda run, model, step: iterate(run, model, step, count=2 + step % 2),
    "shape": lambda run, model, step: iterate(run, model, step, length=12 + 4 * (step % 2)),
    "step_function": lambda run, model, step: iterate(run, model, step, forward_step_func=STEPS[step % 2]),
    "config": other_config,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_settings_never_replay_a_stale_graph(change):
    run, stats = graphed()
    assert_same(train(run, gpt(), each=CHANGES[change]), train(no_pipelining, gpt(), each=CHANGES[change]))
    assert counts(stats) == (2, 4, {"warming_up": 4})


def test_a_keyword_is_compared_by_value_and_type_and_an_object_by_identity():
    seen = []

    def function(
        *,
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        forward_only=False,
        first_val_step=None,
        p2p_communicator=None,
    ):
        seen.append((first_val_step, p2p_communicator))
        return [forward_step_func(data_iterator, model) for _ in range(num_microbatches)]

    class Equal:
        def __eq__(self, other):
            return True

        __hash__ = None

    run, stats = graphed(function, warmup_steps=1)
    model, one, other = nn.Linear(2, 2), Equal(), Equal()

    def ask(**keywords):
        run(forward_step_func=len, data_iterator=None, model=model, num_microbatches=0, **keywords)

    for _ in range(3):
        ask(first_val_step=True)
        ask(first_val_step=1)
        ask(p2p_communicator=one)
        ask(p2p_communicator=other)
    assert counts(stats) == (4, 4, {"warming_up": 4})
    assert [value for value, _ in seen if value is not None] == [True, 1, True, 1]


def test_another_model_never_replays_a_stale_graph():
    def trained(run):
        models, log = [gpt(0), gpt(7)], []
        for step in range(14):
            model = models[step % 2 if step > 4 else 0]
            for one in models:
                one.zero_grad()
            log.append((iterate(run, model, step), [one.grad.clone() for one in model.parameters()]))
        return log

    run, stats = graphed()
    assert_same(trained(run), trained(no_pipelining))
    assert counts(stats) == (3, 5, {"warming_up": 6})
    assert len(run.table()) == 2  # the first graph, captured before the second model was known, was dropped


def test_a_step_that_creates_modules_is_captured():
    def function(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
        loss = nn.MSELoss()(model(next(data_iterator)), torch.ones(2))
        loss.backward()
        return [loss.detach()]

    model = nn.Linear(2, 2)
    run, stats = graphed(function)
    for seed in range(6):
        model.zero_grad()
        run(
            forward_step_func=None, data_iterator=iter([torch.full((2,), float(seed))]), model=model, num_microbatches=1
        )
    assert counts(stats) == (1, 3, {"warming_up": 2})


def test_a_graph_whose_parameters_moved_is_captured_again():
    def move(model, step):
        if step in (5, 6):
            weight = next(model.parameters())
            weight.data = weight.data.clone() * 0.5

    run, stats = graphed()
    assert_same(train(run, gpt(), before=move), train(no_pipelining, gpt(), before=move))
    assert stats.invalidations == {"stale_address": 2}
    assert counts(stats) == (3, 5, {"warming_up": 2})


def test_losses_are_copies_that_later_iterations_do_not_overwrite():
    run, stats = graphed()
    model = gpt()
    kept = [iterate(run, model, step) for step in range(6)]
    copies = [[one["lm loss"].clone() for one in losses] for losses in kept]
    iterate(run, model, 9)
    assert_same([[one["lm loss"] for one in losses] for losses in kept], copies)
    tensors = [one["lm loss"] for losses in kept for one in losses]
    assert len({one.data_ptr() for one in tensors}) == len(tensors)
    assert not any(one.requires_grad for one in tensors)
    assert counts(stats)[1] == 3


def test_model_chunks_have_separate_buffers():
    where = []

    def forward_step(data_iterator, chunk):
        given = next(data_iterator)
        where.append(given["tokens"].untyped_storage()._cdata)  # noqa: SLF001
        return chunk(given["tokens"], given["positions"], None), functools.partial(mean_loss, given)

    def chunks():
        return [gpt(0, num_layers=1, post_process=False), gpt(1, num_layers=1, pre_process=False)]

    def each(run, model, step):
        return iterate(run, model, step, data=[batches(step), batches(step)], forward_step_func=forward_step)

    run, stats = graphed(two_stages)
    ours, captured = train(run, chunks(), each=each), where[-2 * MICRO :]
    assert_same(ours, train(two_stages, chunks(), each=each))
    assert counts(stats) == (1, 7, {"warming_up": 2})
    assert len(set(captured)) == 2 * MICRO


def test_a_stage_without_data_gets_none():
    seen = []

    def function(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
        seen.append(data_iterator)
        return []

    run, _ = graphed(function)
    for given in (None, [None]):
        assert run(forward_step_func=None, data_iterator=given, model=nn.Linear(2, 2), num_microbatches=2) == []
    assert seen == [None, [None]]
