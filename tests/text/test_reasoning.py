"""Thought and answer, split from a text however it is cut."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import REASONING_PARSERS
from jaxinfer.text import reasoning
from jaxinfer.text.reasoning import FORMATS, ReasoningSplitter, Split, choose

QWEN3, R1 = FORMATS["qwen3"], FORMATS["deepseek_r1"]
PLAIN_PROMPT = "<|im_start|>assistant\n"
OPENED_PROMPT = PLAIN_PROMPT + "<think>\n"
CLOSED_PROMPT = PLAIN_PROMPT + "<think>\n\n</think>\n\n"


def split(pieces, prompt=PLAIN_PROMPT, reasoning_format=QWEN3):
    splitter = ReasoningSplitter(reasoning_format, prompt)
    splits = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return Split(*("".join(column) for column in zip(*splits, strict=True)))


def whole(text, prompt=PLAIN_PROMPT, reasoning_format=QWEN3):
    return split([text], prompt, reasoning_format)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nso", ("why", "so")),
        ("\n<think>why</think>so", ("why", "so")),
        ("<think>\n\n</think>\n\nso\n", ("", "so\n")),
        ("so", ("", "so")),
        ("  so <think>x</think>", ("", "  so <think>x</think>")),
        ("<think>a </think> b</think>", ("a", "b</think>")),
        ("<think>a <think> b</think>c", ("a <think> b", "c")),
        ("<think>a </thinx", ("a </thinx", "")),
        ("<thin air", ("", "<thin air")),
        ("", ("", "")),
        (" \n", ("", " \n")),
        ("<thi", ("", "<thi")),
    ],
)
def test_a_thought_is_what_stands_between_the_tags(text, expected):
    assert whole(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("why\n</think>\n\nso", ("why", "so")),
        ("<think>\nwhy</think>so", ("why", "so")),
        ("</think>so", ("", "so")),
        ("why", ("why", "")),
        ("\n<thi", ("<thi", "")),
        ("", ("", "")),
    ],
)
def test_a_thought_that_the_prompt_opened_needs_no_tag_of_the_model(text, expected):
    assert whole(text, OPENED_PROMPT) == expected
    assert whole(text, PLAIN_PROMPT, R1) == expected


@pytest.mark.parametrize("reasoning_format", [QWEN3, R1])
def test_with_thinking_switched_off_by_the_prompt_all_is_the_answer(reasoning_format):
    assert whole("\n so", CLOSED_PROMPT, reasoning_format) == ("", "\n so")
    assert whole("<think>why</think>so", CLOSED_PROMPT, reasoning_format) == ("why", "so")


def test_a_thought_that_is_cut_off_is_all_thought():
    assert whole("<think>one </think", PLAIN_PROMPT) == ("one </think", "")
    assert whole("one \n", OPENED_PROMPT) == ("one \n", "")


def test_words_are_given_at_once_and_only_the_possible_beginning_of_a_tag_waits():
    splitter = ReasoningSplitter(QWEN3, OPENED_PROMPT)
    assert splitter.push("a") == ("a", "")
    assert splitter.push(" <") == ("", "")
    assert splitter.push("b") == (" <b", "")
    assert splitter.push("</thin") == ("", "")
    assert splitter.push("g") == ("</thing", "")
    assert splitter.push(".\n</think") == (".", "")
    assert splitter.push(">\n\nc ") == ("", "c ")
    assert splitter.push("<think") == ("", "<think")


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "a", "é", "<th", "</thi", "nk>"]),
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(
    pieces=pieces,
    prompt=st.sampled_from([PLAIN_PROMPT, OPENED_PROMPT, CLOSED_PROMPT]),
    reasoning_format=st.sampled_from([QWEN3, R1]),
)
def test_however_the_text_is_cut_the_split_is_that_of_the_whole(pieces, prompt, reasoning_format):
    text = "".join(pieces)
    inside = prompt == OPENED_PROMPT or (reasoning_format is R1 and prompt != CLOSED_PROMPT)
    expected = Split("", text)
    if (opened := re.match(r"\s*<think>", text)) or inside:
        thought, close, answer = text[opened.end() if opened else 0 :].partition("</think>")
        expected = Split(thought.strip(), answer.lstrip()) if close else Split(thought.lstrip(), "")
    assert split(pieces, prompt, reasoning_format) == expected
    assert split(list(text), prompt, reasoning_format) == expected
    assert whole(text, prompt, reasoning_format) == expected


def test_the_format_follows_from_the_template_unless_it_is_named():
    assert choose("auto", "{{ '<think>\n' }}") is QWEN3
    assert choose("auto", "{{ content.split('</think>') }}") is QWEN3
    assert choose("auto", "{{ content }}") is None
    assert choose("none", "<think>") is None
    assert choose("deepseek_r1", "") is R1


def test_the_names_that_a_server_may_be_given_are_those_of_the_formats():
    assert set(REASONING_PARSERS) == {"auto", "none", *reasoning.FORMATS}
