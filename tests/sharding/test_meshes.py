"""What users may ask of a mesh, and what is refused with what would work."""

import dataclasses
import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from checkpoints import orbax_store
from checkpoints.resolve import Checkpoint
from jaxinfer.build import build_engine, choose_mesh, choose_rules
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.models import registry
from jaxinfer.params import random_params
from jaxinfer.runner.buckets import Bucket
from jaxinfer.serving import engine_command
from jaxinfer.sharding import mesh as meshes
from jaxinfer.sharding import report, rules
from jaxinfer.sharding.mesh import ShardingError
from tests.sharding.configs import CONFIGS


def model_on(name, sizes, axis_rules=rules.TENSOR_PARALLEL, **changes):
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return registry.for_mesh({**CONFIGS[name], **changes}, (), mesh, rules.find(axis_rules))


def test_a_mesh_in_words_is_its_sizes_in_their_order():
    assert list(meshes.parse("expert=4, tensor=2").items()) == [("expert", 4), ("tensor", 2)]


@pytest.mark.parametrize("text", ["", "tensor", "tensor=two", "tensor=2,tensor=2", "=2", "tensor=-1", "tensor=2,"])
def test_a_text_that_is_no_mesh_is_refused(text):
    with pytest.raises(ShardingError, match=re.escape(f"mesh is {text!r}; axes and their sizes are needed")):
        meshes.parse(text)


REFUSED = [
    ("llama", {"tensor": 3}, "tensor",
     "a tensor axis of 3 devices does not divide kv_heads 8, mlp 48, vocab 96; sizes that would: 1, 2, 4, 8"),
    ("qwen3_moe", {"expert": 3}, "tensor",
     "an expert axis of 3 devices does not divide experts 8; sizes that would: 1, 2, 4, 8"),
    ("qwen3_next", {"tensor": 8}, "tensor",
     "a tensor axis of 8 devices does not divide delta_heads 4, expert_mlp 16, kv_heads 8, mlp 16, vocab 96; "
     "sizes that would: 1, 2, 4"),
    ("qwen3_moe", {"expert": 2, "tensor": 8}, "whole-experts",
     "an expert axis of 2 devices does not divide experts 8; sizes that would: 1"),
    ("llama", {"pipeline": 3}, "tensor",
     "a pipeline axis of 3 devices does not divide layers 4; sizes that would: 1, 2, 4"),
    ("qwen3_5", {"pipeline": 4}, "tensor",
     "a pipeline axis of 4 devices does not divide layers 2; sizes that would: 1, 2"),
    ("llama", {"expert": 2}, "tensor",
     "mesh axis expert of 2 devices splits nothing of LlamaForCausalLM: they would all do the same work; axes that "
     "split it under these rules: data, pipeline, sequence, tensor"),
    ("llama", {"mine": 2, "data": 2}, "tensor",
     "mesh axis mine of 2 devices splits nothing of LlamaForCausalLM: they would all do the same work; axes that split "
     "it under these rules: data, pipeline, sequence, tensor"),
    ("llama", {"data": 2, "tensor": 3}, "tensor",
     "a tensor axis of 3 devices does not divide kv_heads 8, mlp 48, vocab 96; sizes that would: 1, 2, 4, 8"),
    ("qwen3_moe", {"tensor": 2}, {"rows": "tensor", "mlp": "tensor", "vocab": "tensor"},
     "logical axes rows and mlp are both split over mesh axis tensor, whose devices have different tokens: only "
     "experts and expert_mlp gather these; one of the two must go to another axis, or to none"),
    ("llama", {"data": 2}, {"rows": "data", "tokens": "data"},
     "logical axes rows and tokens are both split over mesh axis data, whose devices have different tokens"),
    ("llama", {"pipeline": 2}, {"layers": "pipeline", "tokens": "pipeline"},
     "logical axes tokens and layers are both split over mesh axis pipeline, whose devices have different tokens"),
    ("qwen3_moe", {"tensor": 2}, {"experts": "tensor", "expert_mlp": "tensor"},
     "logical axes experts and expert_mlp of one array are both split over mesh axis tensor; one of them must go to"),
    ("llama", {"tensor": 2}, {"heads": "tensor"}, "rules name the logical axes heads; known: layers, kv_heads, "),
    ("llama", {"tensor": 2}, "fast", "rules are 'fast'; known: tensor, whole-experts, data-attention"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "axis_rules", "message"), REFUSED, ids=str)
def test_what_cannot_be_split_so_is_refused_with_what_could(name, sizes, axis_rules, message):
    with pytest.raises(ShardingError, match=re.escape(message)):
        model_on(name, sizes, axis_rules)


def test_a_step_that_devices_cannot_share_out_by_tokens_is_refused_with_sizes_that_they_could():
    mesh = AbstractMesh((4,), ("sequence",))
    builder = report.make_builder(
        CONFIGS["llama"], mesh, rules.TENSOR_PARALLEL, report.Load(num_seqs=2, tokens_per_seq=32)
    )
    message = "a step of 30 tokens is not shared out evenly by 4 devices along sequence; 28 or 32 tokens (max_num_"
    with pytest.raises(ShardingError, match=re.escape(message)):
        dataclasses.replace(builder, buckets=(Bucket(True, 2, 2), Bucket(False, 30, 2)))


@pytest.mark.parametrize(
    ("sizes", "axis_rules", "rows", "tokens"),
    [
        ({"data": 2, "tensor": 2}, "tensor", 2, 1),
        ({"data": 2, "expert": 4}, "data-attention", 8, 1),
        ({"data": 2, "expert": 4}, "tensor", 2, 1),
        ({"sequence": 4, "expert": 2}, "tensor", 1, 4),
    ],
)
def test_groups_have_pages_and_slots_of_their_own_and_parts_of_prompts_the_same(sizes, axis_rules, rows, tokens):
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    load = report.Load(num_seqs=8, tokens_per_seq=32)
    builder = report.make_builder(CONFIGS["qwen3_moe"], mesh, rules.find(axis_rules), load)
    state, (decode, mixed) = builder.abstract_state, builder.buckets
    assert builder.num_groups == rows and decode.rows == 8 // rows
    local = state.k_pages.sharding.shard_shape(state.k_pages.shape)
    assert local[1] == builder.shape.num_pages + 1 == state.k_pages.shape[1] // rows
    assert state.last_token.sharding.shard_shape(state.last_token.shape) == (8 // rows + 1,)
    assert "tokens" not in builder.split_of(decode)
    assert ("tokens" in builder.split_of(mixed)) == (tokens > 1)


def test_groups_of_several_processes_are_refused_with_what_would_work():
    devices = np.asarray([SimpleNamespace(process_index=i) for i in (0, 0, 1, 1)])
    two: Any = SimpleNamespace(devices=devices, shape={"data": 2, "tensor": 2})
    with pytest.raises(ShardingError, match="rows are split over mesh axis data, whose devices belong to 2 processes"):
        rules.check_one_process(two, rules.TENSOR_PARALLEL)
    rules.check_one_process(two, {**rules.TENSOR_PARALLEL, "rows": ()})
    two.devices = devices[:2]
    rules.check_one_process(two, rules.TENSOR_PARALLEL)


@pytest.mark.parametrize(("axis", "what"), [("data", "rows"), ("sequence", "tokens")])
def test_prompts_that_no_device_has_whole_are_not_scored(axis, what):
    mesh = AbstractMesh((2, 2), (axis, "tensor"))
    with pytest.raises(ShardingError, match=f"enable_prompt_logprobs is set, and mesh axis {axis} splits {what}"):
        rules.check_scored(mesh, rules.TENSOR_PARALLEL)
    rules.check_scored(AbstractMesh((2, 2), ("expert", "tensor")), rules.TENSOR_PARALLEL)


def test_groups_of_devices_have_no_host_tier_and_it_says_so(tmp_path):
    if jax.device_count() < 2:
        pytest.skip(f"{jax.device_count()} devices; 2 are needed")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", mesh="data=2", kv_host_gib=1)
    with pytest.raises(ConfigError, match="kv_host_gib is 1, and 2 groups of devices have sequences of their own; a "):
        build_engine(config, show_progress=False)


@pytest.mark.parametrize("size", [0, -1, True, "2", 2.0])
def test_a_size_that_is_no_number_of_devices_is_refused(size):
    with pytest.raises(ShardingError, match=re.escape(f"mesh axis tensor is {size!r}; a number of devices")):
        meshes.make_mesh({"tensor": size})


def test_more_devices_than_there_are_are_refused_with_both_numbers():
    count = jax.device_count()
    with pytest.raises(
        ShardingError, match=f"mesh tensor=2,expert={count} has {2 * count} devices, but there are {count}"
    ):
        meshes.make_mesh({"tensor": 2, "expert": count})


@pytest.mark.parametrize(
    ("sizes", "copies"), [({"tensor": 1}, 1), ({"tensor": 2}, 1), ({"tensor": 4}, 2), ({"tensor": 8}, 4)]
)
def test_devices_beyond_the_kv_heads_share_them_and_the_pool_has_a_copy_for_each(sizes, copies):
    model = model_on("llama", sizes)
    assert model.cache.num_kv_heads == 2 * copies
    assert model.specs["qkv"].shape[:2] == (2 * copies, 4 // copies + 2)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_copies_of_kv_heads_are_those_of_the_checkpoint_and_of_random_weights_alike(name):
    """What packing makes of published tensors is what spreading makes of the packed whole."""
    one, shared = model_on(name, {"tensor": 1}), model_on(name, {"tensor": 4})
    rng = np.random.default_rng(0)
    for param in ("qkv", "out"):
        tensors = [rng.standard_normal(s.shape).astype(np.float32) for s in one.specs[param].sources]
        whole = one.specs[param].pack(tensors)
        assert shared.specs[param].whole_shape == one.specs[param].array_shape
        spread = shared.specs[param].spread(whole[None])[0]
        np.testing.assert_array_equal(spread, shared.specs[param].pack(tensors))
    q, k = (
        shared.specs["qkv"]
        .pack([np.full(s.shape, i) for i, s in enumerate(one.specs["qkv"].sources)])[:, [0, 2], 0, 0]
        .T
    )
    assert set(q) == {0} and set(k) == {1}


def test_a_store_of_one_device_is_read_into_heads_that_devices_share(tmp_path):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    config = {**CONFIGS["qwen3_next"], "num_hidden_layers": 2}
    found = {}
    for size in (1, 4):
        mesh = meshes.make_mesh({"tensor": size})
        model = registry.for_mesh(config, (), mesh, rules.TENSOR_PARALLEL)
        places = rules.shardings(model.specs, mesh)
        found[size] = model.specs, places, random_params(model.specs, jnp.float32, places, 5)
    checkpoint = Checkpoint(
        name="m", path=tmp_path, format="dummy", config=config, generation_config={}, tensors=None, tokenizer_json=None,
        tokenizer_config={},
    )  # fmt: skip
    orbax_store.save(tmp_path / "store", found[1][2], found[1][0], checkpoint)
    specs, places, drawn = found[4]
    restored = orbax_store.restore(tmp_path / "store", specs, jnp.dtype("float32"), places)
    for name, array in restored.items():
        assert (array.shape, array.sharding) == (drawn[name].shape, places[name])
        np.testing.assert_array_equal(array, drawn[name], err_msg=name)
    assert restored["qkv"].shape[1] == 4 and specs["qkv"].whole_shape[1] == 2


def test_a_logical_axis_may_be_split_over_two_mesh_axes():
    mesh = AbstractMesh((2, 2), ("expert", "tensor"))
    assert rules.partition(("experts", None, "mlp"), mesh, {"experts": ("expert", "tensor")}) == PartitionSpec(
        ("expert", "tensor"), None, None
    )


def test_the_older_names_are_presets():
    config = EngineConfig(tensor_parallel_size=1, enable_expert_parallel=True)
    assert dict(choose_mesh(config).shape) == {"tensor": 1}
    assert choose_rules(config) == rules.PRESETS["whole-experts"]
    assert choose_rules(EngineConfig()) == rules.PRESETS["tensor"]


def test_two_names_for_one_thing_are_refused():
    with pytest.raises(ConfigError, match="mesh is 'tensor=2' and tensor_parallel_size is 2; give one"):
        EngineConfig(mesh="tensor=2", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="rules is 'tensor' and enable_expert_parallel is True; give one"):
        EngineConfig(rules="tensor", enable_expert_parallel=True)


def test_a_server_takes_a_mesh_by_the_sizes_of_its_axes():
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("expert", "mine"))
    command = engine_command(EngineConfig(mesh=mesh, rules={"mlp": ("mine",)}), show_progress=False)
    sent = json.loads(command[3])
    assert (sent["mesh"], sent["rules"]) == ({"expert": 1, "mine": 1}, {"mlp": ["mine"]})
    assert rules.find(sent["rules"]) == {"mlp": ("mine",)}


def test_a_server_refuses_a_mesh_of_devices_in_another_order():
    if jax.device_count() < 2:
        pytest.skip("one device; 2 are needed")
    mesh = Mesh(np.asarray(jax.devices()[1::-1]), ("tensor",))
    with pytest.raises(ConfigError, match=r"mesh has the devices \[1, 0\]; the engine of a server"):
        engine_command(EngineConfig(mesh=mesh), show_progress=False)
