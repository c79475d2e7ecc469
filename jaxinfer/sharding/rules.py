"""Logical axes to mesh axes: how each parameter and each pool is laid over the devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.params import Specs
from jaxinfer.sharding import mesh as meshes
from jaxinfer.sharding.mesh import DATA, EXPERT, PIPELINE, SEQUENCE, TENSOR, ShardingError

Rules = Mapping[str, str | tuple[str, ...]]
"""The mesh axis, or axes, that each logical axis is split over. Those that a mesh has not split nothing."""
AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or of none, for plans."""

LOGICAL_AXES: Mapping[str, str] = {
    "layers": "stages of layers, their weights and their part of the cache",
    "kv_heads": "attention, by KV heads and their queries",
    "delta_heads": "the gated delta rule, by key heads",
    "mlp": "dense MLPs and shared experts, by width",
    "experts": "experts, whole ones",
    "expert_mlp": "experts, by width",
    "vocab": "embedding and head, by token ids",
    "rows": "sequences: their rows of a step, slots and pages",
    "tokens": "tokens of a step that has prompts; every device has all of their cache",
}
"""What may be split, and what that is. The last two split a step and its state, the others weights."""
ROWS, TOKENS = "rows", "tokens"
SHARED_WITH = ("experts", "expert_mlp")
"""Logical axes that may be split over a mesh axis of rows or tokens: these are gathered for them."""

TENSOR_PARALLEL: Rules = {
    **dict.fromkeys(("kv_heads", "delta_heads", "mlp", "vocab", "expert_mlp"), TENSOR),
    "experts": EXPERT,
    "layers": PIPELINE,
    ROWS: DATA,
    TOKENS: SEQUENCE,
}
"""Megatron's split (Shoeybi et al. 2019) over `tensor`: whole heads and slices of the MLP, of experts, too; two sums
per layer. Over `expert` whole experts, over `pipeline` stages of layers (Huang et al. 2019), over `data` sequences, and
over `sequence` the tokens of prompts."""
EXPERT_PARALLEL: Rules = {**TENSOR_PARALLEL, "experts": (EXPERT, TENSOR), "expert_mlp": ()}
"""The same but for the experts, of which every device has some, whole."""
DATA_ATTENTION: Rules = {**TENSOR_PARALLEL, ROWS: (DATA, EXPERT)}
"""The same, but each device along `expert` has sequences of its own, too: attention and all else but the experts runs
on these alone, and the experts on the tokens of all: as DeepSeek-AI 2024, section 3.4, but by a gather and a scattered
sum."""
EXPERT_HEADS: Rules = {**TENSOR_PARALLEL, **dict.fromkeys(("kv_heads", "delta_heads"), (TENSOR, EXPERT))}
"""The same, but each device along `expert` has some heads, too: attention reads its part of the cache alone, for one
sum more a layer."""
PRESETS: Mapping[str, Rules] = {
    "tensor": TENSOR_PARALLEL,
    "whole-experts": EXPERT_PARALLEL,
    "data-attention": DATA_ATTENTION,
    "expert-heads": EXPERT_HEADS,
}
"""By the names that users give."""
MOST_SIZES = 64
"""Sizes of a mesh axis that an error lists go up to this."""


def find(rules: str | Rules) -> Rules:
    """The rules of a preset's name, or the rules themselves. ShardingError for names that are not known."""
    if isinstance(rules, str):
        if rules not in PRESETS:
            raise ShardingError(f"rules are {rules!r}; known: {', '.join(PRESETS)}")
        return PRESETS[rules]
    if unknown := sorted(set(rules) - set(LOGICAL_AXES)):
        raise ShardingError(f"rules name the logical axes {', '.join(unknown)}; known: {', '.join(LOGICAL_AXES)}")
    return {axis: tuple(_names(over)) for axis, over in rules.items()}


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of the first devices with one axis. ShardingError if there are not enough."""
    if tensor_parallel_size > jax.device_count():
        raise ShardingError(
            f"tensor_parallel_size is {tensor_parallel_size}, but there are {jax.device_count()} devices"
        )
    return meshes.make_mesh({TENSOR: tensor_parallel_size})


def platform(mesh: Mesh) -> str:
    """What the devices are: "cpu" or "gpu"."""
    return "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"


def _names(over: str | Iterable[str]) -> tuple[str, ...]:
    return (over,) if isinstance(over, str) else tuple(over)


def split(mesh: AnyMesh, rules: Rules) -> dict[str, tuple[str, ...]]:
    """The mesh axes of more than one device that each logical axis is split over, for those that are."""
    found = {axis: tuple(a for a in _names(over) if mesh.shape.get(a, 1) > 1) for axis, over in rules.items()}
    return {axis: over for axis, over in found.items() if over}


def num_shards(logical: str, mesh: AnyMesh, rules: Rules) -> int:
    """Parts that a logical axis is split into."""
    return math.prod(mesh.shape[axis] for axis in split(mesh, rules).get(logical, ()))


def partition(axes: tuple[str | None, ...], mesh: AnyMesh, rules: Rules) -> PartitionSpec:
    """Mesh axes of each dimension, from its logical axis. ShardingError if two dimensions would share one."""
    over = split(mesh, rules)
    dimensions = [over.get(axis, ()) if axis else () for axis in axes]
    used = [axis for names in dimensions for axis in names]
    if len(used) != len(set(used)):
        twice = next(axis for axis in used if used.count(axis) > 1)
        sharing = [axis for axis in axes if axis and twice in over.get(axis, ())]
        raise ShardingError(
            f"logical axes {' and '.join(sharing)} of one array are both split over mesh axis {twice}; one of them "
            "must go to another axis, or to none"
        )
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in dimensions))


def by_rows(mesh: AnyMesh, rules: Rules) -> PartitionSpec:
    """The partition of what each group of devices has of its own, along the first dimension."""
    return partition((ROWS,), mesh, rules) if ROWS in split(mesh, rules) else PartitionSpec()


def partitions(specs: Specs, mesh: AnyMesh, rules: Rules = TENSOR_PARALLEL) -> dict[str, PartitionSpec]:
    """The partition of every parameter."""
    return {name: partition(spec.array_axes, mesh, rules) for name, spec in specs.items()}


def shardings(specs: Specs, mesh: AnyMesh, rules: Rules = TENSOR_PARALLEL) -> dict[str, NamedSharding]:
    """The sharding of every parameter. ShardingError if a size does not divide, with the sizes that would work."""
    check_divisible(specs, mesh, rules)
    return {name: NamedSharding(mesh, spec) for name, spec in partitions(specs, mesh, rules).items()}


def check_divisible(specs: Specs, mesh: AnyMesh, rules: Rules, lengths: Mapping[str, int] | None = None) -> None:
    """ShardingError unless every dimension divides by the devices that it is split over.

    lengths: of logical axes that need not divide as the arrays do: heads, where devices may share a KV head.
    """
    over = split(mesh, rules)
    for mesh_axis, size in mesh.shape.items():
        # By name: the length, and how many other devices split it, too.
        found = {
            (axis, (lengths or {}).get(axis, length), num_shards(axis, mesh, rules) // size)
            for spec in specs.values()
            for axis, length in zip(spec.array_axes, spec.array_shape, strict=True)
            if axis and mesh_axis in over.get(axis, ())
        }
        if any(length % (size * others) for _, length, others in found):
            works = [
                n for n in range(1, MOST_SIZES + 1) if not any(length % (n * others) for _, length, others in found)
            ]
            sizes = ", ".join(f"{axis} {length}" for axis, length, _ in sorted(found))
            raise ShardingError(
                f"{'an' if mesh_axis[0] in 'aeiou' else 'a'} {mesh_axis} axis of {size} devices does not divide {sizes}"
                f"; sizes that would: {', '.join(map(str, works)) or 'none with the other axes as they are'}"
            )


def check_used(specs: Specs, mesh: AnyMesh, rules: Rules, architecture: str) -> None:
    """ShardingError for a mesh axis that splits nothing of the model: its devices would all do the same work."""
    over = split(mesh, rules)
    logical = {axis for spec in specs.values() for axis in spec.array_axes if axis} | {ROWS, TOKENS}
    used = {name for axis in logical for name in over.get(axis, ())}
    for mesh_axis, size in mesh.shape.items():
        if size > 1 and mesh_axis not in used:
            would = sorted({name for axis in logical for name in _names(rules.get(axis, ()))})
            raise ShardingError(
                f"mesh axis {mesh_axis} of {size} devices splits nothing of {architecture}: they would all do the same "
                f"work; axes that split it under these rules: {', '.join(would) or 'none'}"
            )


def check_one_process(mesh: Mesh, rules: Rules) -> None:
    """ShardingError for rows that are split over devices of several processes: each would have to be given inputs, and
    to be asked for tokens, that the others do not have."""
    num_processes = len({device.process_index for device in mesh.devices.flat})
    if num_processes > 1 and (axes := split(mesh, rules).get(ROWS)):
        raise ShardingError(
            f"rows are split over mesh axis {' and '.join(axes)}, whose devices belong to {num_processes} processes; "
            "one process has to have all groups: other axes would work, or an engine in each process"
        )


def check_step(num_tokens: int, mesh: AnyMesh, rules: Rules) -> None:
    """ShardingError for a step whose tokens are not shared out evenly by the devices that split them."""
    num_parts = num_shards(TOKENS, mesh, rules)
    if rest := num_tokens % num_parts:
        raise ShardingError(
            f"a step of {num_tokens} tokens is not shared out evenly by {num_parts} devices along "
            f"{' and '.join(split(mesh, rules)[TOKENS])}; {num_tokens - rest} or {num_tokens + num_parts - rest} "
            "tokens (max_num_batched_tokens) would be"
        )


def check_scored(mesh: AnyMesh, rules: Rules) -> None:
    """ShardingError for rows or tokens that are split over devices: scores are those of a step that has all of both."""
    over = split(mesh, rules)
    for mine in (ROWS, TOKENS):
        if mine in over:
            raise ShardingError(
                f"enable_prompt_logprobs is set, and mesh axis {' and '.join(over[mine])} splits {mine}, which prompts "
                "that are scored need undivided: other axes would work, or leave it out"
            )


def check_apart(mesh: AnyMesh, rules: Rules) -> None:
    """ShardingError where rows or tokens go over a mesh axis of anything else but experts: its devices have different
    tokens, and would sum what belongs to these."""
    over = split(mesh, rules)
    for mine, axis in itertools.product((ROWS, TOKENS), over):
        twice = sorted(set(over.get(mine, ())) & set(over[axis]))
        if axis != mine and axis not in SHARED_WITH and twice:
            raise ShardingError(
                f"logical axes {mine} and {axis} are both split over mesh axis {twice[0]}, whose devices have "
                f"different tokens: only {' and '.join(SHARED_WITH)} gather these; one of the two must go to another "
                "axis, or to none"
            )
