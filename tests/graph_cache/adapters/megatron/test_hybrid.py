"""Graphs of a Megatron-Core hybrid model of Mamba (M), attention (*), MLP (-) and MoE (E) layers, packed or not.

Layers and stack are Megatron's. The mixer of the Mamba layers needs a GPU and is replaced by a reference in torch.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.mamba import MambaModel
from megatron.core.packed_seq_params import PackedSeqParams

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place
from graph_cache.adapters.megatron.packed import padded
from graph_cache.adapters.megatron.packed_seq_idx import sequence_indices, with_sequence_indices
from tests.graph_cache.adapters.megatron.test_packed import PackedCore, packed_of
from tests.support.megatron_mamba import ReferenceMixer, hybrid_stack_spec
from tests.support.megatron_models import FIXED, VOCAB, config, tokens

pytestmark = pytest.mark.usefixtures("experts_on_cpu")
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 8}
LENGTH = 64
LAYERS = {
    "all": ([], [f"decoder.layers.{index}" for index in range(5)]),
    "mamba": (["mamba"], ["decoder.layers.0", "decoder.layers.3"]),
    "attn": (["attn"], ["decoder.layers.1.attn"]),
    "attn_mlp": (["attn", "mlp"], ["decoder.layers.1.attn", "decoder.layers.2.mlp"]),
    "mamba_moe": (["mamba", "moe"], ["decoder.layers.0", "decoder.layers.3", "decoder.layers.4.moe"]),
    "mamba_router": (
        ["mamba", "moe_router"],
        ["decoder.layers.0", "decoder.layers.3", "decoder.layers.4.pre_mlp_layernorm", "decoder.layers.4.moe_router"],
    ),
}


def hybrid(pattern="M*-ME", packed=False, **changes) -> MambaModel:
    torch.manual_seed(0)
    cfg = config(
        **{
            "num_layers": len(pattern),
            "hidden_dropout": 0.1,
            "is_hybrid_model": True,
            "cuda_graph_impl": "none",
        }
        | MAMBA
        | FIXED
        | changes
    )
    model = MambaModel(
        cfg,
        hybrid_stack_spec(num_experts=cfg.num_moe_experts, normalization=cfg.normalization),
        VOCAB,
        64,
        hybrid_override_pattern=pattern,
        post_process=False,  # the final norm needs Transformer Engine
        position_embedding_type="rope",
    )
    keep_rotary_in_place(model)
    for layer in model.decoder.layers if packed else ():
        if hasattr(getattr(layer, "self_attention", None), "core_attention"):
            layer.self_attention.core_attention = PackedCore()
    return model


def train(model, steps=10, documents=None):
    """Return losses and gradients of each step, with `documents[step]` documents if packed."""
    torch.manual_seed(1)
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        packed = {} if documents is None else {"packed_seq_params": packed_of(documents[step], step, LENGTH)}
        ids, positions = tokens(step) if documents is None else tokens(step, 1, LENGTH)
        loss = model(ids, positions, None, **packed).pow(2).mean()
        loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        optimizer.step()
    return log


def training(modules=(), **options):
    settings = {"mode": "training", "cuda_graph_modules": list(modules), "cuda_graph_warmup_steps": 2}
    return Engine(EngineConfig(**settings | options))


def assert_same(found, expected):
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), f"step {step}"


@pytest.mark.parametrize("name", LAYERS)
def test_a_hybrid_model_equals_eager_over_ten_steps(name):
    modules, names = LAYERS[name]
    expected, model = train(hybrid()), hybrid()
    with training(modules) as engine:
        assert engine.attach(model) == names
        assert_same(train(model), expected)
        for row in engine.graphs():
            assert (row["graphs"], row["replays"], row["failed"]) == (1, 8, 0), row
            assert set(row["eager"]) == {"warming_up"}
    assert all("forward" not in vars(one) for one in model.modules())


def test_dropless_experts_of_a_hybrid_model_are_captured():
    options = {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
    model = hybrid(**options)
    with training(cuda_graph_moe_dropless=True) as engine:
        engine.attach(model)
        train(model)
        assert all((row["replays"], row["failed"]) == (8, 0) for row in engine.graphs()), engine.graphs()


DOCUMENTS = [3, 9, 1, 12, 5, 7, 2, 11, 4, 6]


@pytest.mark.parametrize("modules", [(), ("mamba", "attn", "moe")], ids=["layers", "parts"])
def test_packed_batches_of_any_number_of_documents_replay_and_equal_eager(modules):
    expected, model = train(hybrid(packed=True), documents=DOCUMENTS), hybrid(packed=True)
    with training(modules, cuda_graph_packed_seq=True, cuda_graph_max_packed_seqs=12) as engine:
        engine.attach(model)
        assert_same(train(model, documents=DOCUMENTS), expected)
        for row in engine.graphs():
            assert (row["graphs"], row["replays"], row["failed"]) == (1, 8, 0), row
    mixers = [one for one in model.modules() if isinstance(one, ReferenceMixer)]
    assert len(mixers) == 2 and all("_create_packed_seq_idx" not in vars(one) for one in mixers)


def test_without_padding_mixers_compute_indices_on_the_host_and_run_eager():
    model = hybrid("M", packed=True)
    with training() as engine:
        engine.attach(model)
        ids, positions = tokens(0, 1, LENGTH)
        for _ in range(5):
            model(ids, positions, None, packed_seq_params=packed_of(3, 0, LENGTH)).pow(2).mean().backward()
        (row,) = engine.graphs()
        assert row["replays"] == 0 and "repeat_interleave" in row["failure"], row


def test_a_document_does_not_see_the_ones_before_it():
    model = hybrid("MM", packed=True, hidden_dropout=0.0).eval()
    ids, positions = tokens(0, 1, LENGTH)
    ends = torch.tensor([0, 20, 64], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=44, max_seqlen_kv=44)
    whole = model(ids, positions, None, packed_seq_params=packed)
    alone = model(ids[:, 20:], positions[:, :44], None)
    torch.testing.assert_close(whole[20:], alone, rtol=1e-4, atol=1e-5)
    assert (model(ids, positions, None)[20:] - alone).abs().max() > 1e-2


def test_sequence_indices_equal_megatrons():
    """The example is that of Megatron's own docstring."""
    ends = torch.tensor([0, 5, 7, 11], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends)
    expected = torch.tensor([[0] * 5 + [1] * 2 + [2] * 4 + [3] * 5], dtype=torch.int32)
    torch.testing.assert_close(sequence_indices(packed, 16), expected, rtol=0, atol=0)
    later = PackedSeqParams("thd", ends, ends, cu_seqlens_q_padded=torch.tensor([0, 6, 8, 16], dtype=torch.int32))
    expected = torch.tensor([[0] * 6 + [1] * 2 + [2] * 8], dtype=torch.int32)
    torch.testing.assert_close(sequence_indices(later, 16), expected, rtol=0, atol=0)


def test_all_layers_share_one_tensor_of_indices():
    packed = padded(packed_of(5, 0, LENGTH), 16, LENGTH)
    shared = with_sequence_indices(packed, LENGTH)
    assert shared.seq_idx.shape == (1, LENGTH) and getattr(packed, "seq_idx", None) is None
    assert shared.cu_seqlens_q is packed.cu_seqlens_q
    model, seen = hybrid("MM", packed=True), []
    with training(cuda_graph_max_packed_seqs=12) as engine:
        engine.attach(model)
        for layer in model.decoder.layers:
            layer.mixer.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(kwargs["packed_seq_params"].seq_idx), with_kwargs=True
            )
        train(model, documents=[3], steps=1)
    assert len(seen) == 2 and seen[0] is seen[1]
