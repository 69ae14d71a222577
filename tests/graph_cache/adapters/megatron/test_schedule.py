"""Orders of pipeline stages from Megatron-Core's own functions, and the slots derived from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper, is_graph_capturing
from torch import nn

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron import schedule
from graph_cache.adapters.megatron.parts import parts_of
from graph_cache.adapters.megatron.schedule import (
    Stage,
    check_expert_overlap,
    delayed_wgrad_in_graphs,
    expert_overlap_order,
    max_outstanding,
    megatron_capture_flags,
    order_of,
    set_current_microbatch,
    stage_plan,
    warmup_forwards,
)
from graph_cache.adapters.transformer_engine import TransformerEngineGraphs
from graph_cache.adapters.transformer_engine.order import assign_buffers
from graph_cache.errors import GraphConfigError
from graph_cache.training.attached import Part
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker
from tests.graph_cache.adapters.transformer_engine.te_stack import capture_context, reasons, replays
from tests.support.megatron_models import config, gpt, loss_of, tokens

FIVE_MICROBATCHES = [
    1,
    1,
    1,
    2,
    2,
    2,
    -2,
    1,
    -2,
    1,
    -2,
    2,
    -1,
    2,
    -1,
    -1,
    -2,
    -2,
    -1,
    -1,
]  # 5 microbatches, 2 chunks, groups of 3


def test_the_order_of_five_microbatches_in_two_chunks():
    assert order_of(Stage(pipeline_size=2, chunks=2), 5, group_size=3) == FIVE_MICROBATCHES
    assert warmup_forwards(Stage(pipeline_size=2, chunks=2), 5, group_size=3) == 5
    assert order_of(Stage(pipeline_size=2, chunks=2), 5, group_size=3, warmup=5) == FIVE_MICROBATCHES


def buffers_of(order, layers_per_chunk=1):
    """Return (chunk, microbatch, layer) -> buffer for layers with one input, all of one signature."""
    chunks = [[["hidden"]] * layers_per_chunk] * len(max_outstanding(order))
    return {key: buffer for key, (buffer,) in assign_buffers(order, chunks).items()}


def test_outstanding_and_buffers_of_five_microbatches():
    assert max_outstanding(FIVE_MICROBATCHES) == [5, 3]
    found = buffers_of(FIVE_MICROBATCHES)
    assert [(chunk, microbatch) for chunk, microbatch, _ in found] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (0, 3),
        (0, 4),
        (1, 3),
        (1, 4),
    ]
    assert list(found.values()) == [0, 1, 2, 3, 4, 5, 3, 4, 5, 0]


@pytest.mark.parametrize("size", [2, 4])
def test_each_stage_of_a_pipeline_has_its_warm_up_and_one_outstanding(size):
    for rank in range(size):
        stage = Stage(pipeline_size=size, pipeline_rank=rank)
        assert warmup_forwards(stage, 8) == size - rank - 1
        assert max_outstanding(order_of(stage, 8)) == [size - rank]


def test_a_step_shorter_than_the_pipeline_has_all_its_microbatches_outstanding():
    assert order_of(Stage(pipeline_size=4), 2) == [1, 1, -1, -1]


def test_without_a_pipeline_one_microbatch_is_captured_for_all():
    assert order_of(Stage(), 16) == [1, -1]
    assert max_outstanding(order_of(Stage(), 16)) == [1]


@settings(max_examples=200, deadline=None)
@given(microbatches=st.integers(1, 12), chunks=st.integers(1, 4), group=st.integers(1, 6), extra=st.integers(0, 12))
def test_buffers_match_the_peak_and_are_never_shared_by_live_microbatches(microbatches, chunks, group, extra):
    assume(chunks == 1 or group <= microbatches)
    warmup = (chunks - 1) * group + extra  # with fewer, a backward would precede its forward
    order = order_of(Stage(pipeline_size=2, chunks=chunks), microbatches, group, warmup=warmup)
    peaks, buffer_of = max_outstanding(order), {key[:2]: buffer for key, buffer in buffers_of(order).items()}
    assert len(buffer_of) == chunks * microbatches
    alive: dict[int, list[int]] = {chunk: [] for chunk in range(chunks)}
    begun, most, most_of_all = [0] * chunks, [0] * chunks, 0
    for entry in order:
        chunk = abs(entry) - 1
        if entry > 0:
            alive[chunk].append(begun[chunk])
            begun[chunk] += 1
            most[chunk] = max(most[chunk], len(alive[chunk]))
            taken = [buffer_of[one, microbatch] for one, live in alive.items() for microbatch in live]
            assert len(set(taken)) == len(taken)
            most_of_all = max(most_of_all, len(taken))
        else:
            alive[chunk].pop(0)
    assert peaks == most
    assert set(buffer_of.values()) == set(range(most_of_all))


class LayerWithStaticInputs:
    """A layer as Megatron's helper sees it, whose own method allocates on a GPU."""

    def get_layer_static_inputs(self, seq_length, micro_batch_size):
        return {"hidden_states": torch.empty(seq_length, micro_batch_size, 2)}


def megatrons_buffers(order, microbatches, layers_per_chunk):
    """Return the number of distinct buffers that Megatron's own helper allocates."""
    chunks = [[LayerWithStaticInputs() for _ in range(layers_per_chunk)] for _ in range(max(order))]
    helper = SimpleNamespace(
        num_model_chunks=len(chunks),
        num_microbatches=microbatches,
        flattened_callables=[layer for chunk in chunks for layer in chunk],
        callables_per_chunk=chunks,
        num_layers_per_chunk=[layers_per_chunk] * len(chunks),
        chunks_with_decoder=[SimpleNamespace(decoder=SimpleNamespace(layers=chunk)) for chunk in chunks],
        seq_length=3,
        micro_batch_size=1,
        config=None,
    )
    arguments, _ = TECudaGraphHelper._get_sample_arguments(helper, order)  # noqa: SLF001
    return len({id(hidden) for (hidden,) in arguments})


@pytest.mark.parametrize(
    ("pipeline", "chunks"), [(1, 1), *[(pipeline, chunks) for pipeline in range(2, 9) for chunks in range(1, 5)]]
)
def test_a_stage_has_as_many_input_buffers_as_under_megatron_for_any_number_of_microbatches(
    pipeline, chunks, monkeypatch
):
    """Over 8 layers, or one per chunk where there are more than 8 chunks."""
    monkeypatch.setattr(cuda_graphs, "is_te_min_version", lambda version: True)  # not installed without a GPU
    layers = max(1, 8 // (pipeline * chunks))
    for rank in range(pipeline):
        stage = Stage(pipeline, rank, chunks)
        counts = set()
        for groups in (2, 3, 5):  # with one group per step a stage may run all forwards first
            microbatches = groups * pipeline
            order = order_of(stage, microbatches)
            ours = len(set(buffers_of(order, layers).values()))
            assert ours == megatrons_buffers(order, sum(entry == 1 for entry in order), layers)
            counts.add(ours)
        assert len(counts) == 1, (rank, counts)


def test_fewer_buffers_than_one_set_per_chunk():
    for pipeline, expected, per_chunk in ((2, [10, 6], [12, 8]), (4, [11, 9, 7, 5], [12, 12, 10, 6])):
        orders = [order_of(Stage(pipeline, rank, 2), 2 * pipeline) for rank in range(pipeline)]
        layers = 8 // (2 * pipeline)
        assert [len(set(buffers_of(order, layers).values())) for order in orders] == expected
        assert [layers * sum(max_outstanding(order)) for order in orders] == per_chunk


def test_a_warm_up_too_short_for_the_chunks_is_refused():
    with pytest.raises(GraphConfigError, match="no matching forward before it"):
        order_of(Stage(pipeline_size=2, chunks=2), 4, group_size=2, warmup=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Stage(pipeline_size=2, pipeline_rank=2), "ranks count from 0"),
        (lambda: Stage(chunks=2), "without a pipeline"),
        (lambda: Stage(pipeline_size=0), "pipeline_size is 0"),
        (lambda: order_of(Stage(), 0), "microbatches is 0"),
        (lambda: order_of(Stage(pipeline_size=2, chunks=2), 4, group_size=0), "group_size is 0"),
        (lambda: expert_overlap_order(Stage(), 2, [1, 1], delayed_wgrad_in_graphs=False), "layers_per_chunk has 2"),
    ],
)
def test_invalid_stages_and_numbers_are_refused(make, words):
    with pytest.raises(GraphConfigError, match=words):
        make()


# ---- overlapped expert communication ---------------------------------------------------------------------------------


def test_overlapped_layers_are_chunks_whose_weight_gradients_follow_their_backward():
    order = expert_overlap_order(Stage(), 2, [2], delayed_wgrad_in_graphs=True)
    assert order == [1, 2, 1, -2, -2.5, 2, -1, -1.5, -2, -2.5, -1, -1.5]
    assert expert_overlap_order(Stage(), 2, [2], delayed_wgrad_in_graphs=False) == [1, 2, 1, -2, 2, -1, -2, -1]


def test_a_buffer_is_free_again_only_after_the_weight_gradients():
    assert list(buffers_of([1, -1, 1, -1]).values()) == [0, 0]
    assert list(buffers_of([1, -1, -1.5, 1, -1, -1.5]).values()) == [0, 0]
    assert list(buffers_of([1, -1, 2, -1.5, -2]).values()) == [0, 1]
    with_a_forward_between = [1, 1, -1, 1, -1.5, -1, -1.5, -1, -1.5]
    assert max_outstanding(with_a_forward_between) == [3]


@settings(max_examples=50, deadline=None)
@given(microbatches=st.integers(2, 8), first=st.integers(0, 3), second=st.integers(1, 3), delayed=st.booleans())
def test_overlapped_orders_of_interleaved_stages_are_valid(microbatches, first, second, delayed):
    stage = Stage(pipeline_size=2, chunks=2)
    order = expert_overlap_order(stage, microbatches, [first, second], delayed_wgrad_in_graphs=delayed, group_size=2)
    assert len(max_outstanding(order)) == first + second
    assert len(buffers_of(order)) == microbatches * (first + second)


def overlapping(**changes):
    """Return a configuration that supports the overlap with delayed weight gradients in graphs."""
    values = {
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "alltoall",
        "bf16": True,
        "gradient_accumulation_fusion": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "moe_use_legacy_grouped_gemm": False,
    }
    return SimpleNamespace(**(values | changes))


def test_settings_that_fit_the_overlap_pass():
    check_expert_overlap(overlapping(), ["attn", "moe_router"], "2.20.2")
    check_expert_overlap(overlapping(delay_wgrad_compute=False), ["moe_router"], None)


def test_a_configuration_that_megatron_accepts_passes():
    real = config(
        num_layers=4,
        num_moe_experts=4,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="alltoall",
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        overlap_moe_expert_parallel_comm=True,
        delay_wgrad_compute=True,
        gradient_accumulation_fusion=True,
    )
    check_expert_overlap(real, ["attn", "moe_router"], "2.20.2")
    real.gradient_accumulation_fusion = False
    with pytest.raises(GraphConfigError, match="gradient_accumulation_fusion"):
        check_expert_overlap(real, ["attn"], "2.20.2")


@pytest.mark.parametrize(
    ("changes", "modules", "version", "words"),
    [
        ({"overlap_moe_expert_parallel_comm": False}, ["attn"], "2.20.2", "overlap_moe_expert_parallel_comm is off"),
        ({"virtual_pipeline_model_parallel_size": None}, ["attn"], "2.20.2", "without virtual_pipeline"),
        ({"expert_model_parallel_size": 1}, ["attn"], "2.20.2", "expert_model_parallel_size is 1"),
        ({"moe_token_dispatcher_type": "allgather"}, ["attn"], "2.20.2", "'allgather': alltoall or flex"),
        ({"recompute_granularity": "full"}, ["attn"], "2.20.2", "recompute_granularity is 'full'"),
        ({"recompute_method": "uniform"}, ["attn"], "2.20.2", "recompute_method"),
        ({"recompute_num_layers": 1}, ["attn"], "2.20.2", "recompute_num_layers"),
        ({"recompute_modules": ["moe"]}, ["attn"], "2.20.2", "recompute_modules has 'moe'"),
        ({"bf16": False}, ["attn"], "2.20.2", "neither bf16 nor fp16"),
        ({"moe_shared_expert_overlap": True}, ["attn"], "2.20.2", "moe_shared_expert_overlap is on"),
        ({"mtp_num_layers": 2}, ["attn"], "2.20.2", "mtp_num_layers is 2"),
        ({"mtp_num_layers": 1, "pipeline_model_parallel_size": 1}, ["attn"], "2.20.2", "mtp_num_layers is 1 without"),
        ({"overlap_dispatch_backward_with_experts_wgrad": True}, ["attn"], "2.20.2", "one of the two"),
        (
            {
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "ncclep",
                "offload_modules": ["expert_fc1"],
                "fine_grained_activation_offloading": True,
            },
            ["attn"],
            "2.20.2",
            "expert_fc1",
        ),
        ({}, ["attn", "moe"], "2.20.2", "cuda_graph_modules has moe"),
        ({}, [], "2.20.2", "cuda_graph_modules is empty"),
        ({}, ["attn"], None, "2.12.0 or later, found none"),
        ({}, ["attn"], "2.11.0", "2.12.0 or later, found 2.11.0"),
        ({}, ["moe_router"], "2.9.0", "2.10.0 or later, found 2.9.0"),
        ({"moe_use_legacy_grouped_gemm": True}, ["attn"], "2.20.2", "moe_use_legacy_grouped_gemm"),
        ({"gradient_accumulation_fusion": False}, ["attn"], "2.20.2", "gradient_accumulation_fusion is off"),
        ({"add_bias_linear": True, "add_qkv_bias": True}, ["attn"], "2.20.2", "add_bias_linear and add_qkv_bias is on"),
    ],
)
def test_each_setting_incompatible_with_the_overlap_is_named(changes, modules, version, words):
    with pytest.raises(GraphConfigError, match=words) as caught:
        check_expert_overlap(overlapping(**changes), modules, version)
    assert "; " not in str(caught.value)  # only this problem is listed


def test_all_incompatible_settings_are_listed_at_once():
    config = overlapping(bf16=False, gradient_accumulation_fusion=False, expert_model_parallel_size=1)
    with pytest.raises(GraphConfigError) as caught:
        check_expert_overlap(config, ["attn", "mlp"], "2.11.0")
    for words in ("bf16", "gradient_accumulation_fusion", "expert_model_parallel_size", "mlp", "2.12.0"):
        assert words in str(caught.value)


def test_delayed_wgrad_in_graphs_depends_on_captured_modules():
    assert delayed_wgrad_in_graphs(overlapping(), ["attn"])
    assert not delayed_wgrad_in_graphs(overlapping(), ["moe_router"])
    assert delayed_wgrad_in_graphs(overlapping(moe_shared_expert_intermediate_size=64), ["moe_router"])
    assert not delayed_wgrad_in_graphs(
        overlapping(moe_shared_expert_intermediate_size=64, moe_shared_expert_overlap=True), ["moe_router"]
    )
    assert not delayed_wgrad_in_graphs(overlapping(delay_wgrad_compute=False), ["attn"])


def set_pipeline_stage(monkeypatch, size: int, rank: int) -> None:
    for name, value in (("world_size", size), ("rank", rank)):
        monkeypatch.setattr(parallel_state, f"get_pipeline_model_parallel_{name}", lambda value=value: value)


def test_set_current_microbatch_reaches_every_layer():
    model = gpt()
    set_current_microbatch(model, 3)
    assert [layer.current_microbatch for layer in model.decoder.layers] == [3, 3]


def test_stage_plan_follows_parallel_state_and_config():
    model = gpt()
    parts = parts_of([model], [])
    for microbatches in (8, None):
        plan = stage_plan(parts, [model], model.config, [], microbatches, None)
        assert plan.order == [1, -1] and plan.parts == parts and not plan.caches_weights
    object.__setattr__(model.config, "overlap_moe_expert_parallel_comm", True)
    with pytest.raises(GraphConfigError, match="expert_model_parallel_size is 1"):
        stage_plan(parts, [model], model.config, ["attn"], 8, None)


def test_without_a_number_of_microbatches_a_pipeline_or_the_overlap_is_refused(monkeypatch):
    model = gpt()
    parts = parts_of([model], ["attn"])
    with monkeypatch.context() as patched:
        patched.setattr(schedule, "check_expert_overlap", lambda *args: None)
        overlapped = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
        with pytest.raises(GraphConfigError, match=r"found overlap_moe_expert.*attach\(model, microbatches=…\)"):
            stage_plan(parts, [model], overlapped, ["attn"], None, None)
    set_pipeline_stage(monkeypatch, 2, 0)
    with pytest.raises(GraphConfigError, match=r"found a pipeline of 2 stages.*attach\(model, microbatches=…\)"):
        Engine(EngineConfig(mode="training", cuda_graph_impl="transformer_engine")).attach(model)
    assert all("forward" not in vars(layer) for layer in model.decoder.layers)
    assert stage_plan(parts, [model], model.config, ["attn"], 4, None).order == order_of(Stage(2, 0), 4)


def layer_parts_of(path: str, layer: nn.Module) -> list[Part]:
    """Return a method of a layer and submodules, as for cuda_graph_modules=attn,moe_router."""
    return [
        Part(f"{path}.attn", layer, "_forward_attention", (layer.input_layernorm, layer.self_attention)),
        Part(f"{path}.norm", layer.pre_mlp_layernorm),
        Part(f"{path}.mlp", layer.mlp),
    ]


def test_overlapped_parts_are_numbered_by_their_layer(monkeypatch):
    monkeypatch.setattr(schedule, "check_expert_overlap", lambda *args: None)
    set_pipeline_stage(monkeypatch, 2, 0)
    chunks = [gpt(post_process=False), gpt(1, pre_process=False)]
    parts = [
        part._replace(chunk=chunk)
        for chunk, model in enumerate(chunks)
        for number, layer in enumerate(model.decoder.layers)
        for part in layer_parts_of(f"{chunk}.{number}", layer)
    ]
    settings = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    plan = stage_plan(parts, chunks, settings, ["attn", "moe_router"], 4, None)
    assert [part.chunk for part in plan.parts] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert plan.order == expert_overlap_order(Stage(2, 0, 2), 4, [2, 2], delayed_wgrad_in_graphs=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_use_the_microbatch_of_their_layer(monkeypatch, rank):
    set_pipeline_stage(monkeypatch, 2, rank)
    model, eager = gpt(), gpt()
    parts = [
        Part("embedding", model.embedding),
        *(part for number, layer in enumerate(model.decoder.layers) for part in layer_parts_of(str(number), layer)),
    ]
    plan = stage_plan(parts, [model], model.config, [], 4, None)
    layers = model.decoder.layers
    assert list(plan.holders.values()) == [model.embedding, *[layers[0]] * 3, *[layers[1]] * 3]
    graphs = TransformerEngineGraphs(
        plan.parts[1:], plan.order, capture_context(), holders=plan.holders, maker=StaticMaker()
    )
    for number in range(5):
        for one in (model, eager):
            losses, begun = [], 0
            for entry in plan.order:
                if entry > 0:
                    set_current_microbatch(one, begun)
                    losses.append(loss_of(one, *tokens(10 * number + begun)))
                    begun += 1
                else:
                    losses.pop(0).backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)  # residual gradients are added in another order
    assert set(reasons(graphs)) == {"warming_up"} and replays(graphs) == 6 * 4 * 5 - reasons(graphs)["warming_up"]
    graphs.detach()
    held = stage_plan([Part("decoder", model.decoder)], [model], model.config, [], 4, None).holders
    assert held == {"decoder": layers[0]}  # a part that contains layers uses any of them


def test_a_virtual_stage_without_a_captured_part_counts_in_the_order(monkeypatch):
    chunks = [gpt(post_process=False), gpt(1, pre_process=False)]
    set_pipeline_stage(monkeypatch, 2, 0)
    parts = [part for part in parts_of(chunks, ["attn"]) if part.chunk == 0]  # as if the other chunk had no attention
    group_size = chunks[0].config.microbatch_group_size_per_vp_stage
    plan = stage_plan(parts, chunks, chunks[0].config, ["attn"], 4, None)
    assert plan.order == order_of(Stage(2, 0, 2), 4, group_size)


def test_megatron_capture_flags_are_set_and_reset():
    assert not is_graph_capturing()
    with pytest.raises(ValueError, match="broken"), megatron_capture_flags():
        assert is_graph_capturing()
        raise ValueError("broken")
    assert not is_graph_capturing()
