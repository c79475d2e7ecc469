"""Compiles decode steps for two H200s that are not there, which write into each other's memory; prints what of them.

JAX_PLATFORMS=cpu XLA_FLAGS=--xla_dump_to=DUMP python compile_collectives.py TARGET_CONFIG DUMP
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from unittest import mock

import jax
from jax.experimental import topologies

from jaxinfer.runner import peers
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.compiled import lower_step
from tests.capture.compile_steps import QWEN3_4B, QWEN3_30B_A3B, facts, make_builder

BUCKETS = (Bucket(True, 1, 1), Bucket(True, 64, 64))
STEPS = {
    "tensor": {**QWEN3_4B, "num_hidden_layers": 4},
    "expert": {**QWEN3_30B_A3B, "num_hidden_layers": 4},
}
"""By the axis that two devices are along."""


def main() -> None:
    target, dump = Path(sys.argv[1]).read_text(), sys.argv[2]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x2"
    )
    found = {}
    with mock.patch.object(peers, "reachable", lambda _: True):
        for axis, config in STEPS.items():
            mesh = topologies.make_mesh(topology, (2,), (axis,))
            builder = dataclasses.replace(make_builder(target, config, BUCKETS), mesh=mesh)
            with jax.set_mesh(mesh):
                for bucket in BUCKETS:
                    lower = functools.partial(lower_step, builder, builder.abstract_params, bucket)
                    found[f"{axis}, {bucket}"] = facts(builder, lower, dump, captured=True)
    print(json.dumps({"state_leaves": len(jax.tree.leaves(builder.abstract_state)), "programs": found}))


if __name__ == "__main__":
    main()
