import struct

import gguf as published
import numpy as np
import pytest

from checkpoints import gguf, gguf_tokenizer
from checkpoints.gguf_file import GgufFile
from checkpoints.source import CheckpointError


def source(path):
    return gguf.GgufSource(gguf.open_gguf(path))


def interleave(rows, num_heads):
    """What the publisher of a GGUF does to q and k of a llama: channels i and i + E/2 of a head become neighbours."""
    half = len(rows) // num_heads // 2
    order = [h * 2 * half + i + j * half for h in range(num_heads) for i in range(half) for j in range(2)]
    return rows[order]


def test_tensors_have_published_names_and_shapes(write_gguf):
    shapes = source(write_gguf()).shapes()
    assert shapes["model.embed_tokens.weight"] == (40, 64)
    assert shapes["lm_head.weight"] == (40, 64)
    assert shapes["model.norm.weight"] == (64,)
    layer = {
        name.removeprefix("model.layers.1."): s for name, s in shapes.items() if name.startswith("model.layers.1.")
    }
    assert layer == {
        "input_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "post_attention_layernorm.weight": (64,),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
    }


def test_rows_of_q_and_k_of_a_llama_return_to_the_published_order(write_gguf, tiny):
    tensors = tiny()
    plain = tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_k.weight"], tensors["blk.0.attn_v.weight"]
    tensors["blk.0.attn_q.weight"] = interleave(plain[0], 4)
    tensors["blk.0.attn_k.weight"] = interleave(plain[1], 2)
    found = source(write_gguf(tensors=tensors))
    for name, expected in zip("qkv", plain, strict=True):
        assert np.array_equal(found.read(f"model.layers.0.self_attn.{name}_proj.weight"), expected)


def test_quantised_rows_return_to_the_published_order_too(write_gguf, tiny):
    kind = published.GGMLQuantizationType.Q8_0
    tensors = tiny()
    plain = tensors["blk.0.attn_q.weight"]
    tensors["blk.0.attn_q.weight"] = (published.quantize(interleave(plain, 4), kind), kind)
    found = source(write_gguf(tensors=tensors)).read("model.layers.0.self_attn.q_proj.weight")
    assert np.array_equal(found, published.dequantize(published.quantize(plain, kind), kind))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_a_qwen_stay_as_they_are(architecture, write_gguf, tiny):
    tensors = tiny()
    extra = {"qwen2": {"blk.0.attn_q.bias": (64,)}, "qwen3": {"blk.0.attn_q_norm.weight": (16,)}}[architecture]
    tensors |= {name: np.arange(shape[0], dtype=np.float32) for name, shape in extra.items()}
    found = source(write_gguf(architecture=architecture, tensors=tensors))
    assert np.array_equal(found.read("model.layers.0.self_attn.q_proj.weight"), tensors["blk.0.attn_q.weight"])
    name = {"qwen2": "self_attn.q_proj.bias", "qwen3": "self_attn.q_norm.weight"}[architecture]
    assert found.shapes()[f"model.layers.0.{name}"] == next(iter(extra.values()))


def test_the_bias_of_a_llama_is_put_in_order_with_its_rows(write_gguf, tiny):
    bias = np.arange(64, dtype=np.float32)
    path = write_gguf(tensors=tiny() | {"blk.0.attn_q.bias": interleave(bias, 4)})
    assert np.array_equal(source(path).read("model.layers.0.self_attn.q_proj.bias"), bias)
    assert gguf.config(gguf.open_gguf(path))["attention_bias"] is True


def test_an_unknown_tensor_keeps_its_name_and_so_is_seen_as_extra(write_gguf, tiny):
    path = write_gguf(tensors=tiny() | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    assert "blk.0.attn_sinks.weight" in source(path).shapes()


def test_the_config_is_that_of_the_published_model(write_gguf):
    assert gguf.config(gguf.open_gguf(write_gguf())) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "hidden_act": "silu",
        "vocab_size": 40,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_model_without_output_weights_is_tied(write_gguf, tiny):
    path = write_gguf("tied.gguf", architecture="qwen3", tensors=tiny(tied=True))
    config = gguf.config(gguf.open_gguf(path))
    assert (config["tie_word_embeddings"], config["architectures"]) == (True, ["Qwen3ForCausalLM"])


def test_a_head_width_of_its_own_is_read(write_gguf):
    metadata = {"qwen3.attention.key_length": 128, "qwen3.rope.dimension_count": 128}
    assert gguf.config(gguf.open_gguf(write_gguf(architecture="qwen3", metadata=metadata)))["head_dim"] == 128


def test_the_end_of_a_turn_ends_a_generation_as_the_eos_does(write_gguf):
    path = write_gguf(metadata={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2})
    assert gguf.generation_config(gguf.open_gguf(path)) == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def test_yarn_and_linear_scaling_are_passed_on(write_gguf):
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    assert gguf.config(gguf.open_gguf(write_gguf(metadata=yarn)))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    config = gguf.config(gguf.open_gguf(write_gguf("b.gguf", metadata=linear)))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_stored_rope_factors_become_the_llama3_scaling_that_gives_them(write_gguf, tiny):
    theta, width, factor, low, high, original = 500000.0, 16, 32.0, 1.0, 4.0, 8192
    factors = []
    for i in range(width // 2):  # the definition, one frequency at a time
        wavelength = 2 * np.pi * theta ** (2 * i / width)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    tensors = tiny() | {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write_gguf(tensors=tensors, metadata={"llama.rope.freq_base": theta})
    file = gguf.open_gguf(path)
    assert gguf.config(file)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in gguf.GgufSource(file).shapes()


def test_rope_factors_of_another_kind_are_refused(write_gguf, tiny):
    path = write_gguf(tensors=tiny() | {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=r"the 8 factors of rope_freqs\.weight \(largest 3\.0, theta 10000\.0\)"):
        gguf.config(gguf.open_gguf(path))


CONFIG_REFUSALS = {
    "missing": ({"llama.block_count": None}, r"metadata key 'llama\.block_count' is missing"),
    "text": ({"llama.block_count": "two"}, r"metadata key 'llama\.block_count' is 'two', not a number"),
    "experts": ({"llama.expert_count": 8}, r"expert_count is 8, which is not supported from GGUF"),
    "window": ({"llama.attention.sliding_window": 4096}, r"attention\.sliding_window is 4096, which is not supported"),
    "partial": ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count is 8, but heads are 16 wide"),
    "no heads": ({"llama.attention.head_count": 0}, r"0 heads and 2 key-value heads"),
    "scaling": (
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        r"llama\.rope\.scaling\.type is 'longrope'; known: none, linear, yarn",
    ),
}


@pytest.mark.parametrize("case", CONFIG_REFUSALS)
def test_what_the_config_cannot_express_is_refused(case, write_gguf):
    metadata, message = CONFIG_REFUSALS[case]
    path = write_gguf(metadata=metadata)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: " + message):
        gguf.config(gguf.open_gguf(path))


def test_an_unknown_architecture_is_refused_with_the_known_ones(write_gguf):
    with pytest.raises(CheckpointError, match=r"architecture 'falcon' is not supported .* known: llama, qwen2, qwen3"):
        gguf.open_gguf(write_gguf(architecture="falcon"))


def test_one_file_of_several_is_refused(write_gguf):
    with pytest.raises(CheckpointError, match=r"one of 3 files; join them first"):
        gguf.open_gguf(write_gguf(metadata={"split.count": 3}))


def test_heads_that_cannot_share_the_rows_are_refused(write_gguf, tiny):
    tensors = tiny() | {"blk.0.attn_q.weight": np.ones((60, 64), np.float32)}
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' has 60 rows, which 4 heads cannot share"):
        source(write_gguf(tensors=tensors)).read("model.layers.0.self_attn.q_proj.weight")


def test_an_unsupported_type_is_refused_with_tensor_type_and_the_supported_ones(write_gguf, tiny):
    kind = published.GGMLQuantizationType.Q2_K
    tensors = tiny() | {"blk.0.ffn_up.weight": (np.zeros((2, 84), np.uint8), kind)}
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' is of type Q2_K; supported: F32, F16, Q4_0"):
        GgufFile(write_gguf(tensors=tensors))


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name, shape, kind, start):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def container(*infos, keys=b"", num_keys=0, version=3, data=b""):
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), num_keys) + keys + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


DAMAGE = {
    "empty": (b"", r"cannot be read"),
    "magic": (b"PK\x03\x04" + bytes(40), r"starts with b'PK\\x03\\x04', so it is not a GGUF file"),
    "version 1": (container(version=1), r"GGUF version 1 is not supported; known: 2, 3"),
    "big-endian": (container(version=3 << 24), r"not supported; the file is big-endian; known: 2, 3"),
    "short": (b"GGUF\x03\x00", r"truncated: 4 more bytes expected \(at byte 4 of 6\)"),
    "counts": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), r"truncated: 1152921504606846976 tensors and 0 metadata"),
    "key twice": (container(keys=(text("a") + struct.pack("<IB", 0, 1)) * 2, num_keys=2), r"key 'a' occurs twice"),
    "kind": (container(keys=text("a") + struct.pack("<I", 99), num_keys=1), r"metadata of type 99 at depth 0"),
    "array": (
        container(keys=text("a") + struct.pack("<IIQ", 9, 4, 1 << 40), num_keys=1),
        r"truncated: an array claims 1099511627776 items",
    ),
    "tensor twice": (
        container(tensor("w", [1], 0, 0), tensor("w", [1], 0, 32), data=bytes(64)),
        r"tensor 'w' occurs twice",
    ),
    "dims": (container(tensor("w", [1] * 5, 0, 0)), r"tensor 'w' has 5 dimensions; at most 4"),
    "type": (container(tensor("w", [1], 77, 0)), r"tensor 'w' is of type 77; supported: F32"),
    "row": (
        container(tensor("w", [33], 8, 0), data=bytes(64)),
        r"tensor 'w' has rows of 33 values; Q8_0 needs a multiple of 32",
    ),
    "cut": (
        container(tensor("w", [16], 0, 0), data=bytes(32)),
        r"truncated: tensor 'w' ends at byte 128, but the file ends after 96",
    ),
    "overlap": (
        container(tensor("v", [16], 0, 0), tensor("w", [16], 0, 32), data=bytes(128)),
        r"tensor 'w' starts at byte \d+ and overlaps tensor 'v', which ends at \d+",
    ),
    "alignment": (
        container(keys=text("general.alignment") + struct.pack("<II", 4, 0), num_keys=1),
        r"general\.alignment is 0; it must be at least 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_refused_with_its_name_and_figures(case, tmp_path):
    content, message = DAMAGE[case]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.gguf: .*" + message):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_is_read_byte_by_byte_as_published(version, tmp_path):
    keys = text("n") + struct.pack("<Iq", 11, -5) + text("s") + struct.pack("<I", 8) + text("é")
    keys += text("l") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3) + text("b") + struct.pack("<IB", 7, 1)
    keys += text("t") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("")
    data = np.arange(6, dtype=np.float32).tobytes()
    content = container(tensor("w", [3, 2], 0, 0), keys=keys, num_keys=5, version=version, data=data)
    (tmp_path / "x.gguf").write_bytes(content)
    file = GgufFile(tmp_path / "x.gguf")
    assert file.metadata == {"n": -5, "s": "é", "l": [1, 2, 3], "b": True, "t": ["x", ""]}
    assert file.tensors["w"].shape == (2, 3)
    assert file.raw("w").view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_changed_byte_never_gives_anything_but_a_model_or_a_refusal(write_gguf, tmp_path):
    path = write_gguf()
    content = path.read_bytes()
    header = GgufFile(path).tensors["token_embd.weight"].start
    rng = np.random.default_rng(2)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.integers(1, 6)):
            damaged[rng.integers(header)] = rng.integers(256)
        if rng.random() < 0.1:
            damaged = damaged[: rng.integers(len(damaged))]
        (tmp_path / "y.gguf").write_bytes(damaged)
        try:
            file = gguf.open_gguf(tmp_path / "y.gguf")
            gguf.config(file)
            gguf_tokenizer.tokenizer_json(file)
            gguf_tokenizer.tokenizer_config(file)
            gguf.generation_config(file)
            found = gguf.GgufSource(file)
            for name, shape in found.shapes().items():
                assert found.read(name).shape == shape
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20, outcomes
