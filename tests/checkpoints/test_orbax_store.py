import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import orbax_store, resolve
from checkpoints.orbax_store import restore, save
from checkpoints.resolve import STORE_MARKER, Checkpoint
from checkpoints.source import CheckpointError
from jaxinfer.params import ParamSpec, Source

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SPECS = {
    "w": ParamSpec(shape=(4, 6), axes=(None, None), sources=(Source("l.{layer}.w", (4, 6)),), layers=range(2)),
    "n": ParamSpec(shape=(6,), axes=(None,), sources=(Source("n", (6,)),)),
}
PLACES = dict.fromkeys(SPECS, HERE)
ORIGIN = Checkpoint(
    name="tiny",
    path=Path("tiny"),
    format="safetensors",
    config={"model_type": "llama"},
    generation_config={"eos_token_id": [1, 2]},
    tensors=None,
    tokenizer_json='{"é": 1}',
    tokenizer_config={"chat_template": "T"},
)


def params(dtype=jnp.float32):
    rng = np.random.default_rng(5)
    return {name: jnp.asarray(rng.standard_normal(spec.array_shape), dtype) for name, spec in SPECS.items()}


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_a_store_gives_back_what_was_saved_in_the_dtype_asked_for(stored, wanted, tmp_path):
    given = params(stored)
    save(tmp_path / "s", given, SPECS, ORIGIN)
    found = restore(tmp_path / "s", SPECS, wanted, PLACES)
    assert set(found) == set(SPECS)
    for name, array in given.items():
        assert (found[name].dtype, found[name].sharding) == (wanted, HERE)
        assert np.array_equal(np.asarray(found[name]), np.asarray(array.astype(wanted)))


def test_a_store_is_a_folder_that_resolve_knows(tmp_path):
    save(tmp_path, params(), SPECS, ORIGIN)
    found = resolve.resolve(str(tmp_path))
    assert (found.format, found.tensors) == ("orbax", None)
    for field in ("config", "generation_config", "tokenizer_json", "tokenizer_config"):
        assert getattr(found, field) == getattr(ORIGIN, field)


def test_a_store_goes_to_a_new_folder_only(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(CheckpointError, match=r"is not empty; a store is written to a new folder"):
        save(tmp_path, params(), SPECS, ORIGIN)


def test_parameters_that_do_not_fit_are_not_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"1 missing: n\n1 misshapen: w is \[2\] where the model has \[2, 4, 6\]"):
        save(tmp_path, {"w": jnp.zeros(2)}, SPECS, ORIGIN)
    assert not list(tmp_path.iterdir())


def test_missing_extra_and_misshapen_parameters_are_listed_together(tmp_path):
    save(tmp_path, params(), SPECS, ORIGIN)
    other = {
        "w": ParamSpec(shape=(6, 4), axes=(None, None), sources=(), layers=range(2)),
        "m": ParamSpec(shape=(6,), axes=(None,), sources=()),
    }
    with pytest.raises(CheckpointError) as error:
        restore(tmp_path, other, jnp.float32, dict.fromkeys(other, HERE))
    assert str(error.value).splitlines()[1:] == [
        "1 missing: m",
        "1 extra: n",
        "1 misshapen: w is [2, 4, 6] where the model has [2, 6, 4]",
    ]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": 1, "params": {"w": 3}}'])
def test_a_damaged_marker_is_refused(content, tmp_path):
    (tmp_path / STORE_MARKER).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{STORE_MARKER}: not the description of a store"):
        orbax_store.stored_shapes(tmp_path)


def test_a_store_of_another_version_is_refused(tmp_path):
    (tmp_path / STORE_MARKER).write_text(json.dumps({"version": 9, "params": {}}))
    with pytest.raises(CheckpointError, match=r"version 9 is not known; known: 1"):
        orbax_store.stored_shapes(tmp_path)


def test_a_store_whose_arrays_are_gone_is_refused(tmp_path):
    save(tmp_path / "s", params(), SPECS, ORIGIN)
    (tmp_path / "s" / "params").rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"params: cannot be restored"):
        restore(tmp_path / "s", SPECS, jnp.float32, PLACES)


MESHES = """
import sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pathlib import Path
from checkpoints import load, orbax_store, resolve
from jaxinfer.params import ParamSpec, Source

class Memory:
    def __init__(self, tensors): self.tensors = tensors
    def shapes(self): return {name: tensor.shape for name, tensor in self.tensors.items()}
    def read(self, name): return self.tensors[name]

rng = np.random.default_rng(0)
layers = [rng.standard_normal((8, 16), dtype=np.float32) for _ in range(4)]
embed = rng.standard_normal((32, 8), dtype=np.float32)
source = Memory({f"l.{i}.w": w for i, w in enumerate(layers)} | {"e": embed})
specs = {
    "w": ParamSpec(shape=(16, 8), axes=("a", "b"), sources=(Source("l.{layer}.w", (8, 16)),),
                   pack=lambda parts: parts[0].T, layers=range(4)),
    "e": ParamSpec(shape=(32, 8), axes=("v", None), sources=(Source("e", (32, 8)),)),
}
stacked = np.stack([w.T for w in layers])

def check(params, places):
    assert {name: array.sharding for name, array in params.items()} == places
    for name, whole in {"w": stacked, "e": embed}.items():
        for shard in params[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), whole[shard.index])

assert len(jax.devices()) == 4
splits = {
    AxisType.Auto: (P(), P(None, "x", "y"), P("x", None, "y"), P(("x", "y"))),
    AxisType.Explicit: (P(None, None, ("x", "y")), P("x", None, "y")),
}
for kind, kinds_splits in splits.items():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    for split in kinds_splits:
        places = {"w": NamedSharding(mesh, split), "e": NamedSharding(mesh, P("y"))}
        check(load.load(source, specs, jnp.float32, places), places)
        if split != P("x", None, "y"):
            continue
        # Layers split over a mesh axis: the update of one layer still sends nothing between devices.
        placer = load._Placer(jnp.dtype(jnp.float32))
        sharding = load._automatic(places["w"])
        one = load._place(stacked[0], load._layer_sharding(sharding))
        text = load._update(sharding).lower(placer.empty((4, 16, 8), sharding), one, 0).compile().as_text()
        assert not [op for op in ("all-gather", "all-reduce", "permute(", "all-to-all") if op in text], split

origin = resolve.Checkpoint(name="t", path=Path("t"), format="safetensors", config={}, generation_config={},
                            tensors=None, tokenizer_json=None, tokenizer_config={})
line = jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,))
places = {"w": NamedSharding(line, P(None, "t")), "e": NamedSharding(line, P("t"))}
orbax_store.save(sys.argv[1], load.load(source, specs, jnp.float32, places), specs, origin)
one = jax.sharding.SingleDeviceSharding(jax.devices()[2])
for places in (
    {"w": NamedSharding(mesh, P("x", None, "y")), "e": NamedSharding(mesh, P("y", "x"))},
    {"w": NamedSharding(line, P()), "e": NamedSharding(line, P(None, "t"))},
    {"w": one, "e": one},
):
    check(orbax_store.restore(sys.argv[1], specs, jnp.float32, places), places)
print("ok")
"""


def test_loading_and_restoring_put_every_part_on_its_device_whatever_the_mesh(tmp_path):
    # Its own process: the number of devices is fixed when JAX starts.
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ":".join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-c", MESHES, str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.stdout == "ok\n", run.stderr[-3000:]
