"""Compiling, or fetching: every step and the small programs around it, before the first request and never after."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.runner import inputs, scoring
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.executables import Executables, Program, hits_of_jax
from jaxinfer.runner.small_programs import as_called, small_programs
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
    # Products of one input are not made one: XLA would copy their weights side by side in every step.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
UNCAPTURED = {"xla_gpu_enable_command_buffer": ""}
"""For programs of a copy or two, whose new buffers would have a graph updated at every call."""

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""
Check = Callable[[], None]
"""Raises what went wrong elsewhere meanwhile, so that nobody waits for programs that will not be used."""
CHECK_EVERY_S = 0.1
MAX_THREADS = 8

log = logging.getLogger(__name__)


class Programs(NamedTuple):
    """All that runs on the device. What a program changes is donated to it, so that no buffer ever moves.

    A captured graph replays in 0.1 ms of host time, but takes 2 to 5 ms once a buffer that it touches has moved (H200):
    hence inputs are staged in buffers that stay, and results are read from the state.

    On a single device what passes between it and the host passes through pinned memory: see `pinned.py`.
    """

    steps: Mapping[Bucket, Any]  # (params, state, staged inputs) -> state, with the likeliest token of every row
    samplers: Mapping[int, Any]  # by rows: state -> state, with what the requests of the last step's rows ask for
    stage: Any  # (staged inputs, new inputs) -> staged inputs
    stage_rows: Any  # the same for the inputs of decode steps, which have a buffer of their own
    read_tokens: Any  # DeviceState.last_token -> a copy for the host
    read_logprobs: Any  # DeviceState.logprobs -> a copy for the host
    set_up_slot: Any  # (state, packed history) -> state
    set_up_prefix: Any  # (state, staged inputs, packed prefix and new inputs) -> state, staged inputs
    set_up_prefix_rows: Any  # the same with the inputs of a decode step
    set_masks: Mapping[int, Any]  # by masks: (state, packed masks) -> state
    long: Mapping[int, Any]  # by tokens: (params, state, host context, staged inputs) -> state, rows to store
    long_stores: Mapping[int, Any]  # by tokens: (host context, rows to store, staged inputs) -> host context
    gather_frame: Any = None  # (k_pages, v_pages, pages) -> frame; None: there is no host tier
    scatter_frame: Any = None  # (state, frame, pages) -> state
    scored: Mapping[Bucket, Any] = MappingProxyType({})  # as steps, with targets behind: -> state, their scores
    copy_state: Any = None  # (state, place that is copied and where to) -> state; None: no recurrent states are kept


def compile_programs(
    builder: StepBuilder, params: Any, executables: Executables, progress: Progress, check: Check = lambda: None
) -> Programs:
    """Fetches what `executables` has and compiles the rest: traced one by one, compiled in parallel without the GIL.

    params: arrays or their abstract values with shardings.
    """
    # The largest first: they take longest.
    steps = {bucket: step_program(builder, params, bucket) for bucket in reversed(builder.buckets)}
    sampled = {bucket.rows for bucket in builder.buckets} | ({1} if builder.long else set())
    samplers = {rows: sampler_program(builder, rows) for rows in sorted(sampled)}
    masks = {rows: mask_program(builder, rows) for rows in builder.mask_rows}
    small = small_programs(builder, _options(builder, captured=False))
    sizes = builder.long.sizes if builder.long else ()
    long = {tokens: long_program(builder, params, tokens) for tokens in sizes}
    scored = {bucket: scored_program(builder, params, bucket) for bucket in scored_buckets(builder)}
    stores = {tokens: long_store_program(builder, tokens) for tokens in sizes}
    programs = [
        *steps.values(),
        *samplers.values(),
        *masks.values(),
        *small.values(),
        *long.values(),
        *stores.values(),
        *scored.values(),
    ]
    made = _make(builder, programs, executables, progress, check)
    return Programs(
        steps={bucket: made[steps[bucket].name] for bucket in builder.buckets},
        samplers={rows: made[program.name] for rows, program in samplers.items()},
        set_masks={rows: made[program.name] for rows, program in masks.items()},
        **as_called(builder, {name: made[program.name] for name, program in small.items()}),
        long={tokens: made[program.name] for tokens, program in long.items()},
        long_stores={tokens: made[program.name] for tokens, program in stores.items()},
        scored={bucket: made[program.name] for bucket, program in scored.items()},
    )


def temp_bytes(programs: Programs) -> list[int]:
    """Bytes of temporaries of each step on each device. Fewer, and it says so, where a backend does not know them."""
    found: list[int] = []
    for bucket, program in programs.steps.items():
        try:
            sizes = program.memory_analysis()
        except jax.errors.JaxRuntimeError as error:  # of one that was stored
            log.warning("what %s needs for temporaries is not known: %s", bucket, error)
        else:
            found += [] if sizes is None else [sizes.temp_size_in_bytes]
    return found


def largest_temp_bytes(
    builder: StepBuilder, params: Any, executables: Executables, progress: Progress, check: Check
) -> int:
    """Bytes of temporaries of the largest step on each device, which do not depend on the number of pages.

    From `executables` if a former start stored it under the key of the builder as it is before its pool is sized.
    """
    programs = [step_program(builder, params, builder.buckets[-1])]
    if builder.long:
        programs.append(long_program(builder, params, builder.long.chunk))
    programs += [scored_program(builder, params, bucket) for bucket in scored_buckets(builder)[-1:]]
    return max(_temp_bytes(builder, program, executables, progress, check) for program in programs)


def _temp_bytes(
    builder: StepBuilder, program: Program, executables: Executables, progress: Progress, check: Check
) -> int:
    key = executables.key(builder, program)
    found = executables.fetch_number(key)
    if found is None:
        progress(f"compiling {program.name} to size the cache", 0, 1)
        with _threads(1) as pool:
            compiled = _result(pool.submit(_compile, lower(program), program.options), check)
        found = compiled.memory_analysis().temp_size_in_bytes
        executables.store_number(key, found)
    return found


def _make(
    builder: StepBuilder, programs: list[Program], executables: Executables, progress: Progress, check: Check
) -> dict[str, Any]:
    """Compiled programs by their names."""
    keys = {program.name: executables.key(builder, program) if executables.enabled else "" for program in programs}
    made, missing = {}, []
    with _threads(MAX_THREADS) as pool:
        fetched = {p.name: pool.submit(executables.fetch, keys[p.name], builder, p) for p in programs}
        for program in programs:
            if (compiled := _result(fetched[program.name], check)) is None:
                missing.append(program)
            else:
                made[program.name] = compiled
                progress(f"fetched {len(made)} of {len(programs)} steps from the cache", len(made), len(programs))
        # Where an entry was deleted, JAX's own cache may still have the program of its key. That one cannot be kept
        # (see Executables.store), so it is compiled again, under a name that no cache knows.
        for suffix in ("", secrets.token_hex(4)):
            compiling = {}
            for program in missing:
                check()
                progress(f"tracing {program.name}", len(made), len(programs))
                lowered = lower(program, keys[program.name] + suffix)
                compiling[program.name] = pool.submit(
                    _compile_and_store, program, lowered, executables, keys[program.name]
                )
            for name, future in compiling.items():
                progress(f"compiling {name}", len(made), len(programs))
                if (compiled := _result(future, check)) is not None:
                    made[name] = compiled
            missing = [program for program in missing if program.name not in made]
    progress("compiled", len(programs), len(programs))
    return made


def _compile_and_store(
    program: Program, lowered: jax.stages.Lowered, executables: Executables, key: str
) -> jax.stages.Compiled | None:
    """None if it has to be compiled under another name to be kept."""
    with hits_of_jax() as hits:
        compiled = _compile(lowered, program.options)
    return compiled if executables.store(key, compiled, complete=not hits) else None


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that, on an error, are waited for only as long as what they have begun takes."""
    with ThreadPoolExecutor(max_workers=min(count, os.cpu_count() or 1)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _result(future: Future[Any], check: Check) -> Any:
    while not wait([future], timeout=CHECK_EVERY_S).done:
        check()
    return future.result()


def step_program(builder: StepBuilder, params: Any, bucket: Bucket) -> Program:
    """A bucket's step. `params` are arrays or their abstract values with shardings."""
    staged = builder.abstract_rows if bucket.decode else builder.abstract_inputs
    args = (_abstract(params), builder.abstract_state, staged)
    options = _options(builder, captured=True)
    return Program(str(bucket), builder.step(bucket), args, builder.abstract_state, donated=(1,), options=options)


def scored_buckets(builder: StepBuilder) -> list[Bucket]:
    """Of the steps that can tell log-probabilities of prompts, smallest first: the mixed ones, with all their rows."""
    rows = max(bucket.rows for bucket in builder.buckets)
    mixed = [bucket for bucket in builder.buckets if not bucket.decode and bucket.rows == min(bucket.tokens, rows)]
    return mixed if builder.scores else []


def scored_program(builder: StepBuilder, params: Any, bucket: Bucket) -> Program:
    """A bucket's step that scores. Never captured: its loop runs over the parts of the step that have targets."""
    targets = builder.replicated((bucket.tokens,), jnp.int32)
    scores = builder.replicated((bucket.tokens, scoring.num_fields(builder.shape.vocab_rows)), jnp.int32)
    args = (_abstract(params), builder.abstract_state, builder.abstract_inputs, targets)
    result, options = (builder.abstract_state, scores), _options(builder, captured=False)
    return Program(f"scored {bucket}", builder.scored_step(bucket), args, result, donated=(1,), options=options)


def sampler_program(builder: StepBuilder, rows: int) -> Program:
    """The sampler of steps with this many rows."""
    state, options = builder.abstract_state, _options(builder, captured=True)
    return Program(f"sampler, {rows} rows", builder.sampler(rows), (state,), state, donated=(0,), options=options)


def mask_program(builder: StepBuilder, rows: int) -> Program:
    """What writes so many masks."""
    packed = builder.by_group((rows, inputs.mask_size(builder.shape.vocab_rows)), jnp.int32)
    state, options = builder.abstract_state, _options(builder, captured=False)
    args, function = (state, packed), builder.in_groups(builder.set_masks, (state, packed), state)
    return Program(f"set_masks, {rows} rows", function, args, state, donated=(0,), options=options)


def long_program(builder: StepBuilder, params: Any, num_tokens: int) -> Program:
    """The long step of so many tokens. Never captured: how often its loops run is known only to its inputs."""
    assert builder.long is not None
    args = (_abstract(params), builder.abstract_state, builder.abstract_context(), builder.abstract_inputs)
    result = (builder.abstract_state, builder.abstract_context(num_tokens))
    name = f"long {num_tokens} tokens, blocks of {builder.long.block}"
    options = _options(builder, captured=False)
    return Program(name, builder.long_step(num_tokens), args, result, donated=(1,), options=options)


def long_store_program(builder: StepBuilder, num_tokens: int) -> Program:
    """What takes the keys and values of such a step to the host."""
    host, new = builder.abstract_context(), builder.abstract_context(num_tokens)
    args, options = (host, new, builder.abstract_inputs), _options(builder, captured=False)
    return Program(
        f"long store, {num_tokens} tokens", builder.long_store(num_tokens), args, host, donated=(0,), options=options
    )


def lower(program: Program, key: str = "") -> jax.stages.Lowered:
    """Traces a program.

    Its name in JAX ends in `key`, if there is one: JAX's own cache then has it only if it was compiled for that key.
    """

    def run(*args: Any) -> Any:
        return program.function(*args)

    if key:
        run.__name__ = run.__qualname__ = re.sub(r"\W+", "_", f"{program.name} {key[:16]}{key[64:]}")
    placed = {} if program.out_shardings is None else {"out_shardings": program.out_shardings}
    with _donations_are_errors():
        return jax.jit(run, donate_argnums=program.donated, **placed).lower(*program.args)


def lower_step(builder: StepBuilder, params: Any, bucket: Bucket) -> jax.stages.Lowered:
    """Traces a bucket's step. `params` are arrays or their abstract values with shardings."""
    return lower(step_program(builder, params, bucket))


def lower_long(builder: StepBuilder, params: Any, num_tokens: int) -> jax.stages.Lowered:
    """Traces the long step of so many tokens."""
    return lower(long_program(builder, params, num_tokens))


def lower_sampler(builder: StepBuilder, rows: int) -> jax.stages.Lowered:
    """Traces the sampler of steps with this many rows."""
    return lower(sampler_program(builder, rows))


def lower_masks(builder: StepBuilder, rows: int) -> jax.stages.Lowered:
    """Traces what writes so many masks."""
    return lower(mask_program(builder, rows))


def lower_small(builder: StepBuilder) -> dict[str, jax.stages.Lowered]:
    """Traces the programs around the steps, by their names in Programs."""
    programs = small_programs(builder, _options(builder, captured=False))
    return {name: lower(program) for name, program in programs.items()}


def compile_lowered(builder: StepBuilder, lowered: jax.stages.Lowered, *, captured: bool = True) -> jax.stages.Compiled:
    """Compiles for the builder's devices; on GPUs so that it is captured in a graph, or so that it is not."""
    return _compile(lowered, _options(builder, captured=captured))


def _compile(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None) -> jax.stages.Compiled:
    return lowered.compile(compiler_options=None if options is None else dict(options))


def _options(builder: StepBuilder, *, captured: bool) -> Mapping[str, Any] | None:
    """Of XLA; on a GPU for a program that is captured in a graph, or for one that is not."""
    if builder.platform == "cpu":
        return None
    return GPU_OPTIONS if captured else UNCAPTURED


def _abstract(arrays: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), arrays)


@contextlib.contextmanager
def _donations_are_errors() -> Iterator[None]:
    """A donated buffer that cannot be reused would be copied in every step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Some donated buffers were not usable")
        yield
