"""SamplingParams: what is no value of its kind is refused by its name, before it gets anywhere."""

import numpy as np
import pytest

from jaxinfer.types import InvalidRequest, SamplingParams

WRONG_KINDS = [
    ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be an integer"),
    ({"max_tokens": True}, "max_tokens is True; it must be an integer"),
    ({"n": None}, "n is None; it must be an integer"),
    ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
    ({"seed": "7"}, "seed is '7'; it must be an integer"),
    ({"temperature": "0.5"}, "temperature is '0.5'; it must be a number"),
    ({"frequency_penalty": None}, "frequency_penalty is None; it must be a number"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias has the key '5'"),
    ({"logit_bias": {5: "1"}}, "logit_bias of token 5 is '1'"),
    ({"logit_bias": [5]}, "logit_bias must be a mapping"),
    ({"stop": [5]}, "stop has 5; it must hold strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids has 'a'; it must hold token ids"),
]
OUT_OF_RANGE = [
    ({"n": 0}, "n is 0; it must be at least 1"),
    ({"temperature": -1}, "temperature is -1; it must be 0 or more"),
    ({"temperature": float("nan")}, "temperature is nan; it must be 0 or more"),
    ({"top_p": 2}, "top_p is 2; it must be above 0 and at most 1"),
    ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
    ({"min_p": 1.5}, "min_p is 1.5; it must be from 0 to 1"),
    ({"top_k": -2}, "top_k is -2; it must be at least 1, or 0 or -1"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be above 0"),
    ({"presence_penalty": 3}, "presence_penalty is 3; it must be from -2 to 2"),
    ({"seed": 2**64}, "seed is 18446744073709551616; it must be of 64 bits"),
    ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens 4"),
    ({"stop": ""}, "stop contains an empty string"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_KINDS + OUT_OF_RANGE, ids=str)
def test_a_value_that_cannot_be_honoured_is_refused_by_its_name(fields, message):
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**fields)
    assert str(refusal.value).startswith(message)
    assert refusal.value.param in fields


def test_numbers_of_numpy_and_absent_collections_are_taken():
    params = SamplingParams(max_tokens=np.int64(4), temperature=np.float32(0.5), stop=None, logit_bias=None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
