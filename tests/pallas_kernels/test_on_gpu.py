"""The compiled kernels on the GPU of this machine against the reference, in bfloat16."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from tests.capture import environment
from tests.pallas_kernels.kernel_checks import assert_right, of_every_case

TOLERANCE = 8e-3
"""bfloat16 keeps 8 bits: a result that is rounded once is off by 1.6e-3 in the norm, cuBLAS with a gate by 6.2e-3."""

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def computed():
    """By op, check and route. In a process of its own, since this one runs JAX on the CPU."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU")
    script = "tests/pallas_kernels/check_kernels.py"
    return functools.cache(lambda op: environment.run_with(sys.executable, script, op, timeout_s=900))


@of_every_case
def test_a_kernel_computes_what_the_reference_does_and_leaves_the_rest_alone(computed, op, name):
    assert_right(computed(op)[name], TOLERANCE)
