"""Several virtual devices give the tokens of one; what cannot be split is refused with what could."""

import json

import jax
import pytest

from jaxinfer.sharding.rules import ShardingError
from jaxinfer.types import Request
from tests.engine.drive import GOLDEN, build, drive, num_equal

OPTIONS = {"page_size": 8, "num_pages": 12, "max_num_seqs": 1, "max_num_batched_tokens": 16}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TRAITS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "llama, tied, biases": {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2, tied": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "norm_topk_prob": True, **EXPERTS},
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        **HYBRID,
        **EXPERTS,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], **HYBRID},
}
REQUESTS = [
    Request(request_id="a", prompt_ids=list(range(3, 40)), max_tokens=20, temperature=0.0, logprobs=2),
    Request(request_id="b", prompt_ids=[9, 8, 7], max_tokens=30, temperature=0.0, logprobs=2),
    Request(request_id="c", prompt_ids=[1] * 11, max_tokens=5, temperature=0.0, logprobs=2, repetition_penalty=1.3),
]


def tokens_of(model, size, requests, **options):
    if jax.device_count() < size:
        pytest.skip(f"{jax.device_count()} devices; {size} are needed")
    engine = build(model, tensor_parallel_size=size, **OPTIONS, **options)
    outputs = drive(engine, requests)
    engine.close()
    return outputs


@pytest.mark.parametrize(
    "family", ["llama_bias", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen2", "qwen3_tied"))]
)
def test_two_devices_give_the_tokens_of_transformers(family, golden):
    expected = golden(family)
    requests = [
        Request(request_id=str(i), prompt_ids=prompt.tolist(), max_tokens=16, temperature=0.0)
        for i, prompt in enumerate(expected.prompts)
    ]
    outputs = tokens_of(expected.folder, 2, requests)
    for i, tokens in enumerate(expected.tokens):
        num_equal(outputs[str(i)].tokens, tokens.tolist(), expected.margins[i])


LONG = ("llama", "llama, tied, biases", "qwen3_moe", "qwen3_5")
CASES = [
    ("qwen2, tied", False),
    ("qwen3_moe", True),
    pytest.param("qwen3_next", False, marks=pytest.mark.long),
    *(pytest.param(name, False, marks=pytest.mark.long) for name in LONG),
    pytest.param("qwen3_next", True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "whole_experts"), CASES)
def test_four_devices_give_the_tokens_of_one(name, whole_experts, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **TRAITS[name]}))
    one = tokens_of(tmp_path, 1, REQUESTS, load_format="dummy")
    four = tokens_of(tmp_path, 4, REQUESTS, load_format="dummy", enable_expert_parallel=whole_experts)
    ties = 0
    for request in REQUESTS:
        expected, output = one[request.request_id], four[request.request_id]
        if request.repetition_penalty != 1:
            assert output.tokens == expected.tokens
            continue
        margins = [logprobs.top[0][1] - logprobs.top[1][1] for logprobs in expected.logprobs]
        ties += num_equal(output.tokens, expected.tokens, margins)[1]
    assert ties <= 1


def test_a_size_that_does_not_divide_is_refused_with_the_sizes_that_would():
    if jax.device_count() < 3:
        pytest.skip(f"{jax.device_count()} devices; 3 are needed")
    message = r"a tensor axis of 3 devices does not divide kv_heads 4, mlp 96, vocab 128; sizes that would: 1, 2, 4$"
    with pytest.raises(ShardingError, match=message):
        build(GOLDEN / "llama", tensor_parallel_size=3, **OPTIONS)


def test_experts_that_do_not_divide_are_refused_with_the_sizes_that_would(tmp_path):
    config = {**SIZES, **TRAITS["qwen3_moe"], "num_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = "a tensor axis of 4 devices does not divide experts 6, .*; sizes that would: 1, 2$"
    with pytest.raises(ShardingError, match=message):
        tokens_of(tmp_path, 4, REQUESTS, load_format="dummy", enable_expert_parallel=True)


def test_more_devices_than_there_are_are_refused_with_both_numbers():
    wanted = jax.device_count() + 1
    with pytest.raises(ShardingError, match=f"tensor_parallel_size is {wanted}, but there are {wanted - 1} devices"):
        build(GOLDEN / "llama", tensor_parallel_size=wanted, **OPTIONS)
