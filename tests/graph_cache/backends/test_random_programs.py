"""Random programs of views, in-place writes and new tensors: replays of several buckets on one arena equal eager."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_cache.backends.cpu_arena import Arena
from tests.graph_cache.backends.tapes import eager, programs, same_bits

WIDTH = 6

MADE = {
    "add": lambda a, b: a + b[: len(a), : a.shape[1]].expand_as(a) if a.shape == b.shape else a + 1,
    "mul": lambda a, b: a * 0.5,
    "tanh": lambda a, b: a.tanh(),
    "softmax": lambda a, b: a.softmax(-1),
    "sort": lambda a, b: a.sort(-1)[0],
    "cumsum": lambda a, b: a.cumsum(0),
    "norm": lambda a, b: a - a.mean(-1, keepdim=True),
    "gram": lambda a, b: a @ a.t(),
    "cat": lambda a, b: torch.cat((a, a.flip(0)), 1),
    "max": lambda a, b: a.max(-1, keepdim=True)[0] - a,
    "where": lambda a, b: torch.where(a > 0, a, 0.25),
    "gather": lambda a, b: a[torch.arange(len(a) - 1, -1, -1)],
    "fill": lambda a, b: torch.zeros_like(a) + b.sum(),
}
SEEN = {
    "transpose": lambda a: a.t(),
    "step": lambda a: a[:, ::2],
    "first": lambda a: a[: max(1, len(a) // 2)],
    "flat": lambda a: a.reshape(1, -1),
    "tail": lambda a: a[-1:],
    "same": lambda a: a.view(a.shape),
}
WRITTEN = {
    "add_": lambda a, b: a.add_(1),
    "mul_": lambda a, b: a.mul_(0.5),
    "copy_": lambda a, b: a.copy_(b.mean()),
    "fill row": lambda a, b: a[0].fill_(0.125),
    "relu_": lambda a, b: a.relu_(),
    "put_": lambda a, b: a.index_put_((torch.zeros(1, dtype=torch.int64),), b.sum()),
    "out": lambda a, b: torch.sin(a, out=a),
    "swap": lambda a, b: a.t_(),
}
steps = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.sampled_from(sorted(MADE)), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("see"), st.sampled_from(sorted(SEEN)), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("write"), st.sampled_from(sorted(WRITTEN)), st.integers(0, 99), st.integers(0, 99)),
    ),
    min_size=1,
    max_size=12,
)


def interpreter(plan):
    """Return a callable that runs the plan: each step takes earlier tensors by index, and may write into them."""

    def fn(x, y):
        made = [x, y, x * 1.5]
        for kind, name, first, second in plan:
            a, b = made[first % len(made)], made[second % len(made)]
            if kind == "make":
                made.append(MADE[name](a, b))
            elif kind == "see":
                made.append(SEEN[name](a))
            elif a.numel() <= 10_000:
                WRITTEN[name](a.view(a.shape) if name == "swap" else a, b)
        return made

    return fn


@settings(max_examples=40, deadline=None)
@given(steps, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1000)), min_size=3, max_size=6))
def test_replays_of_several_buckets_interleaved_equal_eager_bit_for_bit(plan, runs):
    fn, arena = interpreter(plan), Arena()
    statics = [(torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)) for rows in (4, 2, 1)]
    captured = [programs(fn, x, y, arena=arena) for x, y in statics]
    for bucket, seed in runs:
        for engine, replay in captured[bucket].items():
            x, y = statics[bucket]
            noise = torch.Generator().manual_seed(seed)
            x.copy_(torch.randn(x.shape, generator=noise))
            y.copy_(torch.randn(y.shape, generator=noise))
            mine, other = x.clone(), y.clone()
            wanted = eager(fn, mine, other)
            for got, want in zip(replay(), wanted, strict=True):
                assert same_bits(got, want), engine
            assert same_bits(x, mine) and same_bits(y, other), engine  # writes into its inputs
