# %% [markdown]
"""Sharding as a laboratory: plan meshes for Qwen3-32B, run them, compare, and write rules and collectives of your own.

    python scripts/sharding_guide.py          # on a CPU's virtual devices, or on all GPUs that there are
    # or open it in an editor that runs cells (`# %%`), and change what you like

Every part is code that runs. Planning needs no GPU and no memory for the model. Running takes Qwen3-32B with random
weights where there are two GPUs of the size of an H200, and otherwise a tiny model of the same family on virtual
devices of the CPU: then all is real but the times, since these devices share the cores of one processor.
"""

# %%
from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.params import random_params
from jaxinfer.runner import cache, inputs
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.compiled import compile_lowered, lower_step
from jaxinfer.runner.peers import Inboxes
from jaxinfer.runner.step import StepBuilder
from jaxinfer.scheduler.plan import DecodeRow, PrefillChunk, StepPlan
from jaxinfer.sharding import report, report_output, rules
from jaxinfer.sharding.cards import CARDS, Card
from jaxinfer.sharding.mesh import ShardingError, make_mesh
from jaxinfer.types import Request

NUM_CPU_DEVICES = 4


def start_jax() -> str:
    """ "gpu" or "cpu"; a CPU has as many virtual devices as the guide needs."""
    try:
        jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    except RuntimeError:  # JAX runs already, as in a notebook whose cells are run again
        pass
    return "cpu" if jax.devices()[0].platform == "cpu" else "gpu"


PLATFORM = start_jax()
print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## 1. A plan
#
# A plan follows from a model's config.json and the sizes of a mesh's axes. `jaxinfer shard-report --model NAME --mesh
# tensor=2` prints it; here it is data. What it is for is said by a Load: so many sequences, of so many tokens each.

# %%
QWEN3_32B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
MESHES: list[dict[str, int]] = [{"tensor": 1}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}]
LOAD = report.Load(num_seqs=64, tokens_per_seq=2048)


def plan_all(config: Mapping[str, Any], **how: Any) -> dict[str, report.ShardReport]:
    """The plan of every mesh by its text, and a word on those that cannot be."""
    found = {}
    for mesh in MESHES:
        try:
            found[report_output.mesh_text(mesh)] = report.plan(config, mesh, **how)
        except ShardingError as error:
            print(f"{report_output.mesh_text(mesh)}: {error}")
    return found


plans = plan_all(QWEN3_32B, load=LOAD)
print(report_output.ranking(list(plans.values()), {}))

# %% [markdown]
# How to read it. `tensor=2` halves the weights and the cache of each GPU, and so the bytes that a step reads; it pays
# with two sums in every layer. `pipeline=2` halves them, too, but its stages wait for each other: a step reads as many
# bytes, one half after the other, and sends the hidden state once. `data=2` has all weights on each GPU, and half of
# the sequences: no collective, room for fewer tokens, and a step as quick as that of half the load.

# %%
for name, found in plans.items():
    step = found.decode
    gib = {part: f"{size / 2**30:.1f}" for part, size in report_output.parts(found).items() if size > 2**28}
    print(f"{name}: {'fits' if found.fits else 'does not fit'}; GiB of each device: {gib}")
    print(f"  decode of {step.rows} rows: reads {step.memory_s * 1e3:.2f} ms, links {step.link_s * 1e3:.2f} ms")
    for one in step.collectives:
        print(f"  {one.count:4} x {one.kind} over {', '.join(one.axes)}: {one.num_bytes:,} bytes")

# %% [markdown]
# `report.sweep` ranks all meshes of a number of devices, and says of the others why they cannot be: experts, for one,
# are nothing that this model has. `report.as_json` gives all of a plan for other programs.

# %%
ranked, refused = report.sweep(QWEN3_32B, 2, load=LOAD)
print(report_output.ranking(ranked, refused))
assert report.as_json(ranked[0])["mesh"] == dict(ranked[0].mesh)

# %% [markdown]
# ## 2. The card that a plan is for
#
# Times follow from five figures of a card. Those of this machine can be measured, and a plan asked for it by a name.


# %%
def seconds(function: Callable[..., Any], *args: Any, num_runs: int = 10) -> float:
    """The median time of a call, waited for."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(num_runs):
        start_s = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def measure_card() -> Card:
    """Of the first devices, roughly: a copy, a product, and a sum over two devices, if there are two."""
    side, num_bytes = (8192, 2**30) if PLATFORM == "gpu" else (512, 2**25)
    dtype = jnp.bfloat16 if PLATFORM == "gpu" else jnp.float32
    array, square = jnp.zeros(num_bytes // 4, jnp.float32), jnp.ones((side, side), dtype)
    read = 2 * num_bytes / seconds(jax.jit(lambda x: x + 1), array)
    flops = 2 * side**3 / seconds(jax.jit(jnp.matmul), square, square)
    memory = int((jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**33))
    if len(jax.devices()) < 2:
        return Card(memory, read, flops, read, 0.0, "measured by this guide, one device")
    mesh, whole = make_mesh({"tensor": 2}), jax.sharding.PartitionSpec()

    def sum_over(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "tensor")

    summed = jax.jit(jax.shard_map(sum_over, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    small_s, large_s = (seconds(summed, jnp.zeros(size, jnp.float32)) for size in (64, 2**21))
    # A sum over two devices sends as many bytes as the array has, each way.
    return Card(memory, read, flops, 2**23 / max(large_s - small_s, 1e-9), small_s, "measured by this guide")


CARDS["here"] = measure_card()
print(CARDS["here"])

# %% [markdown]
# ## 3. Run it, and compare
#
# A StepBuilder makes the same steps that the engine runs: one `shard_map` with visible collectives. Its arguments are
# the parameters, the state, and one packed array of integers, which is all that a step is told.

# %%
TINY = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1024, "vocab_size": 4096}  # fmt: skip
HAS_ROOM = PLATFORM == "gpu" and len(jax.devices()) > 1 and CARDS["here"].memory_bytes > 100 * 2**30
CONFIG = dict(QWEN3_32B) if HAS_ROOM else {**QWEN3_32B, **TINY}
RUN = report.Load(num_seqs=8, tokens_per_seq=64, dtype="bfloat16" if HAS_ROOM else "float32")
BUCKETS = (Bucket(True, 8, 8), Bucket(False, 256, 8))


def make_builder(mesh: Mapping[str, int], axis_rules: str | rules.Rules = "tensor") -> StepBuilder:
    """Of a decode step of 8 rows, and of a step that fills their slots."""
    made = report.make_builder(CONFIG, make_mesh(mesh), rules.find(axis_rules), RUN)
    return dataclasses.replace(made, buckets=BUCKETS)


def make_params(builder: StepBuilder) -> dict[str, jax.Array]:
    """Random weights, straight into the shards of each device: the same on every mesh."""
    shardings = rules.shardings(builder.model.specs, builder.mesh, builder.axis_rules)
    return random_params(builder.model.specs, builder.shape.dtype, shardings, seed=0)


def fill_and_decode() -> tuple[StepPlan, StepPlan]:
    """Prompts of 32 tokens for 8 sequences, then a token of each."""
    chunks, pages = [], RUN.tokens_per_seq // report.PAGE_SIZE
    for slot in range(8):
        tokens = [(7 * slot + 3 * i) % CONFIG["vocab_size"] for i in range(32)]
        request = Request(request_id=str(slot), prompt_ids=tokens, max_tokens=9, temperature=0.0)
        own = [1 + slot * pages + i for i in range(3)]
        chunks.append(PrefillChunk(slot, 0, tokens, own, 0, True, request, 32, None))
    return StepPlan(1, (), chunks), StepPlan(2, [DecodeRow(slot, 32, None) for slot in range(8)], ())


def run(builder: StepBuilder) -> tuple[np.ndarray, float]:
    """Logits [8, V] of a decode step after prompts, and the milliseconds of such a step, by launches back to back."""
    inboxes = Inboxes(builder.mesh) if builder.writes_to_peers else None  # GPUs write into each other's memory
    params, state = make_params(builder), cache.zeros(builder.abstract_state, inboxes)
    for plan, bucket in zip(fill_and_decode(), reversed(BUCKETS), strict=True):
        place = builder.abstract_rows if bucket.decode else builder.abstract_inputs
        packed = np.zeros(place.shape, np.int32)
        used = inputs.pack(plan, bucket, page_size=report.PAGE_SIZE, num_slots=RUN.num_seqs)
        packed[: len(used)] = used
        staged = jax.device_put(packed, place.sharding)
        step = compile_lowered(builder, lower_step(builder, params, bucket))
        state = step(params, state, staged)
    logits = np.asarray(state.logits, np.float32)
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        for _ in range(20):  # the same step again writes the same keys to the same places
            state = step(params, state, staged)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start_s) / 20)
    return logits, min(times) * 1e3


def bytes_of_first_device(builder: StepBuilder) -> int:
    device = builder.mesh.devices.flat[0]
    arrays = make_params(builder).values()
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device)


expected, _ = run(make_builder({"tensor": 1}))
print(f"{'mesh':14}{'planned weights':>18}{'real':>14}{'least ms':>10}{'measured':>10}{'difference':>12}")
for name, found in plan_all(CONFIG, gpu="here", load=RUN).items():
    if found.num_devices > len(jax.devices()) or "data" in found.mesh:
        continue  # groups of `data` have inputs of their own: below, the engine runs them
    builder = make_builder(found.mesh)
    logits, measured_ms = run(builder)
    planned, real = sum(found.weights.values()), bytes_of_first_device(builder)
    difference = float(np.abs(logits - expected).max())
    least_ms = found.decode.total_s * 1e3
    print(f"{name:14}{planned:>18,}{real:>14,}{least_ms:>10.3f}{measured_ms:>10.3f}{difference:>12.1e}")
    assert abs(planned - real) <= 0.01 * real
    assert difference <= (0.5 if HAS_ROOM else 1e-4)

# %% [markdown]
# Bytes agree to the last one. The time is the least that the figures allow: what a step takes beyond it is where to
# look, kernels that do not reach the card's rate, or launches. On a CPU all devices share the same cores and one
# memory, so more devices take longer, and small arrays stay in its caches: the plan knows neither.
#
# The whole engine takes the same mesh, with scheduler, prefix cache and sampling around the steps.


# %%
def generate(mesh: str) -> list[list[int]]:
    """Greedy tokens of two prompts."""
    with tempfile.TemporaryDirectory() as folder:
        small = {**QWEN3_32B, **TINY, "max_position_embeddings": 128}
        Path(folder, "config.json").write_text(json.dumps(small))
        options: dict[str, Any] = {"load_format": "dummy", "page_size": 16, "num_pages": 32}
        options |= {"max_num_seqs": 2, "max_num_batched_tokens": 16, "show_progress": False, "compile_cache_dir": ""}
        with LLM(folder, mesh=mesh, **options) as llm:
            outputs = llm.generate([[1, 2, 3], [5, 6, 7, 8]], SamplingParams(max_tokens=8, temperature=0))
    return [output.outputs[0].token_ids for output in outputs]


if len(jax.devices()) > 1:
    tokens = generate("tensor=1")
    for mesh in plans.keys() & {"tensor=2", "data=2"}:
        same = generate(mesh) == tokens
        print(f"{mesh}: {'the same tokens as one device' if same else 'OTHER tokens than one device'}")
        assert same or PLATFORM == "gpu"  # in bfloat16, sums in another order may decide between two likely tokens

# %% [markdown]
# ## 4. A rule of your own
#
# Every dimension of a weight has a logical axis, and rules say which mesh axis splits it: `rules.LOGICAL_AXES` are all.
# This one splits the MLP, and keeps attention and its cache whole on each device: one sum in a layer, not two, and no
# KV head is shared out. What it costs is in the plan before anything runs; what cannot be split is refused with sizes.

# %%
MLP_ONLY: rules.Rules = {"mlp": "tensor", "vocab": "tensor"}
for name, axis_rules in (("tensor", "tensor"), ("MLP only", MLP_ONLY)):
    found = report.plan(QWEN3_32B, {"tensor": 2}, axis_rules=axis_rules, load=LOAD)
    count = sum(one.count for one in found.decode.collectives)
    gib, kv_gib = sum(found.weights.values()) / 2**30, found.kv_bytes / 2**30
    print(f"{name}: weights {gib:.1f} GiB, cache {kv_gib:.1f} GiB of each device, {count} collectives a step, "
          f"{found.decode.total_s * 1e3:.2f} ms")  # fmt: skip
if len(jax.devices()) > 1:
    logits, measured_ms = run(make_builder({"tensor": 2}, MLP_ONLY))
    print(f"MLP only, run: {measured_ms:.3f} ms")
    assert float(np.abs(logits - expected).max()) <= (0.5 if HAS_ROOM else 1e-4)
try:
    report.plan(QWEN3_32B, {"tensor": 3}, axis_rules=MLP_ONLY, load=LOAD)
except ShardingError as error:
    print(f"refused: {error}")

# %% [markdown]
# ## 5. A collective schedule of your own
#
# The sums of a step are the calls of `jax.lax.psum` in jaxinfer/models/layers.py: nothing is left to a partitioner, so
# another function in its place is another schedule. This one parts each sum into the two halves that a ring has: first
# every device sums a slice, then all gather the slices. (Between them, norms could work on slices, which is what
# sequence parallelism is.) It replaces psum while the step is traced.

# %%
psum = jax.lax.psum


def sum_by_slices(x: jax.Array, axes: Any) -> jax.Array:
    """psum of x [T, D] over a mesh axis, as reduce-scatter and all-gather along D."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    devices = math.prod(jax.lax.axis_size(name) for name in names)
    if x.ndim < 2 or x.shape[-1] % devices:
        return psum(x, axes)
    part = jax.lax.psum_scatter(x, names, scatter_dimension=x.ndim - 1, tiled=True)
    return jax.lax.all_gather(part, names, axis=x.ndim - 1, tiled=True)


if len(jax.devices()) > 1:
    builder = make_builder({"tensor": 2})
    before = report.trace(builder, BUCKETS[0])
    plain, plain_ms = run(builder)
    with mock.patch.object(jax.lax, "psum", sum_by_slices):
        after = report.trace(builder, BUCKETS[0])
        sliced, sliced_ms = run(builder)
    for name, found, measured_ms in (("sums", before, plain_ms), ("slices", after, sliced_ms)):
        card = CARDS["here"]
        links_ms = sum(one.seconds(card.link_bytes_per_s, card.collective_s) for one in found) * 1e3
        kinds = ", ".join(f"{one.count} x {one.kind} of {one.num_bytes:,} bytes" for one in found)
        print(f"{name}: {kinds}; collectives at least {links_ms:.3f} ms, step measured {measured_ms:.3f} ms")
    assert "reduce-scatter" in {one.kind for one in after} and "reduce-scatter" not in {one.kind for one in before}
    assert float(np.abs(sliced - plain).max()) <= (0.5 if HAS_ROOM else 1e-4)
    print("the logits are the same")

# %% [markdown]
# ## 6. Several hosts
#
# The same mesh may have devices of several processes, one on each host. All get the same command but for its id:
#
#     jaxinfer serve MODEL --mesh tensor=8,pipeline=2 --coordinator 10.0.0.1:9000 --num-processes 2 --process-id 0
#     jaxinfer serve MODEL --mesh tensor=8,pipeline=2 --coordinator 10.0.0.1:9000 --num-processes 2 --process-id 1
#
# Neighbours along the last axis are devices of one host where that axis has no more than a host has: put the axis with
# the most collectives last. In Python, process 0 makes an LLM, and the others call `jaxinfer.follow` with its options.
