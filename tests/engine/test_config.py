"""EngineConfig refuses values of a wrong type, and names the setting."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"async_scheduling": 1}, "async_scheduling=1 must be True or False"),
        ({"seed": "1"}, "seed='1' must be a whole number"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization='0.5' must be a number"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan must be a number above 0"),
        ({"graph_buckets": 8}, "graph_buckets=8 must be a list of batch sizes"),
        ({"graph_buckets": "8"}, "graph_buckets='8' must be a list of batch sizes"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_unset_values_and_lists_are_accepted() -> None:
    config = EngineConfig(async_scheduling=None, gpu_memory_utilization=1, graph_buckets=[1, 2])
    assert config.graph_buckets == (1, 2)
