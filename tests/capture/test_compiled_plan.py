"""A plan whose steps are compiled for an H200 that is not there has XLA's temporaries and XLA's collectives."""

from collections import Counter

import pytest

from tests.capture import environment

pytestmark = [pytest.mark.long, pytest.mark.capture, pytest.mark.timeout(900)]


def counts(collectives):
    return Counter({(c["kind"], frozenset(c["axes"]), c["num_bytes"]): c["count"] for c in collectives})


MESHES = [("expert=2,tensor=2", "tensor"), ("sequence=2,expert=2", "data-attention")]


@pytest.mark.parametrize(("mesh", "axis_rules"), MESHES, ids=str)
def test_xla_makes_the_collectives_that_were_traced_and_its_temporaries_are_counted(mesh, axis_rules):
    plan = environment.run("tests/capture/compile_plan.py", environment.H200, mesh, axis_rules, timeout_s=900)
    assert plan["temp_is_compiled"]
    for step in plan["steps"]:
        assert counts(step["compiled"]["collectives"]) == counts(step["collectives"])
    temp_bytes = [step["compiled"]["temp_bytes"] for step in plan["steps"]]
    assert plan["temp_bytes"] == max(temp_bytes)
    # No copy of the experts, of which a device has 604 MB a layer.
    assert 0 < max(temp_bytes) < 600e6
