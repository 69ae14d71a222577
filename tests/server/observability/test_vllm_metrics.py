"""--compat vllm: vLLM's metric names, its version and its token strings."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from server.serving.vllm_metrics import CACHE_CONFIG, LORA, OWN, OWN_ONLY, SHARED_NAMES, SLEEP_STATE, THEIRS, document
from server.version import VLLM_VERSION
from tests.server.conftest import running, tiny_config
from tests.support.waiting import PATIENCE

# What vLLM's Grafana dashboard and the Gateway API inference extension query.
QUERIED = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prompt_tokens_total
vllm:generation_tokens_total vllm:e2e_request_latency_seconds_bucket vllm:time_to_first_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:cache_config_info vllm:lora_requests_info
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
        assert theirs.type == ours.type and len(theirs.samples) == len(ours.samples)
        assert ours.samples or name == "spec_decode_num_accepted_tokens_per_pos"  # no drafts, no positions
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert other.value == one.value
            assert other.labels == {"model_name": "tiny", "engine": "0", **one.labels}
    assert {name for name in found if name.startswith(THEIRS)} == {THEIRS + name for name in (*SHARED_NAMES, *OWN_ONLY)}


def test_the_cache_config_is_the_resolved_one(server):
    cache = families(server)[THEIRS + CACHE_CONFIG].samples[0].labels
    info = server.service.client.info()
    assert (cache["block_size"], cache["num_gpu_blocks"]) == (str(info.page_size), str(info.num_pages))
    assert cache["enable_prefix_caching"] == "True" and cache["cache_dtype"] == "float32"
    assert cache["kv_cache_size_tokens"] == str(info.page_size * info.num_pages)
    assert float(cache["kv_cache_max_concurrency"]) == info.page_size * info.num_pages / 256
    states = {sample.labels["sleep_state"]: sample.value for sample in families(server)[THEIRS + SLEEP_STATE].samples}
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


COUNTED = """
time_to_first_token_seconds_count inter_token_latency_seconds_count request_num_preemptions_count
request_num_preemptions_sum request_prompt_tokens_sum request_generation_tokens_sum request_params_n_count
request_params_n_sum request_params_max_tokens_sum request_params_max_tokens_count request_success_total
request_max_num_generation_tokens_sum request_max_num_generation_tokens_count iteration_tokens_total_sum
iteration_tokens_total_count prompt_tokens_total prompt_tokens_cached_total request_prefill_kv_computed_tokens_sum
admission_rejections_total
""".split()


def counts(server):
    server.wait_idle()
    found = dict.fromkeys(COUNTED, 0.0)
    for family in families(server).values():
        for sample in family.samples:
            name = sample.name.removeprefix(THEIRS)
            if name in found:
                found[name] += sample.value
            elif "by_source" in name and name.endswith("_total"):
                found[sample.labels["source"]] = sample.value
    return found


def steps_now(server):
    """Ask the engine: a snapshot may be a fraction of a second old."""
    asked = server.service.client.ask("stats")
    return asyncio.run_coroutine_threadsafe(asked, server.service.startup.get_loop()).result(PATIENCE).steps


def counted(server, body, path="/v1/completions"):
    """Return by how much a request changed the counts, without those that it did not change."""
    before = counts(server)
    answer = server.answer(path, body)
    server.wait(lambda: server.service.client.stats().steps == steps_now(server), "the last snapshot")
    after = counts(server)
    return answer["usage"], {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_counts_of_a_request_are_those_of_vllm(server):
    ids = [7, 9, 11, 13, 15] * 8  # 40 tokens, of which two pages of 16 are cached afterwards
    body = {"prompt": ids, "max_tokens": 10, "ignore_eos": True}
    usage, cold = counted(server, body)
    assert usage["prompt_tokens"] == 40 and cold.pop("inter_token_latency_seconds_count") <= 9
    once = dict.fromkeys(
        ("time_to_first_token_seconds_count", "request_num_preemptions_count", "request_params_n_count",
         "request_params_n_sum", "request_params_max_tokens_count", "request_success_total",
         "request_max_num_generation_tokens_count"), 1,
    )  # fmt: skip
    lengths = dict.fromkeys(
        ("request_generation_tokens_sum", "request_params_max_tokens_sum", "request_max_num_generation_tokens_sum"), 10
    )
    prompts = {"request_prompt_tokens_sum": 40, "prompt_tokens_total": 40}
    steps = {"iteration_tokens_total_count": 10}
    computed = {"request_prefill_kv_computed_tokens_sum": 40, "local_compute": 40, "iteration_tokens_total_sum": 50}
    assert cold == once | lengths | prompts | steps | computed
    _, warm = counted(server, body)
    warm.pop("inter_token_latency_seconds_count")
    computed = {"request_prefill_kv_computed_tokens_sum": 8, "local_compute": 8, "iteration_tokens_total_sum": 18}
    cached = dict.fromkeys(("prompt_tokens_cached_total", "local_cache_hit", "device"), 32)
    assert warm == once | lengths | prompts | steps | computed | cached


def test_a_request_of_several_sequences_counts_once_with_its_longest(server):
    _, found = counted(server, {"prompt": "blue bird", "n": 3, "max_tokens": 4, "ignore_eos": True})
    assert (found["request_params_n_count"], found["request_params_n_sum"]) == (1, 3)
    assert found["request_max_num_generation_tokens_count"] == 1 and found["request_max_num_generation_tokens_sum"] == 4
    assert found["request_params_max_tokens_sum"] == found["request_generation_tokens_sum"] == 12


def test_without_a_limit_the_context_is_the_maximum(server):
    body = {"input_ids": [5] * 250, "sampling_params": {"max_new_tokens": None, "ignore_eos": True}}
    before = counts(server)
    assert server.answer("/generate", body)["meta_info"]["completion_tokens"] == 6
    after = counts(server)
    assert after["request_params_max_tokens_sum"] - before["request_params_max_tokens_sum"] == 6


def test_refused_preempted_and_drafted_sequences_are_counted(start_server):
    server = start_server(
        compat="vllm", max_waiting=1, max_num_seqs=2, num_pages=20, num_speculative_tokens=3, max_model_len=256
    )
    server.service.admission.add_in_flight(3)  # as many as can run and wait
    assert server.post("/v1/completions", {"prompt": "red"}).status_code == 429
    server.service.admission.add_in_flight(-3)
    assert server.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
    body = {"prompt": [[3, 4, 5] * 20] * 2, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    server.answer("/v1/completions", body)
    server.wait_idle()
    preempted = server.service.client.stats().num_preemptions
    assert server.metric("vllm:request_num_preemptions_sum") == preempted >= 1
    assert server.metric("vllm:request_num_preemptions_count") == 2
    drafts, tokens, accepted = (
        server.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    by_position = [
        server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(one)) for one in range(3)
    ]
    assert 0 < drafts <= tokens <= 3 * drafts
    assert accepted == sum(by_position) > 0 and by_position == sorted(by_position, reverse=True)


def test_openmetrics_is_sent_when_asked_for(server):
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.1"
    response = server.http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert "\nvllm:num_requests_running{" in response.text
    assert response.text.endswith("# EOF\n")
    parsed = {family.name for family in parse_openmetrics(response.text)}
    plain = server.http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain") and "# EOF" not in plain.text
    assert parsed == {family.name for family in text_string_to_metric_families(plain.text)}
    plain_text = (
        "application/openmetrics-text; version=two", "application/openmetrics-text;version=0.0.1", "*/*", "", ";;,=",
        "application/openmetrics-text;q=0", "application/openmetrics-text;q=0.2, text/plain;q=0.9",
        "application/openmetrics-text;q=x",
    )  # fmt: skip
    for accept in plain_text:
        response = server.http.get("/metrics", headers={"Accept": accept})
        assert response.status_code == 200 and "# EOF" not in response.text, accept
    assert server.http.get("/metrics", headers={"Accept": "application/openmetrics-text"}).text.endswith("# EOF\n")


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


def test_the_gauge_of_adapters_says_that_there_are_none(server):
    [sample] = families(server)[THEIRS + LORA].samples
    assert sample.labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert abs(sample.value - time.time()) < 60


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
