"""What a mesh would cost: bytes, collectives and least times of a model on devices that need not be there."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from jaxinfer.models import registry
from jaxinfer.models.model import Model
from jaxinfer.params import shard_bytes
from jaxinfer.runner import cache
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.compiled import compile_lowered, lower_step
from jaxinfer.runner.step import StepBuilder
from jaxinfer.sharding import collectives, rules
from jaxinfer.sharding.cards import CARDS, Card
from jaxinfer.sharding.collectives import Collective
from jaxinfer.sharding.mesh import AXES, ShardingError, check_sizes
from pallas_kernels import dispatch

USED_SHARE = 0.9
"""Of a card's memory, as EngineConfig.gpu_memory_utilization."""
PREFILL_TOKENS, PREFILL_ROWS = 8192, 8
"""Of the larger of the two steps that are planned."""
PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What a plan is for: sequences that decode at once, each of so many tokens."""

    num_seqs: int = 64
    tokens_per_seq: int = 4096
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_seqs", "tokens_per_seq"):
            if getattr(self, name) < 1:
                raise ShardingError(f"{name} is {getattr(self, name)}; it must be at least 1")


class Compiled(NamedTuple):
    """What XLA made of a step for the card, without one."""

    temp_bytes: int
    collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """A step on one device. Times are the least that the card's figures allow."""

    name: str
    tokens: int  # of all groups of devices
    rows: int  # likewise, those that sample
    context: int  # tokens of each row that decodes
    collectives: tuple[Collective, ...]
    read_bytes: Mapping[str, int]  # weights by part, and the cache; of experts those that fair routers hit
    memory_s: float
    matrix_s: float
    link_s: float
    total_s: float  # of each part, the longer of reading and computing; then all collectives
    compiled: Compiled | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardReport:
    """A model on a mesh. Bytes are those of one device; all devices have the same."""

    architecture: str
    mesh: Mapping[str, int]
    rules: Mapping[str, tuple[str, ...]]  # of those logical axes of the model that are split
    load: Load
    card_name: str
    card: Card
    weights: Mapping[str, int]  # by part
    kv_bytes: int
    kv_copies: int  # devices that share a KV head
    recurrent_bytes: int
    slot_bytes: int  # page tables, logits, penalties
    temp_bytes: int
    temp_is_compiled: bool  # whether they are those of a compiled step; otherwise about what its widest layer needs
    steps: tuple[StepReport, ...]

    @property
    def num_devices(self) -> int:
        """Of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def total_bytes(self) -> int:
        """Of everything, with what the engine leaves free."""
        state = self.kv_bytes + self.recurrent_bytes + self.slot_bytes
        return sum(self.weights.values()) + state + self.temp_bytes + cache.GPU_RESERVE_BYTES

    @property
    def usable_bytes(self) -> int:
        """Of the card's memory."""
        return int(self.card.memory_bytes * USED_SHARE)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes

    @property
    def decode(self) -> StepReport:
        return self.steps[0]


def plan(
    config: Mapping[str, Any],
    mesh: Mapping[str, int],
    *,
    axis_rules: str | rules.Rules = rules.TENSOR_PARALLEL,
    gpu: str = "h200",
    load: Load = Load(),  # noqa: B008 - frozen
    target_config: str | None = None,
) -> ShardReport:
    """The report of a model's config.json on a mesh of these sizes. Needs no GPU, and no memory for the model.

    target_config: text of XLA's description of the card, for which both steps are then compiled: that needs JAX's
    plugin for CUDA, and tells what their temporaries take and which collectives XLA makes of ours. Raises ModelError,
    and ShardingError for a mesh that cannot be, or a card that is not known.
    """
    if gpu not in CARDS:
        raise ShardingError(f"gpu is {gpu!r}; known: {', '.join(CARDS)}")
    card, sizes, axis_rules = CARDS[gpu], check_sizes(mesh), rules.find(axis_rules)
    abstract = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    builder = make_builder(config, abstract, axis_rules, load)
    model, state = builder.model, builder.abstract_state
    params = builder.abstract_params
    axes = {axis for spec in model.specs.values() for axis in spec.array_axes} | {rules.ROWS, rules.TOKENS}
    compiled = _compile(builder, target_config) if target_config else {}
    steps = tuple(_step(builder, bucket, load, card, compiled.get(bucket)) for bucket in builder.buckets)
    return ShardReport(
        architecture=model.architecture,
        mesh=sizes,
        rules={axis: over for axis, over in rules.split(abstract, axis_rules).items() if axis in axes},
        load=load,
        card_name=gpu,
        card=card,
        weights={part: shard_bytes([params[name] for name in names]) for part, names in model.parts.items()},
        kv_bytes=shard_bytes((state.k_pages, state.v_pages)),
        kv_copies=model.specs["qkv"].shape[0] // _published_kv_heads(model),
        recurrent_bytes=shard_bytes((state.recurrent, state.conv)),
        slot_bytes=cache.slot_bytes(state) - shard_bytes((state.recurrent, state.conv)),
        temp_bytes=max(c.temp_bytes for c in compiled.values()) if compiled else _temp_bytes(builder),
        temp_is_compiled=bool(compiled),
        steps=steps,
    )


def make_builder(config: Mapping[str, Any], mesh: rules.AnyMesh, axis_rules: rules.Rules, load: Load) -> StepBuilder:
    """The builder of the two steps: all sequences decode, and chunks of prompts. Groups of devices share both out."""
    model = registry.for_mesh(config, (), mesh, axis_rules)
    if load.tokens_per_seq > model.max_model_len:
        raise ShardingError(
            f"tokens_per_seq is {load.tokens_per_seq}; the model was made for at most {model.max_model_len}"
        )
    num_groups, num_parts = (rules.num_shards(axis, mesh, axis_rules) for axis in (rules.ROWS, rules.TOKENS))
    num_seqs = -(-load.num_seqs // num_groups)
    shape = StateShape(
        cache=model.cache,
        recurrent=model.recurrent,
        num_pages=num_seqs * -(-load.tokens_per_seq // PAGE_SIZE),
        page_size=PAGE_SIZE,
        num_slots=num_seqs,
        max_model_len=load.tokens_per_seq,
        vocab_rows=model.vocab_rows,
        dtype=jnp.dtype(load.dtype),
    )
    tokens = -(-min(PREFILL_TOKENS, load.num_seqs * load.tokens_per_seq) // (num_groups * num_parts)) * num_parts
    buckets = (
        Bucket(True, num_seqs, num_seqs),
        Bucket(False, tokens, min(-(-PREFILL_ROWS // num_groups), num_seqs, tokens)),
    )
    return StepBuilder(
        model=model,
        shape=shape,
        vocab_size=model.vocab_rows,
        mesh=mesh,
        buckets=buckets,
        axis_rules=axis_rules,
        target_of_plan=dispatch.CPU if isinstance(mesh, AbstractMesh) else None,
    )


def trace(builder: StepBuilder, bucket: Bucket) -> list[Collective]:
    """The collectives of a step, traced on abstract values."""
    args = builder.abstract_params, builder.abstract_state, builder.abstract_inputs
    return collectives.of_jaxpr(jax.make_jaxpr(builder.step(bucket))(*args), builder.mesh.shape)


def sweep(
    config: Mapping[str, Any], num_devices: int, **how: Any
) -> tuple[list[ShardReport], dict[tuple[tuple[str, int], ...], str]]:
    """Reports of all meshes of so many devices, the quickest to decode first and those that do not fit last; and why
    the others cannot be, by their sizes. `how`: as of `plan`."""
    found, refused = [], {}
    for sizes in all_meshes(num_devices):
        try:
            found.append(plan(config, sizes, **how))
        except ShardingError as error:
            refused[tuple(sizes.items())] = str(error)
    return sorted(found, key=lambda report: (not report.fits, report.decode.total_s)), refused


def all_meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Sizes of all meshes of so many devices, without axes of one; neighbours along `tensor`."""
    if num_devices < 1:
        raise ShardingError(f"devices are {num_devices}; at least 1 is needed")
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    names = list(AXES)[::-1]
    for sizes in itertools.product(divisors, repeat=len(names)):
        if math.prod(sizes) == num_devices:
            yield {name: size for name, size in zip(names, sizes, strict=True) if size > 1} or {names[-1]: 1}


def _published_kv_heads(model: Model) -> int:
    whole = model.specs["qkv"].whole
    return model.specs["qkv"].shape[0] if whole is None else whole.shape[0]


def _step(builder: StepBuilder, bucket: Bucket, load: Load, card: Card, compiled: Compiled | None) -> StepReport:
    found = tuple(trace(builder, bucket)) if builder.mesh.size > 1 else ()
    context = load.tokens_per_seq if bucket.decode else 0
    costs = _costs(builder, bucket, context)
    # Stages wait for each other: each part of a layer takes its time once a stage.
    memory_s = sum(cost.turns * cost.read_bytes / card.read_bytes_per_s for cost in costs.values())
    matrix_s = sum(cost.turns * cost.flops / card.matrix_flops for cost in costs.values())
    link_s = sum(c.seconds(card.link_bytes_per_s, card.collective_s) for c in found)
    least_s = sum(
        cost.turns * max(cost.read_bytes / card.read_bytes_per_s, cost.flops / card.matrix_flops)
        for cost in costs.values()
    )
    rows = min(builder.num_groups * bucket.rows, load.num_seqs)
    of_all = Bucket(bucket.decode, rows if bucket.decode else builder.num_groups * bucket.tokens, rows)
    return StepReport(
        name=str(of_all),
        tokens=of_all.tokens,
        rows=of_all.rows,
        context=context,
        collectives=found,
        read_bytes={part: round(cost.read_bytes) for part, cost in costs.items()},
        memory_s=memory_s,
        matrix_s=matrix_s,
        link_s=link_s,
        total_s=least_s + link_s,
        compiled=compiled,
    )


class _Cost(NamedTuple):
    read_bytes: float
    flops: float
    turns: int  # of stages, which wait for each other


class _OwnTokens(NamedTuple):
    """Of a step, those that one device computes."""

    of_all_else: int
    of_experts: int  # whose tokens may be gathered from others


def _own_tokens(builder: StepBuilder, bucket: Bucket) -> _OwnTokens:
    split, sizes = builder.split_of(bucket), builder.mesh.shape
    by_tokens = split.get(rules.TOKENS, ())
    own = bucket.tokens // math.prod(sizes[axis] for axis in by_tokens)
    axes = {axis for logical in rules.SHARED_WITH for axis in split.get(logical, ())}
    return _OwnTokens(own, own * math.prod(sizes[a] for a in axes & {*split.get(rules.ROWS, ()), *by_tokens}))


def _costs(builder: StepBuilder, bucket: Bucket, context: int) -> dict[str, _Cost]:
    """What one device reads and computes of each part.

    Of the embedding, rows; of experts, those that are hit if the router is fair: X (1 - (1 - k / X) ** T) of X.
    """
    model, params, own = builder.model, builder.abstract_params, _own_tokens(builder, bucket)
    stages = rules.num_shards("layers", builder.mesh, builder.axis_rules)
    tied = "head" not in model.parts
    costs = {}
    for part, names in model.parts.items():
        read = flops = 0.0
        for name in names:
            spec, size = model.specs[name], shard_bytes(params[name])
            values, hit, share, tokens = size / params[name].dtype.itemsize, 1.0, 1.0, own.of_all_else
            if name in ("router", "expert_gate_up", "expert_down"):
                tokens = own.of_experts
            if "experts" in spec.axes:
                share = model.top_k / spec.shape[0]
                hit = 1 - (1 - share) ** tokens
            read += size * hit
            if len(spec.shape) > 1:
                flops += 2 * values * tokens * share
        if part in ("embedding", "head"):
            flops *= bucket.rows / own.of_all_else
            if part == "embedding" and not tied:
                read = flops = 0.0
        layered = any(model.specs[name].layers is not None for name in names)
        costs["head" if part == "embedding" and tied else part] = _Cost(read, flops, stages if layered else 1)
    state = builder.abstract_state
    heads = state.k_pages.sharding.shard_shape(state.k_pages.shape)
    # Of a prompt that is split, the device with its end has the most before it, and the others wait.
    length = bucket.tokens / bucket.rows
    pairs = own.of_all_else * (length - min(own.of_all_else, length) / 2)
    pairs = bucket.rows * context if bucket.decode else pairs
    group = model.num_heads // model.cache.num_kv_heads
    attention = 4 * heads[0] * heads[3] * group * heads[4] * pairs
    kv = heads[0] * 2 * heads[3] * heads[4] * state.k_pages.dtype.itemsize
    costs["KV cache"] = _Cost(kv * (bucket.rows * context if bucket.decode else bucket.tokens), attention, stages)
    if state.recurrent is not None:
        states = shard_bytes((state.recurrent, state.conv)) * bucket.rows / (builder.shape.num_slots + 1)
        costs["recurrent states"] = _Cost(2 * states, 0.0, stages)
    return costs


def _temp_bytes(builder: StepBuilder) -> int:
    """About what the largest step needs beside its arguments: three times the residual and the widest rows of a layer,
    for every token; what the experts of a token make; and the logits that are sampled from."""
    model, bucket = builder.model, builder.buckets[-1]
    own = _own_tokens(builder, bucket)
    itemsize, hidden = builder.shape.dtype.itemsize, model.specs["embed"].shape[1]

    def width(name: str) -> int:
        if name not in model.specs:
            return 0
        spec = model.specs[name]
        local = rules.shardings({name: spec}, builder.mesh, builder.axis_rules)[name].shard_shape(spec.array_shape)
        return math.prod(local[1:]) // hidden

    experts = 0
    if "expert_down" in model.specs:
        spec = model.specs["expert_down"]
        sharding = rules.shardings({"w": spec}, builder.mesh, builder.axis_rules)["w"]
        experts = model.top_k * (2 * sharding.shard_shape(spec.array_shape)[-1] + hidden) * own.of_experts
    widest = max(*(width(name) * own.of_all_else for name in ("qkv", "gate_up", "delta_in")), experts)
    return (3 * hidden * own.of_all_else + widest) * itemsize + 2 * bucket.rows * model.vocab_rows * 4


def _compile(builder: StepBuilder, target_config: str) -> dict[Bucket, Compiled]:
    """Both steps for a card that is only described. Raises JAX's error where its plugin for CUDA is not installed."""
    sizes = builder.mesh.shape
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="plan", target_config=target_config, topology=f"1x1x{builder.mesh.size}"
    )
    mesh = topologies.make_mesh(topology, tuple(sizes.values()), tuple(sizes))
    real = dataclasses.replace(builder, mesh=mesh, target_of_plan=None)
    found = {}
    with jax.set_mesh(mesh):
        for bucket in real.buckets:
            compiled = compile_lowered(real, lower_step(real, real.abstract_params, bucket))
            memory, text = compiled.memory_analysis(), compiled.as_text()
            assert memory is not None and text is not None
            found[bucket] = Compiled(memory.temp_size_in_bytes, tuple(collectives.of_hlo(text)))
    return found


def as_json(report: ShardReport) -> dict[str, Any]:
    """A report for programs."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, Card | Compiled):
            return plain(value._asdict())
        if isinstance(value, Mapping):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value

    totals = {"num_devices": report.num_devices, "total_bytes": report.total_bytes, "usable_bytes": report.usable_bytes}
    return plain(report) | totals | {"fits": report.fits}
