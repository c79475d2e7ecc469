"""The state of devices that write into each other's memory: how it is made, and what a step leaves of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import registry
from jaxinfer.params import random_params
from jaxinfer.runner import cache, peers, scoring
from jaxinfer.runner.compiled import lower_step, scored_program
from jaxinfer.runner.step import StepBuilder
from jaxinfer.sharding import rules
from pallas_kernels.collectives import api, reference
from pallas_kernels.dispatch import Route
from tests.runner.test_step import BUCKETS, make_builder


def counted(op: str) -> tuple[Route, ...]:
    """XLA's collective, which counts itself as a kernel would."""

    def run(*args, peers: api.Peers | None, **how) -> jax.Array:
        if peers is None:
            raise NotImplementedError("none can be written to")
        peers.counts[0] += 1
        return getattr(reference, op)(*args, peers=None, **how)

    return Route("counted", run), Route("reference", getattr(reference, op))


@pytest.fixture
def builder(golden, monkeypatch) -> StepBuilder:
    monkeypatch.setattr(peers, "reachable", lambda mesh: mesh.size > 1)
    for name, op in (("SUM", "all_reduce"), ("GATHER", "all_gather"), ("SCATTER", "reduce_scatter")):
        monkeypatch.setattr(api, name, counted(op))
    return dataclasses.replace(make_builder(registry.from_config(golden("llama").config), 2), scores=True)


def collectives_after(builder: StepBuilder, state: cache.DeviceState) -> list[int]:
    """What each device counted."""
    return np.asarray(state.peers.counts).reshape(builder.mesh.size, -1)[:, 0].tolist()


def test_a_state_without_the_inboxes_that_its_steps_write_to_is_refused(builder):
    with pytest.raises(ValueError, match="no inboxes were given"):
        cache.zeros(builder.abstract_state)
    alone = make_builder(builder.model)
    with pytest.raises(ValueError, match="has no place for them"):
        cache.zeros(alone.abstract_state, peers.Inboxes(builder.mesh))


def test_a_step_that_scores_counts_as_many_collectives_as_one_that_does_not(builder):
    inboxes = peers.Inboxes(builder.mesh)
    shardings = rules.shardings(builder.model.specs, builder.mesh)
    params = random_params(builder.model.specs, builder.shape.dtype, shardings, seed=0)
    bucket = BUCKETS[1]
    staged = jnp.zeros_like(builder.abstract_inputs, device=builder.abstract_inputs.sharding)
    plain = lower_step(builder, params, bucket).compile()
    plain = plain(params, cache.zeros(builder.abstract_state, inboxes), staged)
    (count, *others) = collectives_after(builder, plain)
    assert count == 2 + 2 * builder.model.cache.num_layers and set(others) == {count}
    program = scored_program(builder, params, bucket)
    targets = jax.device_put(np.full(bucket.tokens, scoring.NO_TARGET, np.int32), program.args[3].sharding)
    targets = targets.at[0].set(1)
    second = np.uint32(peers.GENERATION).view(np.int32)
    scored, _ = jax.jit(program.function)(params, cache.zeros(builder.abstract_state, inboxes), staged, targets)
    assert collectives_after(builder, scored) == [second + count] * builder.mesh.size


@pytest.mark.parametrize(
    ("axes", "any_order", "found"),
    [
        (("tensor",), False, (2, 1)),
        (("expert",), False, (2, 2)),
        (("expert", "tensor"), False, (4, 1)),
        (("tensor", "expert"), True, (4, 1)),
        (("data", "expert"), False, (6, 2)),
        (("one", "tensor"), False, (2, 1)),
    ],
)
def test_a_ring_is_of_axes_that_follow_each_other(axes, any_order, found):
    mesh = (("data", 3), ("one", 1), ("expert", 2), ("tensor", 2))
    assert api.ring(axes, mesh, any_order=any_order)[:2] == found


@pytest.mark.parametrize("axes", [("tensor", "expert"), ("data", "tensor"), ("one",)])
def test_axes_that_do_not_follow_each_other_and_devices_alone_have_no_ring(axes):
    mesh = (("data", 3), ("one", 1), ("expert", 2), ("tensor", 2))
    with pytest.raises(NotImplementedError, match="one alone, or not equally far apart in this order"):
        api.ring(axes, mesh, any_order=False)


def test_rings_share_no_place_of_an_inbox_and_no_count():
    mesh = (("data", 2), ("expert", 2), ("tensor", 2))
    found = list(api.rings(mesh).values())
    places = [place for ring in found for place in range(ring.before, ring.before + ring.size)]
    assert places == list(range(22)) and api.inbox_words(mesh) == 22 * api.SLOTS * api.PROGRAMS * api.REGION
    assert [ring.number for ring in found] == list(range(6)) and api.num_counts(mesh) == 6 * api.PROGRAMS + 1
