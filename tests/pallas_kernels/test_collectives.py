"""Sums, gathers and scattered sums: the reference on virtual devices, and the kernel in the interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.collectives import api
from pallas_kernels.dispatch import CPU
from tests.capture import environment
from tests.pallas_kernels.collective_cases import CASES

SHAPES = (("data", 2), ("expert", 2), ("tensor", 2))


def run(function, x, *, out):
    """The function's result on each of 4 devices, of their rows of x."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("tensor"), out_specs=out, check_vma=False)
    )(x)


@pytest.fixture
def x():
    if jax.device_count() < 4:
        pytest.skip("4 devices are needed")
    return jnp.asarray(np.random.default_rng(0).standard_normal((16, 6), np.float32))


def test_a_sum_adds_what_every_device_has_to_the_residual(x):
    residual = jnp.ones((4, 6))

    def total(mine):
        return api.all_reduce(mine, ("tensor",), residual=residual, peers=None, target=CPU)

    np.testing.assert_allclose(run(total, x, out=PartitionSpec()), x.reshape(4, 4, 6).sum(0) + 1, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_gather_puts_what_devices_have_one_behind_the_other(x, axis):
    def gathered(mine):
        return api.all_gather(mine, ("tensor",), axis=axis, peers=None, target=CPU)

    found = run(gathered, x, out=PartitionSpec())
    np.testing.assert_array_equal(found, np.concatenate(np.split(x, 4), axis=axis))


def test_a_scattered_sum_gives_each_device_its_rows(x):
    def scattered(mine):
        return api.reduce_scatter(mine, ("tensor",), peers=None, target=CPU)

    found = run(scattered, x, out=PartitionSpec("tensor"))
    np.testing.assert_allclose(found, x.reshape(4, 4, 6).sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("axes", "ring"),
    [
        (("tensor",), (2, 1)),
        (("expert",), (2, 2)),
        (("data",), (2, 4)),
        (("expert", "tensor"), (4, 1)),
        (("data", "expert"), (4, 2)),
        (("data", "expert", "tensor"), (8, 1)),
        (("absent", "tensor"), (2, 1)),
    ],
)
def test_the_devices_along_axes_are_so_many_and_so_far_apart(axes, ring):
    found = api.ring(axes, (*SHAPES, ("absent", 1)), any_order=False)
    assert (found.size, found.stride) == ring
    numbers = np.arange(8).reshape(2, 2, 2)
    group = numbers[tuple(slice(None) if name in axes else 0 for name, _ in SHAPES)].ravel()
    assert list(group) == [found.stride * i for i in range(found.size)]


def test_kinds_of_rings_share_no_place_and_no_count():
    found = sorted(api.rings(SHAPES).values(), key=lambda ring: ring.number)
    assert [ring.number for ring in found] == list(range(6))
    assert [ring.before for ring in found] == [sum(r.size for r in found[:i]) for i in range(6)]
    assert api.inbox_words(SHAPES) == api.SLOTS * sum(ring.size for ring in found) * api.PROGRAMS * api.REGION


def test_a_sum_may_name_axes_in_any_order_and_others_not():
    assert api.ring(("tensor", "expert"), SHAPES, any_order=True) == api.rings(SHAPES)["expert", "tensor"]
    with pytest.raises(NotImplementedError, match="not equally far apart"):
        api.ring(("tensor", "expert"), SHAPES, any_order=False)


@pytest.mark.parametrize("axes", [("data", "tensor"), ()])
def test_devices_that_are_not_equally_far_apart_or_single_are_refused(axes):
    with pytest.raises(NotImplementedError, match="one alone, or not equally far apart"):
        api.ring(axes, SHAPES, any_order=True)


def test_shapes_that_do_not_fit_are_refused_with_them():
    x = jnp.zeros((3, 4))
    with pytest.raises(ValueError, match=r"residual \(3, 5\) does not fit x \(3, 4\)"):
        api.all_reduce(x, (), residual=jnp.zeros((3, 5)), peers=None, target=CPU)
    with pytest.raises(ValueError, match="along dimension 2"):
        api.all_gather(x, (), axis=2, peers=None, target=CPU)


def test_rows_that_devices_cannot_share_out_are_refused(x):
    def scattered(mine):
        return api.reduce_scatter(mine[:3], ("tensor",), peers=None, target=CPU)

    with pytest.raises(ValueError, match=r"\(3, 6\) cannot be shared out by 4 devices"):
        run(scattered, x, out=PartitionSpec("tensor"))


@pytest.fixture(scope="module")
def interpreted():
    """What is wrong, by case: each device is a process, and they share their inboxes."""
    script = "tests/pallas_kernels/interpret_collectives.py"
    return environment.run(script, timeout_s=600, TRITON_INTERPRET="1")


@pytest.mark.long
@pytest.mark.capture
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_devices_that_write_to_each_other_get_the_same_results(interpreted, name):
    assert interpreted[name] == []
