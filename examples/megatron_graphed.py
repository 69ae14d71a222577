"""Train a Megatron-Core GPTModel with and without graphs, compare every loss, and generate text with the result.

    python examples/megatron_graphed.py                          # under a minute on a CPU, in one process
    python examples/megatron_graphed.py --steps 100 --layers 8

The results are equal. On a CPU, a step with graphs is about a tenth slower: a replay checks and copies a layer's
inputs, which takes longer than the Python and dispatch that it saves. On a GPU, kernels wait for the host, and small
steps gain; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from engine import Engine, EngineConfig, SamplingParams
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow brown bear. " * 40
LETTERS = sorted(set(TEXT))
LENGTH, ROWS, MICROBATCHES = 24, 4, 2
WARM = 5  # steps that are not timed: warm-up and capture are among them


def build(layers: int) -> GPTModel:
    """Build the same model each time. On a GPU, use Megatron's own layer spec and omit the CPU options."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.1,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        layer_spec(normalization="RMSNorm"),
        vocab_size=len(LETTERS),
        max_sequence_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    keep_rotary_in_place(model)
    return model


def train(model: GPTModel, steps: int, label: str) -> tuple[list[float], float]:
    """Train with plain code: two microbatches per step, both forwards before the backwards.

    Return the losses, and the median CPU time of a step in ms.
    """
    tokens = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses, seconds = torch.Generator().manual_seed(2), [], []
    for step in range(1, steps + 1):
        started = time.process_time()  # of this process, whatever else the machine does
        microbatches = []
        for _ in range(MICROBATCHES):
            starts = torch.randint(len(tokens) - LENGTH - 1, (ROWS,), generator=generator)
            batch = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
            positions = torch.arange(LENGTH).expand(ROWS, -1)
            microbatches.append(model(batch[:, :-1], positions, None, labels=batch[:, 1:]).mean())
        for loss in microbatches:
            (loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in microbatches) / MICROBATCHES)
        seconds.append(time.process_time() - started)
        if step % max(1, steps // 3) == 0:
            print(f"{label}: step {step} of {steps}, loss {losses[-1]:.3f}", flush=True)
    return losses, 1000 * statistics.median(seconds[WARM:])


def main(steps: int, layers: int) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()

    expected, eager_ms = train(build(layers), steps, "eager")
    model = build(layers)
    inference = Engine(
        EngineConfig(max_num_seqs=1, warmup="lazy", num_threads=torch.get_num_threads()), model=model
    )  # shares the model's parameters
    training = Engine(
        EngineConfig(mode="training", cuda_graph_impl="local", cuda_graph_modules=["attn", "mlp"]), pool=inference.pool
    )
    training.attach(model)
    losses, graph_ms = train(model, steps, "graphs")
    table = training.graphs()

    inference.weights_changed("trained")
    prompt = [LETTERS.index(letter) for letter in "the quick brown "]
    (output,) = inference.generate(
        prompt_token_ids=[prompt], sampling_params=SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    )
    print("the quick brown " + "".join(LETTERS[token] for token in output.token_ids))
    training.detach()
    inference.close()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()

    print("\nmodule                          replays  eager calls")
    for row in table:
        print(f"{row['module']:30} {row['replays']:8}  {row['eager']}")
    print("\n                     eager   with graphs")
    print(f"CPU time/step  {eager_ms:8.1f} ms  {graph_ms:9.1f} ms")
    print(f"first loss     {expected[0]:11.4f}  {losses[0]:12.4f}")
    print(f"last loss      {expected[-1]:11.4f}  {losses[-1]:12.4f}")
    print(f"every loss the same: {'yes' if losses == expected else 'no'}")
    if graph_ms > eager_ms:
        print(
            f"graphs are slower on this CPU: checks and copies of {layers} layers take {graph_ms - eager_ms:.1f} ms "
            "longer than the Python and dispatch that the replays save"
        )
    if losses != expected or losses[-1] > 0.7 * losses[0]:
        raise SystemExit("the runs differ, or the loss did not decrease")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="at least 20 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="small operations gain nothing from more (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    main(options.steps, options.layers)
