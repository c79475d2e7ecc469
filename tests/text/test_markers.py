from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.text.markers import unfinished


def test_the_end_of_a_text_is_unfinished_as_far_as_a_marker_begins_with_it():
    assert unfinished("a<th", ["<think>", "</think>"]) == 3
    assert unfinished("a<", ["<think>", "</think>"]) == 1
    assert unfinished("a<think>", ["<think>"]) == 0
    assert unfinished("<<", ["<<a"]) == 2
    assert unfinished("<<<", ["<<a"]) == 2
    assert unfinished("", ["<"]) == 0
    assert unfinished("<", []) == 0


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_it_is_the_longest_proper_prefix_of_any_marker(text, markers):
    prefixes = [marker[:n] for marker in markers for n in range(len(marker)) if text.endswith(marker[:n])]
    assert unfinished(text, markers) == max(map(len, prefixes), default=0)
