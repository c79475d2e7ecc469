import hashlib
import time
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import load as module
from checkpoints import safetensors
from checkpoints.load import held_layers, load
from checkpoints.source import CheckpointError
from jaxinfer.params import ParamSpec, Source

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
LAYERS = 3


class Memory:
    """Tensors in memory that count how often each is read."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.reads = []

    def shapes(self):
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name):
        self.reads.append(name)
        return self.tensors[name]


def join_and_turn(tensors):
    return np.concatenate(tensors).T


SPECS = {
    "embed": ParamSpec(shape=(12, 4), axes=("vocab", None), sources=(Source("embed", (12, 4)),)),
    "gate_up": ParamSpec(
        shape=(4, 16),
        axes=(None, "mlp"),
        sources=(Source("l.{layer}.gate", (8, 4)), Source("l.{layer}.up", (8, 4))),
        pack=join_and_turn,
        layers=range(LAYERS),
    ),
    "odd": ParamSpec(shape=(4,), axes=(None,), sources=(Source("l.{layer}.odd", (4,)),), layers=[1]),
}
PLACES = dict.fromkeys(SPECS, HERE)


def tensors(dtype=np.float32):
    rng = np.random.default_rng(3)
    shapes = {"embed": (12, 4), "l.1.odd": (4,)}
    shapes |= {f"l.{layer}.{part}": (8, 4) for layer in range(LAYERS) for part in ("gate", "up")}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def expected(stored):
    layers = [np.concatenate([stored[f"l.{i}.gate"], stored[f"l.{i}.up"]]).T for i in range(LAYERS)]
    return {"embed": stored["embed"], "gate_up": np.stack(layers), "odd": stored["l.1.odd"][None]}


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_parameters_are_packed_stacked_and_converted(stored, wanted):
    given = tensors(stored)
    params = load(Memory(given), SPECS, wanted, PLACES)
    assert list(params) == list(SPECS)
    for name, value in expected(given).items():
        assert params[name].dtype == wanted
        assert params[name].sharding == HERE
        assert np.array_equal(np.asarray(params[name]), value.astype(np.float32).astype(wanted))


def test_every_tensor_is_read_once():
    source = Memory(tensors())
    load(source, SPECS, jnp.float32, PLACES)
    assert sorted(source.reads) == sorted(source.tensors)


def test_progress_counts_every_byte_and_never_goes_back():
    seen = []
    load(Memory(tensors()), SPECS, jnp.bfloat16, PLACES, progress=lambda done, total: seen.append((done, total)))
    total = 2 * (12 * 4 + LAYERS * 4 * 16 + 4)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert (len(seen), seen[-1]) == (5, (total, total))
    assert {t for _, t in seen} == {total}


def test_one_packed_tensor_is_on_the_host_at_a_time():
    alive = []

    def pack(parts):
        until = time.monotonic() + 10  # the runtime drops its reference in its own time; nothing else may hold one
        while any(ref() is not None for ref in alive):
            assert time.monotonic() < until, "a layer before is still held"
            jnp.zeros(()).block_until_ready()
        packed = np.concatenate(parts).T.copy()
        alive.append(weakref.ref(packed))
        return packed

    spec = ParamSpec(
        shape=(4, 16), axes=(None, None), sources=SPECS["gate_up"].sources, pack=pack, layers=range(LAYERS)
    )
    given = {name: tensor for name, tensor in tensors().items() if "gate" in name or "up" in name}
    load(Memory(given), {"w": spec}, jnp.float32, {"w": HERE})
    assert len(alive) == LAYERS


def test_layers_are_written_into_one_buffer():
    placer = module._Placer(jnp.dtype(jnp.float32))
    stacked = placer.empty((LAYERS, 4, 16), HERE)
    address = stacked.unsafe_buffer_pointer()
    for index in range(LAYERS):
        stacked = placer.set_layer(stacked, index, np.full((4, 16), index, np.float32), HERE)
        assert stacked.unsafe_buffer_pointer() == address
    assert np.asarray(stacked)[:, 0, 0].tolist() == [0, 1, 2]


def test_a_parameter_is_no_view_of_the_file(tmp_path):
    safetensors.write(tmp_path / "x", {"embed": np.zeros((1024, 64), np.float32)})
    spec = ParamSpec(shape=(1024, 64), axes=(None, None), sources=(Source("embed", (1024, 64)),))
    params = load(safetensors.SafetensorsFile(tmp_path / "x"), {"embed": spec}, jnp.float32, {"embed": HERE})
    with (tmp_path / "x").open("r+b") as file:
        file.seek(-1024 * 64 * 4, 2)
        file.write(b"\x01" * 1024 * 64 * 4)
    assert not np.asarray(params["embed"]).any()


def test_missing_extra_and_misshapen_tensors_are_listed_together_before_any_is_read():
    given = tensors()
    del given["l.2.up"]
    given["embed"] = np.zeros((12, 5), np.float32)
    given["l.0.bias"] = np.zeros(3, np.float32)
    source = Memory(given)
    with pytest.raises(CheckpointError) as error:
        load(source, SPECS, jnp.float32, PLACES)
    assert str(error.value).splitlines() == [
        "the checkpoint does not fit the model (8 tensors found, 8 expected)",
        "1 missing: l.2.up",
        "1 extra: l.0.bias",
        "1 misshapen: embed is [12, 5] where the model has [12, 4]",
    ]
    assert source.reads == []


def test_a_long_list_is_cut_and_counted():
    given = tensors() | {f"x{i:02}": np.zeros(1) for i in range(25)}
    with pytest.raises(CheckpointError, match=r"25 extra: x00, .*x19, and 5 more$"):
        load(Memory(given), SPECS, jnp.float32, PLACES)


def test_ignored_tensors_may_be_extra():
    given = tensors() | {"l.0.rotary_emb.inv_freq": np.zeros(2), "mtp.x": np.zeros(2)}
    load(Memory(given), SPECS, jnp.float32, PLACES, ignore=lambda name: name.startswith(("mtp.", "l.0.rotary")))
    with pytest.raises(CheckpointError, match=r"2 extra: l\.0\.rotary_emb\.inv_freq, mtp\.x$"):
        load(Memory(given), SPECS, jnp.float32, PLACES)


def test_a_pack_that_gives_another_shape_is_refused():
    spec = ParamSpec(shape=(4, 12), axes=(None, None), sources=(Source("embed", (12, 4)),))
    with pytest.raises(CheckpointError, match=r"'e': packing gave \[12, 4\] where the model has \[4, 12\]"):
        load(Memory({"embed": tensors()["embed"]}), {"e": spec}, jnp.float32, {"e": HERE})


def test_parameters_that_disagree_on_a_tensor_are_refused():
    specs = {
        "a": SPECS["embed"],
        "b": ParamSpec(shape=(4,), axes=(None,), sources=(Source("embed", (4,)),)),
    }
    with pytest.raises(CheckpointError, match=r"'b' expects 'embed' as \(4,\), another parameter as \(12, 4\)"):
        load(Memory(tensors()), specs, jnp.float32, dict.fromkeys(specs, HERE))


def llama_specs(config):
    keys = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"
    hidden, layers, heads, kv_heads, width = (config[key] for key in keys)
    mlp, vocab = config["intermediate_size"], config["vocab_size"]

    def linear(*parts):
        """Linear weights side by side, (in, out)."""
        sources = tuple(Source(f"model.layers.{{layer}}.{name}.weight", shape) for name, shape in parts)
        shape = (parts[0][1][1], sum(shape[0] for _, shape in parts))
        return ParamSpec(shape=shape, axes=(None, None), sources=sources, pack=join_and_turn, layers=range(layers))

    def norm(name):
        source = Source(f"model.layers.{{layer}}.{name}.weight", (hidden,))
        return ParamSpec(shape=(hidden,), axes=(None,), sources=(source,), layers=range(layers), init="ones")

    embed = Source("model.embed_tokens.weight", (vocab, hidden))
    return {
        "embed": ParamSpec(shape=(vocab, hidden), axes=(None, None), sources=(embed,)),
        "norm": ParamSpec(shape=(hidden,), axes=(None,), sources=(Source("model.norm.weight", (hidden,)),)),
        "attention_norm": norm("input_layernorm"),
        "mlp_norm": norm("post_attention_layernorm"),
        "qkv": linear(
            ("self_attn.q_proj", (heads * width, hidden)),
            ("self_attn.k_proj", (kv_heads * width, hidden)),
            ("self_attn.v_proj", (kv_heads * width, hidden)),
        ),
        "o": linear(("self_attn.o_proj", (hidden, heads * width))),
        "gate_up": linear(("mlp.gate_proj", (mlp, hidden)), ("mlp.up_proj", (mlp, hidden))),
        "down": linear(("mlp.down_proj", (hidden, mlp))),
    }


def test_smollm2_loads_into_the_layout_of_its_specs(smollm2):
    specs = llama_specs(smollm2.config)
    params = load(smollm2.tensors, specs, jnp.bfloat16, dict.fromkeys(specs, HERE))
    assert sum(array.size for array in params.values()) == 134_515_008
    q = smollm2.tensors.read("model.layers.29.self_attn.q_proj.weight")
    assert np.array_equal(np.asarray(params["qkv"][29, :, :576]), q.T.astype(jnp.bfloat16))


def test_smollm2_has_the_weights_that_transformers_reads(smollm2):
    # SHA-256 of the float32 bytes of transformers 5.24's from_pretrained(folder, gguf_file=...); all 272 were equal.
    recorded = {
        "model.embed_tokens.weight": "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa",
        "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab945dfdba7fb59e0ca3eb74329358bd1b53b635b3ff37c1a56",
        "model.layers.29.self_attn.k_proj.weight": "8e99b2450d5f3d53731f52790cc82f80b04341e533306bcfee6669ffa3c79921",
        "model.layers.7.mlp.down_proj.weight": "9d3af8b67d13c727ae5ffe470464163b9cac42eb494525392bd3e79c8db73880",
        "model.norm.weight": "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",
    }
    for name, digest in recorded.items():
        assert hashlib.sha256(smollm2.tensors.read(name).tobytes()).hexdigest() == digest, name


class PartHeld:
    """A sharding of [L, F] over layers, of which this process has the devices of some."""

    def __init__(self, *layers: slice):
        self._layers = layers

    def addressable_devices_indices_map(self, _shape):
        return {number: (layers, slice(None)) for number, layers in enumerate(self._layers)}


def test_a_process_reads_the_layers_that_its_devices_have_and_no_others():
    assert held_layers(PartHeld(slice(0, 2), slice(0, 2)), (6, 3)) == {0, 1}
    assert held_layers(PartHeld(slice(2, 4), slice(4, 6)), (6, 3)) == {2, 3, 4, 5}
    assert held_layers(PartHeld(slice(None)), (6, 3)) == set(range(6))
