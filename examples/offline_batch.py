"""Generate from many prompts without a server, and show which graphs answered.

`python examples/offline_batch.py [MODEL]` uses the default model (93 MB) unless one is named.
"""

from __future__ import annotations

import sys

from engine import Engine, EngineConfig, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "Water boils at", "The opposite of cold is"]


def main(model: str) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    settings = {"max_num_seqs": len(PROMPTS), "max_model_len": 256, "num_threads": 1}  # small, to start fast
    with Engine(EngineConfig(model=model, warmup="lazy", **settings)) as engine:
        for output in engine.generate(prompts=PROMPTS, sampling_params=params):
            print(f"{output.prompt!r} -> {output.text!r} ({output.finish_reason})")
        for row in engine.graphs():
            if row["replays"]:
                print(f"{row['site']} bucket {row['bucket']}: {row['replays']} replays")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
