"""One rank of two pipeline stages of two virtual stages each: Megatron's own schedule, data parallelism and optimizer.

`python pipeline_worker.py RANK FOLDER` prints one line of JSON before it tears everything down: whether all losses and
gradients of this rank are eager's, step by step, the rows of what was captured, and the system's monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

import torch

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # attention's backward too must round alike twice

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from engine import Engine, EngineConfig

STAGES, VIRTUAL, STEPS, MICRO = 2, 2, 8, 4
LENGTH, ROWS, VOCAB = 128, 2, 512


def chunks_of() -> list[DistributedDataParallel]:
    """This stage's chunks, weights and random states the same each time, wrapped as Megatron's training does."""
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=8, hidden_size=256, num_attention_heads=4, ffn_hidden_size=512, hidden_dropout=0.1,
        attention_dropout=0.1, add_bias_linear=False, normalization="RMSNorm", bf16=True, params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False, pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.bfloat16,
        virtual_pipeline_model_parallel_size=VIRTUAL,
    )
    chunks = []
    for stage in range(VIRTUAL):
        model = GPTModel(
            config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=VOCAB, max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="rope", share_embeddings_and_output_weights=False, vp_stage=stage)
        overlap = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        chunks.append(DistributedDataParallel(config, overlap, model.cuda().bfloat16(), disable_bucketing=stage > 0))
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    config.finalize_model_grads_func = lambda models, *rest, **more: [one.finish_grad_sync() for one in models]
    return chunks


def batches(step: int):
    for micro in range(MICRO):
        generator = torch.Generator().manual_seed(97 * step + micro)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator).cuda()
        yield ids[:, :-1], torch.arange(LENGTH, device=ids.device).expand(ROWS, -1), ids[:, 1:]


def forward_step(iterator, chunk):
    ids, positions, labels = next(iterator)
    return chunk(ids, positions, None, labels=labels), lambda out: (out.float().mean(), {"loss": out.mean()})


def train(graphed: bool) -> tuple[list, list]:
    """Losses (on the last stage) and all gradients of every step, and what was captured."""
    chunks = chunks_of()
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0), chunks)
    engine = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) if graphed else None
    if engine is not None:
        engine.attach(chunks)
    log = []
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = forward_backward_pipelining_with_interleaving(
            forward_step_func=forward_step, data_iterator=[batches(step) for _ in chunks], model=chunks,
            num_microbatches=MICRO, seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False)
        log.append([one["loss"].detach().clone() for one in found]
                   + [parameter.main_grad.clone() for chunk in chunks for parameter in chunk.parameters()])
        optimizer.step()
    rows = engine.graphs() if engine is not None else []
    if engine is not None:
        engine.detach()
    return log, rows


def main(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/meeting", STAGES), rank=rank, world_size=STAGES)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES,
                                             virtual_pipeline_model_parallel_size=VIRTUAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _ = train(False)
        found, rows = train(True)
    same = [all(map(torch.equal, ours, theirs)) for ours, theirs in zip(found, expected, strict=True)]
    losses = sum(one.dim() == 0 for one in expected[0])
    print(json.dumps({"same": same, "losses": losses, "rows": rows, "done_at": time.monotonic()}), flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
