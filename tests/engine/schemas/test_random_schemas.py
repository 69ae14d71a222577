"""Random weights under random schemas: every answer that ends by itself validates."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.engine.schemas.outcomes import outcomes
from tests.engine.schemas.strategies import schemas
from tests.support.engines import engines

BATCH = 8


@pytest.fixture(scope="module")
def engine(lively_model):
    with engines(model=str(lively_model), max_model_len=1024) as make:
        yield make()


def test_answers_that_stop_validate(engine):
    found = Counter()

    @hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
    @hypothesis.given(
        st.lists(schemas(), min_size=BATCH, max_size=BATCH), st.integers(0, 2**20), st.sampled_from([0.7, 1.0, 2.0])
    )
    def run(batch, seed, temperature):
        found.update(outcomes(engine, batch, seed, temperature))

    run()
    assert found["stop"] > 0.8 * found.total(), found
