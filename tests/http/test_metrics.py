"""/metrics: what dashboards read."""

import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.http.counters import Counters
from tests.http.conftest import wait_for

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "corrupted_requests": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "request_params_n": "histogram",
    "cache_config_info": "gauge",
}
VLLM_ONLY = {
    "gpu_cache_usage_perc": "gauge",
    "time_per_output_token_seconds": "histogram",
    "request_max_num_generation_tokens": "histogram",
}


OWN_VALUES = {
    "kv_host_pages_used": 11,
    "kv_host_pages": 12,
    "kv_disk_pages_used": 13,
    "num_requests_restoring": 14,
    "num_sessions": 15,
    "kv_offloaded_pages_total": 16,
    "kv_restored_pages_total": 17,
    "kv_disk_written_pages_total": 18,
    "kv_disk_read_pages_total": 19,
    "stuck_steps_total": 20,
    "corrupted_requests_total": 21,
}


def families(server):
    return {family.name: family for family in text_string_to_metric_families(server.metrics())}


def value(server, name, **labels):
    for family in families(server).values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"{name} {labels} is not reported")


def test_metrics_are_prometheus_text_with_every_name_in_both_sets(server):
    """B10."""
    assert server.http.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = families(server)
    for prefix in ("jaxinfer:", "vllm:"):
        assert {name: found[prefix + name].type for name in NAMES} == NAMES
    assert {name: found["vllm:" + name].type for name in VLLM_ONLY} == VLLM_ONLY
    assert found["jaxinfer:xla_compilations_after_ready"].type == "counter"
    assert found["jaxinfer:prefix_cache_evictions"].type == "counter"
    assert found["jaxinfer:prefix_cache_pages"].type == "gauge"
    for family in found.values():
        assert all(sample.labels["model_name"] == "models/fake" for sample in family.samples)


def test_histogram_buckets_are_cumulative_and_end_at_the_count(server):
    """B10."""
    server.complete()
    for prefix in ("jaxinfer:", "vllm:"):
        samples = families(server)[prefix + "time_to_first_token_seconds"].samples
        buckets = [sample.value for sample in samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == next(sample.value for sample in samples if sample.name.endswith("_count"))


def test_each_sequence_is_one_first_token_and_each_further_token_one_interval(server, engine):
    def counts():
        names = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
        return [value(server, f"jaxinfer:{name}_count") for name in names]

    engine.tokens_per_event = 3
    before = counts()
    server.complete(n=2, max_tokens=9)
    assert [a - b for a, b in zip(counts(), before, strict=True)] == [2, 12, 2]


def test_first_token_time_is_measured_from_arrival(server, engine):
    """B10."""
    engine.step_s = 0.05
    before = value(server, "jaxinfer:time_to_first_token_seconds_sum")
    server.complete(max_tokens=2)
    assert 0.05 <= value(server, "jaxinfer:time_to_first_token_seconds_sum") - before < 0.5


@pytest.mark.parametrize(("body", "reason"), [({}, "length"), ({"stop": "sat"}, "stop")])
def test_ends_are_counted_by_reason(server, body, reason):
    """B9.3, B10."""
    before = value(server, "vllm:request_success_total", finished_reason=reason)
    server.complete(**body)
    assert value(server, "vllm:request_success_total", finished_reason=reason) == before + 1


def test_prefix_cache_is_told_of_in_tokens_and_pages(own_server):
    """B10."""
    server = own_server(prefix_caching=True, cached_tokens={"0-0": 4})
    assert server.complete(prompt=[5] * 7).status_code == 200
    for prefix in ("jaxinfer:", "vllm:"):
        assert value(server, prefix + "prefix_cache_queries_total") == 7
        assert value(server, prefix + "prefix_cache_hits_total") == 4
    assert value(server, "jaxinfer:prefix_cache_pages") == 3
    assert value(server, "jaxinfer:prefix_cache_evictions_total") == 2


@pytest.mark.parametrize("name", OWN_VALUES)
def test_what_the_engine_says_of_tiers_sessions_and_faults_is_reported_once(server, name):
    assert value(server, f"jaxinfer:{name}") == OWN_VALUES[name]
    assert (f"vllm:{name}{{" in server.metrics()) == (name == "corrupted_requests_total")


def test_without_a_prefix_cache_nothing_is_looked_up_in_it(server):
    server.complete(prompt=[5] * 7)
    assert value(server, "vllm:prompt_tokens_total") >= 7
    assert value(server, "vllm:prefix_cache_queries_total") == 0


def test_gauges_follow_the_engine_and_return_to_0_after_drain(server, engine):
    """B10."""
    engine.gate.clear()
    thread = threading.Thread(target=server.complete)
    thread.start()
    wait_for(lambda: engine.running)
    assert value(server, "jaxinfer:num_requests_running") == 1
    assert value(server, "vllm:kv_cache_usage_perc") == 1 / 8
    engine.gate.set()
    thread.join()
    assert value(server, "jaxinfer:num_requests_running") == 0
    assert value(server, "jaxinfer:kv_cache_usage_perc") == 0


def test_counters_never_decrease(server):
    """B10."""

    def counters():
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families(server).values()
            if family.type == "counter"
            for sample in family.samples
        }

    before = counters()
    server.complete(n=2)
    server.complete(surprise=1)
    after = counters()
    assert all(after[key] >= before[key] for key in before)
    assert sum(after.values()) > sum(before.values())


def test_two_servers_in_one_process_count_apart(server, own_server):
    other = own_server()
    server.complete()
    assert value(other, "jaxinfer:time_to_first_token_seconds_count") == 0


def test_engine_that_gives_no_answer_leaves_the_metrics_of_the_last_scrape(server, engine, monkeypatch):
    server.complete(max_tokens=3)
    before = [line for line in server.metrics().splitlines() if line.startswith("jaxinfer:generation_tokens_total")]

    async def stands_still():
        raise TimeoutError

    monkeypatch.setattr(engine, "stats", stands_still)
    reply = server.http.get("/metrics")
    assert reply.status_code == 200
    assert before[0] in reply.text


def test_lengths_limits_and_choices_of_requests_are_counted(server):
    """B10."""

    def sums():
        names = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "request_params_n")
        return [value(server, f"vllm:{name}_{end}") for name in names for end in ("sum", "count")]

    before = sums()
    server.complete(prompt=[5] * 7, n=2, max_tokens=9)
    assert [a - b for a, b in zip(sums(), before, strict=True)] == [14, 2, 18, 2, 18, 2, 2, 1]


def test_aborted_and_failed_sequences_are_in_no_latency_and_no_length(server, engine):
    """B9.3."""

    def counts():
        names = ("e2e_request_latency_seconds", "request_decode_time_seconds", "request_prompt_tokens")
        return [value(server, f"vllm:{name}_count") for name in names]

    before = counts()
    engine.fail_after = 2
    assert server.complete().status_code == 500
    assert counts() == before


def test_cache_is_described_by_labels(server):
    """B10."""
    labels = {"block_size": "16", "num_gpu_blocks": "8", "num_cpu_blocks": "0", "enable_prefix_caching": "False"}
    for prefix in ("jaxinfer:", "vllm:"):
        assert value(server, prefix + "cache_config_info", **labels) == 1


def test_http_requests_are_counted_by_address_method_and_status(own_server):
    """B10."""
    server = own_server()
    server.complete()
    server.complete(temperature=-1)
    server.http.delete("/v1/completions")
    server.http.get("/v1/models/models/fake")
    server.http.get("/a")
    server.http.get("/b")
    server.http.put("/a")

    def count(handler, method, status):
        return value(server, "http_requests_total", handler=handler, method=method, status=status)

    wait_for(lambda: value(server, "http_request_duration_seconds_count", handler="other") == 3)
    assert count("/v1/completions", "POST", "2xx") == count("/v1/completions", "POST", "4xx") == 1
    assert count("/v1/completions", "DELETE", "4xx") == count("/v1/models/", "GET", "2xx") == 1
    assert (count("other", "GET", "4xx"), count("other", "other", "4xx")) == (2, 1)
    assert value(server, "http_request_duration_seconds_count", handler="/v1/completions") == 3


def test_client_that_leaves_before_there_is_a_status_is_counted_as_gone(own_server):
    """B10."""
    server = own_server()
    server.engine.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json={"prompt": "a"}, timeout=0.1)
    wait_for(lambda: not server.engine.running)
    server.engine.gate.set()
    name = {"handler": "/v1/completions", "method": "POST", "status": "gone"}
    wait_for(lambda: 'status="gone"' in server.metrics())
    assert value(server, "http_requests_total", **name) == 1


def test_who_takes_more_cells_than_there_are_is_told_at_once():
    counters = Counters()
    counters.take(Counters.NUM_CELLS)
    with pytest.raises(ValueError, match="1025 cells are taken; a front end has 1024"):
        counters.take(1)
