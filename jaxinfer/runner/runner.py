"""ModelRunner: owner of everything on the device. Launches plans, and collects what they sampled one step later."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.params import Params
from jaxinfer.runner import cache, compiled, host_pages, inputs, long_context, packing, scoring
from jaxinfer.runner.buckets import Bucket, choose
from jaxinfer.runner.compiled import Programs, Progress
from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.runner.host_pages import HostPages
from jaxinfer.runner.page_file import BLOCK_BYTES
from jaxinfer.runner.peers import Inboxes
from jaxinfer.runner.step import StepBuilder
from jaxinfer.runner.warm_up import NOBODY, full_plan
from jaxinfer.scheduler.plan import (
    CachedPrefix,
    LongChunk,
    StepPlan,
    StepResult,
    TokenMask,
    Transferred,
)

WARM_UP_RUNS = {"cpu": 1, "gpu": 3}
"""Runs of each program before ready: a graph is recorded on the second run and replayed from the third."""
QUICK_MS = 10.0
MORE_RUNS = 2
"""Further replays of a step that takes less than QUICK_MS, by which a time of few milliseconds is sure."""
EMPTY_PLAN = StepPlan(0, (), ())
"""Padding alone."""
MIN_POLL_S = 20e-6
"""Shortest sleep between two looks at a step that is waited for. In an engine's own process (see `timer_slack.py`)
Linux makes 34 us of it, elsewhere 85.

So a step of 2.7 ms is seen to be done 0.02 ms late in the median, while the next one runs already; elsewhere 0.05 ms.
The looks take 0.36 of a core. Measured on a CPU, with a clock for the step.
"""
POLL_SHARE = 1 / 128
"""Of the wait so far, the sleep where that is longer: a step of 300 ms is seen to be done 0.9 ms late in the median."""


class StuckStep(RuntimeError):
    """A step did not end within its time."""


class InFlight(NamedTuple):
    """A launched step whose results are on their way to the host, by slot."""

    plan: StepPlan
    tokens: jax.Array  # [N + 1]
    logprobs: jax.Array | None  # [N + 1, 1 + 2k]; None when no row asked
    scores: jax.Array | None = None  # of the step's tokens, see `scoring.score`; None when no chunk asked


class Unsampled(NamedTuple):
    """A launched step whose tokens are to be sampled under masks: see `ModelRunner.sample`."""

    plan: StepPlan
    num_rows: int  # of its bucket


class ModelRunner:
    """Parameters, state and compiled programs of one model on one mesh. Ready once made."""

    def __init__(
        self,
        builder: StepBuilder,
        params: Params,
        programs: Programs,
        progress: Progress,
        *,
        disk: DiskPages | None = None,
    ):
        """Warms up: every program runs. The state is zeros. disk: what is behind the host tier."""
        self._builder = builder
        self._num_groups = builder.num_groups
        self._empty_plan = StepPlan(0, (), (), groups=(EMPTY_PLAN,) * self._num_groups if self._num_groups > 1 else ())
        self._params = params
        self._programs = programs
        self._host: long_context.HostContext | None = None
        self._scores: jax.Array | None = None  # of the step that was launched last, until it is read
        self._inboxes = Inboxes(builder.mesh) if builder.writes_to_peers else None
        self._make_state()
        self._make_host()
        self._around_holes = cache.make_holes(self._hole_sizes()) if builder.platform != "cpu" else []
        self._counter = CompilationCounter()
        self._tier: HostPages | None = None
        self.restore_ms = 0.0
        """What it takes to copy a frame from the host to the device."""
        if builder.frame_pages:
            progress("warming up the host tier", 0, 1)
            self._tier = HostPages(programs.gather_frame, programs.scatter_frame, builder.abstract_frame, disk)
            self._state, self.restore_ms = self._tier.warm_up(self._state)
        self.times_ms = self._warm_up(progress)
        """Of each bucket, full: the median of the runs that replayed its graph, in ms."""

    @property
    def compilations_after_ready(self) -> int:
        """Compilations in `launch`; any one stalls every stream, so it stays 0."""
        return self._counter.count

    @property
    def page_file_bytes(self) -> int:
        """Of a page's file."""
        shape = self._builder.shape
        return cache.token_bytes(shape.cache, shape.dtype) * shape.page_size + BLOCK_BYTES

    @property
    def num_disk_writes(self) -> int:
        """Pages written to disk."""
        return self._tier.num_disk_writes if self._tier else 0

    @property
    def num_disk_reads(self) -> int:
        """Pages read from disk."""
        return self._tier.num_disk_reads if self._tier else 0

    def launch(self, plan: StepPlan) -> InFlight | Unsampled | None:
        """Starts a step and returns without waiting for it; None for a plan without rows, which has no step.

        Steps run in the order of their launches. One that is constrained is to be sampled before the next is launched.
        ValueError for a plan of more or fewer groups than there are.
        """
        if len(plan.parts) != self._num_groups:
            raise ValueError(f"the plan is for {len(plan.parts)} groups of devices; there are {self._num_groups}")
        with self._counter:
            if plan.transfers:
                assert self._tier is not None
                self._tier.begin(self._state, plan.transfers)
            for packed in packing.histories_of(plan, self._builder.shape):
                self._state = self._programs.set_up_slot(self._state, packed)
            if not plan.num_rows:
                self._stage_rows([packing.NOTHING] * self._num_groups, [part.prefixes for part in plan.parts])
                return None
            num_rows = self._run_plan(plan) if plan.long is None else self._run_long(plan.long, plan.prefixes)
            for kept in zip_longest(*(part.kept_states for part in plan.parts)):
                self._copy_states([one and (one.slot, self._first_copy + one.place) for one in kept])
            if plan.constrained:
                return Unsampled(plan, num_rows)
            if not plan.is_plain:
                self._state = self._programs.samplers[num_rows](self._state)
            return self._read(plan, wants_logprobs=plan.wants_logprobs)

    def sample(self, launched: Unsampled, masks: Sequence[TokenMask]) -> InFlight:
        """Samples the step that was launched last, and returns without waiting for it.

        Its rows without a mask sample as ever: those whose requests have no grammar, and those that ended meanwhile.
        """
        with self._counter:
            self._set_masks(masks)
            self._state = self._programs.samplers[launched.num_rows](self._state)
            return self._read(launched.plan, wants_logprobs=launched.plan.wants_logprobs)

    def collect(self, in_flight: InFlight, timeout_s: float = math.inf) -> StepResult:
        """Waits for a step and reads what it sampled: -1 where the logits were not numbers. Raises StuckStep."""
        _wait(in_flight, timeout_s)
        logprobs = None if in_flight.logprobs is None else np.asarray(in_flight.logprobs)
        found = packing.results(in_flight.plan, np.asarray(in_flight.tokens), logprobs)
        if in_flight.scores is None:
            return found
        return dataclasses.replace(found, scores=scoring.unpack(in_flight.plan, np.asarray(in_flight.scores)))

    def transferred(self) -> list[Transferred]:
        """The transfers that have ended. What they brought is there for whatever is launched from now on."""
        if self._tier is None:
            return []
        with self._counter:
            self._state, done = self._tier.finish(self._state)
        return done

    def wait_for_transfer(self, timeout_s: float) -> None:
        """Returns when `transferred` has something to do, or after that time."""
        if self._tier is None:
            time.sleep(timeout_s)
        else:
            self._tier.wait(timeout_s)

    def reset(self) -> None:
        """Makes the state anew, all zeros: after a step that failed, what was donated to it may be lost.

        The host's part of a long context is kept if it is whole; nothing of it is read before it is written again.
        """
        if self._tier is not None:
            self._tier.lose_device()
        del self._state, self._staged, self._rows  # first, since there may be no room for both
        self._make_state()
        if self._host is not None and not long_context.is_whole(self._host):
            self._host = None  # first, for the same reason
            self._make_host()

    def close(self) -> None:
        """Gives up the device's memory. Nothing can be launched any more."""
        self._counter.close()
        if self._tier is not None:
            self._tier.close()
        if self._inboxes is not None:  # what a step writes there once they are gone would be another's
            with contextlib.suppress(Exception):
                jax.block_until_ready(self._state)
        del self._programs, self._params, self._state, self._staged, self._rows, self._host, self._around_holes
        del self._inboxes

    def _make_state(self) -> None:
        inputs, rows = self._builder.abstract_inputs, self._builder.abstract_rows
        self._state = cache.zeros(self._builder.abstract_state, self._inboxes)
        self._staged = jnp.zeros_like(inputs, device=inputs.sharding)
        self._rows = jnp.zeros_like(rows, device=rows.sharding)  # of decode steps

    def _hole_sizes(self) -> list[int]:
        """See `cache.hole_sizes`."""
        masks_bytes = 4 * self._builder.mask_rows[-1] * inputs.mask_size(self._builder.shape.vocab_rows)
        small_bytes, frame_bytes = max(self._staged.nbytes, self._state.logprobs.nbytes, masks_bytes), 0
        if self._builder.frame_pages:
            frame = self._builder.abstract_frame
            assert frame.sharding is not None
            frame_bytes = math.prod(frame.sharding.shard_shape(frame.shape)) * frame.dtype.itemsize
        temp_bytes = compiled.temp_bytes(self._programs) if frame_bytes else ()
        return cache.hole_sizes(small_bytes, temp_bytes, frame_bytes, host_pages.MAX_MOVING)

    def _make_host(self) -> None:
        if self._builder.long is not None:
            self._host = long_context.zeros(self._builder.abstract_context())

    def _run(self, bucket: Bucket, plan: StepPlan) -> None:
        shape = self._builder.shape
        sizes = {"page_size": shape.page_size, "num_slots": shape.num_slots}
        stage = self._stage_rows if bucket.decode else self._stage
        stage([inputs.pack(part, bucket, **sizes) for part in plan.parts], [part.prefixes for part in plan.parts])
        staged = self._rows if bucket.decode else self._staged
        if plan.is_scored:
            behind = scoring.targets(plan, bucket.tokens)
            self._state, self._scores = self._programs.scored[bucket](self._params, self._state, staged, behind)
            self._scores.copy_to_host_async()
        else:
            self._state = self._programs.steps[bucket](self._params, self._state, staged)

    def _run_plan(self, plan: StepPlan) -> int:
        """Runs the smallest bucket that holds the plan, and returns its rows."""
        buckets = tuple(self._programs.scored) if plan.is_scored else self._builder.buckets
        decode = not any(part.prefills for part in plan.parts)
        bucket = choose(buckets, decode=decode, tokens=plan.num_tokens, rows=plan.num_rows)
        self._run(bucket, plan)
        return bucket.rows

    def _run_long(self, chunk: LongChunk, prefixes: Sequence[CachedPrefix] = ()) -> int:
        """Runs the smallest long step that holds the chunk, and returns its rows: 1.

        ValueError for more tokens than a long step or the host holds, or if there are no long steps.
        """
        long, programs, end = self._builder.long, self._programs, chunk.start + chunk.num_tokens
        if long is None:
            raise ValueError("the plan has a chunk beyond the device's pages, but no step was compiled for such")
        if chunk.num_tokens > long.chunk or end - chunk.num_device_tokens > long.num_tokens:
            raise ValueError(
                f"a chunk of {chunk.num_tokens} tokens up to position {end}, of which {chunk.num_device_tokens} are in "
                f"pages, does not fit: a step holds {long.chunk} tokens, the host {long.num_tokens}"
            )
        size = min(size for size in long.sizes if size >= chunk.num_tokens)
        self._stage([inputs.pack_long(chunk, size)], [prefixes])
        self._state, new = programs.long[size](self._params, self._state, self._host, self._staged)
        self._host = programs.long_stores[size](self._host, new, self._staged)
        return 1

    def _stage(self, packed: Sequence[np.ndarray], prefixes: Sequence[Sequence[CachedPrefix]]) -> None:
        """Puts the inputs of a step where it reads them, of each group, and what begins in the cache into its slots."""
        programs = self._programs
        self._staged = self._staged_with(self._staged, packed, prefixes, programs.stage, programs.set_up_prefix)

    def _stage_rows(self, packed: Sequence[np.ndarray], prefixes: Sequence[Sequence[CachedPrefix]]) -> None:
        """The same for a decode step, or for none."""
        programs = self._programs
        self._rows = self._staged_with(self._rows, packed, prefixes, programs.stage_rows, programs.set_up_prefix_rows)

    def _staged_with(
        self,
        staged: jax.Array,
        packed: Sequence[np.ndarray],
        prefixes: Sequence[Sequence[CachedPrefix]],
        stage: Any,
        set_up_prefix: Any,
    ) -> jax.Array:
        shape, size = self._builder.shape, staged.size // self._num_groups
        if not any(prefixes):
            return stage(staged, packing.steps(packed, size))
        for of_groups in zip_longest(*prefixes, fillvalue=packing.no_prefix(shape)):
            both = packing.prefixes(of_groups, packed, size, shape)
            self._state, staged = set_up_prefix(self._state, staged, both)
            states = [None if p.state is None else (self._first_copy + p.state, p.slot) for p in of_groups]
            if any(states):
                self._copy_states(states)
        return staged

    @property
    def _first_copy(self) -> int:
        """Of the places of recurrent states, the first that is no slot's."""
        return self._builder.shape.num_slots + 1

    def _copy_states(self, places: Sequence[tuple[int, int] | None]) -> None:
        """Copies a recurrent state of each group from one place to another; None: of that group none."""
        self._state = self._programs.copy_state(self._state, packing.state_copies(places, self._builder.shape))

    def _read(self, plan: StepPlan, *, wants_logprobs: bool) -> InFlight:
        """Starts copying what the last step sampled to the host, before the next step overwrites it."""
        tokens = self._programs.read_tokens(self._state.last_token)
        logprobs = self._programs.read_logprobs(self._state.logprobs) if wants_logprobs else None
        scores, self._scores = self._scores, None
        if not self._builder.has_pinned:
            tokens.copy_to_host_async()
            if logprobs is not None:
                logprobs.copy_to_host_async()
        return InFlight(plan, tokens, logprobs, scores)

    def _set_masks(self, masks: Sequence[TokenMask]) -> None:
        shape, (*_, most) = self._builder.shape, self._builder.mask_rows
        for num_rows, packed in packing.masks(masks, self._num_groups, most, shape):
            self._state = self._programs.set_masks[num_rows](self._state, packed)

    def _warm_up(self, progress: Progress) -> dict[Bucket, float]:
        """Runs everything, as often as it takes until graphs are replayed: steps full, and all else on padding.

        Waits after every program: XLA fails when a second program is launched while the first is being recorded.
        """
        platform, buckets = self._builder.platform, self._builder.buckets
        least = WARM_UP_RUNS[platform]
        none = [None] * self._num_groups
        history = packing.histories(none, self._builder.shape)
        self._state = jax.block_until_ready(self._programs.set_up_slot(self._state, history))
        prefixes = [[packing.no_prefix(self._builder.shape)]] * self._num_groups
        for stage in (self._stage, self._stage_rows):
            stage([packing.NOTHING] * self._num_groups, prefixes)
            jax.block_until_ready(self._state)
        if self._programs.copy_state is not None:
            self._copy_states(none)
            jax.block_until_ready(self._state)
        for num_rows in self._builder.mask_rows:
            self._set_masks([TokenMask(self._builder.shape.num_slots, b"", {})] * num_rows)
            jax.block_until_ready(self._state)
        self._warm_up_long()
        total = len(self._programs.samplers) + len(buckets)
        for done, (rows, sampler) in enumerate(self._programs.samplers.items()):
            progress(f"warming up sampler, {rows} rows", done, total)
            for _ in range(least):
                self._state = jax.block_until_ready(sampler(self._state))
        self.collect(self._read(self._empty_plan, wants_logprobs=True))
        times_ms = {}
        for done, bucket in enumerate(buckets, len(self._programs.samplers)):
            progress(f"warming up {bucket}", done, total)
            plan = full_plan(bucket, self._builder.shape, self._builder.vocab_size, self._num_groups)
            runs_ms = [self._time_run(bucket, plan) for _ in range(least)]
            # Of several processes each measures for itself, and all have to run the same.
            if platform != "cpu" and (self._builder.mesh.is_multi_process or runs_ms[-1] < QUICK_MS):
                runs_ms += [self._time_run(bucket, plan) for _ in range(MORE_RUNS)]
            times_ms[bucket] = statistics.median(runs_ms[least - 1 :])
        progress("warmed up", total, total)
        return times_ms

    def _warm_up_long(self) -> None:
        for size in self._programs.long:
            tokens = (0,) * size if size > 1 else ()
            self._run_long(LongChunk(self._builder.shape.num_slots, 0, tokens, 0, False, NOBODY, 0))
            jax.block_until_ready((self._state, self._host))

    def _time_run(self, bucket: Bucket, plan: StepPlan) -> float:
        """Milliseconds of a step, waited for."""
        start_s = time.perf_counter()
        self._run(bucket, plan)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - start_s) * 1e3


def _wait(in_flight: InFlight, timeout_s: float) -> None:
    """Returns when a step has run. To read what still runs would wait for ever if it never ended."""
    start_s = time.monotonic()
    while not all(array.is_ready() for array in in_flight[1:] if array is not None):
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            raise StuckStep(f"step {in_flight.plan.step} was not done within {timeout_s:g} s (step_timeout_s)")
        time.sleep(max(MIN_POLL_S, waited_s * POLL_SHARE))


class CompilationCounter:
    """Counts what JAX compiles on this thread while it is entered. The process may compile for others meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, _duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and self._thread == threading.get_ident():
            self.count += 1
