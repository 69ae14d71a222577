"""A decode step that samples, or follows a JSON schema, beside a greedy one, in turns.

    python -m benchmarks step.sampled_decode --shape qwen3-0.6b --batches 1,64,192 --json FILE
    python -m benchmarks step.sampled_decode --ways greedy,schema,one_schema --batches 64
    python -m benchmarks step.sampled_decode --shape tiny --batches 1,4 --outputs 16,48 --rounds 2

Random weights, 64-token prompts. A step's time is that of a generation of the longer output less that of the shorter
one, by the difference in tokens. extra_ms is the median over rounds of a way's step less the first one's.

Each way is a set of sampling parameters. All rows of a batch have the same, with two exceptions: in `mixed`, every
fourth row is sampled, and in `one_schema`, only the first row follows a JSON schema. `top_p` alone is the kernels'
worst case: random weights give a flat distribution, so a nucleus has tens of thousands of tokens.

In `bounded_schema`, strings have a maximum length. The ways with a schema need a tokenizer; the shape gets a synthetic
one of the size of its vocabulary. They run only if they are named.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import harness
from benchmarks.shapes import shape, shape_config, write_shape
from benchmarks.vocabulary import write_tokenizer

NEEDS = "CPU or 1 GPU"
GREEDY: dict[str, Any] = {"temperature": 0.0}
MAX_ROWS = 1024


def records(name: dict[str, Any], tag: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters for a list of records that is longer than any output; `name` and `tag` bound strings.

    A mask within a string of bounded length takes llguidance about four times as long as in an unbounded one.
    """
    fields = {
        "name": {"type": "string"} | name,
        "kind": {"enum": ["integer", "number", "string", "boolean"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"type": "string"} | tag, "maxItems": 4},
    }
    record = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    schema = {"type": "array", "minItems": 1000, "items": record}
    return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


SCHEMA = records({}, {})
BOUNDED_SCHEMA = records({"minLength": 4, "maxLength": 24}, {"maxLength": 12})
WAYS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY],
    "temperature": [{"temperature": 0.8}],
    "top_k_top_p": [{"temperature": 0.8, "top_k": 50, "top_p": 0.95}],
    "top_p": [{"temperature": 0.8, "top_p": 0.95}],
    "penalties": [{"temperature": 0.8, "top_k": 50, "top_p": 0.95, "presence_penalty": 0.5}],
    "logprobs": [GREEDY | {"logprobs": 5}],
    "mixed": [{"temperature": 0.8, "top_k": 50, "top_p": 0.95}, GREEDY, GREEDY, GREEDY],
    "schema": [GREEDY | SCHEMA],
    "bounded_schema": [GREEDY | BOUNDED_SCHEMA],
    "one_schema": [GREEDY | SCHEMA, *[GREEDY] * (MAX_ROWS - 1)],
    "sampled_schema": [{"temperature": 0.8} | SCHEMA],
}
CONSTRAINED = {"schema", "bounded_schema", "one_schema", "sampled_schema"}


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="qwen3-0.6b")
    parser.add_argument("--batches", type=harness.counts, default=[1, 64, 192])
    parser.add_argument("--outputs", type=harness.counts, default=[32, 288], help="shorter and longer output length")
    parser.add_argument("--rounds", type=harness.count, default=5)
    parser.add_argument("--ways", type=harness.names(WAYS), default=[way for way in WAYS if way not in CONSTRAINED])
    args = parser.parse_args(argv)
    if len(args.outputs) != 2 or args.outputs[0] >= args.outputs[1]:
        parser.error("--outputs takes two lengths, the shorter one first")
    from engine import Engine, EngineConfig, SamplingParams

    report = harness.Report(__spec__.name, args, argv)
    with tempfile.TemporaryDirectory() as root:
        folder = write_shape(args.shape, root)
        if CONSTRAINED & set(args.ways):
            write_tokenizer(folder, shape_config(args.shape)["vocab_size"])
        engine = Engine(
            EngineConfig(
                model=folder,
                load_format="dummy",
                graph_manifest="none",
                enable_prefix_caching=False,
                max_model_len=1024,
                max_num_seqs=max(args.batches),
                graph_buckets=tuple(args.batches),
            )
        )
    rng, vocab = random.Random(1), engine.info.vocab_size

    def seconds(way: str, batch: int, length: int) -> float:
        chosen = (WAYS[way] * batch)[:batch]
        params = [
            SamplingParams(max_tokens=length, ignore_eos=True, seed=row, **fields) for row, fields in enumerate(chosen)
        ]
        prompts = [[rng.randrange(3, vocab) for _ in range(64)] for _ in range(batch)]
        started = time.perf_counter()
        engine.generate(prompt_token_ids=prompts, sampling_params=params)
        return time.perf_counter() - started

    def step_ms(way: str, batch: int) -> float:
        short, long = args.outputs
        return (seconds(way, batch, long) - seconds(way, batch, short)) / (long - short) * 1e3

    for batch in args.batches:
        for way in args.ways:
            seconds(way, batch, args.outputs[0])  # compile and capture
        taken = harness.alternate(
            {way: lambda way=way, batch=batch: step_ms(way, batch) for way in args.ways}, args.rounds
        )
        first = taken[args.ways[0]]
        for way, times in taken.items():
            extra = statistics.median(one - base for one, base in zip(times, first, strict=True))
            report.add({"batch": batch, "way": way, "step_ms": round(statistics.median(times), 4),
                        "extra_ms": round(extra, 4)})  # fmt: skip
    replays = {str(labels): count for labels, count in engine.stats().graphs["replays"]}
    fallbacks = {str(labels): count for labels, count in engine.stats().graphs["fallbacks"]}
    engine.close()
    report.finish(replays=replays, fallbacks=fallbacks)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
