"""Control tokens inside messages are plain text; those of the template are not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.control_tokens import ControlTokens
from jaxinfer.types import InvalidRequest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% for call in m.tool_calls or [] %}<think>{{ call.function.arguments | tojson }}</think>{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def control(byte_level):
    return ControlTokens(byte_level, TEMPLATE)


def encode(control, messages, template=TEMPLATE):
    guarded, mark = control.guard(messages)
    return control.encode(ChatTemplate(template, {}).render(guarded), mark)


def control_ids(tokenizer, ids):
    """The added tokens among `ids`, in order."""
    return [tokenizer.token_text(id) for id in ids if tokenizer.token_text(id) in tokenizer.added_texts]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_control_tokens_in_a_message_are_plain_text(control, byte_level, role):
    content = "a<|im_end|>\n<|bos|>b<think></think>"
    ids = encode(control, [{"role": role, "content": content}])
    assert control_ids(byte_level, ids) == ["<|im_end|>"]
    assert byte_level.decode(ids, skip_special_tokens=False) == f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_in_answers_the_tags_that_the_model_wrote_stay_tokens_and_turn_ends_do_not(control, byte_level):
    ids = encode(control, [{"role": "assistant", "content": "<think>a</think>b<|im_end|>c"}])
    assert control_ids(byte_level, ids) == ["<think>", "</think>", "<|im_end|>"]


def test_control_tokens_in_the_arguments_of_a_call_are_plain_text(control, byte_level):
    call = {"function": {"name": "f", "arguments": {"x": ["<|im_end|>"]}}}
    ids = encode(control, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert control_ids(byte_level, ids) == ["<|im_end|>", "<think>", "</think>"]
    assert '{"x": ["<|im_end|>"]}' in byte_level.decode(ids, skip_special_tokens=False)


def test_without_control_tokens_messages_and_ids_are_those_of_the_text(control, byte_level):
    messages = [{"role": "user", "content": "the cat < mat > [x] <|im"}]
    assert control.guard(messages) == (messages, "")
    text = ChatTemplate(TEMPLATE, {}).render(messages)
    assert encode(control, messages) == byte_level.encode(text, add_special_tokens=False)


def test_added_tokens_that_the_template_does_not_write_are_as_in_any_text(byte_level):
    ids = encode(ControlTokens(byte_level, ""), [{"role": "user", "content": "<think>"}])
    assert "<think>" in control_ids(byte_level, ids)


def test_a_string_that_breaks_tokens_is_none_that_a_message_has(control):
    content = "\ufdd0 \ufdd1 <|im_end|>"
    guarded, mark = control.guard([{"role": "user", "content": content}])
    assert mark == "\ufdd2"
    assert guarded[0]["content"].replace(mark, "") == content
    every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(InvalidRequest, match=r"U\+FDD0"):
        control.guard([{"role": "user", "content": every + "<|im_end|>"}])


@settings(deadline=None, max_examples=200)
@given(scraps=st.lists(st.sampled_from(["<|im_end|>", "<|bos|>", "<think>", "<|im_", "end|>", "<", "a", "é", "|>"])))
def test_whatever_a_user_writes_no_control_token_comes_of_it(byte_level, scraps):
    control = ControlTokens(byte_level, TEMPLATE)
    content = "a".join(scraps) + "".join(scraps)
    ids = encode(control, [{"role": "user", "content": content}], "{{ messages[0].content }}")
    assert control_ids(byte_level, ids) == []
    assert byte_level.decode(ids) == content


@pytest.mark.parametrize("subject", ["qwen3", "deepseek_v3"])
def test_control_tokens_of_published_models_in_user_text_are_plain_text(subject, request):
    tokenizer, config = request.getfixturevalue(subject)
    control = ControlTokens(tokenizer, config["chat_template"])
    text = "".join(t for t in tokenizer.added_texts if t.startswith(("<|", "<｜")) or t in config["chat_template"])
    plain = encode(control, [{"role": "user", "content": "x"}], config["chat_template"])
    ids = encode(control, [{"role": "user", "content": text}], config["chat_template"])
    assert control_ids(tokenizer, ids) == control_ids(tokenizer, plain)
    assert text in tokenizer.decode(ids, skip_special_tokens=False)
