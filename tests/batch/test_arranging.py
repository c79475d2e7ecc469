"""The order in which rows run."""

from __future__ import annotations

import random
from array import array

from jaxinfer.batch.arranging import Extent, arrange

PAGE = 4


def extent(prompt, output):
    return Extent(array("I", prompt), output)


def extents(*lengths):
    """Of rows whose prompts begin differently, by (prompt, output) in tokens."""
    return [extent((number, *range(100, 99 + prompt)), output) for number, (prompt, output) in enumerate(lengths)]


def test_every_row_has_one_place():
    places = random.Random(0)
    rows = [extent([places.randrange(3) for _ in range(places.randrange(12))], places.randrange(9)) for _ in range(200)]
    assert sorted(arrange(rows, PAGE)) == list(range(200))
    assert arrange([], PAGE) == []


def test_long_rows_come_before_short_ones_by_prompt_and_output_together():
    assert arrange(extents((5, 1), (1, 9), (20, 1), (2, 2)), PAGE) == [2, 1, 0, 3]


def test_rows_that_share_most_of_their_prompts_are_side_by_side_however_long_they_are():
    shared = {name: tuple(range(at, at + 20)) for name, at in (("a", 1000), ("b", 2000))}
    rows = [extent((*shared["ab"[i % 2]], i), 1 + 30 * (i // 2 % 2)) for i in range(8)]
    order = arrange(rows, PAGE)
    assert [index % 2 for index in order] in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    assert [rows[index].max_tokens for index in order] == [31, 31, 1, 1] * 2


def test_a_short_beginning_that_all_rows_have_makes_no_group():
    system = tuple(range(2 * PAGE))
    rows = [extent((*system, *range(100 * i, 100 * i + 4 * PAGE)), output) for i, output in enumerate((1, 50, 2, 60))]
    assert arrange(rows, PAGE) == [3, 1, 2, 0]


def test_less_than_a_page_is_not_worth_sharing():
    rows = [extent((7, 7, number), output) for number, output in enumerate((1, 30, 2))]
    assert arrange(rows, PAGE) == [1, 2, 0]
