"""EngineConfig: what cannot work is refused when it is made, with the values that do not go together."""

import re

import pytest

from jaxinfer.cluster.config import RayConfig
from jaxinfer.config import ConfigError, EngineConfig

TWO = {"num_processes": 2, "coordinator": "127.0.0.1:7"}
REFUSED = [
    ({"kv_host_gib": -1}, "kv_host_gib is -1; it must be from 0 to 1048576 GiB"),
    ({"kv_host_gib": float("nan")}, "kv_host_gib is nan; it must be from 0 to 1048576 GiB"),
    ({"kv_host_gib": float("inf")}, "kv_host_gib is inf; it must be from 0 to 1048576 GiB"),
    ({"kv_host_gib": 2**20 + 1}, "kv_host_gib is 1048577; it must be from 0 to 1048576 GiB"),
    ({"kv_disk_gib": 0}, "kv_disk_gib is 0; it must be above 0 and at most 1048576 GiB"),
    ({"kv_disk_gib": -2.5}, "kv_disk_gib is -2.5; it must be above 0 and at most 1048576 GiB"),
    ({"kv_disk_gib": float("nan")}, "kv_disk_gib is nan; it must be above 0 and at most 1048576 GiB"),
    ({"kv_disk_gib": float("inf")}, "kv_disk_gib is inf; it must be above 0 and at most 1048576 GiB"),
    ({"max_step_ms": 0.0}, "max_step_ms is 0.0; it must be above 0"),
    ({"max_step_ms": float("nan")}, "max_step_ms is nan; it must be above 0"),
    ({"step_timeout_s": 0}, "step_timeout_s is 0; it must be from 0.01 to 86400 seconds"),
    ({"step_timeout_s": float("nan")}, "step_timeout_s is nan; it must be from 0.01 to 86400 seconds"),
    ({"step_timeout_s": float("inf")}, "step_timeout_s is inf; it must be from 0.01 to 86400 seconds"),
    (
        {"kv_host_gib": 4, "enable_prefix_caching": False},
        "kv_host_gib is 4 and enable_prefix_caching is False; only pages of the prefix cache leave the device, so it "
        "must be enabled",
    ),
    (
        {"kv_disk_dir": "/tmp/kv"},
        "kv_disk_dir is '/tmp/kv' and kv_host_gib is 0.0; pages go to disk by way of the host's memory, so "
        "kv_host_gib must be above 0",
    ),
    ({"kv_disk_dir": "", "kv_host_gib": 4}, "kv_disk_dir is empty; give a folder, or leave it out for none"),
    ({"num_processes": 0}, "num_processes is 0; it must be from 1 to 4096"),
    ({"process_id": 1}, "process_id is 1 of 1 processes; it must be from 0 to 0"),
    ({"coordinator": "a:1"}, "coordinator is 'a:1' and num_processes is 1; several processes meet there"),
    ({"num_processes": 2}, "coordinator is None with 2 processes; HOST:PORT of process 0 is needed"),
    (
        {"num_processes": 2, "coordinator": "host"},
        "coordinator is 'host' with 2 processes; HOST:PORT of process 0 is needed",
    ),
    (
        {**TWO, "initialization_timeout_s": 0},
        "initialization_timeout_s is 0; it must be from 0.01 to 86400 seconds",
    ),
    (
        {**TWO, "kv_host_gib": 4},
        "kv_host_gib is 4 with 2 processes; pages that leave the devices, and so sessions and contexts beyond these, "
        "are kept by one process for all of its devices: leave it out",
    ),
    (
        {**TWO, "compile_cache_dir": "steps"},
        "compile_cache_dir is 'steps' with 2 processes; these compile together in every start, and one that had steps "
        "already would not take part: leave it out",
    ),
    (
        {**TWO, "mesh": object()},
        "mesh is a object with 2 processes; its devices are known only once these have met: give the sizes of its axes",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_work_is_refused_with_its_values(fields, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_caching": False},
        {"kv_host_gib": 0.25},
        {"kv_host_gib": 2**20, "kv_disk_dir": "kv", "kv_disk_gib": 0.5},
        {"max_step_ms": float("inf")},
        {"step_timeout_s": 0.1},
        {"step_timeout_s": 86400},
    ],
    ids=str,
)
def test_tiers_and_limits_that_go_together_are_taken(fields):
    config = EngineConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_nothing_leaves_the_device_unless_it_is_asked_for():
    config = EngineConfig()
    assert (config.kv_host_gib, config.kv_disk_dir, config.kv_disk_gib, config.step_timeout_s) == (0, None, 64, 300)


def test_an_engine_of_several_processes_is_none_of_a_ray_cluster():
    with pytest.raises(ConfigError, match="num_processes is 2; an engine of a Ray cluster is one process"):
        RayConfig.of({}, num_processes=2)
