"""Run one of two ranks with Megatron's own schedules, data parallelism and optimizer, eager and from graphs.

`python ranks_worker.py RANK FOLDER LAYOUT` prints one line of JSON before it shuts down: for each step whether all
losses and gradients of this rank equal eager's, the rows of captured graphs, and the monotonic clock.

Layouts: `pipeline` has two stages of two virtual stages each; `data` has two replicas with a distributed optimizer and
overlapped parameter all-gather.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

import torch

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # makes attention's backward deterministic

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from engine import Engine, EngineConfig

RANKS, STEPS, MICRO = 2, 8, 4
LENGTH, ROWS, VOCAB = 128, 2, 512


SPLITS = {"pipeline": {"pipeline_model_parallel_size": RANKS, "virtual_pipeline_model_parallel_size": 2}, "data": {}}


def chunks_of(layout: str) -> list[DistributedDataParallel]:
    """Build this rank's DDP-wrapped chunks, always with the same weights and RNG states."""
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=512,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.bfloat16,
        **SPLITS[layout],
    )
    overlap = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=layout == "data",
        overlap_param_gather=layout == "data",
    )
    stages = range(2) if layout == "pipeline" else (None,)
    chunks = []
    for stage in stages:
        ends = (
            {}
            if stage is None
            else {
                "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                "vp_stage": stage,
            }
        )
        model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(),
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **ends,
        )
        chunks.append(DistributedDataParallel(config, overlap, model.cuda().bfloat16(), disable_bucketing=bool(stage)))
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    if layout == "pipeline":
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    config.finalize_model_grads_func = lambda models, *rest, **more: [one.finish_grad_sync() for one in models]
    return chunks


def batches(step: int, replica: int):
    for micro in range(MICRO):
        generator = torch.Generator().manual_seed(97 * step + micro + 5000 * replica)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator).cuda()
        yield ids[:, :-1], torch.arange(LENGTH, device=ids.device).expand(ROWS, -1), ids[:, 1:]


def forward_step(iterator, chunk):
    ids, positions, labels = next(iterator)
    return chunk(ids, positions, None, labels=labels), lambda out: (out.float().mean(), {"loss": out.mean()})


def train(layout: str, graphed: bool) -> tuple[list, list]:
    """Return the losses (on the last stage) and all gradients of every step, and the graph rows."""
    chunks = chunks_of(layout)
    is_split = layout == "data"
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=is_split,
            overlap_param_gather=is_split,
        ),
        chunks,
    )
    engine = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) if graphed else None
    if engine is not None:
        engine.attach(chunks if len(chunks) > 1 else chunks[0])
    run = forward_backward_no_pipelining if is_split else forward_backward_pipelining_with_interleaving
    replica = parallel_state.get_data_parallel_rank()
    log = []
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        data = [batches(step, replica) for _ in chunks]
        found = run(
            forward_step_func=forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=MICRO,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        log.append(
            [one["loss"].detach().clone() for one in found]
            + [parameter.main_grad.clone() for chunk in chunks for parameter in chunk.parameters()]
        )
        optimizer.step()
    rows = engine.graphs() if engine is not None else []
    if engine is not None:
        engine.detach()
    return log, rows


def main(rank: int, folder: str, layout: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/meeting", RANKS), rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(**SPLITS[layout])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _ = train(layout, False)
        found, rows = train(layout, True)
    same = [all(map(torch.equal, ours, theirs)) for ours, theirs in zip(found, expected, strict=True)]
    losses = sum(one.dim() == 0 for one in expected[0])
    print(json.dumps({"same": same, "losses": losses, "rows": rows, "done_at": time.monotonic()}), flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
