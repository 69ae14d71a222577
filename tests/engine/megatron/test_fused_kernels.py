"""Fused kernels on a GPTModel's parameters: equal bits to the native model; both split over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (must come before triton is imported)

pytest.importorskip("megatron.core", reason="needs megatron-core")

import torch.distributed as dist
import torch.multiprocessing

from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata, PrefillMetadata
from engine.attention.triton import TritonBackend
from engine.distributed.tensor_parallel import TensorParallel
from engine.megatron.config import gpt_model_arguments, transformer_config_values
from engine.megatron.model import MegatronModel
from engine.models.decoder import Decoder
from engine.models.interface import ForwardContext
from engine.sampling.greedy import GreedySampler
from engine.worker.input_buffers import Layout
from tests.engine.kernels.test_decode_step import TOLERANCE, small_model
from tests.support.megatron_shards import empty_gpt_model, forget_groups, split_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable, pytest.mark.filterwarnings("default")]

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ROWS, TOKENS, PAGES = 3, 24, 4
CASES = {
    "qwen3": {"vocab_size": 511},  # padded
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-biases": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def run_fused(model: Any) -> dict[str, torch.Tensor]:
    """Run the fused kernels on the model: a prefill of two chunks, then two decode steps with given tokens."""
    config, device, dtype = model.config, model.device, model.dtype
    layout = Layout(ROWS + 1, PAGES)
    kv = KVCache(config.cache_specs(), (ROWS + 2) * PAGES, 16, dtype, device)
    state = layout.views(torch.zeros(layout.size, dtype=torch.int64, device=device))
    state.slots[:ROWS] = torch.tensor([2, 1, 3])
    state.positions[:ROWS] = torch.tensor([5, 18, 0])
    state.page_tables[0, 1:] = (torch.arange((ROWS + 1) * PAGES) + 1).view(ROWS + 1, PAGES).to(device)
    varlen = PrefillMetadata(
        state.page_tables,
        *(
            torch.tensor(values, device=device)
            for values in ([*range(5), *range(18), 0], [2] * 5 + [1] * 18 + [0], [5, 23], [0, 0], [2, 1])
        ),
    )
    logits = torch.empty(ROWS, config.vocab_size, dtype=dtype, device=device)
    chosen = torch.empty(ROWS, dtype=torch.int64, device=device)
    fused, attention, found = model.fused(ROWS, TOKENS), TritonBackend(kv, ROWS), {}
    sampler = GreedySampler(ROWS, config.vocab_size, device)
    with torch.inference_mode():
        tokens = torch.arange(TOKENS, device=device) * 31 % config.vocab_size
        found["prefill"] = fused.forward(tokens, varlen.positions, attention.prefill(varlen))[:23].clone()
        for step in range(2):
            state.last_tokens[1:] = torch.tensor([7, 300, 510 - step, 44], device=device)
            slots, positions = state.slots[:ROWS], state.positions[:ROWS]
            context = ForwardContext((), attention.decode(DecodeMetadata(state.page_tables, slots, positions)))
            hidden = fused.embed(state.last_tokens, slots)
            for index in range(config.num_layers):
                hidden = fused.layer(index, hidden, context)
            maxima = fused.head(hidden, logits, after_layer=True)
            sampler(logits, maxima, slots, positions, state.last_tokens, chosen)
            assert torch.equal(chosen, logits.float().argmax(-1))
            found |= {f"hidden {step}": hidden.clone(), f"logits {step}": logits.clone()}
    return {name: tensor.cpu() for name, tensor in found.items()}


def native_model(case: str) -> Any:
    return small_model(**({"num_attention_heads": 8} | CASES[case]))


def megatron_model(case: str, ranks: int, device: torch.device) -> MegatronModel:
    """Build this rank's shard of the same model as a GPTModel."""
    model = native_model(case)
    arguments = gpt_model_arguments(model.config)
    arguments["vocab_size"] = 512
    gpt = empty_gpt_model(transformer_config_values(model.config), arguments, ranks=ranks, dtype=DTYPE, device=device)
    found = MegatronModel(gpt, 256, model.config.vocab_size)
    weights = dict(model.named_weights())
    for name, slot in found.weight_slots().items():
        slot.write(weights[name])
    return found


def native_shard(case: str, rank: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Build this rank's shard of the native model."""
    model = native_model(case)
    found = Decoder(model.config, DTYPE, device, parallel=TensorParallel(rank, ranks, group))
    weights = dict(model.named_weights())
    for name, slot in found.weight_slots().items():
        slot.write(weights[name])
    return found


def rank(index: int, ranks: int, case: str, folder: str) -> None:
    """Body of each spawned process."""
    device = torch.device("cpu") if INTERPRETED else torch.device("cuda", index)
    if not INTERPRETED:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if INTERPRETED else "nccl",
        store=dist.FileStore(f"{folder}/meeting", ranks),
        rank=index,
        world_size=ranks,
    )
    split_tensors(ranks)
    torch.save(run_fused(megatron_model(case, ranks, device)), f"{folder}/{index}")
    forget_groups()
    torch.save(run_fused(native_shard(case, index, ranks, dist.group.WORLD, device)), f"{folder}/native.{index}")
    dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path: Path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    split_tensors(1)
    yield
    forget_groups()
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_fused_kernels_match_the_native_model_bit_for_bit(one_rank, case):
    found, wanted = run_fused(megatron_model(case, 1, torch.device(DEVICE))), run_fused(native_model(case))
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()


@pytest.mark.skipif(not INTERPRETED and GPUS < 2, reason=f"needs 2 CUDA devices: torch.cuda.device_count() is {GPUS}")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_the_same_as_one(tmp_path, case):
    torch.multiprocessing.spawn(rank, (2, case, str(tmp_path)), nprocs=2)
    wanted = run_fused(native_model(case))
    for model in ("", "native."):
        first, second = (torch.load(tmp_path / f"{model}{index}") for index in range(2))
        for name, tensor in wanted.items():
            assert torch.equal(first[name], second[name]), name  # else ranks would sample different tokens
            assert relative_error(first[name], tensor) < 8 * TOLERANCE, (model, name)
