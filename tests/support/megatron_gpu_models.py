"""Small Megatron-Core models with Transformer Engine layers, and their training loop, for GPU tests.

Importing it skips the test module, with a reason, if they can't run: import it before Megatron.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # attention's backward must be deterministic too
pytest.importorskip("transformer_engine", reason="needs Transformer Engine")
pytest.importorskip("megatron.core", reason="needs megatron-core")

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from engine import Engine, EngineConfig

LENGTH, ROWS, VOCAB = 128, 2, 512  # cuDNN 9.14's attention can be captured at multiples of 128 only
FP8 = {"delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"}, "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_ffn_hidden_size": 128,
    "moe_grouped_gemm": False,
}

PLAIN = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "num_query_groups": 2,
    "qk_layernorm": True,
}  # supported by the engine's fused kernels


@pytest.fixture(scope="module", autouse=True)
def one_process():
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(pattern=None, **changes):
    """Build a small model with reproducible weights and RNG states; with a pattern, a hybrid model."""
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    values = {
        "num_layers": 3,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "ffn_hidden_size": 512,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": False,
    } | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if pattern is not None:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            config = TransformerConfig(**values | {"num_layers": len(pattern), "is_hybrid_model": True})
            return (
                HybridModel(
                    config, hybrid_stack_spec, VOCAB, 256, hybrid_layer_pattern=pattern, position_embedding_type="rope"
                )
                .cuda()
                .bfloat16()
            )
        config = TransformerConfig(**values)
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=256,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
    return model.cuda().bfloat16()


def batch(step, micro=0):
    generator = torch.Generator().manual_seed(97 * step + micro)
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator).cuda()
    return ids[:, :-1], torch.arange(LENGTH, device="cuda").expand(ROWS, -1), ids[:, 1:]


def loss_of(model, step, micro=0):
    ids, positions, labels = batch(step, micro)
    return model(ids, positions, None, labels=labels).float().mean()


def train(model, steps=10, micro=2, outstanding=True):
    """Train, and return the losses and gradients of each step."""
    torch.manual_seed(2)
    optimizer, log = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        model.set_is_first_microbatch()
        losses = []
        for index in range(micro):
            losses.append(loss_of(model, step, index))
            if not outstanding:
                losses[-1].backward()
        for loss in losses if outstanding else ():
            loss.backward()
        log.append(
            [loss.detach().clone() for loss in losses]
            + [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        )
        optimizer.step()
    return log


def assert_same(ours, theirs):
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            difference = (one.float() - other.float()).abs().max().item()
            assert difference == 0, f"step {step}, value {index}: {difference}"


def training(modules=(), **options):
    return Engine(EngineConfig(mode="training", cuda_graph_modules=list(modules), cuda_graph_warmup_steps=2, **options))


def equal_to_eager(modules=(), steps=10, micro=2, outstanding=True, **changes):
    """Assert that training with graphs equals eager training, and return the rows of `Engine.graphs`."""
    expected = train(build(**changes), steps, micro, outstanding)
    model = build(**changes)
    with training(modules) as engine:
        engine.attach(model)
        assert_same(train(model, steps, micro, outstanding), expected)
        return engine.graphs()


def compare(*args, **kwargs):
    """Like `equal_to_eager`, and assert that everything was captured."""
    rows = equal_to_eager(*args, **kwargs)
    assert all(row["failed"] == 0 and row["replays"] > 0 for row in rows), rows
    return rows
