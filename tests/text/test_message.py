"""Chat messages in parts: thought, words and calls, and the tokens that mark them."""

import json

import pytest

from jaxinfer.text import reasoning
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.message import Call, MessageFormat, MessageParser, Thought, Words
from jaxinfer.text.output import OutputStream
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.tool_calls import formats
from jaxinfer.types import SamplingParams, TokenEvent

QWEN = MessageFormat(reasoning.FORMATS["qwen3"], formats.FORMATS["hermes"])
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def read(text, message_format=QWEN, tools=("f",), *, parallel=True, prompt=""):
    parser = MessageParser(message_format, prompt, {name: {} for name in tools}, parallel=parallel)
    parts = [*parser.push(text), *parser.flush()]
    return [part._replace(id="") if isinstance(part, Call) else part for part in parts]


def test_a_message_has_its_thought_its_words_and_its_calls_in_order():
    text = f"<think>why</think>\n\nLook: {CALL}\n{CALL}"
    first, second = Call(0, "", "f", '{"x": 1}'), Call(1, "", "f", '{"x": 1}')
    assert read(text) == [Thought("why"), Words("Look:"), first, second]


def test_a_call_inside_a_thought_is_thought():
    assert read(f"<think>{CALL}") == [Thought(CALL)]


def test_without_tools_markup_of_calls_is_words():
    assert read(f"<think>a</think>{CALL}", tools=()) == [Thought("a"), Words(CALL)]


def test_without_a_format_of_thoughts_their_tags_are_words():
    assert read("<think>a</think>b", MessageFormat(None, QWEN.tool_calls)) == [Words("<think>a</think>b")]


def test_without_parallel_calls_only_the_first_is_given():
    """B4.9."""
    assert read(CALL + CALL + "so", parallel=False) == [Call(0, "", "f", '{"x": 1}'), Words("so")]


def test_ids_of_calls_are_unique():
    """B4.2."""
    parser = MessageParser(QWEN, "", {"f": {}}, parallel=True)
    calls = parser.push(CALL * 20)
    assert parser.has_calls and len({call.id for call in calls}) == 20


@pytest.fixture(scope="module")
def marked(made):
    """The byte-level tokenizer with the markers of two formats added, some of them as special tokens."""
    text, config, tokenizer = made["byte_level"]
    state = json.loads(text)
    added = [("[TOOL_CALLS]", True), ("<tool_call>", False), ("<|python_tag|>", True)]
    for i, (content, special) in enumerate(added):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        state["added_tokens"].append({"id": tokenizer.vocab_size + i, "content": content, "special": special, **flags})
    return Tokenizer(json.dumps(state), config)


PUBLISHED = {
    "qwen3": ("hermes", f"<think>why</think>{CALL}"),
    "deepseek_v3": (
        "deepseek_v3",
        "<think>why</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
}


@pytest.mark.parametrize("subject", PUBLISHED)
def test_tokens_of_published_models_become_thought_and_call(subject, request):
    tokenizer, _ = request.getfixturevalue(subject)
    name, text = PUBLISHED[subject]
    message_format = MessageFormat(QWEN.reasoning, formats.FORMATS[name])
    stream = OutputStream(tokenizer, [], SamplingParams(), always_shown=message_format.marker_ids(tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert read("".join(stream.push(TokenEvent("r", [id])).text for id in ids), message_format) == [
        Thought("why"),
        Call(0, "", "f", '{"x": 1}'),
    ]


def test_markers_that_are_special_tokens_are_the_ones_to_show(marked):
    def ids(name):
        return MessageFormat(reasoning.FORMATS["qwen3"], formats.FORMATS[name]).marker_ids(marked)

    assert ids("mistral") == {marked.special_id("[TOOL_CALLS]")}
    assert ids("llama3_json") == {marked.special_id("<|python_tag|>")}
    assert ids("hermes") == frozenset()
    assert MessageFormat(None, None).marker_ids(marked) == frozenset()


def test_a_special_token_that_is_always_shown_is_in_the_text_and_others_are_not(marked):
    ids = marked.encode("a[TOOL_CALLS]b<|im_end|>c<|python_tag|>", add_special_tokens=False)
    shown = {marked.special_id("[TOOL_CALLS]")}
    whole = Detokenizer(marked, [], always_shown=shown)
    assert whole.push(ids) + whole.flush() == "a[TOOL_CALLS]bc"
    single = Detokenizer(marked, [], always_shown=shown)
    assert "".join(single.push([id]) for id in ids) == "a[TOOL_CALLS]bc"
    stream = OutputStream(marked, [], SamplingParams(), always_shown=shown)
    deltas = [stream.push(TokenEvent("r", [id])) for id in ids]
    assert "".join(delta.text for delta in deltas) == "a[TOOL_CALLS]bc"
    assert MessageParser(QWEN, "", {}, parallel=True).push("") == []
