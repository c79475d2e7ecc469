import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer.text.stop import StopMatcher

letters = st.text("abc", max_size=24)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=6), max_size=4)
examples = settings(deadline=None, max_examples=400)


def naive(text, stops, *, include=False):
    """Reads the whole text at once: the earliest start, and of equal starts the shortest string."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + (length if include else 0)], stop


def run(pieces, stops, *, include=False):
    matcher = StopMatcher(stops, include=include)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.matched


@examples
@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 24)), include=st.booleans())
@example(text="aabcab", stops=["abcx", "bc"], cuts=[3, 4], include=False)
def test_however_the_text_is_cut_the_earliest_match_ends_it(text, stops, cuts, include):
    expected = naive(text, stops, include=include)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert run([text[a:b] for a, b in zip(edges, edges[1:], strict=False)], stops, include=include) == expected
    assert run(list(text), stops, include=include) == expected


@examples
@given(text=letters, stops=stop_lists)
def test_what_waits_is_the_longest_end_of_the_text_that_begins_a_stop_string(text, stops):
    """B6.3."""
    matcher, shown = StopMatcher(stops), ""
    for end, char in enumerate(text, 1):
        shown += matcher.push(char)
        if matcher.matched is None and not matcher.pending:
            taken = text[:end]
            begun = [i for i in range(end) if any(s != taken[i:] and s.startswith(taken[i:]) for s in stops)]
            assert shown == taken[: min(begun, default=end)]


@examples
@given(text=letters, stops=stop_lists, armed_from=st.integers(0, 24), cuts=st.lists(st.integers(0, 24)))
def test_strings_complete_before_the_matcher_is_armed_end_nothing(text, stops, armed_from, cuts):
    matches = [
        (end - len(stop), end, stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text.startswith(stop, end - len(stop)) and end > armed_from
    ]
    start, end, stop = min(matches, default=(len(text), None, None))
    matcher = StopMatcher(stops)
    edges = sorted({0, len(text), *(cut for cut in [*cuts, armed_from] if cut < len(text))})
    shown = "".join(matcher.push(text[a:b], armed=a >= armed_from) for a, b in zip(edges, edges[1:], strict=False))
    shown += matcher.flush()
    assert (shown, matcher.matched, matcher.matched_end) == (text[:start], stop, end)


def test_a_match_may_start_and_end_inside_a_token():
    """B6.1."""
    assert run(["I say ", "ABDEF", "GH"], ["DE"]) == ("I say AB", "DE")
    assert run(["Pa", "ris"], ["Pari"]) == ("", "Pari")


def test_the_order_of_the_list_does_not_matter():
    """B6.2."""
    for stops in (["world", "lo"], ["lo", "world"]):
        assert run(["hello world"], stops) == ("hel", "lo")


def test_of_two_that_start_together_the_shorter_is_complete_first():
    """B6.2."""
    for stops in (["abc", "ab"], ["ab", "abc"]):
        assert run(["xabc"], stops) == ("x", "ab")


def test_a_complete_match_waits_for_one_that_starts_before_it():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == "x"
    assert matcher.pending and matcher.matched is None
    assert matcher.push("d tail") == ""
    assert (matcher.matched, matcher.matched_end) == ("abcd", 5)
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") + matcher.push("e") == "xa"
    assert (matcher.matched, matcher.matched_end) == ("bc", 4)
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") + matcher.flush() == "xa"
    assert matcher.matched == "bc"


def test_text_after_the_match_is_dropped():
    """B6.5."""
    matcher = StopMatcher(["\n\n"], include=True)
    assert matcher.push("one\n\ntwo") == "one\n\n"
    assert matcher.push("three") == matcher.flush() == ""


def test_text_that_begins_no_stop_string_is_not_held_back():
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("</think> <b") == "</think> <b"
    assert matcher.push(" </ans") == " "
    assert matcher.push("wers>") == "</answers>"


def test_without_stop_strings_all_text_passes():
    assert run(["a", "b"], []) == ("ab", None)


def test_an_empty_stop_string_is_refused():
    """B6.8."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_long_stop_string_costs_constant_time_per_character():
    matcher = StopMatcher(["a" * 20_000 + "b"])
    text = "a" * 60_000
    shown = "".join(matcher.push(text[i : i + 3]) for i in range(0, len(text), 3))
    assert shown == "a" * 40_000


def test_a_stop_string_of_megabytes_costs_nothing_until_the_text_begins_it():
    stop = "ab" * 10**6
    start_s = time.perf_counter()
    matchers = [StopMatcher([stop]) for _ in range(200)]
    assert [matcher.push("xaby") for matcher in matchers] == ["xaby"] * 200
    assert time.perf_counter() - start_s < 1
