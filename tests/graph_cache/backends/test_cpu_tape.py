"""Tape: recorded operations and buffers, and refused operations."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn import functional as F

from graph_cache import BATCH, Buckets, BufferSpec, GraphCache, GraphConfig, Site, StaticBuffers
from graph_cache.backends.cpu_out import out_overload_matches
from graph_cache.backends.cpu_tape import Ref, TapeRecorder
from graph_cache.errors import CaptureRefused
from tests.graph_cache.backends.tapes import recorded


def names(tape):
    return [op.func._schema.name for op in tape.ops]


def test_views_are_recorded_as_geometry_not_as_operations():
    x = torch.randn(4, 6)
    tape = recorded(lambda: (x * 2)[1:, ::2].t() + 1)
    assert names(tape) == ["aten::mul", "aten::add"]
    seen = tape.ops[1].args[0]
    assert seen == Ref(0, torch.float32, (3, 3), (2, 6), 6)


def test_a_buffer_lives_from_the_call_that_makes_it_to_the_last_that_touches_it():
    x = torch.randn(4)

    def fn():
        first = x * 2
        second = first + 1
        second.add_(first.view(2, 2).view(4))
        return second * 3

    buffers = recorded(fn).buffers
    assert [(one.first, one.last) for one in buffers] == [(0, 2), (1, 3), (3, 3)]
    assert [one.nbytes for one in buffers] == [16, 16, 16]


def test_composite_operations_are_decomposed_as_in_eager():
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    assert "aten::linear" not in names(recorded(lambda: F.linear(x, weight)))
    assert "aten::matmul" not in names(recorded(lambda: x @ weight.t()))


def test_a_reused_address_is_a_new_buffer():
    x = torch.randn(64)

    def fn():
        total = torch.zeros(64)
        for _ in range(50):
            total = total + (x * 2)  # each product is freed at once, and its address reused
        return total

    tape = recorded(fn)
    assert len(tape.buffers) == 101


def test_an_external_tensor_keeps_its_memory_when_its_data_is_reassigned():
    weight = torch.nn.Parameter(torch.ones(2, 3))

    def fn():
        before = weight * 1
        weight.data = torch.zeros(2, 3)
        return before

    held = recorded(fn).ops[0].args[0]
    assert held.tolist() == [[1.0] * 3] * 2
    assert not held.requires_grad


def test_state_written_in_place_is_not_an_output():
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    tape = recorded(lambda: torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 1e-5))
    (op,) = tape.ops
    assert op.fresh and not op.in_place
    assert [type(out) for out in op.outs] == [Ref, Ref, Ref]
    assert len(tape.buffers) == 3


def test_an_output_that_aliases_an_input_gets_no_buffer():
    lib = torch.library.Library("encore_tape_test", "FRAGMENT")
    lib.define("both(Tensor(a) x) -> (Tensor(a), Tensor)")
    lib.impl("both", lambda x: (x, x * 2), "CPU")
    x = torch.randn(3)
    tape = recorded(lambda: torch.ops.encore_tape_test.both(x)[1] + 1)
    both = tape.ops[0]
    assert both.outs[0] is None and isinstance(both.outs[1], Ref)
    assert len(tape.buffers) == 2
    assert not both.in_place


@pytest.mark.parametrize("fn", [lambda x: F.mse_loss(x, x * 2), lambda x: torch.rand_like(x)])
def test_calls_whose_out_overload_needs_scratch_or_randomness_are_copied(fn):
    x = torch.randn(4, 8)
    tape = recorded(lambda: fn(x), [torch.default_generator])
    assert not tape.ops[-1].in_place


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda x: x.sum().item(), "host reads"),
        (lambda x: float(x[0, 0]), "host reads"),
        (lambda x: 1 if x.sum() > 0 else 2, "host reads"),
        (lambda x: torch.equal(x, x), "host reads"),
        (lambda x: x.nonzero(), "depends on data"),
        (lambda x: torch.unique(x), "depends on data"),
        (lambda x: x.masked_select(x > 0), "depends on data"),
        (lambda x: torch.repeat_interleave(x, torch.tensor([1, 2]), 0), "depends on data"),
        (lambda x: x[x > 0], "mask"),
        (lambda x: x[torch.ones(2, dtype=torch.uint8)], "mask"),
        (lambda x: x.clone().index_put_((x > 0,), x.sum()), "mask"),
        (lambda x: x.clone().index_put_((x > 0,), torch.tensor([1.0, 2.0])), "mask"),
        (lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0), accumulate=True), "mask"),
        (lambda x: torch.ops.aten._unsafe_index(x, [x > 0]), "mask"),
        (lambda x: x.clone().resize_(1), "moves storage"),
        (lambda x: x.clone().set_(torch.zeros(3)), "moves storage"),
        (lambda x: torch.rand(2), "not registered"),
        (lambda x: torch.empty(2).normal_(), "not registered"),
        (lambda x: F.dropout(x, 0.5), "not registered"),
        (lambda x: F.rrelu(x, training=True), "not registered"),
        (lambda x: torch.rand(2, generator=torch.Generator()), "not registered"),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5), "not registered"),
    ],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_uncapturable_operations_are_refused(fn, what):
    x = torch.randn(2, 3)
    with pytest.raises(CaptureRefused, match=what):
        recorded(lambda: fn(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x[[1, 0]],
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: F.dropout(x, 0.5, training=False) + 1,
        lambda x: F.rrelu(x),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: torch.repeat_interleave(x, 2, 0),
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0)),
        lambda x: operator.setitem(x.clone(), x > 0, 1.0),
    ],
)
def test_capturable_operations_are_recorded(fn):
    x = torch.randn(2, 3)
    assert recorded(lambda: fn(x)).ops


def test_random_operations_need_a_registered_generator():
    mine, other = torch.Generator(), torch.Generator()
    assert recorded(lambda: torch.rand(2, generator=mine), [mine]).ops
    with pytest.raises(CaptureRefused):
        recorded(lambda: torch.rand(2, generator=other), [mine])
    with pytest.raises(CaptureRefused):
        recorded(lambda: torch.rand(2), [mine])


@pytest.mark.parametrize(
    ("fn", "reads"),
    [
        (lambda x, out: out.copy_(x), False),
        (lambda x, out: out.zero_(), False),
        (lambda x, out: torch.mul(x, 2, out=out), False),
        (lambda x, out: (out.copy_(x), out.argmax()), False),
        (lambda x, out: (out[:2].copy_(x[:2]), out[:2].argmax()), False),
        (lambda x, out: (out[:2].copy_(x[:2]), out.argmax()), True),  # the rest is from outside
        (lambda x, out: (out.argmax(), out.copy_(x)), True),
        (lambda x, out: out.copy_(out), True),
        (lambda x, out: out.add_(x), True),
        (lambda x, out: torch.mul(out, 2, out=out), True),
        (lambda x, out: (out.fill_(out.sum()), x), True),
        (lambda x, out: torch.stack([x, out]), True),
        (lambda x, out: (out.copy_(x), out.view(torch.int32).sum()), True),  # not exactly what was written
    ],
)
def test_a_tape_knows_whether_the_run_reads_memory_before_it_overwrites_it(fn, reads):
    x, out = torch.randn(4, 3), torch.randn(4, 3)
    assert recorded(lambda: fn(x, out)).reads([out]) is reads
    assert not recorded(lambda: fn(x, out)).reads([torch.ones(4, 3)])


def test_an_overload_is_tried_once_for_each_geometry_where_replays_are_checked(monkeypatch):
    tried = []

    def try_overload(func, args, kwargs, results):
        tried.append(func._schema.name)
        return out_overload_matches(func, args, kwargs, results)

    monkeypatch.setattr("graph_cache.backends.cpu_tape.out_overload_matches", try_overload)
    x, wide = torch.randn(4, 3), torch.randn(4, 6)

    def fn():
        for _ in range(5):
            (x * 2, x * 3, x * 3.0, x.exp(), wide[:, ::2].exp())

    def ops(matches) -> list[bool]:
        recorder = TapeRecorder((), matches=matches)
        with torch.inference_mode(), recorder:
            fn()
        return [op.in_place for op in recorder.tape.ops]

    wanted, known = ops(None), {}
    assert len(tried) == 25
    assert ops(known) == ops(known) == wanted
    assert len(tried) == 30 and len(known) == 5


def test_a_capture_runs_from_noise_only_where_noise_could_change_the_run():
    """A run from noise repeats the recorded run if it reads no floating-point number from outside."""

    def runs(fn) -> int:
        count = 0
        specs = {"x": BufferSpec((BATCH, 3), torch.float32), "i": BufferSpec((BATCH,), torch.int64)}
        buffers = StaticBuffers(specs, 2, torch.device("cpu"))

        def body(x, i):
            nonlocal count
            count += 1
            fn(x, i)

        cache = GraphCache(config=GraphConfig())
        cache.add_site(Site("step", [body], buffers, Buckets((2,))))
        cache.warm()
        assert cache.stats.captures.total() == 1
        return count

    assert runs(lambda x, i: x.copy_(i[:, None].expand(2, 3))) == 2
    assert runs(lambda x, i: x.copy_(x + i[:, None])) == 3
