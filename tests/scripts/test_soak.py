"""scripts/soak.py: what it calls flat, and what it asks. The soak itself is run by hand."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
import soak

MIB = 2**20


def samples(rise_mib_per_min=0.0, files=10, noise_mib=3.0, warm_up_mib=200.0, more_files=0):
    """Of 30 minutes, the first five of which are a warm-up."""
    rng = random.Random(1)
    found = []
    for at_s in range(0, 1800, 2):
        warm = min(1.0, at_s / 300) * warm_up_mib
        pss = int((500 + warm + rise_mib_per_min * at_s / 60 + rng.uniform(0, noise_mib)) * MIB)
        found.append(soak.Sample(at_s, pss, pss, files + rng.randint(0, 5) + more_files * (at_s > 900)))
    return found


def test_a_warm_up_and_noise_are_flat():
    found = soak.judge(samples(), limit_mib=8, limit_files=2)
    assert found["flat"] and abs(found["pss_rise_mib_per_10_min"]) < 0.5


@pytest.mark.parametrize("wrong", [{"rise_mib_per_min": 1.0}, {"more_files": 9}])
def test_a_slow_leak_of_memory_or_of_files_is_not_flat(wrong):
    assert not soak.judge(samples(**wrong), limit_mib=8, limit_files=2)["flat"]


def test_a_single_step_up_or_down_is_no_slope():
    found = samples(noise_mib=0.0)
    found[600] = found[600]._replace(pss=10**12)
    assert soak.judge(found, limit_mib=8, limit_files=2)["pss_rise_mib_per_10_min"] == 0


def test_requests_are_of_every_kind_the_same_for_a_seed_and_only_nonsense_is_no_json():
    one, other = ([*itertools.islice(soak.requests(random.Random("0/1")), 400)] for _ in range(2))
    assert one == other
    assert {ask.kind for ask in one} == {
        *("chat", "completion", "n", "structured", "tools", "responses"),
        *("messages", "session", "embeddings", "nonsense"),
    }
    assert any(ask.leaves for ask in one)
    for ask in one:
        if ask.kind != "nonsense":
            assert isinstance(json.loads(ask.body), dict)


def test_a_process_is_sampled_and_one_that_is_gone_is_none():
    found = soak.sample(os.getpid(), 1.0)
    assert found is not None and 0 < found.pss <= found.rss and found.files > 2
    assert os.getpid() in soak.family(os.getppid())
    assert soak.sample(2**22 + 1, 1.0) is None
