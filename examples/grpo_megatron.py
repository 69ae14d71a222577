"""Train a Megatron-Core model to count with GRPO: the model that trains is the model that generates.

    python examples/grpo_megatron.py                 # about a minute on a CPU, in one process
    python examples/grpo_megatron.py --steps 100

Task and algorithm are the same as in examples/grpo.py. The engine runs the GPTModel on the parameters that the
optimizer writes, so an update of the weights is a call of `weights_changed`. A second engine captures the forward and
backward passes of training in the same pool of memory. No graph is captured again after an update.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from grpo import GIVEN, GROUP, WANTED, Sample, group_advantages, improve, questions, reward
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engine import Engine, EngineConfig
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec

QUESTIONS = 10  # per step
WARM = 4  # steps in which graphs are captured: of prompts and decodes, and of training after its warm-up


def build(seed: int) -> GPTModel:
    """Build a random model whose token ids are the digits. On a GPU, use Megatron's own layer spec."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        layer_spec(normalization="RMSNorm"),
        vocab_size=10,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    keep_rotary_in_place(model)
    return model


class Trainer(nn.Module):
    """The model with the call that examples/grpo.py makes: token ids [n, t] to `logits` [n, t, vocabulary]."""

    def __init__(self, model: GPTModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return SimpleNamespace(logits=self.model(ids, positions, None))


def captures(inference: Engine, training: Engine) -> int:
    """Return how many graphs the engines have captured so far."""
    return sum(count for _, count in inference.stats().graphs["captures"]) + training.stats.captures.total()


def train(steps: int, seed: int) -> None:
    model, generator = build(seed), random.Random(seed)
    inference = Engine(
        EngineConfig(
            max_num_seqs=QUESTIONS * GROUP, max_model_len=64, warmup="full", graph_manifest="none", seed=seed,
            num_threads=torch.get_num_threads(),
        ),
        model=model,
    )  # fmt: skip
    training = Engine(
        EngineConfig(mode="training", cuda_graph_impl="local", cuda_graph_modules=["attn", "mlp"]), pool=inference.pool
    )
    training.attach(model)
    trainer, rewards, difference, captured = Trainer(model), [], 0.0, 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    started = time.process_time()
    for step in range(1, steps + 1):
        asked = questions(QUESTIONS, generator)
        outputs = inference.generate(
            prompt_token_ids=[[int(digit) for digit in question] for question, _ in asked],
            sampling_params={"n": GROUP, "max_tokens": WANTED, "logprobs": 0, "ignore_eos": True},
        )
        scores = torch.tensor([
            [reward("".join(map(str, one.token_ids)), answer) for one in output.outputs]
            for output, (_, answer) in zip(outputs, asked, strict=True)
        ])  # fmt: skip
        samples: list[Sample] = [
            (output.prompt_token_ids, one.token_ids, [entry.logprob for entry in one.logprobs])
            for output in outputs
            for one in output.outputs
        ]
        difference = max(difference, improve(trainer, optimizer, samples, group_advantages(scores)))
        inference.weights_changed(f"step-{step}")  # the optimizer has written the engine's parameters

        rewards.append(scores.mean().item())
        if step == WARM:
            captured = captures(inference, training)
        if step % max(1, steps // 5) == 0:
            print(f"step {step:4}  reward {statistics.mean(rewards[-10:]):.3f}", flush=True)
    seconds = time.process_time() - started
    again = captures(inference, training) - captured
    replays = sum(row["replays"] for row in training.graphs())
    training.detach()
    inference.close()

    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    print(f"\nmean reward of {GIVEN + WANTED}-digit counts: first 10 steps {first:.3f}, last 10 {last:.3f}")
    print(f"largest difference of log-probabilities: {difference:.1e}")
    print(f"graphs captured: {captured} in the first {WARM} steps, {again} after; {replays} replays in training")
    print(f"CPU time per step: {1000 * seconds / steps:.0f} ms")


def main(steps: int, seed: int) -> None:
    """Train in a process group of one rank, as Megatron-Core needs."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    try:
        train(steps, seed)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="a tiny model gains nothing from more (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    main(options.steps, options.seed)
