"""Compiling: every step and the small programs around it, before the first request and never after."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.runner import inputs
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.step import StepBuilder

GPU_OPTIONS = {
    # Scanned layers as one captured graph: 0.08 ms to dispatch and 3.57 ms a step for Qwen3-4B at batch 1 on an H200;
    # with the default flags 1.1 and 7.6 ms.
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
    "xla_gpu_graph_min_graph_size": 1,
    # Kernels that share no buffer may overlap: 3.52 instead of 3.73 ms a step.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
UNCAPTURED = {"xla_gpu_enable_command_buffer": ""}
"""For programs of a copy or two, whose new buffers would have a graph updated at every call."""

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""


class Programs(NamedTuple):
    """All that runs on the device. What a program changes is donated to it, so that no buffer ever moves.

    A captured graph replays in 0.1 ms of host time, but takes 2 to 5 ms once a buffer that it touches has moved (H200):
    hence inputs are staged in one buffer that stays, and results are read from the state.
    """

    steps: Mapping[Bucket, Any]  # (params, state, staged inputs) -> state, with the likeliest token of every row
    samplers: Mapping[int, Any]  # by rows: state -> state, with what the requests of the last step's rows ask for
    stage: Any  # (staged inputs, new inputs) -> staged inputs
    read_tokens: Any  # DeviceState.last_token -> a copy for the host
    read_logprobs: Any  # DeviceState.logprobs -> a copy for the host
    set_up_slot: Any  # (state, packed history) -> state


def compile_programs(builder: StepBuilder, params: Any, progress: Progress) -> Programs:
    """Compiles everything: traced one by one, compiled in parallel, since compilation releases the GIL."""
    buckets = builder.buckets
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        # The largest first: they take longest.
        steps = {b: pool.submit(compile_lowered, builder, lower_step(builder, params, b)) for b in reversed(buckets)}
        samplers = {
            rows: pool.submit(compile_lowered, builder, lower_sampler(builder, rows))
            for rows in sorted({bucket.rows for bucket in buckets})
        }
        small = {
            name: pool.submit(compile_lowered, builder, lowered, captured=False)
            for name, lowered in lower_small(builder).items()
        }
        futures = {f"compiling {bucket}": future for bucket, future in steps.items()}
        futures |= {f"compiling sampler, {rows} rows": future for rows, future in samplers.items()}
        for done, (stage, future) in enumerate(futures.items()):
            progress(stage, done, len(futures))
            future.result()
        progress("compiled", len(futures), len(futures))
        return Programs(
            steps={bucket: steps[bucket].result() for bucket in buckets},
            samplers={rows: future.result() for rows, future in samplers.items()},
            **{name: future.result() for name, future in small.items()},
        )


def lower_step(builder: StepBuilder, params: Any, bucket: Bucket) -> jax.stages.Lowered:
    """Traces a bucket's step. `params` are arrays or their abstract values with shardings."""
    with _donations_are_errors():
        step = jax.jit(builder.step(bucket), donate_argnums=1)
        return step.lower(params, builder.abstract_state, builder.abstract_inputs)


def lower_sampler(builder: StepBuilder, rows: int) -> jax.stages.Lowered:
    """Traces the sampler of steps with this many rows."""
    with _donations_are_errors():
        return jax.jit(builder.sampler(rows), donate_argnums=0).lower(builder.abstract_state)


def lower_small(builder: StepBuilder) -> dict[str, jax.stages.Lowered]:
    """Traces the programs around the steps, by their names in Programs."""
    state, staged = builder.abstract_state, builder.abstract_inputs
    history = builder.replicated((inputs.history_size(builder.shape.max_model_len),), jnp.int32)

    def stage(staged: jax.Array, new: jax.Array) -> jax.Array:
        return staged.at[:].set(new)

    def read(array: jax.Array) -> jax.Array:
        return jnp.where(True, array, 0)  # computed, since an identity would hand out the donated buffer itself

    with _donations_are_errors():
        return {
            "stage": jax.jit(stage, donate_argnums=0).lower(staged, staged),
            "read_tokens": jax.jit(read).lower(state.last_token),
            "read_logprobs": jax.jit(read).lower(state.logprobs),
            "set_up_slot": jax.jit(builder.set_up_slot, donate_argnums=0).lower(state, history),
        }


def compile_lowered(builder: StepBuilder, lowered: jax.stages.Lowered, *, captured: bool = True) -> jax.stages.Compiled:
    """Compiles for the builder's devices; on GPUs so that it is captured in a graph, or so that it is not."""
    options = GPU_OPTIONS if captured else UNCAPTURED
    return lowered.compile(compiler_options=None if builder.platform == "cpu" else options)


@contextlib.contextmanager
def _donations_are_errors() -> Iterator[None]:
    """A donated buffer that cannot be reused would be copied in every step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Some donated buffers were not usable")
        yield
