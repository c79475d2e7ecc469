"""What profile_step.py measures: plans for a real ModelRunner, their times, and the limits of model and card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from step_spec import StepSpec

from jaxinfer import build
from jaxinfer.config import EngineConfig
from jaxinfer.runner import cache
from jaxinfer.runner.buckets import Bucket, choose
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.runner.step import StepBuilder
from jaxinfer.scheduler.plan import DecodeRow, PrefillChunk, StepPlan
from jaxinfer.types import Request

WARM_UP_STEPS = 6
"""Launches of a plan before it is timed: a graph is recorded on the second, and replayed from the third."""
COPY_BYTES = {"cpu": 2**24, "gpu": 2**31}
MATRIX_SIZE = {"cpu": 256, "gpu": 8192}
EXPERT_AXES = {"expert", "experts"}


class Rates(NamedTuple):
    """What the card reaches."""

    copy_bytes_per_s: float  # bytes read and written by a device copy
    matrix_flops: float  # of a square product in bfloat16, operations per second


class Built(NamedTuple):
    """A runner that is ready, and what it was made from."""

    runner: ModelRunner
    builder: StepBuilder
    param_bytes: Mapping[str, int]  # by parameter, over all devices
    ready_s: float


def measure_rates() -> Rates:
    """Times a copy and a matrix product on the first device. To be called before the weights take its memory."""
    kind = "cpu" if jax.default_backend() == "cpu" else "gpu"
    source = jax.random.bits(jax.random.key(0), (COPY_BYTES[kind] // 4,), jnp.uint32)
    copy_s = _seconds_each(jax.jit(jnp.copy), source)
    size = MATRIX_SIZE[kind]
    square = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    product_s = _seconds_each(jax.jit(jnp.matmul), square, square)
    return Rates(2 * source.nbytes / copy_s, 2 * size**3 / product_s)


def _seconds_each(function: Any, *args: jax.Array, num_runs: int = 20) -> float:
    for _ in range(3):
        jax.block_until_ready(function(*args))
    start_s = time.perf_counter()
    for _ in range(num_runs):
        out = function(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start_s) / num_runs


def build_runner(config: EngineConfig, *, show_progress: bool) -> Built:
    """The engine's own runner, without the engine around it."""
    start_s = time.perf_counter()
    engine = build.build_engine(config, show_progress=show_progress)
    runner = engine._runner
    params = runner._params
    sizes = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(value)) for name, value in params.items()}
    return Built(runner, runner._builder, sizes, time.perf_counter() - start_s)


class Plans:
    """Gives the sequences of a step their pages, fills these, and makes the plan to launch over and over.

    The same plan again writes the same keys and values to the same places, so that every launch has the same context.
    """

    def __init__(self, built: Built, spec: StepSpec, *, group: int = 0, first: int = 0):
        """group: of devices, where there are several, whose slots and pages these are; first: number of its first
        sequence, which tells its text. ValueError for a step that the runner cannot hold, with what it could."""
        shape = built.builder.shape
        self._built, self._spec, self._group, self._first = built, spec, group, first
        self._page_size = shape.page_size
        self._lengths = [spec.context + 1] * spec.rows + ([spec.chunk] if spec.chunk else [])
        needs = sum(self._num_pages(length) for length in self._lengths)
        if len(self._lengths) > shape.num_slots:
            raise ValueError(f"step {spec} has {len(self._lengths)} sequences; there are {shape.num_slots} slots")
        if max(self._lengths) > shape.max_model_len:
            raise ValueError(f"step {spec} has {max(self._lengths)} tokens; the context is {shape.max_model_len}")
        if needs > shape.num_pages:
            raise ValueError(f"step {spec} needs {needs} pages; there are {shape.num_pages}")
        rng = np.random.default_rng(0)
        # Of each slot its own: of one text, all rows would go to the same experts.
        num_tokens = max(self._lengths) + first + len(self._lengths)
        self._tokens = rng.integers(0, built.builder.vocab_size, num_tokens).tolist()
        chunks = [self._chunk(spec.rows, 0, spec.chunk)] if spec.chunk else []
        decodes = [DecodeRow(slot, spec.context, self._page(slot, spec.context)) for slot in range(spec.rows)]
        self.plan = StepPlan(1, decodes, chunks)
        self.bucket: Bucket = choose(
            built.builder.buckets, decode=not chunks, tokens=self.plan.num_tokens, rows=self.plan.num_rows
        )

    def fill(self) -> None:
        """Computes the context of every decoding sequence, in steps as large as there are."""
        biggest = max((b for b in self._built.builder.buckets if not b.decode), key=lambda b: (b.tokens, b.rows))
        waiting: list[PrefillChunk] = []
        room = biggest.tokens
        for slot in range(self._spec.rows):
            start = 0
            while start < self._spec.context:
                count = min(room, self._spec.context - start)
                waiting.append(self._chunk(slot, start, count))
                start, room = start + count, room - count
                if room == 0 or len(waiting) == biggest.rows:
                    self._run(waiting)
                    waiting, room = [], biggest.tokens
        self._run(waiting)

    def _run(self, chunks: Sequence[PrefillChunk]) -> None:
        if chunks:
            plans = [StepPlan(0, [], [])] * self._built.builder.num_groups
            plans[self._group] = StepPlan(0, [], chunks)
            self._built.runner.collect(self._built.runner.launch(of_groups(plans)))

    def _num_pages(self, length: int) -> int:
        return -(-length // self._page_size)

    def _page(self, slot: int, position: int) -> int:
        """Slots have their pages one after another, from page 1 on."""
        return 1 + sum(self._num_pages(length) for length in self._lengths[:slot]) + position // self._page_size

    def _chunk(self, slot: int, start: int, count: int) -> PrefillChunk:
        first, tokens = self._num_pages(start), self._tokens[self._first + slot :]
        pages = range(first, self._num_pages(start + count))
        return PrefillChunk(
            slot=slot,
            start=start,
            token_ids=tokens[start : start + count],
            new_pages=[self._page(slot, index * self._page_size) for index in pages],
            first_new_page=first,
            samples=True,
            request=Request(request_id=f"slot {slot}", prompt_ids=tokens, max_tokens=1, temperature=0.0),
            prompt_len=start + count,
            history=None,
        )


def of_groups(plans: Sequence[StepPlan]) -> StepPlan:
    """The plans of all groups of devices as one."""
    return StepPlan(1, (), (), groups=tuple(plans)) if len(plans) > 1 else plans[0]


def time_plan(runner: ModelRunner, plan: StepPlan, num_steps: int) -> dict[str, float]:
    """Times of a step in ms.

    step_ms: of `num_steps` launched back to back, waiting only for the last: what the device takes, or the host where
    that is slower. waited_ms: when the host reads each step's tokens before it launches the next. dispatch_ms: of these
    the part in which the device was idle and the host launched. Both are medians.
    """
    for _ in range(WARM_UP_STEPS):
        runner.collect(runner.launch(plan))
    dispatch_ms, waited_ms = [], []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        in_flight = runner.launch(plan)
        launched_s = time.perf_counter()
        runner.collect(in_flight)
        waited_ms.append(1e3 * (time.perf_counter() - start_s))
        dispatch_ms.append(1e3 * (launched_s - start_s))
    start_s = time.perf_counter()
    launch_all(runner, plan, num_steps)
    step_ms = 1e3 * (time.perf_counter() - start_s) / num_steps
    times = {
        "step_ms": step_ms,
        "waited_ms": statistics.median(waited_ms),
        "dispatch_ms": statistics.median(dispatch_ms),
    }
    return {name: round(value, 4) for name, value in times.items()}


def launch_all(runner: ModelRunner, plan: StepPlan, num_steps: int) -> None:
    """Back to back; waits for the last."""
    for _ in range(num_steps):
        in_flight = runner.launch(plan)
    runner.collect(in_flight)


def record_trace(runner: ModelRunner, plan: StepPlan, num_steps: int, folder: Path) -> None:
    """Writes a trace of the plan's launches below the folder."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its events would slow the host down many times over
    with jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options):
        launch_all(runner, plan, num_steps)


def traffic(built: Built, spec: StepSpec, config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that a step has to read by what they are, and its operations; of one device.

    weights: every parameter once, but no table that is only looked up in, and of experts those that the tokens hit if
    the router is fair. kv: keys and values of each sequence that decodes, once. flops: products with weights, without
    attention.
    """
    specs, shape = built.builder.model.specs, built.builder.shape
    tokens, samples = spec.rows + spec.chunk, spec.rows + (1 if spec.chunk else 0)
    head = "head" if "head" in specs else "embed"
    chosen, known = config.get("num_experts_per_tok") or 1, config.get("num_experts") or 1
    weights, flops = 0.0, 0.0
    for name, param in specs.items():
        if name == "embed" and head != "embed":
            continue
        is_expert = bool(EXPERT_AXES & set(filter(None, param.axes)))
        weights += built.param_bytes[name] * (1 - (1 - chosen / known) ** tokens if is_expert else 1)
        if len(param.shape) > 1:
            flops += 2 * param.size * (samples if name == head else tokens) * (chosen / known if is_expert else 1)
    kv = spec.rows * (spec.context + 1) * cache.token_bytes(shape.cache, shape.dtype)
    return {name: round(value / built.builder.mesh.size) for name, value in
            {"weights_bytes": weights, "kv_bytes": kv, "flops": flops}.items()}  # fmt: skip


def limits(moved: Mapping[str, int], rates: Rates, step_ms: float) -> dict[str, float | str]:
    """The least a step can take, in ms, and its share of what it takes."""
    memory_ms = 1e3 * (moved["weights_bytes"] + moved["kv_bytes"]) / rates.copy_bytes_per_s
    matrix_ms = 1e3 * moved["flops"] / rates.matrix_flops
    least_ms = max(memory_ms, matrix_ms)
    return {
        "memory_ms": round(memory_ms, 4),
        "matrix_ms": round(matrix_ms, 4),
        "limit_ms": round(least_ms, 4),
        "bound_by": "memory" if memory_ms >= matrix_ms else "matrix products",
        "share_of_limit": round(least_ms / step_ms, 4),
    }


def floor(moved: Mapping[str, int], read_bytes_per_s: float, step_ms: float) -> dict[str, float]:
    """The time in which the card would read the weights and do nothing else, and how many times that the step takes."""
    floor_ms = 1e3 * moved["weights_bytes"] / read_bytes_per_s
    return {"floor_ms": round(floor_ms, 4), "times_floor": round(step_ms / floor_ms, 4)}
