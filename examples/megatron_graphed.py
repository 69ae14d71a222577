"""Train a Megatron-Core GPTModel with and without graphs, compare every loss, and generate text with the result.

`python examples/megatron_graphed.py` takes under a minute on a CPU, in one process.
"""

from __future__ import annotations

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
LENGTH, ROWS, STEPS, MICROBATCHES = 48, 4, 40, 2
WARM = 10  # steps that are not timed: warm-up and capture are among them


def build() -> GPTModel:
    """Build the same model each time. On a GPU, use Megatron's own layer spec and omit the CPU options."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=4,
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


def train(model: GPTModel) -> tuple[list[float], float]:
    """Train with plain code: two microbatches per step, both forwards before the backwards.

    Return the losses, and the median time of a step in ms.
    """
    tokens = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses, seconds = torch.Generator().manual_seed(2), [], []
    for _ in range(STEPS):
        started = time.perf_counter()
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
        seconds.append(time.perf_counter() - started)
    return losses, 1000 * statistics.median(seconds[WARM:])


def main() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()

    expected, eager_ms = train(build())
    model = build()
    inference = Engine(EngineConfig(max_num_seqs=4, warmup="full"), model=model)  # shares the model's parameters
    training = Engine(
        EngineConfig(mode="training", cuda_graph_impl="local", cuda_graph_modules=["attn", "mlp"]), pool=inference.pool
    )
    training.attach(model)
    losses, graph_ms = train(model)
    for row in training.graphs():
        print(row)

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

    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the same with graphs on and off: {losses == expected}")
    print(f"a step: eager {eager_ms:.1f} ms, with graphs {graph_ms:.1f} ms")
    if losses != expected or losses[-1] > 0.7 * losses[0]:
        raise SystemExit("the runs differ, or the loss did not decrease")


if __name__ == "__main__":
    main()
