"""Alternate rollouts and updates: policy gradient on a tiny random Llama.

    python examples/rl_loop.py                             # under a minute on a CPU
    python examples/rl_loop.py --steps 40 --samples 16

The engine generates, the trainer (transformers) computes the loss, and `update_weights` writes the new weights in
place, so every graph stays valid. The reward is the share of even token ids.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import Engine, EngineConfig

PROMPTS, TOKENS = 8, 12


def reward(token_ids: list[int]) -> float:
    """Return the share of even token ids."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def log_probabilities(model: LlamaForCausalLM, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each answer token, float32 [samples, tokens]."""
    logits = model(torch.cat([prompts, answers], 1)).logits[:, prompts.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, answers[:, :, None])[:, :, 0]


def main(steps: int, samples: int) -> None:
    """Run the loop, and print a row per step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    trainer = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_pretrained(folder)
        settings = {"dtype": "float32", "warmup": "lazy", "max_num_seqs": PROMPTS * samples, "max_model_len": 64}
        settings["num_threads"] = torch.get_num_threads()
        engine = Engine(EngineConfig(model=folder, graph_manifest="none", **settings))  # the folder is temporary
    print("step  reward  largest difference  rollouts  update", flush=True)
    with engine:
        for step in range(1, steps + 1):
            started = time.perf_counter()
            prompts = torch.randint(3, 256, (PROMPTS, 4)).tolist()
            rollouts = engine.generate(
                prompt_token_ids=prompts,
                sampling_params={"max_tokens": TOKENS, "n": samples, "ignore_eos": True, "logprobs": 0},
            )
            outputs = [one for rollout in rollouts for one in rollout.outputs]
            generated = time.perf_counter()

            rewards = torch.tensor([reward(one.token_ids) for one in outputs])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            repeated = torch.tensor([prompt for prompt in prompts for _ in range(samples)])
            found = log_probabilities(trainer, repeated, torch.tensor([one.token_ids for one in outputs]))
            sampled = torch.tensor([[entry.logprob for entry in one.logprobs] for one in outputs])
            difference = (found.detach() - sampled).abs().max().item()
            optimizer.zero_grad()
            (-advantages * found.sum(1)).mean().backward()
            optimizer.step()
            engine.update_weights(trainer.state_dict(), version=f"step-{step}")
            rollout_ms, update_ms = 1000 * (generated - started), 1000 * (time.perf_counter() - generated)
            print(
                f"{step:4}  {rewards.mean():6.3f}  {difference:18.1e}  {rollout_ms:5.0f} ms  {update_ms:3.0f} ms",
                flush=True,
            )
        graphs = engine.stats().graphs
        print("graph replays:", sum(count for _, count in graphs["replays"]))
        print("eager:", {" ".join(labels): count for labels, count in graphs["fallbacks"]})
        print("graphs dropped by the updates:", sum(count for _, count in graphs["invalidations"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="rollouts, each with an update (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each of 8 prompts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="a tiny model gains nothing from more (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    main(options.steps, options.samples)
