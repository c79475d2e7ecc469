"""The kernels in Triton's interpreter against the reference, in float32, and the limits of their routes."""

from __future__ import annotations

import functools
import re

import pytest

from tests.capture import environment
from tests.pallas_kernels.kernel_checks import assert_right, of_every_case
from tests.pallas_kernels.route_limits import REFUSED, TAKEN

TOLERANCE = 2e-6
LIMIT_S = 1800
"""Of an op in the interpreter, or of all calls that are compiled: minutes on two cores that do other work, too."""

pytestmark = [pytest.mark.long, pytest.mark.capture, pytest.mark.timeout(LIMIT_S)]


@pytest.fixture(scope="module")
def interpreted():
    """By op, check and route."""
    return functools.cache(
        lambda op: environment.run("tests/pallas_kernels/check_kernels.py", op, timeout_s=LIMIT_S, TRITON_INTERPRET="1")
    )


@pytest.fixture(scope="module")
def reasons():
    """By the name of a call why its route refused it."""
    return environment.run("tests/pallas_kernels/route_limits.py", timeout_s=LIMIT_S)


@of_every_case
def test_a_kernel_computes_what_the_reference_does_and_leaves_the_rest_alone(interpreted, op, name):
    assert_right(interpreted(op)[name], TOLERANCE)


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.name)
def test_what_a_route_does_not_take_is_refused_with_the_reason(reasons, call):
    reason = reasons[call.name]
    assert reason is not None
    assert re.search(f"^no route for {call.op}: {call.route}: .*{call.refusal}", reason), reason


@pytest.mark.parametrize("call", TAKEN, ids=lambda call: call.name)
def test_kernels_compile_for_every_gpu_that_their_route_is_for(reasons, call):
    assert reasons[call.name] is None
