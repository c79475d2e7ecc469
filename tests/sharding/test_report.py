"""Plans without devices say what real arrays take, and which collectives a real program has."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jaxinfer import cli
from jaxinfer.params import random_params
from jaxinfer.runner import cache
from jaxinfer.runner.compiled import compile_lowered, lower_step
from jaxinfer.sharding import collectives, report, rules
from jaxinfer.sharding.mesh import ShardingError, make_mesh
from tests.sharding.configs import CONFIGS

LOAD = report.Load(num_seqs=2, tokens_per_seq=24, dtype="float32")
MESHES = [
    ("llama", {"tensor": 4}, "tensor"),
    ("qwen3_moe", {"expert": 2, "tensor": 2}, "tensor"),
    ("qwen3_moe", {"tensor": 4}, "whole-experts"),
    ("qwen3_next", {"expert": 4}, "tensor"),
    ("qwen3_5", {"pipeline": 2, "tensor": 2}, "tensor"),
    ("qwen3_moe", {"data": 2, "expert": 2}, "data-attention"),
    pytest.param("qwen3_5", {"data": 2, "sequence": 2}, "tensor", marks=pytest.mark.long),
]
on_meshes = pytest.mark.parametrize(("name", "mesh", "axis_rules"), MESHES, ids=str)
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
QWEN3_30B = QWEN3_235B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "moe_intermediate_size": 768,
}


def bytes_on(device, arrays):
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(arrays)
        for shard in array.addressable_shards
        if shard.device == device
    )


@on_meshes
def test_planned_bytes_are_those_of_real_arrays_on_every_device(name, mesh, axis_rules):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    plan = report.plan(CONFIGS[name], mesh, axis_rules=axis_rules, load=LOAD)
    builder = report.make_builder(CONFIGS[name], make_mesh(mesh), rules.find(axis_rules), LOAD)
    shardings = rules.shardings(builder.model.specs, builder.mesh, builder.axis_rules)
    params = random_params(builder.model.specs, jnp.float32, shardings, 0)
    state = cache.zeros(builder.abstract_state)
    for device in builder.mesh.devices.flat:
        for part, names in builder.model.parts.items():
            assert plan.weights[part] == bytes_on(device, [params[n] for n in names])
        assert sum(plan.weights.values()) == bytes_on(device, params)
        assert plan.kv_bytes == bytes_on(device, (state.k_pages, state.v_pages))
        assert plan.recurrent_bytes == bytes_on(device, (state.recurrent, state.conv))
        assert plan.kv_bytes + plan.recurrent_bytes + plan.slot_bytes == bytes_on(device, state)


@on_meshes
def test_traced_collectives_are_those_of_the_compiled_program(name, mesh, axis_rules):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    plan = report.plan(CONFIGS[name], mesh, axis_rules=axis_rules, load=LOAD)
    builder = report.make_builder(CONFIGS[name], make_mesh(mesh), rules.find(axis_rules), LOAD)
    bucket = builder.buckets[0]
    text = compile_lowered(builder, lower_step(builder, builder.abstract_params, bucket)).as_text()

    found = collectives.of_hlo(text)
    assert plan.decode.collectives or set(mesh) <= {"data", "sequence"}
    assert counts(plan.decode.collectives) == counts(found)


def counts(found):
    """How often each runs. A permutation names pairs of devices in HLO, and no axis."""
    total = Counter()
    for c in found:
        who = () if c.kind == "collective-permute" else (frozenset(c.axes), c.num_devices)
        total[c.kind, *who, c.num_bytes] += c.count
    return total


def test_qwen3_235b_is_planned_on_eight_devices_by_arithmetic():
    layer_experts = 128 * 3 * 4096 * 1536
    for mesh, shared in (({"tensor": 8}, 8), ({"expert": 8}, 1)):
        plan = report.plan(QWEN3_235B, mesh)
        assert plan.weights["sparse"] == 94 * 2 * (layer_experts // 8 + 128 * 4096 + 4096)
        assert plan.weights["head"] == 2 * 151936 * 4096 // shared
        # A page of 16 tokens more than 64 sequences of 4,096 have; over tensor, two devices share each of 4 KV heads.
        assert plan.kv_bytes == 2 * 2 * 94 * (64 * 4096 + 16) * 128 * (1 if shared == 8 else 4)
        assert plan.kv_copies == (2 if shared == 8 else 1)
        assert plan.fits
        assert set(plan.rules) == ({"kv_heads", "vocab", "expert_mlp"} if shared == 8 else {"experts"})
        per_layer = {"tensor": 2, "expert": 1}[next(iter(mesh))]
        reduced = [c for c in plan.decode.collectives if c.kind == "all-reduce"]
        assert sum(c.count for c in reduced) == 94 * per_layer + (per_layer == 2)  # and the embedding
        assert {c.num_bytes for c in reduced} == {64 * 4096 * 2}


def test_time_is_what_is_moved_over_what_the_card_moves():
    plan = report.plan(QWEN3_235B, {"tensor": 8})
    step = plan.decode
    assert step.memory_s == pytest.approx(sum(step.read_bytes.values()) / 4.3e12)
    (gather,) = [c for c in step.collectives if c.kind == "all-gather"]
    assert gather.seconds(450e9, 1e-5) == pytest.approx(1e-5 + 7 / 8 * 64 * 151936 * 4 / 450e9)
    reduce = next(c for c in step.collectives if c.kind == "all-reduce")
    assert reduce.seconds(450e9, 1e-5) == pytest.approx(189 * (1e-5 + 2 * 7 / 8 * 64 * 4096 * 2 / 450e9))
    assert (
        max(step.memory_s, step.matrix_s) + step.link_s <= step.total_s <= step.memory_s + step.matrix_s + step.link_s
    )


def test_groups_share_out_sequences_and_gather_only_the_tokens_of_experts():
    one, four = (report.plan(QWEN3_30B, mesh, axis_rules="data-attention") for mesh in ({"tensor": 1}, {"expert": 4}))
    assert four.weights["attention"] == one.weights["attention"]
    page_bytes = 2 * 2 * 48 * 16 * 4 * 128
    assert one.kv_bytes - page_bytes == 4 * (four.kv_bytes - page_bytes) == 64 * 256 * page_bytes
    assert (four.decode.tokens, four.decode.rows, four.decode.name) == (64, 64, "decode 64 rows")
    assert four.decode.read_bytes["KV cache"] * 4 == one.decode.read_bytes["KV cache"]
    for step in four.steps:
        found = {(c.kind, c.num_bytes): c.count for c in step.collectives}
        # Which tokens are padding, once; then in each layer the tokens on their way to all experts, and back.
        size = step.tokens * 2048 * 2
        assert found == {("all-gather", step.tokens): 1, ("all-gather", size): 48, ("reduce-scatter", size): 48}


def test_parts_of_a_prompt_share_out_its_products_and_gather_keys_and_values():
    one, four = (report.plan(QWEN3_30B, mesh) for mesh in ({"tensor": 1}, {"sequence": 4}))
    assert four.weights == one.weights and four.kv_bytes == one.kv_bytes
    (alone, alone_prefill), (decode, prefill) = one.steps, four.steps
    assert decode.collectives == () and decode.total_s == alone.total_s
    # The head is for the rows that sample, which every device has.
    assert prefill.matrix_s * 4 == pytest.approx(alone_prefill.matrix_s, rel=1e-3)
    keys = 2 * prefill.tokens * 4 * 128 * 2
    assert {(c.kind, c.num_bytes, c.count) for c in prefill.collectives} == {
        ("all-gather", keys, 48), ("all-reduce", prefill.rows * 2048 * 2, 1)
    }  # fmt: skip


def test_stages_take_as_long_as_all_layers_and_hold_a_part_of_them():
    one, two = (report.plan(CONFIGS["llama"], {"pipeline": n}, load=LOAD) for n in (1, 2))
    assert two.weights["attention"] * 2 == one.weights["attention"]
    assert two.decode.total_s - two.decode.link_s == pytest.approx(one.decode.total_s)


def test_a_sweep_ranks_what_fits_by_the_time_of_a_step_and_says_why_the_rest_cannot_be():
    found, refused = report.sweep(CONFIGS["qwen3_moe"], 2, load=LOAD)
    times = [plan.decode.total_s for plan in found]
    assert times == sorted(times)
    assert {tuple(plan.mesh.items()) for plan in found} | set(refused) == {
        tuple(sizes.items()) for sizes in report.all_meshes(2)
    }
    assert (("pipeline", 2),) in {tuple(plan.mesh.items()) for plan in found}
    llama, refused = report.sweep(CONFIGS["llama"], 2, load=LOAD)
    assert len(llama) == 4 and "splits nothing of LlamaForCausalLM" in refused[("expert", 2),]


def test_a_loop_of_unknown_length_is_refused_where_it_has_collectives():
    mesh = AbstractMesh((2,), ("tensor",))

    def loop(x, end, inside):
        def run(x, end):
            return jax.lax.while_loop(lambda s: s[0] < end, lambda s: (s[0] + 1, inside(s[1])), (0, x))[1]

        spec = jax.sharding.PartitionSpec()
        return jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)(x, end)

    x, end = jnp.zeros(3), jnp.zeros((), jnp.int32)
    quiet = jax.make_jaxpr(lambda x, end: loop(x, end, lambda y: y + 1))(x, end)
    assert collectives.of_jaxpr(quiet, mesh.shape) == []
    loud = jax.make_jaxpr(lambda x, end: loop(x, end, lambda y: jax.lax.psum(y, "tensor")))(x, end)
    with pytest.raises(ValueError, match="runs for a number of turns that is not known"):
        collectives.of_jaxpr(loud, mesh.shape)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gpu": "tpu"}, "gpu is 'tpu'; known: h200, h100"),
        ({"load": report.Load(tokens_per_seq=65)}, "tokens_per_seq is 65; the model was made for at most 64"),
    ],
)
def test_a_plan_for_what_cannot_be_is_refused_with_what_could(how, message):
    with pytest.raises(ShardingError, match=message):
        report.plan(CONFIGS["llama"], {"tensor": 2}, **how)


def test_the_command_prints_a_table_json_and_a_ranking(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    flags = ["shard-report", "--model", str(config), "--seqs", "2", "--len", "24"]
    assert cli.main([*flags, "--mesh", "tensor=4"]) == 0
    out = capsys.readouterr().out
    assert "2 devices share each KV head" in out and ": fits" in out and "x all-reduce" in out
    assert cli.main([*flags, "--mesh", "expert=2,tensor=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"expert": 2, "tensor": 2} and found["fits"] and found["num_devices"] == 4
    assert cli.main([*flags, "--sweep", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("mesh")
    assert cli.main([*flags, "--mesh", "tensor=3"]) == 1
    assert "does not divide" in capsys.readouterr().err
    assert cli.main(flags) == 1
    assert "needs one of --mesh" in capsys.readouterr().err


def test_a_chart_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    chart = tmp_path / "chart.png"
    assert (
        cli.main(
            ["shard-report", "--model", str(config), "--seqs", "2", "--len", "24", "--sweep", "2", "--png", str(chart)]
        )
        == 0
    )
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_said_and_is_no_success(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_235B))
    assert cli.main(["shard-report", "--model", str(config), "--mesh", "tensor=2"]) == 2
    assert "DOES NOT FIT" in capsys.readouterr().out
