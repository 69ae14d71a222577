"""Alternate rollouts and updates: policy gradient on a tiny random Llama, in under a minute on a CPU.

The engine generates, the trainer (transformers) computes the loss, and `update_weights` writes the new weights in
place, so every graph stays valid. The reward is the share of even token ids. `python examples/rl_loop.py`
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import Engine, EngineConfig

STEPS, PROMPTS, SAMPLES, TOKENS = 20, 8, 8, 12


def reward(token_ids: list[int]) -> float:
    """Return the share of even token ids."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def log_probabilities(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the log-probability of each answer token, float32 [tokens]."""
    ids = torch.tensor([prompt + answer])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def main() -> list[float]:
    """Run the loop and return the mean reward of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    trainer = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_pretrained(folder)
        settings = {"dtype": "float32", "warmup": "full", "max_num_seqs": 64, "max_model_len": 64}
        engine = Engine(EngineConfig(model=folder, graph_manifest="none", **settings))  # the folder is temporary
    rewards = []
    with engine:
        for step in range(STEPS):
            prompts = torch.randint(3, 256, (PROMPTS, 4)).tolist()
            rollouts = engine.generate(
                prompt_token_ids=prompts,
                sampling_params={"max_tokens": TOKENS, "n": SAMPLES, "ignore_eos": True, "logprobs": 0},
            )
            samples = [
                (prompt, one) for prompt, rollout in zip(prompts, rollouts, strict=True) for one in rollout.outputs
            ]
            gains = torch.tensor([reward(one.token_ids) for _, one in samples])
            rewards.append(gains.mean().item())

            advantages = (gains - gains.mean()) / (gains.std() + 1e-6)
            loss, worst = torch.zeros(()), 0.0
            for (prompt, one), advantage in zip(samples, advantages, strict=True):
                found = log_probabilities(trainer, prompt, one.token_ids)
                sampled = torch.tensor([entry.logprob for entry in one.logprobs])
                worst = max(worst, (found.detach() - sampled).abs().max().item())
                loss = loss - advantage * found.sum() / len(samples)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            engine.update_weights(trainer.state_dict(), version=f"step-{step}")
            print(f"step {step}: reward {rewards[-1]:.3f}, engine and trainer differ by {worst:.1e}")
        print("graphs dropped:", dict(engine.stats().graphs["invalidations"]))
    return rewards


if __name__ == "__main__":
    main()
