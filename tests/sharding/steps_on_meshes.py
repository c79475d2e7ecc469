"""Two steps of tiny models on meshes, against one device. In a process of its own, which has as many devices as needed:

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python steps_on_meshes.py CASES

CASES is JSON, a list of {"model": name of `configs.CONFIGS`, "mesh": sizes, "rules": name or mapping}. Prints
for each the largest difference of logits from those on one device, in the steps of two prompts and the step after
them, and the standard deviation of those on one device.
"""

import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.models import registry
from jaxinfer.params import random_params
from jaxinfer.runner import cache, inputs
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.compiled import lower_step
from jaxinfer.runner.step import StepBuilder
from jaxinfer.scheduler.plan import DecodeRow, PrefillChunk, StepPlan
from jaxinfer.sharding import rules
from jaxinfer.sharding.mesh import make_mesh
from jaxinfer.types import Request
from tests.sharding.configs import CONFIGS

PAGE_SIZE, NUM_SLOTS = 8, 2
PROMPTS = {0: list(range(3, 14)), 1: [9, 8, 7]}
BUCKETS = (Bucket(True, 2, 2), Bucket(False, 16, 2))


def make_builder(config: Mapping[str, Any], mesh: Mesh, axis_rules: rules.Rules) -> StepBuilder:
    model = registry.for_mesh(config, (), mesh, axis_rules)
    shape = StateShape(
        cache=model.cache,
        recurrent=model.recurrent,
        num_pages=8,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        max_model_len=32,
        vocab_rows=model.vocab_rows,
        dtype=jnp.dtype(jnp.float32),
    )
    return StepBuilder(
        model=model, shape=shape, vocab_size=model.vocab_rows, mesh=mesh, buckets=BUCKETS, axis_rules=axis_rules
    )


def chunk(slot: int, first_page: int) -> PrefillChunk:
    tokens = PROMPTS[slot]
    request = Request(request_id=str(slot), prompt_ids=tokens, max_tokens=9, temperature=0.0)
    pages = [first_page + i for i in range(2)]
    return PrefillChunk(
        slot=slot, start=0, token_ids=tokens, new_pages=pages, first_new_page=0, samples=True, request=request,
        prompt_len=len(tokens), history=None,
    )  # fmt: skip


PLANS = (
    StepPlan(1, (), (chunk(0, 1), chunk(1, 3))),
    StepPlan(2, tuple(DecodeRow(slot, len(tokens), 0) for slot, tokens in PROMPTS.items()), ()),
)


def logits(builder: StepBuilder) -> list[np.ndarray]:
    """[R, V] of both steps, with random weights and whatever tokens they make."""
    shardings = rules.shardings(builder.model.specs, builder.mesh, builder.axis_rules)
    params = random_params(builder.model.specs, builder.shape.dtype, shardings, seed=3)
    # As the checkpoint's weights would be: such that attention and experts matter.
    params = {name: array if array.ndim == 2 else array * 5 for name, array in params.items()}
    state = cache.zeros(builder.abstract_state)
    found = []
    for plan, bucket in zip(PLANS, reversed(BUCKETS), strict=True):
        place = builder.abstract_rows if bucket.decode else builder.abstract_inputs
        packed = np.zeros(place.shape, np.int32)
        used = inputs.pack(plan, bucket, page_size=PAGE_SIZE, num_slots=NUM_SLOTS)
        packed[: len(used)] = used
        staged = jax.device_put(packed, place.sharding)
        state = lower_step(builder, params, bucket).compile()(params, state, staged)
        found.append(np.asarray(state.logits))
    return found


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    return logits(make_builder(CONFIGS[name], make_mesh({"tensor": 1}), rules.TENSOR_PARALLEL))


def compare(case: Mapping[str, Any]) -> dict[str, float]:
    builder = make_builder(CONFIGS[case["model"]], make_mesh(case["mesh"]), rules.find(case["rules"]))
    ours, theirs = (np.stack(found) for found in (logits(builder), expected(case["model"])))
    return {"difference": float(np.abs(ours - theirs).max()), "spread": float(theirs.std())}


if __name__ == "__main__":
    print(json.dumps([compare(case) for case in json.loads(sys.argv[1])]))
