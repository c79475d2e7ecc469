"""Two steps of tiny models on meshes, against one device. In a process of its own, which has as many devices as needed:

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python steps_on_meshes.py CASES

CASES is JSON, a list of {"model": name of `configs.CONFIGS`, "mesh": sizes, "rules": name or mapping}. Prints
for each the largest difference of logits from those on one device, in the step of some prompts and the step after it,
and the standard deviation of those on one device. Where sequences are split, the prompts go to the groups in turn.
"""

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.models import registry
from jaxinfer.params import random_params
from jaxinfer.runner import cache, inputs, packing
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.compiled import lower_step
from jaxinfer.runner.step import StepBuilder
from jaxinfer.scheduler.plan import DecodeRow, PrefillChunk, StepPlan
from jaxinfer.sharding import rules
from jaxinfer.sharding.mesh import make_mesh
from jaxinfer.types import Request
from tests.sharding.configs import CONFIGS

PAGE_SIZE, PAGES_PER_SEQ = 8, 2
PROMPTS = (list(range(3, 14)), [9, 8, 7], [40, 2, 71, 5, 33, 90, 14], [66])
NUM_SLOTS = len(PROMPTS)
BUCKETS = (Bucket(True, NUM_SLOTS, NUM_SLOTS), Bucket(False, 24, NUM_SLOTS))
"""Of 24 tokens as many are each device's of 8; the first prompt is then of four of them."""


def make_builder(config: Mapping[str, Any], mesh: Mesh, axis_rules: rules.Rules) -> StepBuilder:
    model = registry.for_mesh(config, (), mesh, axis_rules)
    shape = StateShape(
        cache=model.cache,
        recurrent=model.recurrent,
        num_pages=NUM_SLOTS * PAGES_PER_SEQ,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        max_model_len=32,
        vocab_rows=model.vocab_rows,
        dtype=jnp.dtype(jnp.float32),
    )
    return StepBuilder(
        model=model, shape=shape, vocab_size=model.vocab_rows, mesh=mesh, buckets=BUCKETS, axis_rules=axis_rules
    )


def chunk(slot: int, tokens: list[int]) -> PrefillChunk:
    request = Request(request_id="", prompt_ids=tokens, max_tokens=9, temperature=0.0)
    pages = [1 + slot * PAGES_PER_SEQ + i for i in range(len(tokens) // PAGE_SIZE + 1)]
    return PrefillChunk(
        slot=slot, start=0, token_ids=tokens, new_pages=pages, first_new_page=0, samples=True, request=request,
        prompt_len=len(tokens), history=None,
    )  # fmt: skip


def plans_of(prompts: Sequence[list[int]]) -> tuple[StepPlan, StepPlan]:
    """The two steps of a group."""
    decodes = tuple(DecodeRow(slot, len(tokens), None) for slot, tokens in enumerate(prompts))
    return StepPlan(1, (), tuple(map(chunk, range(NUM_SLOTS), prompts))), StepPlan(2, decodes, ())


def logits(builder: StepBuilder) -> list[np.ndarray]:
    """[prompts, V] of both steps, with random weights and whatever tokens they make."""
    shardings = rules.shardings(builder.model.specs, builder.mesh, builder.axis_rules)
    params = random_params(builder.model.specs, builder.shape.dtype, shardings, seed=3)
    # As the checkpoint's weights would be: such that attention and experts matter.
    params = {name: array if array.ndim == 2 else array * 5 for name, array in params.items()}
    state, num_groups = cache.zeros(builder.abstract_state), builder.num_groups
    plans, found = [plans_of(PROMPTS[group::num_groups]) for group in range(num_groups)], []
    for step, bucket in enumerate(reversed(BUCKETS)):
        place = builder.abstract_rows if bucket.decode else builder.abstract_inputs
        sizes = {"page_size": PAGE_SIZE, "num_slots": NUM_SLOTS}
        packed = [inputs.pack(of_group[step], bucket, **sizes) for of_group in plans]
        staged = jax.device_put(packing.steps(packed, place.size // num_groups), place.sharding)
        state = lower_step(builder, params, bucket).compile()(params, state, staged)
        rows = np.asarray(state.logits).reshape(num_groups, NUM_SLOTS, -1)
        found.append(np.stack([rows[i % num_groups, i // num_groups] for i in range(len(PROMPTS))]))
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
