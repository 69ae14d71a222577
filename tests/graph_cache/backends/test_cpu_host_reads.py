"""Host reads that bypass the dispatcher are refused during a capture, and only there."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch

from graph_cache.backends import backend_for
from graph_cache.backends.cpu_host_reads import refuse_host_reads
from graph_cache.core.pool import GraphPool
from graph_cache.core.runner import GraphRunner
from graph_cache.errors import CaptureRefused
from tests.support.waiting import PATIENCE


def scripted_list(x):
    values: list[float] = x[0].tolist()
    return values


def calls_scripted_list(x):
    return scripted_list(x)


class Scripted(torch.nn.Module):
    def forward(self, x):
        values: list[float] = x[0].tolist()
        return values


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("code", [scripted_list, calls_scripted_list, Scripted], ids=lambda code: code.__name__)
def test_torch_script_that_reads_a_tensor_is_refused(code):
    scripted = torch.jit.script(code() if isinstance(code, type) else code)
    x = torch.ones(2, 3)
    runner = GraphRunner(lambda: x.mul_(len(scripted(x))), GraphPool(backend_for("cpu")), statics=lambda: [x])
    with pytest.raises(CaptureRefused, match="TorchScript"):
        runner.capture()
    assert scripted(x) == [1.0] * 3  # outside of captures it may


READS = {
    "tensor_of_tensors": lambda x: torch.tensor([x.sum(), x.sum()]),
    "tensor_of_nested_tensors": lambda x: torch.tensor([[1.0, x.sum()]]),
    "tensor_of_integers": lambda x: torch.tensor([x.sum().long()]),
    "tensor_of_booleans": lambda x: torch.tensor([x.sum() > 1]),
    "as_tensor": lambda x: torch.as_tensor([x.sum()]),
    "asarray_of_torch": lambda x: torch.asarray([x.sum()]),
    "new_tensor": lambda x: x.new_tensor([x.sum()]),
    "legacy_constructor": lambda x: torch.LongTensor([x.sum().long(), x.sum().long()]),
    "default_constructor": lambda x: torch.Tensor([x.sum()]),
    "new": lambda x: x.new([x.sum()]),
    "from_dlpack": lambda x: np.from_dlpack(x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "of_what_was_computed": lambda x: x.sum(0).tolist(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_capture_that_reads_a_tensor_is_refused(read, grad):
    x = torch.ones(2, 3)
    runner = GraphRunner(
        lambda: x.mul_(len(read(x))), GraphPool(backend_for("cpu")), statics=lambda: [x], grad=grad, checked=not grad
    )
    with pytest.raises(CaptureRefused, match="the host reads a tensor's values .* or pass the value as an argument"):
        runner.capture()
    assert x.tolist() == [[1.0] * 3] * 2  # unchanged, and readable again
    assert not {"tolist", "numpy"} & set(vars(torch.Tensor))


def test_constants_may_be_read_by_the_host():
    x = torch.ones(4)

    def double():
        counts = torch.full((2,), 1)
        counts[1] = torch.tensor(2)
        x.mul_(sum((counts + 1).tolist()[:1]))

    runner = GraphRunner(double, GraphPool(backend_for("cpu")), statics=lambda: [x])
    runner.capture()
    runner.replay()
    assert x.tolist() == [2.0] * 4


def test_an_overwritten_constant_may_not_be_read():
    x = torch.ones(2)

    def step():
        counts = torch.zeros(2)
        counts.copy_(x)
        x.mul_(counts.tolist()[0])

    runner = GraphRunner(step, GraphPool(backend_for("cpu")), statics=lambda: [x])
    with pytest.raises(CaptureRefused, match="tolist"):
        runner.capture()


def test_other_threads_are_unaffected_and_the_last_recorder_restores_the_methods():
    found, entered, go_on = [], threading.Event(), threading.Event()

    def record():
        with refuse_host_reads(lambda tensor: False):
            entered.set()
            go_on.wait(PATIENCE)
            with pytest.raises(CaptureRefused):
                torch.ones(1).tolist()
            found.append("refused")

    other = threading.Thread(target=record)
    with refuse_host_reads(lambda tensor: False):
        other.start()
        assert entered.wait(PATIENCE)
    found.append(torch.ones(1).tolist())  # the other thread is still recording
    go_on.set()
    other.join(PATIENCE)
    assert found == [[1.0], "refused"]
    assert not {"tolist", "numpy"} & set(vars(torch.Tensor))


def test_a_refusal_names_the_line_that_reads():
    with pytest.raises(CaptureRefused, match=rf"at {re.escape(__file__)}:\d+, and a replay"):
        with refuse_host_reads(lambda tensor: False):
            float(torch.zeros(1))


def test_a_refusal_names_the_optimizer_and_the_way_out():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    with pytest.raises(CaptureRefused, match=r"AdamW\.step\(\).*Step AdamW outside of the captured function"):
        GraphRunner(optimizer.step, GraphPool(backend_for("cpu")), statics=lambda: [weight]).capture()


def test_one_hot_with_a_number_of_classes_is_captured_and_still_checks_its_argument():
    classes, out = torch.tensor([[0, 2]]), torch.zeros(1, 2, 3, dtype=torch.int64)
    original = torch.nn.functional.one_hot

    def run():
        out.copy_(torch.nn.functional.one_hot(classes, 3))

    runner = GraphRunner(run, GraphPool(backend_for("cpu")), statics=lambda: [classes, out], inference=False)
    runner.capture()
    assert torch.nn.functional.one_hot is original
    classes.copy_(torch.tensor([[1, 0]]))
    runner.replay()
    assert out.tolist() == [[[0, 1, 0], [1, 0, 0]]]
    for wrong in (3, -1):
        classes[0, 1] = wrong
        with pytest.raises(RuntimeError):
            runner.replay()


def test_one_hot_without_a_number_of_classes_is_refused():
    classes = torch.tensor([0, 2])
    runner = GraphRunner(
        lambda: classes.copy_(torch.nn.functional.one_hot(classes).argmax(-1)),
        GraphPool(backend_for("cpu")),
        statics=lambda: [classes],
    )
    with pytest.raises(CaptureRefused, match="the host reads"):
        runner.capture()


def test_a_distribution_that_checks_its_arguments_is_refused_with_what_to_do():
    mean, out = torch.zeros(3), torch.zeros(3)

    def capture(validate_args: bool) -> GraphRunner:
        def run() -> None:
            out.copy_(torch.distributions.Normal(mean, 2.0, validate_args=validate_args).log_prob(mean + 1))

        runner = GraphRunner(run, GraphPool(backend_for("cpu")), statics=lambda: [mean, out])
        runner.capture()
        return runner

    with pytest.raises(CaptureRefused, match="validate_args=False"):
        capture(True)
    runner, other = capture(False), torch.full((3,), 5.0)
    mean.copy_(other)
    runner.replay()
    assert torch.equal(out, torch.distributions.Normal(other, 2.0).log_prob(other + 1))
