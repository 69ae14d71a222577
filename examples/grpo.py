"""Train a model to count with GRPO: the engine generates, plain PyTorch trains, and both use the same weights.

    python examples/grpo.py                                  # a tiny random Llama, three seeds: minutes on a CPU
    python examples/grpo.py --seeds 1 --steps 60             # under a minute
    python examples/grpo.py --compare                        # also the time per step without graphs
    python examples/grpo.py --engines 2                      # a pool of engines on Ray (pip install 'ray[serve]')
    python examples/grpo.py --model smollm2-135m-instruct    # or a folder, a hub name, a .gguf file

A question is the beginning of a count, such as "789", and the reward is the share of the next digits, "0123456", that
are right. A step samples a group of answers per question, compares each reward with its group's mean, and makes
`EPOCHS` passes over the samples with the clipped policy-gradient loss. `share_weights` makes the trainer's parameters
views of the engine's storage, so that an optimizer step is the weight update; graphs stay valid and are never captured
again. A pool of engines gets a copy of the weights after each step instead.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine import Engine, EngineConfig
from engine.checkpoint.source import resolve_model

GROUP = 16  # answers per question
GIVEN, WANTED = 3, 7  # digits of a question and of its answer
EPOCHS, CLIP = 2, 0.2  # passes over a step's samples; how far a ratio of probabilities may move from 1
TINY = "tiny"
# On a CPU the time of this process, which other processes don't disturb; one thread does all the work by default.
now = time.perf_counter if torch.cuda.is_available() else time.process_time


def questions(count: int, generator: random.Random) -> list[tuple[str, str]]:
    """Return beginnings of the count 0123456789012…, each with the digits that follow."""
    digits = "0123456789" * 2
    starts = [generator.randrange(10) for _ in range(count)]
    return [(digits[start : start + GIVEN], digits[start + GIVEN :][:WANTED]) for start in starts]


def reward(text: str, answer: str) -> float:
    """Return the share of the answer's digits that are right and at their place."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


# ---- the algorithm ---------------------------------------------------------------------------------------------------


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return each reward's distance from its group's mean in standard deviations, [questions, group]."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


Sample = tuple[list[int], list[int], list[float]]  # token ids of a question and an answer, and log-probabilities


def pack(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the samples padded on the right.

    ids [n, t], mask [n, t - 1] of the tokens that were sampled, and the engine's log-probabilities [n, t - 1] of them.
    """
    longest = max(len(question) + len(answer) for question, answer, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask, sampled = torch.zeros(len(samples), longest - 1), torch.zeros(len(samples), longest - 1)
    for row, (question, answer, log_probs) in enumerate(samples):
        start, end = len(question), len(question) + len(answer)
        ids[row, :end] = torch.tensor([*question, *answer])
        mask[row, start - 1 : end - 1] = 1
        sampled[row, start - 1 : end - 1] = torch.tensor(log_probs)
    return ids, mask, sampled


def log_probabilities(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first, float32 [n, t - 1]."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]


def loss_of(found: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the clipped loss, a mean over tokens; `advantages` [n, 1] has one value per sample."""
    ratio = (found - sampled).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum() / mask.sum()


def improve(
    trainer: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list[Sample], advantages: torch.Tensor
) -> float:
    """Train on the samples, whose advantages are [questions, group].

    Returns the largest difference between the engine's and the trainer's log-probability of a token, before training.
    """
    ids, mask, sampled = pack(samples)
    for epoch in range(EPOCHS):
        found = log_probabilities(trainer, ids)
        if epoch == 0:
            difference = ((found.detach() - sampled) * mask).abs().max().item()
        optimizer.zero_grad()
        loss_of(found, sampled, mask, advantages.reshape(-1, 1)).backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
    return difference


# ---- the loop --------------------------------------------------------------------------------------------------------


class Run:
    """The rewards, times and largest difference of log-probabilities of one run."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.rollout_ms: list[float] = []
        self.step_ms: list[float] = []
        self.difference = 0.0
        self.captured_before = self.captured_after = self.dropped = 0

    @property
    def gain(self) -> float:
        """Mean reward of the last 10 steps over the mean of the first 10."""
        return statistics.mean(self.rewards[-10:]) / max(statistics.mean(self.rewards[:10]), 1e-9)


def train(
    folder: str,
    steps: int,
    seed: int,
    num_questions: int,
    learning_rate: float,
    graphs: str = "local",
    engines: int = 0,
) -> Run:
    """Train the model of `folder` in memory, with `num_questions` per step, and return what happened.

    `engines`: the size of a pool; 0: one engine in this process.
    """
    torch.manual_seed(seed)
    generator, run = random.Random(seed), Run()
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"max_num_seqs": num_questions * GROUP, "max_model_len": 64, "num_threads": torch.get_num_threads()}
    config = EngineConfig(
        model=folder, dtype="float32", warmup="full", cuda_graph_impl=graphs, graph_manifest="none", seed=seed,
        progress=False, **settings,
    )  # fmt: skip
    with make_engine(config, engines) as engine:
        hand_over(trainer, engine, "step-0")
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=learning_rate, weight_decay=0.0)
        run.captured_before = captures(engine)
        for step in range(1, steps + 1):
            started = now()
            asked = questions(num_questions, generator)
            outputs = engine.generate(
                prompts=[question for question, _ in asked],
                sampling_params={"n": GROUP, "max_tokens": WANTED, "logprobs": 0},
            )
            generated = now()

            rewards = torch.tensor([
                [reward(one.text, answer) for one in output.outputs]
                for output, (_, answer) in zip(outputs, asked, strict=True)
            ])  # fmt: skip
            advantages = group_advantages(rewards)
            samples = [
                (output.prompt_token_ids, one.token_ids, [entry.logprob for entry in one.logprobs])
                for output in outputs
                for one in output.outputs
            ]
            run.difference = max(run.difference, improve(trainer, optimizer, samples, advantages))
            hand_over(trainer, engine, f"step-{step}")

            run.rewards.append(rewards.mean().item())
            run.rollout_ms.append(1000 * (generated - started))
            run.step_ms.append(1000 * (now() - started))
            if step % max(1, steps // 10) == 0 or step == steps:
                recent = statistics.mean(run.rewards[-10:])
                print(f"seed {seed}  step {step:4}  reward {recent:.3f}  {run.step_ms[-1]:5.0f} ms", flush=True)
        run.captured_after = captures(engine)
        if isinstance(engine, Engine):
            run.dropped = sum(count for _, count in engine.stats().graphs["invalidations"])
    return run


def make_engine(config: EngineConfig, engines: int) -> Any:
    """Return an engine, or a pool of `engines`, which generates in the same way."""
    if not engines:
        return Engine(config)
    from engine.integrations.rollout_pool import RolloutPool

    return RolloutPool(config, engines=engines)


def hand_over(trainer: torch.nn.Module, engine: Any, version: str) -> None:
    """Make the engine generate with the trainer's weights: shared ones in one engine, a copy in a pool."""
    if not isinstance(engine, Engine):
        engine.update_weights(trainer.state_dict(), version=version)
    elif version == "step-0":
        engine.share_weights(trainer, version=version)
    else:
        engine.weights_changed(version)


def captures(engine: Any) -> int:
    """Return how many graphs the engine has captured so far; 0 for a pool, whose engines are other processes."""
    if not isinstance(engine, Engine):
        return 0
    return sum(count for _, count in engine.stats().graphs["captures"])


# ---- the model -------------------------------------------------------------------------------------------------------


def save_tiny_model(folder: str, seed: int) -> None:
    """Write a random 2-layer Llama with a token per character."""
    characters = {character: index for index, character in enumerate("0123456789")}
    tokenizer = Tokenizer(models.WordLevel({"<end>": len(characters), **characters}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(seed)
    end = len(characters)
    config = LlamaConfig(
        vocab_size=end + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def save_model(name: str, folder: str, seed: int) -> None:
    """Write model `name` to a folder in Hugging Face layout, as float32."""
    if name == TINY:
        return save_tiny_model(folder, seed)
    source = resolve_model(name)
    file = {"gguf_file": os.path.basename(source.path)} if source.kind == "gguf" else {}
    place = os.path.dirname(source.path) if file else source.path
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **file)
    if file:  # transformers refuses to save what it read from such a file, so copy its values
        config = type(model.config).from_dict(model.config.to_dict() | {"quantization_config": None})
        copy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        copy.load_state_dict(model.state_dict())
        model = copy
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, **file).save_pretrained(folder)


# ---- the report ------------------------------------------------------------------------------------------------------


def plot(runs: list[Run], file: str) -> None:
    """Write the rewards of all runs as a picture, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for seed, run in enumerate(runs):
        axes.plot(range(1, len(run.rewards) + 1), run.rewards, label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO: counting")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    print(f"plot: {file}")


def main(options: argparse.Namespace) -> None:
    """Train once per seed, and print a row each."""
    is_tiny = options.model == TINY
    steps = options.steps or (150 if is_tiny else 40)
    settings = {"num_questions": 10 if is_tiny else 2, "learning_rate": 2e-3 if is_tiny else 1e-5}
    settings["engines"] = options.engines
    if options.learning_rate:
        settings["learning_rate"] = options.learning_rate
    with tempfile.TemporaryDirectory() as place:
        folders = [os.path.join(place, str(seed)) for seed in range(options.seeds)]
        for seed, folder in enumerate(folders):
            save_model(options.model, folder, seed)
        runs = [train(folder, steps, seed, **settings) for seed, folder in enumerate(folders)]
        compared: dict[str, list[Run]] = {"local": [], "none": []}
        for impl in ("local", "none") * 2 if options.compare else ():  # in turns, so that both are disturbed alike
            compared[impl].append(train(folders[0], min(steps, 10), 0, graphs=impl, **settings))
    print("\nseed  first 10  last 10  gain  largest difference  captures  recaptures  graphs dropped")
    for seed, run in enumerate(runs):
        first, last = statistics.mean(run.rewards[:10]), statistics.mean(run.rewards[-10:])
        print(
            f"{seed:4}  {first:8.3f}  {last:7.3f}  {run.gain:4.1f}  {run.difference:18.1e}  {run.captured_before:8}"
            f"  {run.captured_after - run.captured_before:10}  {run.dropped:14}"
        )
    print(f"mean gain over {len(runs)} seeds: {statistics.mean(run.gain for run in runs):.2f}")
    for name, impl in (("with graphs", "local"), ("without graphs", "none")) if options.compare else ():
        step_ms = statistics.median(ms for run in compared[impl] for ms in run.step_ms)
        rollout_ms = statistics.median(ms for run in compared[impl] for ms in run.rollout_ms)
        print(f"{name:14}  {step_ms:6.1f} ms per step, {rollout_ms:6.1f} ms of it rollouts")
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="the model to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="default: 150, or 40 for a named model")
    parser.add_argument("--seeds", type=int, default=3, help="runs, one per seed (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, help="default: 2e-3, or 1e-5 for a named model")
    parser.add_argument("--engines", type=int, default=0, help="engines of a pool on Ray (default: one, without Ray)")
    parser.add_argument("--compare", action="store_true", help="also run without graphs, and print the time per step")
    parser.add_argument("--plot", default="grpo.png", help="file of the plot; empty: none (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="a tiny model gains nothing from more (default: 1)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    main(given)
