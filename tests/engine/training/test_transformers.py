"""Layers of transformers in training graphs: mixtures of experts with router losses, Mamba-2 hybrids, image towers."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers.modeling_layers import GradientCheckpointingLayer

from engine import Engine, EngineConfig

STEPS = 10


@pytest.fixture(autouse=True)
def one_thread():
    """With several threads a CPU sums the gradients of weights that tokens share in any order (`batched_mm`)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2}


def mixtral(**changes):
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES | EXPERTS | {"num_local_experts": 4} | changes))


def qwen3_moe(**changes):
    sizes = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES | EXPERTS | sizes | changes))


def bamba():
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    return hf.BambaForCausalLM(hf.BambaConfig(**SIZES, num_hidden_layers=2, attn_layer_indices=[1], **sizes))


def zamba2():
    sizes = {"mamba_d_state": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 8}
    options = {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4}
    changes = {"num_key_value_heads": 4, "num_hidden_layers": 2}
    return hf.Zamba2ForCausalLM(hf.Zamba2Config(**SIZES | changes | sizes | options))


def nemotron_h():
    sizes = {"head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1}
    kinds = ["mamba", "attention", "mlp"]
    return hf.NemotronHForCausalLM(hf.NemotronHConfig(**SIZES, **sizes, chunk_size=8, layers_block_type=kinds))


def layers_of(model):
    """Return the paths of the outermost layers."""
    found = [name for name, one in model.named_modules() if isinstance(one, GradientCheckpointingLayer)]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


class DataParallelWrapper(torch.nn.Module):
    """Has the model as `module`, as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


DataParallelWrapper.__name__ = "DistributedDataParallel"  # wrappers are known by name


def build(make):
    torch.manual_seed(0)
    return make()


def ids_of(step):
    return torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(step))


def plain(model, step):
    return model(input_ids=ids_of(step), labels=ids_of(step)).loss


def masked(model, step):
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, : 1 + step % 3] = 0
    return model(input_ids=ids_of(step), labels=ids_of(step), attention_mask=mask).loss


def with_router_loss(model, step):
    found = model(input_ids=ids_of(step), labels=ids_of(step), output_router_logits=True)
    assert len(found.router_logits) == 2 and found.aux_loss is not None
    return found.loss


def train(model, loss_of, steps=STEPS):
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        log.append([loss.detach().clone(), *[one.grad.clone() for one in model.parameters() if one.grad is not None]])
        optimizer.step()
    return log


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def check(make, loss_of, *, replays=STEPS - 2, modules=None):
    """Train with and without graphs, compare, and return the rows of the engine."""
    expected, model = train(build(make), loss_of), build(make)
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
        assert engine.attach(model, modules=modules) == (modules or layers_of(model))
        assert_same(train(model, loss_of), expected)
        for row in engine.graphs():
            assert (row["replays"], row["failed"]) == (replays, 0), row
            assert row["eager"] == {"warming_up": 2}
    assert all("forward" not in vars(one) for one in model.modules())


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.parametrize("loss_of", [plain, masked, with_router_loss])
def test_experts_replay_and_equal_eager_bit_for_bit(make, loss_of):
    check(make, loss_of)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, bamba, zamba2, nemotron_h])
def test_layers_are_captured_by_default(make):
    model = build(make)
    with Engine(EngineConfig(mode="training")) as engine:
        assert engine.attach(model) == layers_of(model)
    parallel = DataParallelWrapper(model)
    with Engine(EngineConfig(mode="training")) as engine:
        assert engine.attach(parallel) == [f"module.{name}" for name in layers_of(model)]


def test_parts_of_layers_are_captured_by_name():
    expected, model = train(build(mixtral), plain, 4), build(mixtral)
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=1, cuda_graph_modules=["attn"])) as engine:
        assert engine.attach(model) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert_same(train(model, plain, 4), expected)
        assert all(row["replays"] == 3 and row["failed"] == 0 for row in engine.graphs()), engine.graphs()


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_implementations_without_host_reads_replay(make, implementation):
    def with_implementation():
        model = make()
        model.set_experts_implementation(implementation)
        return model

    check(with_implementation, plain)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_experts_in_a_loop_run_eager_since_their_shapes_depend_on_data(make):
    def in_a_loop():
        model = make()
        model.set_experts_implementation("eager")
        return model

    expected, model = train(build(in_a_loop), plain, 4), build(in_a_loop)
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=1)) as engine:
        engine.attach(model, modules=layers_of(model))
        assert_same(train(model, plain, 4), expected)
        for row in engine.graphs():
            assert row["eager"] == {"warming_up": 1, "capture_failed": 3}
            assert "its output shape depends on data" in row["failure"]


def test_router_logits_are_recorded_only_in_calls_that_ask_for_them():
    def loss_of(model, step):
        return (with_router_loss if step % 2 else plain)(model, step)

    expected, model = train(build(mixtral), loss_of), build(mixtral)
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=1)) as engine:
        engine.attach(model, modules=layers_of(model))
        assert_same(train(model, loss_of), expected)
        for row in engine.graphs():
            assert row["replays"] == STEPS - 2 and row["graphs"] == 2, row
        with torch.no_grad():
            model.eval()
            found = model(input_ids=ids_of(0), output_router_logits=True, output_hidden_states=True)
        assert len(found.router_logits) == 2 and len(found.hidden_states) == 3


def test_recorded_hidden_states_and_attentions_equal_eager():
    seen = {}

    def loss_of(model, step):
        ids = ids_of(step)
        found = model(input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)
        seen.setdefault(step, []).append([one.detach().clone() for one in (*found.hidden_states, *found.attentions)])
        return found.loss + found.attentions[0][..., 0].mean()

    check(lambda: mixtral(attn_implementation="eager"), loss_of)
    assert len(seen) == STEPS
    for ours, theirs in seen.values():
        assert len(ours) == 5
        assert_same(ours, theirs)


@pytest.mark.parametrize("make", [bamba, zamba2, nemotron_h])
@pytest.mark.parametrize("loss_of", [plain, masked])
def test_mamba_2_hybrids_replay_and_equal_eager_bit_for_bit(make, loss_of):
    check(make, loss_of)


IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def clip():
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGES))


def siglip():
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGES))


def image_loss(model, step):
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    return model(images).last_hidden_state.square().mean()


@pytest.mark.parametrize("make", [clip, siglip])
@pytest.mark.parametrize("scope", [(), ("attn", "mlp")], ids=["layers", "parts"])
def test_image_towers_replay_and_equal_eager_bit_for_bit(make, scope):
    check(make, image_loss, modules=layers_of(build(make)))
    expected, model = train(build(make), image_loss), build(make)
    config = EngineConfig(mode="training", vision_cuda_graph_impl="local", vision_cuda_graph_scope=scope)
    with Engine(config) as engine:
        assert len(engine.attach(model)) == (6 if scope else 3)
        assert_same(train(model, image_loss), expected)
        assert all(row["replays"] == STEPS - 3 for row in engine.graphs())
