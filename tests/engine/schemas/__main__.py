"""Command line: `python -m tests.engine.schemas --schemas 10000 --seed 0`. Prints how the requests ended."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from tests.conftest import write_tiny_model
from tests.engine.lively import write_lively_model
from tests.engine.schemas.outcomes import outcomes
from tests.engine.schemas.strategies import schemas
from tests.support.engines import engines

BATCH = 8


def main() -> int:
    """Run batches of schemas until there were enough. A failure raises, with a smaller example."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.schemas", description=__doc__)
    parser.add_argument("--schemas", type=int, default=1000, help="schemas to run")
    parser.add_argument("--seed", type=int, default=0, help="selects the schemas")
    parser.add_argument("--batch", type=int, default=BATCH, help="requests that run together")
    arguments = parser.parse_args()
    found, started = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        tiny, lively = Path(root, "tiny"), Path(root, "lively")
        write_tiny_model(tiny)
        write_lively_model(tiny, lively, seed=arguments.seed)
        with engines(
            model=str(lively), max_num_seqs=arguments.batch, graph_buckets=(arguments.batch,), max_model_len=1024
        ) as make:
            engine = make()

            @hypothesis.seed(arguments.seed)
            @hypothesis.settings(
                max_examples=-(-arguments.schemas // arguments.batch),
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(
                st.lists(schemas(), min_size=arguments.batch, max_size=arguments.batch),
                st.integers(0, 2**20),
                st.sampled_from([0.7, 1.0, 2.0]),
            )
            def run(batch: list[dict[str, object]], seed: int, temperature: float) -> None:
                found.update(outcomes(engine, batch, seed, temperature))

            run()
    print(f"{found.total()} schemas in {time.monotonic() - started:.0f} s")
    for reason, count in found.most_common():
        print(f"{count:7d}  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
