"""From an EngineConfig to an Engine: finds the checkpoint, loads it while every step is compiled, sizes the cache."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from checkpoints import load, orbax_store
from checkpoints.resolve import Checkpoint
from checkpoints.source import CheckpointError
from jaxinfer.background import Background
from jaxinfer.config import ConfigError, EngineConfig, SchedulerLimits
from jaxinfer.defaults import eos_ids, sampling_defaults
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.follower import Follower
from jaxinfer.engine.group import Group
from jaxinfer.engine.leading import LeadingRunner
from jaxinfer.found import Found, find_model
from jaxinfer.jax_settings import find_devices, open_executables, set_up_jax
from jaxinfer.job_slots import size_job
from jaxinfer.kv_tiers import TierSizes, check_tiers, open_disk, size_memory, with_pages
from jaxinfer.models import registry
from jaxinfer.models.model import Model, ModelError
from jaxinfer.params import Params, num_bytes, random_params
from jaxinfer.processes import check_devices, join, leaving
from jaxinfer.progress import Progress
from jaxinfer.runner import cache
from jaxinfer.runner.buckets import Bucket, make_buckets
from jaxinfer.runner.compiled import compile_programs, largest_temp_bytes
from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.runner.executables import Executables
from jaxinfer.runner.host_pages import take_memory
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.runner.step import StepBuilder
from jaxinfer.scheduler.groups import Groups
from jaxinfer.scheduler.kv_cache import KvCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.sharding import mesh as meshes
from jaxinfer.sharding import rules
from jaxinfer.step_times import cut_times
from jaxinfer.text.grammar import Grammars
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import EngineInfo

MAX_NUM_SEQS = {"cpu": 8, "gpu": 256}
MAX_STEP_TOKENS = {"cpu": 512, "gpu": 8192}
MIXED_TOKENS_ON_CPU = 64
"""Chunk beside decode rows where steps are not measured."""
NUM_STATE_COPIES = {"cpu": 16, "gpu": 64}
STATE_TOKENS = {"cpu": 64, "gpu": 256}
"""Positions between copies of recurrent states: on a GPU a step computes more tokens than that in the time of few."""
SHARES = {"loading": 3.0, "programs": 4.0, "warm-up": 3.0}
"""Of the progress bar, about as they take on a GPU when nothing is cached."""
CALM_STEPS, CALM_ROWS = 3, 32
"""A calm step beside decode rows takes as long as this many decode steps of this many rows at most."""
REFUSALS = (ConfigError, CheckpointError, ModelError, rules.ShardingError, cache.PoolError)
"""What whoever asks for an engine can put right: the message says it all. Other errors are faults."""

log = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    found: Found | None = None,
    *,
    show_progress: bool = True,
    on_lost: Callable[[str], None] | None = None,
    for_job: bool = False,
) -> Engine:
    """An engine that is ready: nothing is compiled after this returns. `found` spares finding the model again.

    on_lost: told why this process is to end, where another one of the engine is lost; None: whatever waits raises it.
    for_job: it is a batch job's alone, which may run more sequences at once where `config` does not say how many.
    Raises ConfigError, CheckpointError, ModelError, ShardingError or PoolError, before anything slow where it can.
    """
    if config.process_id:
        raise ConfigError(
            f"process_id is {config.process_id}; process 0 has the engine, and the others follow it: "
            "jaxinfer.follow, or jaxinfer serve"
        )
    (checkpoint, tokenizer), group = _begin(config, found, on_lost)
    with leaving(group):
        ends, defaults = eos_ids(checkpoint, tokenizer), sampling_defaults(checkpoint)
        builder = make_builder(config, checkpoint, tokenizer)
        grammars = Grammars(tokenizer, builder.vocab_size, ends) if tokenizer else None
        size = size_job if for_job else size_memory
        built = _load_and_compile(config, builder, checkpoint, group, show_progress, size)
    builder, tiers, runner, disk = built
    mesh, buckets, times = builder.mesh, builder.buckets, cut_times(builder, runner.times_ms)
    limits = SchedulerLimits(
        max_model_len=builder.shape.max_model_len,
        page_size=config.page_size,
        num_pages=builder.shape.num_pages,
        max_num_seqs=builder.shape.num_slots,
        max_step_tokens=buckets[-1].tokens,
        max_mixed_tokens=_max_mixed_tokens(config, buckets, runner.times_ms, mesh),
        calm_mixed_tokens=_calm_mixed_tokens(buckets, runner.times_ms, mesh),
        max_waiting=config.max_waiting,
        prefix_caching=config.enable_prefix_caching
        and (builder.model.recurrent is None or builder.shape.num_states > 0),
        num_states=builder.shape.num_states,
        state_tokens=_state_tokens(builder),
        num_frames=tiers.num_frames,
        frame_pages=max(tiers.frame_pages, 1),
        restore_ms=runner.restore_ms,
        compute_ms=min(ms / bucket.tokens for bucket, ms in runner.times_ms.items()),
        num_disk_pages=tiers.num_disk_pages,
        fingerprint=disk.fingerprint if disk else "",
        long_tokens=builder.long.num_tokens if builder.long else 0,
        long_chunk=builder.long.chunk if builder.long else 0,
        mixed_ms=times.mixed_ms,
        decode_ms=times.decode_ms,
    )
    info = EngineInfo(
        model=config.model,
        max_model_len=limits.max_model_len,
        vocab_size=builder.vocab_size,
        eos_ids=ends,
        sampling_defaults=defaults,
        page_size=limits.page_size,
        num_pages=limits.num_pages * builder.num_groups,
        max_num_seqs=limits.max_num_seqs * builder.num_groups,
        prefix_caching=limits.prefix_caching,
        num_host_pages=tiers.num_frames * tiers.frame_pages,
        has_disk_tier=disk is not None,
        has_prompt_logprobs=builder.scores,
    )
    leading = runner if group is None else LeadingRunner(runner, group)
    if builder.num_groups > 1:
        scheduler = Groups(limits, builder.num_groups)
    else:
        scheduler = Scheduler(limits, KvCache(limits, disk.pages(), disk.manifests()) if disk else None)
    return Engine(leading, scheduler, info, step_timeout_s=config.step_timeout_s, grammars=grammars)


def build_follower(
    config: EngineConfig, *, show_progress: bool = True, on_lost: Callable[[str], None] | None = None
) -> Follower:
    """What a process other than the first has, ready to follow. Raises as `build_engine` does."""
    (checkpoint, tokenizer), group = _begin(config, None, on_lost)
    if group is None or not config.process_id:
        raise ConfigError(f"process_id is {config.process_id} of {config.num_processes}; others than 0 follow")
    with leaving(group):
        builder = make_builder(config, checkpoint, tokenizer)
        return Follower(_load_and_compile(config, builder, checkpoint, group, show_progress).runner, group)


def _begin(
    config: EngineConfig, found: Found | None, on_lost: Callable[[str], None] | None
) -> tuple[Found, Group | None]:
    """The model, the other processes if there are any, and JAX with its devices."""
    set_up_jax(config)
    with Background(lambda _: found or find_model(config)) as finding:
        if config.num_processes == 1:
            find_devices()  # a GPU takes seconds to start, and leaves the interpreter to others meanwhile
        model = finding.result()
    group = join(config, model, on_lost)
    with leaving(group):
        find_devices()
    return model, group


def make_builder(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> StepBuilder:
    """What makes the steps of a model; of its shape, the number of pages is still to be found."""
    mesh, axis_rules = choose_mesh(config), choose_rules(config)
    rules.check_one_process(mesh, axis_rules)
    if config.enable_prompt_logprobs:
        rules.check_scored(mesh, axis_rules)
    model = registry.for_mesh(checkpoint.config, tensor_names(checkpoint), mesh, axis_rules)
    check_tiers(config, model, rules.num_shards(rules.ROWS, mesh, axis_rules))
    shape = _state_shape(config, model, mesh)
    buckets = make_buckets(rules.platform(mesh), shape.num_slots, _max_step_tokens(config, shape.num_slots, mesh))
    vocab_size = min(model.vocab_rows, tokenizer.vocab_size) if tokenizer else model.vocab_rows
    return StepBuilder(
        model=model,
        shape=shape,
        vocab_size=vocab_size,
        mesh=mesh,
        buckets=tuple(buckets),
        axis_rules=axis_rules,
        scores=config.enable_prompt_logprobs,
    )


def choose_mesh(config: EngineConfig) -> Mesh:
    """The devices, along their axes."""
    return rules.make_mesh(config.tensor_parallel_size) if config.mesh is None else meshes.choose_mesh(config.mesh)


def choose_rules(config: EngineConfig) -> rules.Rules:
    """How the devices share out the model."""
    if config.rules is not None:
        return rules.find(config.rules)
    return rules.EXPERT_PARALLEL if config.enable_expert_parallel else rules.TENSOR_PARALLEL


def tensor_names(checkpoint: Checkpoint) -> Collection[str]:
    """Of what the checkpoint holds, as far as it is known before it is read."""
    return () if checkpoint.tensors is None else checkpoint.tensors.shapes().keys()


def _num_states(config: EngineConfig, model: Model, platform: str) -> int:
    """Copies of recurrent states that there is room for."""
    if model.recurrent is None or not config.enable_prefix_caching:
        return 0
    return NUM_STATE_COPIES[platform] if config.num_state_copies is None else config.num_state_copies


def _state_tokens(builder: StepBuilder) -> int:
    """Positions between those copies; 0 where there are none."""
    shape = builder.shape
    return max(STATE_TOKENS[builder.platform], shape.page_size) if shape.num_states else 0


SizeMemory = Callable[[EngineConfig, StepBuilder, Callable[[StepBuilder], int]], tuple[StepBuilder, TierSizes]]
"""See `size_memory`."""


class Built(NamedTuple):
    """What is on the devices, and behind them."""

    builder: StepBuilder
    tiers: TierSizes
    runner: ModelRunner
    disk: DiskPages | None


def _load_and_compile(
    config: EngineConfig,
    builder: StepBuilder,
    checkpoint: Checkpoint,
    group: Group | None,
    show_progress: bool,
    size: SizeMemory = size_memory,
) -> Built:
    """See `_make`. With several processes, all have come to the same point before any of them runs what needs all."""
    check_devices(builder.mesh, config.num_processes)
    executables = Executables(open_executables(config), checkpoint.config)
    check_tensors(checkpoint, builder.model)
    working = contextlib.nullcontext() if group is None else group.working()
    with contextlib.closing(Progress(show_progress, SHARES)) as progress, _out_of_memory_explained(config), working:
        return _make(config, builder, executables, checkpoint, progress, group, size)


def _make(
    config: EngineConfig,
    builder: StepBuilder,
    executables: Executables,
    checkpoint: Checkpoint,
    progress: Progress,
    group: Group | None,
    size: SizeMemory,
) -> Built:
    """The builder with its pool and tiers sized, the runner, and the disk tier's files.

    Weights are loaded while programs are compiled or fetched: these need only the shapes of the weights. Tracing stays
    on this thread, which has the caller's contexts of JAX.
    """
    model, dtype = builder.model, builder.shape.dtype
    shardings = rules.shardings(model.specs, builder.mesh, builder.axis_rules)
    params = builder.abstract_params

    def load_all(raise_if_stopped: Callable[[], None]) -> Params:
        def show(stage: str, done: int, total: int) -> None:
            raise_if_stopped()
            progress(stage, done, total)

        return load_params(checkpoint, model, dtype, shardings, seed=config.seed, progress=show)

    with Background(load_all) as loading:

        def temp_bytes(builder: StepBuilder) -> int:
            return largest_temp_bytes(builder, params, executables, progress, loading.check)

        sized, tiers = size(config, builder, temp_bytes)
        if group is not None:
            sized = with_pages(sized, group.agree("pages of the KV cache", sized.shape.num_pages))
        disk = open_disk(config, checkpoint, sized)
        programs = compile_programs(sized, params, executables, progress, loading.check)
        loaded = loading.result()
    if group is not None:
        progress("warming up, once all processes are there", 0, 1)
        group.agree("weights and programs are there")
    if tiers.num_frames:
        progress(f"warming up {tiers.frame_bytes / 2**30:.0f} GiB of host memory", 0, 1)
        take_memory(sized.abstract_frame, tiers.num_frames)
    try:
        runner = ModelRunner(sized, loaded, programs, progress, disk=disk)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) or not executables.discard_fetched(str(error).splitlines()[0]):
            raise
        log.warning("all steps are compiled anew")
    else:
        return Built(sized, tiers, runner, disk)
    programs = compile_programs(sized, params, executables, progress)
    runner = ModelRunner(sized, loaded, programs, progress, disk=disk)
    return Built(sized, tiers, runner, disk)


@contextlib.contextmanager
def _out_of_memory_explained(config: EngineConfig) -> Iterator[None]:
    """Turns a device that ran out of memory into a ConfigError that names what would need less."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked = "" if config.num_pages is None else f"num_pages is {config.num_pages}; "
        raise ConfigError(
            f"the device's memory does not hold the model and its cache ({str(error).splitlines()[0]}); {asked}"
            "fewer of num_pages, max_num_seqs, max_num_batched_tokens or max_model_len need less"
        ) from error


def check_tensors(checkpoint: Checkpoint, model: Model) -> None:
    """CheckpointError for tensors that are missing, extra or misshapen, as far as can be told without reading them."""
    if checkpoint.tensors is not None:
        found, wanted = checkpoint.tensors.shapes(), load.wanted_tensors(model.specs)
        load.check_complete(wanted, found, model.ignored)
        if unread := found.keys() - wanted.keys():
            log.info("%d tensors are set aside, %s among them", len(unread), min(unread))


def load_params(
    checkpoint: Checkpoint,
    model: Model,
    dtype: jnp.dtype,
    shardings: Mapping[str, jax.sharding.Sharding],
    *,
    seed: int,
    progress: Progress,
) -> Params:
    """The weights, on their devices, from whatever the checkpoint is."""
    if checkpoint.format == "dummy":
        progress("loading random weights", 0, num_bytes(model.specs, dtype))
        params = random_params(model.specs, dtype, shardings, seed)
    elif checkpoint.format == "orbax":
        progress(f"loading {checkpoint.path.name}", 0, num_bytes(model.specs, dtype))
        params = orbax_store.restore(checkpoint.path, model.specs, dtype, shardings)
    else:
        assert checkpoint.tensors is not None
        stage = f"loading {checkpoint.path.name}"
        return load.load(
            checkpoint.tensors,
            model.specs,
            dtype,
            shardings,
            ignore=model.ignored,
            progress=lambda done, total: progress(stage, done, total),
        )
    jax.block_until_ready(params)
    progress("loading done", num_bytes(model.specs, dtype), num_bytes(model.specs, dtype))
    return params


def check_context(config: EngineConfig, model: Model) -> None:
    """ConfigError for a context longer than the model's own."""
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for at most {model.max_model_len} tokens"
        )


def _state_shape(config: EngineConfig, model: Model, mesh: Mesh) -> cache.StateShape:
    """All but the number of pages, which needs the weights on the device."""
    check_context(config, model)
    platform = rules.platform(mesh)
    dtype = {"cpu": "float32", "gpu": "bfloat16"}[platform] if config.dtype == "auto" else config.dtype
    return cache.StateShape(
        recurrent=model.recurrent,
        num_states=_num_states(config, model, platform),
        cache=model.cache,
        num_pages=config.num_pages or 1,
        page_size=config.page_size,
        num_slots=config.max_num_seqs or MAX_NUM_SEQS[platform],
        max_model_len=config.max_model_len or model.max_model_len,
        vocab_rows=model.vocab_rows,
        dtype=jnp.dtype(dtype),
    )


def _max_step_tokens(config: EngineConfig, num_slots: int, mesh: Mesh) -> int:
    tokens = config.max_num_batched_tokens or max(MAX_STEP_TOKENS[rules.platform(mesh)], 2 * num_slots)
    if tokens < 2 * num_slots:
        raise ConfigError(
            f"max_num_batched_tokens is {tokens}, less than twice max_num_seqs {num_slots}: a step must hold a row of "
            "every sequence and leave room for prompts"
        )
    return tokens


def _max_mixed_tokens(
    config: EngineConfig, buckets: Sequence[Bucket], times_ms: Mapping[Bucket, float], mesh: Mesh
) -> int:
    """Tokens of a step that has decode rows: as many as keep it within max_step_ms, by measurement on a GPU."""
    least = 2 * max(bucket.rows for bucket in buckets)
    if rules.platform(mesh) == "cpu":
        return min(max(MIXED_TOKENS_ON_CPU, least), buckets[-1].tokens)
    # A size counts with as many rows as it has: any number of sequences may decode beside the chunk.
    slow = {b.tokens for b in buckets if not b.decode and times_ms[b] > config.max_step_ms}
    quick = [b.tokens for b in buckets if not b.decode and b.tokens not in slow]
    return min(max([least, *quick]), buckets[-1].tokens)


def _calm_mixed_tokens(buckets: Sequence[Bucket], times_ms: Mapping[Bucket, float], mesh: Mesh) -> int | None:
    """Tokens of a step that has decode rows while few sequences wait: as many as take CALM_STEPS decode steps."""
    if rules.platform(mesh) == "cpu":
        return None
    decode_ms = max(times_ms[b] for b in buckets if b.decode and b.rows <= CALM_ROWS)
    # A size counts with as many rows as it has, as in `_max_mixed_tokens`.
    slow = {b.tokens for b in buckets if not b.decode and times_ms[b] > CALM_STEPS * decode_ms}
    sizes = {b.tokens for b in buckets if not b.decode}
    return max(sizes - slow, default=min(sizes))
