import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text.output import OutputStream
from jaxinfer.types import FinishReason, SamplingParams, TokenEvent, TokenLogprobs


def event(ids=(), reason=None, stop_id=None, *, logprobs=False):
    entries = [TokenLogprobs(-0.5, ((id, -0.5), (0, -2.0))) for id in ids] if logprobs else None
    return TokenEvent(request_id="r-0", token_ids=ids, logprobs=entries, finish_reason=reason, stop_id=stop_id)


def collect(stream, events):
    """All deltas, and the text, tokens, finish reason and stop reason of the whole."""
    deltas = [delta for e in events if (delta := stream.push(e)) is not None]
    text = "".join(delta.text for delta in deltas)
    ids = [id for delta in deltas for id in delta.token_ids]
    assert len(ids) == stream.num_tokens
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return text, ids, deltas[-1].finish_reason, deltas[-1].stop_reason


def run(tokenizer, ids, reason=FinishReason.LENGTH, stop_id=None, **sampling):
    events = [event([id]) for id in ids[:-1]] + [event(ids[-1:], reason, stop_id)]
    return collect(OutputStream(tokenizer, [], SamplingParams(**sampling)), events)


def chars(tokenizer, text):
    """One token per byte."""
    by_bytes = {tokenizer.token_bytes(id): id for id in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def test_text_and_tokens_pass_through_and_are_counted(byte_level):
    ids = byte_level.encode("the cat sat", add_special_tokens=False)
    assert run(byte_level, ids) == ("the cat sat", ids, FinishReason.LENGTH, None)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR])
def test_nothing_withheld_is_lost_when_the_engine_ends(byte_level, reason):
    """B6.4, B7.4."""
    ids = chars(byte_level, "one <en")
    assert run(byte_level, ids, reason, stop=["<end>"]) == ("one <en", ids, reason, None)
    ids = chars(byte_level, "one 😀")[:-1]
    assert run(byte_level, ids, reason, stop=["\ufffdx"]) == ("one \ufffd", ids, reason, None)


def test_an_event_without_tokens_can_end_the_output(byte_level):
    stream = OutputStream(byte_level, [], SamplingParams(stop=["<end>"]))
    ids = chars(byte_level, "a<e")
    assert collect(stream, [event(ids), event([], FinishReason.ABORT)]) == ("a<e", ids, FinishReason.ABORT, None)


def test_eos_counts_and_shows_no_text_and_has_no_stop_reason(byte_level):
    """B6.6."""
    eos = byte_level.eos_ids[0]
    for skip in (True, False):
        ids = [*chars(byte_level, "ab"), eos]
        out = run(byte_level, ids, FinishReason.STOP, eos, skip_special_tokens=skip)
        assert out == ("ab", ids, FinishReason.STOP, None)


def test_a_stop_token_id_shows_no_text_and_is_the_stop_reason(byte_level):
    ids = chars(byte_level, "abc")
    out = run(byte_level, ids, FinishReason.STOP, ids[-1], stop_token_ids=[ids[-1]])
    assert out == ("ab", ids, FinishReason.STOP, ids[-1])


def test_a_stop_string_that_is_a_special_token_ends_by_its_id_and_is_the_stop_reason(byte_level):
    end = byte_level.special_id("<|im_end|>")
    ids = [*chars(byte_level, "ab"), end]
    assert run(byte_level, ids, FinishReason.STOP, end, stop="<|im_end|>") == (
        "ab",
        ids,
        FinishReason.STOP,
        "<|im_end|>",
    )
    shown = run(byte_level, ids, FinishReason.STOP, end, stop="<|im_end|>", include_stop_str_in_output=True)
    assert shown == ("ab<|im_end|>", ids, FinishReason.STOP, "<|im_end|>")


def test_a_special_tokens_text_spelled_by_ordinary_tokens_ends_the_output_too(byte_level):
    ids = chars(byte_level, "ab</think>c")
    assert run(byte_level, ids, stop="</think>") == ("ab", ids[:-1], FinishReason.STOP, "</think>")


def test_the_stream_ends_itself_at_a_stop_string_and_ignores_what_follows(byte_level):
    stream = OutputStream(byte_level, [], SamplingParams(stop=["lo"]))
    ids = chars(byte_level, "hello world")
    deltas = [stream.push(event([id])) for id in ids]
    assert "".join(d.text for d in deltas if d) == "hel"
    assert deltas[4] is not None and deltas[4].finish_reason == FinishReason.STOP and deltas[4].stop_reason == "lo"
    assert deltas[5:] == [None] * 6 and stream.finished
    assert stream.push(event([1], FinishReason.ABORT)) is None
    assert stream.num_tokens == 5


def test_tokens_after_the_stop_string_in_the_same_event_are_not_counted(byte_level):
    """B6.5."""
    stream = OutputStream(byte_level, [], SamplingParams(stop=["lo"], include_stop_str_in_output=True))
    ids = chars(byte_level, "hello world")
    delta = stream.push(event(ids, FinishReason.LENGTH))
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("hello", tuple(ids[:5]), FinishReason.STOP)


def test_a_stop_string_complete_in_the_last_token_is_a_stop_not_a_length(byte_level):
    ids = chars(byte_level, "hello")
    assert run(byte_level, ids, FinishReason.LENGTH, stop="lo") == ("hel", ids, FinishReason.STOP, "lo")


def test_tokens_taken_while_a_match_waited_for_an_earlier_one_are_not_counted_in_vain(byte_level):
    ids = chars(byte_level, "xabcdz")
    assert run(byte_level, ids, stop=["abcde", "bc"]) == ("xa", ids[:4], FinishReason.STOP, "bc")
    ids = chars(byte_level, "xabcde")
    assert run(byte_level, ids, stop=["abcde", "bc"]) == ("x", ids, FinishReason.STOP, "abcde")
    ids = chars(byte_level, "xabcd")
    assert run(byte_level, ids, stop=["abcde", "bc"]) == ("xa", ids[:4], FinishReason.STOP, "bc")


def test_stop_strings_complete_before_min_tokens_are_shown_and_end_nothing(byte_level):
    ids = chars(byte_level, "ababab")
    assert run(byte_level, ids, stop="ab", min_tokens=0) == ("", ids[:2], FinishReason.STOP, "ab")
    assert run(byte_level, ids, stop="ab", min_tokens=2) == ("", ids[:2], FinishReason.STOP, "ab")
    assert run(byte_level, ids, stop="ab", min_tokens=3) == ("ab", ids[:4], FinishReason.STOP, "ab")
    assert run(byte_level, ids, stop="ab", min_tokens=6) == ("abab", ids, FinishReason.STOP, "ab")


def test_stop_strings_in_the_prompt_do_not_match(byte_level):
    """B6.8."""
    stream = OutputStream(byte_level, chars(byte_level, "hel"), SamplingParams(stop=["hello"]))
    ids = chars(byte_level, "lo")
    assert collect(stream, [event(ids, FinishReason.LENGTH)]) == ("lo", ids, FinishReason.LENGTH, None)


def test_a_withheld_token_gives_a_delta_without_text(byte_level):
    stream = OutputStream(byte_level, [], SamplingParams())
    first, *rest = chars(byte_level, "é")
    delta = stream.push(event([first]))
    assert (delta.text, delta.token_ids, delta.logprobs) == ("", (first,), None)
    assert stream.push(event(rest)).text == "é"
    assert stream.push(event([])) is None


def test_logprobs_have_one_entry_per_counted_token_with_offsets_into_the_output(byte_level):
    eos = byte_level.eos_ids[0]
    ids = [*byte_level.encode("the", add_special_tokens=False), *chars(byte_level, "é"), *chars(byte_level, "b"), eos]
    stream = OutputStream(byte_level, [], SamplingParams(logprobs=2))
    deltas = [
        stream.push(event(ids[:1], logprobs=True)),
        stream.push(event(ids[1:4], logprobs=True)),
        stream.push(event(ids[4:], FinishReason.STOP, eos, logprobs=True)),
    ]
    assert [len(d.logprobs) for d in deltas] == [len(d.token_ids) for d in deltas]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == ids
    assert b"".join(entry.bytes for entry in entries[:-1]).decode() == "".join(d.text for d in deltas) == "theéb"
    by_text = {entry.token: entry.text_offset for entry in entries}
    assert (by_text["b"], by_text["<|eos|>"]) == (4, 5)
    assert [entry.text_offset for entry in entries if entry.token == "\ufffd"] == [3, 3]
    assert entries[0].logprob == -0.5
    assert entries[0].top[1] == (0, "<|bos|>", b"<|bos|>", -2.0)


def test_without_a_tokenizer_tokens_pass_without_text():
    stream = OutputStream(None, [5], SamplingParams(logprobs=1, stop_token_ids=[8]))
    delta = stream.push(event([7], logprobs=True))
    assert (delta.text, delta.token_ids) == ("", (7,))
    assert (delta.logprobs[0].token, delta.logprobs[0].bytes) == ("token_id:7", b"")
    last = stream.push(event([8], FinishReason.STOP, 8, logprobs=True))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("", (8,), FinishReason.STOP, 8)


@settings(deadline=None, max_examples=150)
@given(
    text=st.text("abé", max_size=16),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 24)),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_however_events_are_cut_the_output_is_the_same(byte_level, text, stops, cuts, min_tokens, include):
    """B7.6."""
    ids = chars(byte_level, text)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    groups = [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    sampling = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    outputs = []
    for grouped in (groups, [[id] for id in ids], [ids]):
        events = [event(group) for group in grouped] + [event([], FinishReason.LENGTH)]
        outputs.append(collect(OutputStream(byte_level, [], sampling), events))
    assert outputs[0] == outputs[1] == outputs[2]
    shown, counted, reason, stop = outputs[0]
    if reason == FinishReason.STOP:
        assert stop in stops and len(counted) >= min_tokens
        assert byte_level.decode(counted) == (shown if include else shown + stop)
    else:
        assert (shown, counted) == (text, ids)
