"""ModelRunner: owner of everything on the device. Launches plans, and collects what they sampled one step later."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.params import Params
from jaxinfer.runner import cache, inputs
from jaxinfer.runner.buckets import Bucket, choose
from jaxinfer.runner.sampling import Logprobs
from jaxinfer.runner.step import StepBuilder
from jaxinfer.scheduler.plan import StepPlan, StepResult
from jaxinfer.types import TokenLogprobs

GPU_OPTIONS = {
    # Scanned layers as one captured graph: 0.08 ms to dispatch and 3.57 ms a step for Qwen3-4B at batch 1 on an H200;
    # with the default flags 1.1 and 7.6 ms.
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
    "xla_gpu_graph_min_graph_size": 1,
}
WARM_UP_RUNS = {"cpu": 1, "gpu": 4}
"""Runs of each bucket before ready: a graph is recorded on the second run and replayed from the third."""

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""


class InFlight(NamedTuple):
    """A launched step whose results are on their way to the host."""

    plan: StepPlan
    tokens: jax.Array
    logprobs: Logprobs | None  # None when no row asked


class ModelRunner:
    """Compiled steps, parameters and state of one model on one mesh."""

    def __init__(self, builder: StepBuilder, params: Params, buckets: list[Bucket]):
        self._builder = builder
        self._shape = builder.shape
        self._params = params
        self._buckets = buckets
        self._platform = builder.mesh.devices.flat[0].platform
        self._steps: dict[Bucket, Any] = {}
        self._set_up_slot: Any = None
        self._state: cache.DeviceState | None = None
        self._counter = CompilationCounter()

    @property
    def compilations_after_ready(self) -> int:
        """Compilations in this process since `warm_up` returned; any one stalls every stream, so it stays 0."""
        return self._counter.count

    def close(self) -> None:
        """Gives up the device's memory. Nothing can be launched any more."""
        self._counter.close()
        self._steps, self._params, self._state = {}, {}, None

    def compile(self, progress: Progress) -> None:
        """Compiles every bucket: lowered one by one, compiled in parallel (compilation releases the GIL)."""
        total = len(self._buckets) + 1
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            set_up = lower_set_up(self._builder)
            pending = {pool.submit(compile_lowered, set_up, self._platform): None}
            for bucket in reversed(self._buckets):
                lowered = lower_step(self._builder, self._params, bucket)
                pending[pool.submit(compile_lowered, lowered, self._platform)] = bucket
            for done, (future, bucket) in enumerate(pending.items()):
                progress(f"compiling {bucket or 'slot set-up'}", done, total)
                if bucket is None:
                    self._set_up_slot = future.result()
                else:
                    self._steps[bucket] = future.result()
        progress("compiled", total, total)

    def warm_up(self, progress: Progress) -> dict[Bucket, float]:
        """Makes the state and runs every bucket on padding. Returns the time of each bucket's last runs, in ms."""
        self._state = cache.zeros(self._builder.shape.abstract(self._builder.mesh, self._builder.axis_rules))
        times = {}
        for done, bucket in enumerate(self._buckets):
            progress(f"warming up {bucket}", done, len(self._buckets))
            empty = inputs.pack(StepPlan(0, (), ()), bucket, **self._packing)
            runs = []
            for _ in range(WARM_UP_RUNS["cpu" if self._platform == "cpu" else "gpu"]):
                start = time.perf_counter()
                self._run(bucket, empty)[0].block_until_ready()
                runs.append((time.perf_counter() - start) * 1e3)
            times[bucket] = statistics.median(runs[-2:])
        history = np.zeros(3 + self._shape.max_model_len + 2 * inputs.MAX_LOGIT_BIAS, np.int32)
        history[0] = self._shape.num_slots
        self._state = self._set_up_slot(self._state, history)
        progress("warmed up", len(self._buckets), len(self._buckets))
        self._counter.count = 0
        return times

    def launch(self, plan: StepPlan) -> InFlight:
        """Starts a step and returns without waiting for it. Steps run in the order of their launches."""
        bucket = choose(self._buckets, decode=not plan.prefills, tokens=plan.num_tokens, rows=plan.num_rows)
        for chunk in plan.prefills:
            if chunk.history is not None and (inputs.has_penalties(chunk.request) or chunk.request.logit_bias):
                shape = self._shape
                packed = inputs.pack_history(chunk, max_model_len=shape.max_model_len, vocab_rows=shape.vocab_rows)
                self._state = self._set_up_slot(self._state, packed)
        tokens, logprobs = self._run(bucket, inputs.pack(plan, bucket, **self._packing))
        tokens.copy_to_host_async()
        wanted = any(row.logprobs for row in plan.decodes)
        wanted |= any(chunk.samples and chunk.request.logprobs is not None for chunk in plan.prefills)
        if wanted:
            jax.tree.map(lambda a: a.copy_to_host_async(), logprobs)
        return InFlight(plan, tokens, logprobs if wanted else None)

    def collect(self, in_flight: InFlight) -> StepResult:
        """Waits for a step and reads what it sampled."""
        plan = in_flight.plan
        tokens = np.asarray(in_flight.tokens).tolist()
        rows = [(i, row.slot) for i, row in enumerate(plan.decodes)]
        rows += [(i, row.slot) for i, row in enumerate(plan.prefills, len(rows)) if row.samples]
        sampled = {slot: tokens[i] for i, slot in rows}
        if in_flight.logprobs is None:
            return StepResult(plan.step, sampled, {})
        chosen, ids, top = (np.asarray(a).tolist() for a in in_flight.logprobs)
        logprobs = {slot: TokenLogprobs(chosen[i], tuple(zip(ids[i], top[i], strict=True))) for i, slot in rows}
        return StepResult(plan.step, sampled, logprobs)

    @property
    def _packing(self) -> dict[str, int]:
        return {"page_size": self._shape.page_size, "num_slots": self._shape.num_slots}

    def _run(self, bucket: Bucket, packed: np.ndarray) -> tuple[jax.Array, Logprobs]:
        self._state, tokens, logprobs = self._steps[bucket](self._params, self._state, packed)
        return tokens, logprobs


class CompilationCounter:
    """Counts what JAX compiles in this process, until closed."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, _duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


def lower_step(builder: StepBuilder, params: Any, bucket: Bucket) -> jax.stages.Lowered:
    """Traces a bucket's step. `params` are arrays or their abstract values with shardings."""
    state = builder.shape.abstract(builder.mesh, builder.axis_rules)
    packed = jax.ShapeDtypeStruct((inputs.packed_size(bucket, builder.shape.page_size),), jnp.int32)
    with _donations_are_errors():
        return jax.jit(builder.step(bucket), donate_argnums=1).lower(params, state, packed)


def lower_set_up(builder: StepBuilder) -> jax.stages.Lowered:
    """Traces the setting up of a slot."""
    state = builder.shape.abstract(builder.mesh, builder.axis_rules)
    length = 3 + builder.shape.max_model_len + 2 * inputs.MAX_LOGIT_BIAS
    with _donations_are_errors():
        return jax.jit(builder.set_up_slot, donate_argnums=0).lower(state, jax.ShapeDtypeStruct((length,), jnp.int32))


def compile_lowered(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles for the platform, with the options under which its steps are captured."""
    return lowered.compile(compiler_options=None if platform == "cpu" else GPU_OPTIONS)


@contextlib.contextmanager
def _donations_are_errors() -> Iterator[None]:
    """A donated buffer that cannot be reused would be copied in every step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Some donated buffers were not usable")
        yield
