"""SamplingParams: what is no value of its kind is refused by its name, before it gets anywhere."""

import numpy as np
import pytest

from jaxinfer.types import InvalidRequest, SamplingParams, check_session_id

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
    ({"priority": 1.5}, "priority is 1.5; it must be an integer"),
    ({"priority": None}, "priority is None; it must be an integer"),
    ({"session_id": 5}, "session_id is 5; it must have 1 to 128 characters"),
    ({"session_id": b"a"}, "session_id is b'a'; it must have 1 to 128 characters"),
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
    ({"priority": 2**31}, "priority is 2147483648; it must be from -2147483648 to 2147483647"),
    ({"priority": -(2**31) - 1}, "priority is -2147483649; it must be from -2147483648 to 2147483647"),
    ({"session_id": "a", "n": 2}, "session_id is 'a' and n is 2; a session is one sequence, so n must be 1"),
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


@pytest.mark.parametrize("id", ["a", "Z9", "a.b", "_", "-", "user-7_chat.2", "a..b", "x" * 128])
def test_letters_digits_dots_underscores_and_hyphens_name_a_session(id):
    check_session_id(id)
    assert SamplingParams(session_id=id).session_id == id


@pytest.mark.parametrize(
    "id",
    ["", ".", "..", ".a", "../x", "a/b", "a\\b", "a b", "a\n", "a\0", "%2e", "~", "é", "٣", "x" * 129, 7, None],
)
def test_what_could_be_more_than_the_name_of_a_file_is_no_id_of_a_session(id):
    with pytest.raises(InvalidRequest) as refusal:
        check_session_id(id)
    assert str(refusal.value) == (
        f"session_id is {id!r}; it must have 1 to 128 characters of A-Z a-z 0-9 . _ -, the first of them no dot"
    )
    assert refusal.value.param == "session_id"
