"""GraphCache: modes at the call, inputs that hide differences, and results that depend on padding."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graph_cache.config import GraphConfig
from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache

INPUT = {"x": BufferSpec(("batch", 4), torch.float32)}
TOKENS = {"x": BufferSpec(("batch",), torch.int64)}


def cache_of(pool, device):
    return GraphCache(device=device, pool=pool)


def reasons(cache):
    return {labels[2] for labels, count in cache.stats.fallbacks.items() if count}


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_a_frozen_weight_drops_the_graph(pool, device, kind):
    """Some modules of PyTorch select their kernels by whether their weights require a gradient."""
    torch.manual_seed(0)
    model = (nn.LSTM(4, 4) if kind == "recurrent" else nn.MultiheadAttention(4, 2)).to(device).eval()
    cache = cache_of(pool, device)

    def fn(x):
        x = x[None]
        return (model(x) if kind == "recurrent" else model(x, x, x, need_weights=False))[0][0]

    run = cache.graphed("model", fn, INPUT, independent_rows=True, buckets=(4,), watch=model)
    x = torch.randn(4, 4, device=device)
    for _ in range(2):
        run(x=x)
    assert cache.stats.replays
    next(model.parameters()).requires_grad_(False)
    with torch.inference_mode():
        assert torch.equal(run(x=x), fn(x))
    assert sum(cache.stats.invalidations.values()) == 1


@pytest.mark.parametrize("mode", ["autocast", "eval", "default_dtype", "precision"])
def test_a_call_under_other_modes_than_the_capture_runs_eager(pool, device, mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(device).eval()

    def fn(x):
        return model(x).float() + torch.ones(4, device=x.device, dtype=torch.get_default_dtype())

    cache = cache_of(pool, device)
    run = cache.graphed(
        "model",
        fn,
        INPUT,
        independent_rows=True,
        buckets=(2, 4),
        watch=model,
        generators=[pool.backend.default_generator],
    )
    x = torch.randn(3, 4, device=device)
    run(x=x)
    assert cache.stats.replays
    before = sum(cache.stats.replays.values())
    precision = torch.get_float32_matmul_precision()
    try:
        if mode == "eval":
            model.train()
        elif mode == "default_dtype":
            torch.set_default_dtype(torch.float64)
        elif mode == "precision":
            torch.set_float32_matmul_precision("high" if precision != "high" else "highest")
        with torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast"):
            found = run(x=x)
            if mode != "eval":  # in which dropout draws
                with torch.no_grad():
                    expected = fn(x)
                assert found.dtype == expected.dtype and torch.equal(found, expected)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    assert reasons(cache) == {"other_modes"} and sum(cache.stats.replays.values()) == before
    model.eval()
    run(x=x)
    assert sum(cache.stats.replays.values()) == before + 1


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.nn.functional.linear else result


class Zeroed(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return torch.zeros_like(result)


@pytest.mark.parametrize("mode", [Doubled, Zeroed])
def test_a_call_within_a_mode_that_changes_operations_runs_eager(pool, device, mode):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    cache = cache_of(pool, device)
    run = cache.graphed("model", model, {"input": INPUT["x"]}, independent_rows=True, buckets=(2, 4), watch=model)
    x = torch.randn(3, 4, device=device)
    with torch.no_grad():
        plain = run(input=x)
        with mode():
            found, expected = run(input=x), model(x)
        assert torch.equal(found, expected) and not torch.equal(found, plain)
        assert torch.equal(run(input=x), plain)
    assert reasons(cache) == {"other_modes"} and sum(cache.stats.replays.values()) == 2


def test_a_counter_multiplied_by_a_token_is_found_out(pool):
    if pool.backend.name != "cpu":
        pytest.skip("only the CPU backend compares a replay with eager runs")
    calls = []

    def fn(x):
        calls.append(x)
        return x * len(calls)

    cache = cache_of(pool, "cpu")
    run = cache.graphed("counter", fn, TOKENS, independent_rows=True, buckets=(4,))
    run(x=torch.ones(4, dtype=torch.int64))
    assert cache.stats.failed_captures and not cache.stats.replays


ROWS = {
    "batch_second": lambda x: x.t().contiguous(),
    "mean_over_rows": lambda x: x - x.mean(0),
    "sum_over_rows": lambda x: x.sum(0),
    "softmax_over_rows": lambda x: x.softmax(0),
    "square": lambda x: x @ x.t(),
    "mean_of_normalised_rows": lambda x: nn.functional.layer_norm(x, (4,)).square().mean().round(decimals=3),
    "number_of_rows": lambda x: x / x.shape[0],
    "maximum": lambda x: x - x.amax(0),
    "all": lambda x: torch.where((x > 0.5).all(), x * 2, x),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("warm", [False, True])
def test_results_that_padding_would_change_are_computed_without_padding(pool, device, name, warm):
    cache = cache_of(pool, device)
    run = cache.graphed(name, ROWS[name], INPUT, independent_rows=True, buckets=(2, 4))
    if warm:
        cache.warm()
    for rows in (1, 3, 4):
        for x in (torch.randn(rows, 4, device=device), *(torch.rand(rows, 4, device=device) + low for low in (1, -2))):
            assert torch.equal(run(x=x), ROWS[name](x))
    assert reasons(cache) == {"capture_failed"} and not cache.stats.replays


INTEGER_ROWS = {
    "minimum": lambda x: x - x.min(),
    "mean_of_embeddings": lambda x: TABLE[x] - TABLE[x].mean(0),
    "number_of_rows": lambda x: x + x.shape[0],
}
TABLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", INTEGER_ROWS)
def test_integers_of_other_rows_are_tried_on_a_cpu(pool, device, name):
    if device.type != "cpu":
        pytest.skip("an index out of range ends the use of a GPU")
    cache = cache_of(pool, device)
    run = cache.graphed(name, INTEGER_ROWS[name], TOKENS, independent_rows=True, buckets=(2, 4))
    for rows in (1, 3, 4):
        x = torch.randint(1, 8, (rows,))
        assert torch.equal(run(x=x), INTEGER_ROWS[name](x))
    assert not cache.stats.replays


def test_a_function_that_writes_to_its_input_runs_eager(pool, device):
    cache = cache_of(pool, device)
    run = cache.graphed("adds", lambda x: x.add_(1) * 2, INPUT, independent_rows=True, buckets=(4,))
    for _ in range(3):
        x = torch.zeros(3, 4, device=device)
        assert torch.equal(run(x=x), torch.full_like(x, 2)) and torch.equal(x, torch.ones_like(x))
    assert not cache.stats.replays and "writes to its input x" in cache.stats.failures["adds"]


def test_a_model_switched_to_train_mode_gets_no_padding(pool, device):
    """Its rows depended on no others when they were checked."""
    torch.manual_seed(0)
    model, eager = (nn.BatchNorm1d(4, device=device).eval() for _ in range(2))
    cache = cache_of(pool, device)
    run = cache.graphed("norm", lambda x: model(x), INPUT, independent_rows=True, buckets=(2, 4), watch=model)
    for train, rows in ((False, 3), (True, 3), (True, 2), (False, 3), (False, 2)):
        model.train(train)
        eager.train(train)
        x = torch.randn(rows, 4, device=device)
        with torch.inference_mode():
            torch.testing.assert_close(run(x=x), eager(x), rtol=1e-6, atol=1e-6)
    assert reasons(cache) == {"other_modes"} and sum(cache.stats.replays.values()) == 3


@pytest.mark.parametrize("spec", [INPUT, TOKENS], ids=["floats", "integers"])
def test_an_embedding_that_renormalises_its_weight_gets_no_padding(pool, device, spec):
    """Padding selects rows of the weight that the call does not."""
    torch.manual_seed(0)
    table = nn.Embedding(5, 4, max_norm=0.5, device=device)
    before = table.weight.detach().clone()

    def fn(x):
        return table(x.long().remainder(5))

    cache = cache_of(pool, device)
    run = cache.graphed("embedding", fn, spec, independent_rows=True, buckets=(4,), watch=table)
    x = torch.tensor([2, 4, 3], device=device)
    for _ in range(2):
        run(x=x if spec is TOKENS else x[:, None].expand(3, 4).float())
    assert torch.equal(table.weight[:2], before[:2]) and not torch.equal(table.weight[2:], before[2:])
    assert reasons(cache) == {"capture_failed"} and not cache.stats.replays


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("length", [2, 4, 8])
def test_a_constant_as_long_as_a_bucket_is_not_cut(pool, device, length, warm):
    table = torch.arange(float(length), device=device)
    cache = cache_of(pool, device)
    run = cache.graphed("constant", lambda x: (x * 2, table + 1), INPUT, independent_rows=True, buckets=(2, 4))
    if warm:
        cache.warm()
    for rows in (3, 1, 2, 4, 5):
        x = torch.randn(rows, 4, device=device)
        doubled, constant = run(x=x)
        assert torch.equal(doubled, x * 2) and torch.equal(constant, table + 1)
    assert cache.stats.replays.total() == 4


LINEAR = nn.Linear(4, 4)
OTHER_ROWS = {
    "each_row_twice": lambda x: x.repeat_interleave(2, 0),
    "all_rows_twice": lambda x: torch.cat([x, x]),
    "one_row_more": lambda x: torch.cat([x, x[:1]]),
    "every_other_row": lambda x: x[::2],
    "rows_of_half_the_width": lambda x: x.reshape(-1, 2),
    "transposed": lambda x: x.t(),
    "reversed": lambda x: x.flip(0),
    "shifted_up": lambda x: x.roll(-1, 0),
    "shifted_down": lambda x: x.roll(1, 0),
    "sorted": lambda x: x.sort(0).values,
    "median": lambda x: x.median(0).values.expand_as(x),
    "one_per_mille_of_the_rows": lambda x: x * (1 + 1e-3 * x.shape[0]),
    "rows_in_one_column_of_many": lambda x: torch.cat([x.repeat(1, 20), x[:, :1] / len(x)], 1),
    "rows_after_a_product": lambda x: LINEAR(x) * (1 + 1e-4 * len(x)),
    "number_of_rows": lambda x: torch.full((2,), x.shape[0], device=x.device),
    "positions_in_the_batch": lambda x: torch.linspace(0, 1, len(x), device=x.device)[:, None] + x,
    "at_most_two_rows": lambda x: x[:2],
    "branch_at_two_rows": lambda x: x.flip(0) if len(x) == 2 else x,
    "branch_on_the_dtype": lambda x: x.double() if len(x) == 3 else x,
    "counts_rows": lambda x: x * (x != 9.0).any(1).sum(),
    "complex_mean": lambda x: torch.complex(x, x) - torch.complex(x, x).mean(0),
}


@pytest.mark.parametrize("warm", [False, True], ids=["lazy", "warm"])
@pytest.mark.parametrize("buckets", [(4,), (2, 8)], ids=str)
@pytest.mark.parametrize("name", OTHER_ROWS)
def test_results_that_are_not_one_row_per_row_equal_eager(pool, device, name, buckets, warm):
    cache = cache_of(pool, device)
    LINEAR.to(device)
    run = cache.graphed(name, OTHER_ROWS[name], INPUT, independent_rows=True, buckets=buckets)
    if warm:
        cache.warm()
    for rows in (1, 3, 2, 4, 1, 2):
        x = torch.randn(rows, 4, device=device)
        with torch.no_grad():
            expected = OTHER_ROWS[name](x)
        found = run(x=x)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


ONE_ROW_PER_ROW = {
    "integers": lambda x: x.argmax(1),
    "booleans": lambda x: x > 0,
    "product": lambda x: LINEAR(x),
    "half": lambda x: LINEAR(x).half(),
    "prefix": lambda x: x.cumsum(0),
    "nested": lambda x: {"a": [x, x.softmax(1)], "b": x.sum(1)},
    "positions": lambda x: x + torch.arange(len(x), device=x.device)[:, None],
}


@pytest.mark.parametrize("name", ONE_ROW_PER_ROW)
def test_independent_rows_replay_at_every_size(pool, device, name):
    cache = cache_of(pool, device)
    LINEAR.to(device)
    run = cache.graphed(name, ONE_ROW_PER_ROW[name], INPUT, independent_rows=True, buckets=(2, 8))
    for rows in range(1, 9):
        x = torch.randn(rows, 4, device=device)
        with torch.no_grad():
            torch.testing.assert_close(run(x=x), ONE_ROW_PER_ROW[name](x), rtol=1e-5, atol=1e-6)
    assert cache.stats.replays.total() == 8


def test_complex_inputs_are_checked(pool, device):
    cache = cache_of(pool, device)
    spec = {"x": BufferSpec(("batch", 4), torch.complex64)}
    run = cache.graphed("mean", lambda x: x - x.mean(0), spec, independent_rows=True, buckets=(4,))
    x = torch.randn(3, 4, device=device, dtype=torch.complex64)
    assert torch.equal(run(x=x), x - x.mean(0)) and not cache.stats.replays


def test_rows_that_cannot_be_checked_replay_without_padding_only(pool, device):
    if device.type == "cuda":
        pytest.skip("cholesky reads its result on the host there, so it is never captured")

    def fn(x):  # takes no noise
        return torch.linalg.cholesky(torch.diag_embed(1 - 1000 * x))

    cache = cache_of(pool, device)
    run = cache.graphed("fn", fn, INPUT, independent_rows=True, buckets=(4,))
    x = torch.full((4, 4), -1.0, device=device)
    for rows in (4, 3):
        assert torch.equal(run(x=x[:rows]), fn(x[:rows]))
    assert reasons(cache) == {"unchecked_rows"} and cache.stats.replays.total() == 1


def eager_calls(device):
    """Return functions, by the reason why they run eager at 3 rows of buckets (2, 4), that see what they are given."""
    drop = nn.Dropout(0.5)
    return {
        "capture_failed": lambda x: drop(x) * (1 + 0 * x.sum().item()),
        "not_captured": lambda x: drop(x),
        "graphs_off": lambda x: drop(x),
        "above_largest_bucket": lambda x: drop(x),
        "other_modes": lambda x: drop(x),
        "repeated_tensor": lambda x, y: drop(x) + y,
    }


@pytest.mark.parametrize("reason", eager_calls("cpu"))
def test_a_call_that_runs_eager_advances_the_generator_by_its_own_rows(pool, device, reason):
    fn, generator = eager_calls(device)[reason], pool.backend.default_generator
    config = GraphConfig(inference_scope="none" if reason == "graphs_off" else "block")
    cache = GraphCache(config, device, pool=pool, capture_on_miss=reason != "not_captured")
    inputs = INPUT | ({"y": INPUT["x"]} if reason == "repeated_tensor" else {})
    buckets = (2,) if reason == "above_largest_bucket" else (2, 4)
    run = cache.graphed("fn", fn, inputs, independent_rows=True, buckets=buckets, generators=[generator])
    x = torch.randn(3, 4, device=device)
    given = dict.fromkeys(inputs, x)
    with Doubled() if reason == "other_modes" else contextlib.nullcontext():
        for _ in range(3):
            generator.manual_seed(7)
            with torch.no_grad():
                expected, state = fn(*given.values()), generator.get_state()
            generator.manual_seed(7)
            assert torch.equal(run(**given), expected) and torch.equal(generator.get_state(), state)
    assert reasons(cache) == {reason} and not cache.stats.replays


@pytest.mark.parametrize("outcome", ["not_captured", "capture_failed", "above_largest_bucket"])
def test_an_eager_call_gets_the_tensors_that_the_caller_gave(pool, device, outcome):
    seen = []

    def fn(x):
        if outcome == "capture_failed" and x.sum().item() > 1e9:
            return x
        seen.append((x.data_ptr(), x.stride(), len(x)))
        return x[:, :2]

    cache = GraphCache(device=device, pool=pool, capture_on_miss=outcome != "not_captured")
    run = cache.graphed(
        "fn", fn, INPUT, independent_rows=True, buckets=(2,) if outcome == "above_largest_bucket" else (4,)
    )
    x = torch.randn(4, 3, device=device).t()[:3]
    for _ in range(2):
        result = run(x=x)
    assert seen[-1] == (x.data_ptr(), x.stride(), 3) and result.data_ptr() == x.data_ptr()
    result.requires_grad_()  # an ordinary tensor, as after a replay
    assert reasons(cache) == {outcome}


@pytest.mark.parametrize("layout", ["expanded", "sliding", "sliced", "transposed", "negated"])
def test_a_refused_call_computes_with_the_strides_of_its_inputs(pool, device, layout):
    """The call that finds out about the refusal returns what it computed."""
    memory = torch.randn(64, device=device)
    x = {
        "expanded": memory[:4].expand(4, 4),
        "sliding": memory[:7].as_strided((4, 4), (1, 1)),
        "sliced": memory[:32].view(4, 8)[:, ::2],
        "transposed": memory[:16].view(4, 4).t(),
        "negated": torch.complex(memory[:16], memory[:16]).view(4, 4).conj().imag,
    }[layout]
    strides, calls = [], []

    def fn(x):
        strides.append(x.stride())
        calls.append(None)  # refused
        return x * 2.0

    run = cache_of(pool, device).graphed("model", fn, INPUT, independent_rows=True, buckets=(4,))
    assert torch.equal(run(x=x), x * 2.0) and strides[0] == x.stride()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.calls = nn.GRU(4, 4, batch_first=True), []

    def forward(self, x):
        self.calls.append(None)  # refused
        packed = nn.utils.rnn.pack_padded_sequence(x[:, None].expand(-1, 3, -1), [3] * len(x), batch_first=True)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.cell(packed)[1][0]


def test_an_observed_run_of_a_composite_operation_is_in_its_autocast_region(pool, device):
    torch.manual_seed(0)
    model, x = Recurrent().to(device), torch.randn(4, 4, device=device)
    run = cache_of(pool, device).graphed("model", model, INPUT, independent_rows=True, buckets=(4,), watch=model)
    with torch.inference_mode():
        expected = model(x)
    assert torch.equal(run(x=x), expected)


@pytest.mark.parametrize("layer", ["attention", "encoder"])
def test_a_fused_attention_in_an_autocast_region_of_the_function_equals_eager(pool, device, layer):
    torch.manual_seed(0)
    made = (
        nn.MultiheadAttention(8, 2, batch_first=True) if layer == "attention" else nn.TransformerEncoderLayer(8, 2, 16)
    )
    model = made.to(device).eval()

    def fn(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x, x, x, need_weights=False)[0] if layer == "attention" else model(x)

    cache = cache_of(pool, device)
    run = cache.graphed(
        "model", fn, {"x": BufferSpec(("batch", 3, 8), torch.float32)}, independent_rows=True, buckets=(2,), watch=model
    )
    for _ in range(4):
        x = torch.randn(2, 3, 8, device=device)
        with torch.inference_mode():
            assert torch.equal(run(x=x), fn(x))
    assert cache.stats.replays or cache.stats.failed_captures


@pytest.mark.parametrize("kind", ["negated", "plain"])
def test_a_refused_function_computes_on_lazy_inputs_as_eager_does(pool, device, kind):
    """A kernel may round differently on a negated copy than on a tensor that is negated lazily."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(4, 2, batch_first=True).to(device).eval()
    calls, seen = [], []

    def fn(x):
        calls.append(len(calls))  # a change of Python state is refused
        seen.append(x.is_neg())
        return model(x, x, x, need_weights=False)[0]

    cache = cache_of(pool, device)
    run = cache.graphed(
        "model", fn, {"x": BufferSpec(("batch", 3, 4), torch.float32)}, independent_rows=True, buckets=(4,), watch=model
    )
    for _ in range(20):
        x = torch.randn(2, 3, 4, device=device)
        x = torch.complex(x, x).conj().imag if kind == "negated" else x
        with torch.inference_mode():
            assert torch.equal(run(x=x), model(x, x, x, need_weights=False)[0])
    assert set(seen) == {kind == "negated"} and cache.stats.failed_captures


class LazyModule(nn.Linear):
    """Sets attributes at its first call, as Transformer Engine's modules do, which its results don't depend on."""

    def forward(self, x):
        if getattr(self, "activation_dtype", None) is None:
            self.activation_dtype = x.dtype
        return super().forward(x)


LazyModule.__module__ = "transformer_engine.pytorch.module"


def test_attributes_that_a_library_sets_at_its_first_call_are_not_other_modes(pool, device):
    model = LazyModule(4, 4).to(device).eval()
    cache = cache_of(pool, device)
    run = cache.graphed("model", lambda x: model(x), INPUT, independent_rows=True, buckets=(4,), watch=model)
    x = torch.randn(4, 4, device=device)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(run(x=x), model(x))
    assert sum(cache.stats.replays.values()) == 4 and not reasons(cache)


@pytest.mark.parametrize("default", ["meta", "own"])
def test_a_cache_captures_and_replays_under_a_default_device(pool, device, default):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    cache = cache_of(pool, device)
    run = cache.graphed("model", lambda x: model(x), INPUT, independent_rows=True, buckets=(2, 4), watch=model)
    x = torch.randn(3, 4, device=device)
    with torch.device(device if default == "own" else "meta"):
        for _ in range(3):
            found = run(x=x)
    assert cache.stats.replays, reasons(cache)
    assert torch.equal(found, model(torch.cat([x, torch.zeros(1, 4, device=device)]))[:3])


def test_rows_that_are_not_declared_independent_are_never_padded(pool, device):
    cache = cache_of(pool, device)
    run = cache.graphed("scale", lambda x: x * 2, INPUT, buckets=(2, 4))
    for rows in (1, 2, 3, 4, 5):
        x = torch.randn(rows, 4, device=device)
        assert torch.equal(run(x=x), x * 2)
        assert cache.plan("scale", rows).is_graph is (rows in (2, 4))
    assert reasons(cache) == {"unchecked_rows", "above_largest_bucket"}
    assert cache.plan("scale", 3).reason == "unchecked_rows"
    assert {labels[3] for labels in cache.stats.replays} == {2, 4} and sum(cache.stats.replays.values()) == 2


def test_rows_that_depend_on_each_other_may_replay_where_nothing_is_padded(pool, device):
    cache = cache_of(pool, device)
    run = cache.graphed("mean", lambda x: x - x.mean(0), INPUT, buckets=(2, 4))
    for rows in (2, 4, 3, 2):
        x = torch.randn(rows, 4, device=device)
        assert torch.equal(run(x=x), x - x.mean(0))
    assert sum(cache.stats.replays.values()) == 3


def test_a_shadow_check_changes_the_padding(pool, device):
    """The rows of noise, with which the declaration is checked at the capture, have no such values."""

    def fn(x):
        return torch.where(x[:, :1] > 50, x + x.amin(), x)

    cache = cache_of(pool, device)
    run = cache.graphed("rare", fn, INPUT, independent_rows=True, buckets=(4,))
    x = torch.rand(3, 4, device=device) + 60
    for _ in range(3):
        found = run(x=x)
    assert torch.equal(found, fn(x)) and reasons(cache) == {"capture_failed"}
    assert "with other padding" in cache.stats.failures["rare"]


def test_padding_that_nothing_depends_on_is_changed_without_a_difference(pool, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device).eval()
    cache = GraphCache(GraphConfig(shadow_check_share=1.0), device, pool=pool)
    run = cache.graphed("model", lambda x: model(x), INPUT, independent_rows=True, buckets=(4,), watch=model)
    for rows in (3, 1, 2, 4, 3):
        x = torch.randn(rows, 4, device=device)
        with torch.no_grad():
            torch.testing.assert_close(run(x=x), model(x))
    assert sum(cache.stats.replays.values()) == 5 and not cache.stats.shadow_mismatches
    assert cache.stats.shadow_checks["model", "decode", "equal"] >= 1
