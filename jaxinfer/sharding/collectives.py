"""Collectives of a program, found in what JAX traced or in what XLA made of it; those in loops as often as they run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Names in HLO by those of JAX's primitives."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of a program that are alike."""

    kind: str
    axes: tuple[str, ...]  # mesh axes; none where only the program of XLA is known
    num_devices: int  # that take part in one
    num_bytes: int  # of one, on each device: the larger of what goes in and what comes out
    count: int  # in one run

    def seconds(self, link_bytes_per_s: float, least_s: float) -> float:
        """Of all of them, by rings: Patarasu and Yuan 2009."""
        n = self.num_devices
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(self.kind, (n - 1) / n)
        return self.count * (least_s + share * self.num_bytes / link_bytes_per_s)


def of_jaxpr(jaxpr: ClosedJaxpr, sizes: Mapping[str, int]) -> list[Collective]:
    """The collectives of a traced program. sizes: devices along each mesh axis.

    ValueError for a loop with collectives whose number of turns is not known, and for branches that differ in them.
    """
    found: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    _walk(jaxpr.jaxpr, 1, found)
    return [
        Collective(kind, axes, math.prod(sizes[axis] for axis in axes), num_bytes, count)
        for (kind, axes, num_bytes), count in sorted(found.items())
        if num_bytes
    ]


def _walk(jaxpr: Jaxpr, times: int, found: Counter) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in KINDS:
            axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            if axes:
                size = max(_bytes(eqn.invars), _bytes(eqn.outvars))
                found[KINDS[name], axes, size] += times
        elif name == "while":
            inside: Counter = Counter()
            _walk(eqn.params["body_jaxpr"].jaxpr, 1, inside)
            if inside:
                turns = _turns(jaxpr, eqn)
                found.update({key: count * turns * times for key, count in inside.items()})
        elif name == "cond":
            branches = []
            for branch in eqn.params["branches"]:
                branches.append(Counter())
                _walk(branch.jaxpr, times, branches[-1])
            if any(branch != branches[0] for branch in branches):
                raise ValueError("branches of a condition differ in their collectives: how many run is not known")
            found.update(branches[0])
        else:
            turns = eqn.params["length"] if name == "scan" else 1
            for inner in _inner(eqn):
                _walk(inner, times * turns, found)


def _bytes(variables: Any) -> int:
    return sum(math.prod(v.aval.shape) * np.dtype(v.aval.dtype).itemsize for v in variables)


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in jax.tree.leaves(dict(eqn.params), is_leaf=lambda v: isinstance(v, ClosedJaxpr | Jaxpr)):
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def _turns(jaxpr: Jaxpr, eqn: JaxprEqn) -> int:
    """Of a loop over a counter that starts at a number, grows by one and stays below another."""
    params = eqn.params
    condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    unknown = ValueError(f"a loop with collectives runs for a number of turns that is not known: {condition}")
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        raise unknown
    counter, end = condition.eqns[0].invars
    if counter not in condition.invars or not isinstance(end, Literal):
        raise unknown
    index = condition.invars.index(counter) - params["cond_nconsts"]
    start = _number(jaxpr, eqn.invars[params["cond_nconsts"] + params["body_nconsts"] + index])
    inside = body.invars[params["body_nconsts"] + index]
    steps = [e for e in body.eqns if body.outvars[index] in e.outvars]
    if start is None or not steps or steps[0].primitive.name != "add" or inside not in steps[0].invars:
        raise unknown
    (by,) = [v for v in steps[0].invars if v is not inside]
    if not isinstance(by, Literal) or by.val != 1:
        raise unknown
    return int(end.val) - start


def _number(jaxpr: Jaxpr, variable: Literal | Var) -> int | None:
    """The value of a scalar that the program writes out."""
    while not isinstance(variable, Literal):
        made = [eqn for eqn in jaxpr.eqns if variable in eqn.outvars]
        if not made or made[0].primitive.name not in ("broadcast_in_dim", "convert_element_type", "copy"):
            return None
        variable = made[0].invars[0]
    return int(variable.val)


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_SHAPE = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
_NAMED_GROUPS = re.compile(r"replica_groups=mesh\[(.*?)\] *\{(.*?)\}")
_TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def of_hlo(text: str) -> list[Collective]:
    """The collectives of a compiled program, which may be several of a traced one in one.

    ValueError for a loop with collectives whose number of turns XLA does not know.
    """
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            entry = name if start[1] else entry
            lines[name] = []
        elif name:
            lines[name].append(line)
    found: Counter[tuple[str, tuple[str, ...], int, int]] = Counter()
    _walk_hlo(lines, entry, 1, found)
    return [Collective(*which, count) for which, count in sorted(found.items())]


def _walk_hlo(lines: Mapping[str, list[str]], name: str, times: int, found: Counter) -> None:
    for line in lines.get(name, ()):
        if made := _COLLECTIVE.search(line):
            size, (axes, num_devices) = _result_bytes(made[1], is_start=made[3] is not None), _group(line)
            if made[2] == "reduce-scatter" and made[3] is None:  # names only what comes out
                size *= num_devices
            found[made[2], axes, num_devices, size] += times
            continue
        called = _CALLED.findall(line) + [n.strip(" %") for b in _BRANCHES.findall(line) for n in b.split(",")]
        if not called:
            continue
        inside: Counter = Counter()
        for computation in called:
            _walk_hlo(lines, computation, 1, inside)
        turns = 1
        if inside and " while(" in line:
            known = _TURNS.search(line)
            if known is None:
                raise ValueError(
                    f"a loop with collectives runs for a number of turns that is not known: {line.strip()}"
                )
            turns = int(known[1])
        found.update({key: count * turns * times for key, count in inside.items()})


def _result_bytes(shapes: str, *, is_start: bool) -> int:
    """The larger of what goes in and what comes out; what starts a collective names the former first, then the latter,
    and may name scalars besides."""
    sizes = [
        (s[2], math.prod(map(int, filter(None, s[2].split(",")))) * _itemsize(s[1])) for s in _SHAPE.finditer(shapes)
    ]
    if not is_start:
        return sum(size for _, size in sizes)
    arrays = [size for shape, size in sizes if shape]
    half = len(arrays) // 2
    return max(sum(arrays[:half]), sum(arrays[half:]))


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _group(line: str) -> tuple[tuple[str, ...], int]:
    """Mesh axes, if they are said, and number of the devices that take part."""
    if named := _NAMED_GROUPS.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = tuple(re.findall(r"'(\w+)'", named[2]))
        return axes, math.prod(int(sizes[axis]) for axis in axes)
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return (), len(listed[1].split(","))
    if by_shape := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return (), int(by_shape[1])
    return (), 2  # a permutation's, of which each is between two
