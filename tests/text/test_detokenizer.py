import codecs

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer.text.detokenizer import Detokenizer

examples = settings(deadline=None, max_examples=80)


def stream(tokenizer, prompt, output, cuts=None, skip=True, begins=False):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    if begins:
        detokenizer.begin()
    pieces = [detokenizer.push(output[i : i + 1]) for i in range(len(output))] if cuts is None else []
    if cuts is not None:
        edges = sorted({0, len(output), *(c for c in cuts if c < len(output))})
        pieces = [detokenizer.push(output[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(pieces) + detokenizer.flush()


def ids_of(tokenizer, max_size=10):
    byte_ids = [id for id in range(min(600, tokenizer.vocab_size)) if len(tokenizer.token_bytes(id)) == 1]
    some = st.sampled_from(byte_ids) if byte_ids else st.nothing()
    return st.lists(st.integers(0, tokenizer.vocab_size - 1) | some, max_size=max_size)


def settled(tokenizer, prompt, skip):
    """The prompt's text without a character that it only begins."""
    whole = tokenizer.decode(prompt, skip_special_tokens=skip)
    shown = b"".join(tokenizer.token_bytes(id) for id in prompt if tokenizer.shows(id, skip_special_tokens=skip))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(shown)
    return whole[:-1] if decoder.getstate()[0] else whole


@examples
@given(data=st.data())
def test_joined_deltas_are_what_the_output_adds_to_the_prompt(any_tokenizer, data):
    """B7.1."""
    tokenizer, _ = any_tokenizer
    prompt, output = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    cuts, skip = data.draw(st.none() | st.lists(st.integers(0, 10))), data.draw(st.booleans())
    text = stream(tokenizer, prompt, output, cuts, skip, begins=data.draw(st.booleans()))
    before = settled(tokenizer, prompt, skip)
    assert before + text == tokenizer.decode(prompt + output, skip_special_tokens=skip)


@examples
@given(data=st.data())
def test_without_a_prompt_joined_deltas_are_the_decoded_output(any_tokenizer, data):
    """B7.1."""
    tokenizer, _ = any_tokenizer
    output = data.draw(ids_of(tokenizer))
    assert stream(tokenizer, [], output) == tokenizer.decode(output)


@examples
@given(text=st.text(max_size=20))
@example("naïve 👩‍🚀🇫🇷 한국어 ✈️")
def test_a_text_streams_back_as_it_was_encoded(any_tokenizer, text):
    """B7.3."""
    tokenizer, library = any_tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, [], ids) == library.decode(ids)


@examples
@given(data=st.data())
def test_only_an_unfinished_character_waits(any_tokenizer, data):
    """B7.2."""
    tokenizer, _ = any_tokenizer
    output = data.draw(ids_of(tokenizer))
    detokenizer, text = Detokenizer(tokenizer, [0]), ""
    for id in output:
        text += detokenizer.push([id])
    waiting = detokenizer.flush()
    assert waiting in ("", "\ufffd")
    raw = b"".join(tokenizer.token_bytes(id) for id in output if not tokenizer.is_special(id))
    if waiting:
        tail = raw[-3:]
        assert any(unfinished(tail[i:]) for i in range(len(tail))), (
            f"{tail!r} does not begin a character, and still waited"
        )


def unfinished(raw):
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(raw) == ""
    except UnicodeDecodeError:
        return False


def byte_tokens(tokenizer, raw):
    by_bytes = {tokenizer.token_bytes(id): id for id in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in raw]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_bytes_that_cannot_become_a_character_are_shown_at_once(made, name):
    """B7.2."""
    tokenizer = made[name][2]
    detokenizer = Detokenizer(tokenizer, byte_tokens(tokenizer, b"ab"))
    shown = [detokenizer.push([id]) for id in byte_tokens(tokenizer, b"\xffa\xe4\xbd\xe4\xbd\xa0\xf0\x9f")]
    assert shown == ["\ufffd", "a", "", "", "\ufffd", "", "你", "", ""]
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_character_that_the_prompt_begins_is_shown_whole_by_the_output(made, name):
    """B7.7."""
    tokenizer = made[name][2]
    raw = byte_tokens(tokenizer, "ab😀".encode())
    assert stream(tokenizer, raw[:4], raw[4:]) == "😀"
    assert stream(tokenizer, raw[:2], raw[2:]) == "😀"


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without_one(made):
    """B7.7."""
    for name in ("sentencepiece", "metaspace"):
        tokenizer = made[name][2]
        the = tokenizer.encode("the", add_special_tokens=False)
        cat = tokenizer.encode("cat", add_special_tokens=False)
        assert stream(tokenizer, the, cat) == " cat"
        assert stream(tokenizer, [], cat) == "cat"
        assert stream(tokenizer, [tokenizer.special_id("<s>")], cat) == "cat"
        assert stream(tokenizer, [tokenizer.special_id("<s>")], cat, skip=False) == " cat"


def test_only_the_end_of_a_long_prompt_is_read(byte_level):
    """B7.5."""

    class Prompt(list):
        def __reversed__(self):
            for i in range(4):
                yield self[-1 - i]
            raise AssertionError("read past the last 4 tokens")

    prompt = Prompt(byte_level.encode("the cat sat on the mat", add_special_tokens=False))
    assert Detokenizer(byte_level, prompt).push(byte_level.encode(" on", add_special_tokens=False)) == " on"
