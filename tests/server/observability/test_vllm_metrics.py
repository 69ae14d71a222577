"""--compat vllm: vLLM's metric names, its version and its token strings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.serving.vllm_metrics import CACHE_CONFIG, OWN, SHARED_NAMES, THEIRS, document
from server.version import VLLM_VERSION
from tests.server.conftest import running, tiny_config

# What vLLM's Grafana dashboard and the Gateway API inference extension query.
QUERIED = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prompt_tokens_total
vllm:generation_tokens_total vllm:e2e_request_latency_seconds_bucket vllm:time_to_first_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:cache_config_info
""".split()


@pytest.fixture(scope="module")
def server(tiny_model):
    with running(tiny_config(tiny_model, compat="vllm")) as handle:
        yield handle


def families(server):
    return {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}


def test_metrics_have_vllms_names_labels_and_the_same_values(server):
    server.answer("/v1/completions", {"prompt": "red bird", "max_tokens": 5, "ignore_eos": True, "n": 2})
    server.wait_idle()
    server.wait(lambda: server.metric("vllm:generation_tokens_total") == 10, "the tokens of both sequences")
    found = families(server)
    for name in SHARED_NAMES:
        ours, theirs = found[OWN + name], found[THEIRS + name]
        assert theirs.type == ours.type and len(theirs.samples) == len(ours.samples) > 0
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert other.value == one.value
            assert other.labels == {"model_name": "tiny", "engine": "0", **one.labels}
    assert {name for name in found if name.startswith(THEIRS)} == {
        *(THEIRS + name for name in SHARED_NAMES),
        THEIRS + CACHE_CONFIG,
    }
    cache = found[THEIRS + CACHE_CONFIG].samples[0].labels
    info = server.service.client.info()
    assert (cache["block_size"], cache["num_gpu_blocks"]) == (str(info.page_size), str(info.num_pages))


def test_every_metric_that_dashboards_and_gateways_query_exists(server):
    server.answer("/v1/completions", {"prompt": "red bird", "max_tokens": 2})
    samples = {sample.name for family in families(server).values() for sample in family.samples}
    assert set(QUERIED) <= samples


def test_times_of_a_sequence_add_up(server):
    server.answer("/v1/completions", {"prompt": "red bird", "max_tokens": 9, "ignore_eos": True})
    server.wait_idle()
    total, queue, prefill, decode, inference = (
        server.metric(f"encore_{name}_seconds_sum")
        for name in (
            "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
            "request_inference_time",
        )
    )  # fmt: skip
    assert inference == pytest.approx(prefill + decode) and 0 < queue + inference <= total


def test_version_is_that_of_the_release_that_is_followed(server):
    assert server.http.get("/version").json() == {"version": VLLM_VERSION}
    assert re.fullmatch(r"\d+\.\d+\.\d+", VLLM_VERSION)


def test_token_strings_are_vocabulary_entries(server):
    answer = server.answer("/tokenize", {"prompt": "the red bird", "return_token_strs": True})
    assert "Ġ" in "".join(answer["token_strs"]) and len(answer["token_strs"]) == answer["count"]


def test_without_the_setting_no_name_is_vllms(start_server):
    plain = start_server()
    assert "vllm:" not in plain.http.get("/metrics").text
    assert plain.http.get("/version").json()["version"] != VLLM_VERSION


def test_the_page_is_the_table():
    path = Path(__file__).parents[3] / "docs" / "reference" / "vllm-metrics.md"
    assert path.read_text() == document(), "run: python -m server.serving.vllm_metrics > docs/reference/vllm-metrics.md"
