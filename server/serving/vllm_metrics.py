"""Metrics under vLLM's names, for gateways and dashboards that expect a vLLM server (`--compat vllm`).

python -m server.serving.vllm_metrics > docs/reference/vllm-metrics.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from server.version import VLLM_VERSION

if TYPE_CHECKING:
    from server.serving.service import Service

OWN, THEIRS = "encore_", "vllm:"
SHARED_NAMES = {
    "num_requests_running": "sequences in the running batch",
    "num_requests_waiting": "sequences waiting to be scheduled",
    "kv_cache_usage_perc": "KV cache usage, 1 = 100 percent",
    "prefix_cache_queries": "prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "prompt tokens found in the prefix cache",
    "num_preemptions": "preempted sequences",
    "prompt_tokens": "prompt tokens",
    "generation_tokens": "generated tokens",
    "request_success": "finished sequences, by `finished_reason`",
    "time_to_first_token_seconds": "time to the first token",
    "inter_token_latency_seconds": "time between two tokens",
    "request_time_per_output_token_seconds": "mean time per output token of a sequence",
    "e2e_request_latency_seconds": "time from arrival to the end",
    "request_queue_time_seconds": "time in the queue",
    "request_prefill_time_seconds": "time from the first step to the first token",
    "request_decode_time_seconds": "time from the first token to the last",
    "request_inference_time_seconds": "prefill and decode",
    "request_prompt_tokens": "prompt tokens of a request",
    "request_generation_tokens": "generated tokens of a sequence",
    "spec_decode_num_draft_tokens": "draft tokens",
    "spec_decode_num_accepted_tokens": "accepted draft tokens",
}
"""Names that both servers have after their prefix, without the suffixes `_total`, `_bucket`, `_sum`, `_count`."""

CACHE_CONFIG = "cache_config_info"


class _Source(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class VllmCollector:
    """Exports the metrics of `sources` again, renamed, with vLLM's labels `model_name` and `engine`."""

    def __init__(self, service: Service, sources: Iterable[_Source]):
        self._service, self._sources = service, list(sources)

    def collect(self) -> Iterator[Metric]:
        """Yield the renamed families, once the model is loaded, and vLLM's cache_config_info."""
        if not self._service.started:
            return
        labels = {"model_name": self._service.model_names()[0], "engine": "0"}
        for source in self._sources:
            for family in source.collect():
                if family.name.removeprefix(OWN) in SHARED_NAMES:
                    yield _renamed(family, labels)
        info, engine = self._service.client.info(), self._service.config.engine
        config = {
            "block_size": info.page_size, "num_gpu_blocks": info.num_pages, "engine": "0",
            "enable_prefix_caching": engine.enable_prefix_caching,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
        }  # fmt: skip
        cache = GaugeMetricFamily(THEIRS + CACHE_CONFIG, "Configuration of the KV cache.", labels=tuple(config))
        cache.add_metric([str(value) for value in config.values()], 1)
        yield cache


def _renamed(family: Metric, labels: dict[str, str]) -> Metric:
    found = Metric(THEIRS + family.name.removeprefix(OWN), family.documentation, family.type, family.unit)
    found.samples = [
        Sample(THEIRS + sample.name.removeprefix(OWN), {**labels, **sample.labels}, sample.value)
        for sample in family.samples
    ]
    return found


def document() -> str:
    """Return docs/reference/vllm-metrics.md."""
    lines = [
        "# Metrics with vLLM's names",
        "",
        "With `--compat vllm`, `/metrics` has these families as well, named and labelled (`model_name`, `engine`) as "
        f"in vLLM {VLLM_VERSION}. `python -m server.serving.vllm_metrics` writes this page.",
        "",
        "| name | value |",
        "|---|---|",
        *(f"| `{THEIRS}{name}` | {text} |" for name, text in SHARED_NAMES.items()),
        f"| `{THEIRS}{CACHE_CONFIG}` | labels `block_size`, `num_gpu_blocks` and more; the value is 1 |",
        "",
        "- Counters end in `_total`. Times are histograms in seconds.",
        f"- Encore's own names begin with `{OWN}` in place of `{THEIRS}`; `{THEIRS}{CACHE_CONFIG}` has none.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
