"""In which order rows run: side by side what begins alike, long ones before short ones. The output keeps its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """What is known of a row before it runs."""

    prompt_ids: array[int]  # as it is: to copy those of 2,000 rows would take 40 ms, in which no step is planned
    max_tokens: int  # the most that it gives: what it is taken to be as long as


def arrange(extents: Sequence[Extent], page_size: int) -> list[int]:
    """Indices of rows, in the order in which to run them.

    Rows whose prompts share a page of `page_size` tokens and half of the shorter one are a group, which runs together,
    as the KV cache may not remember its prefix for long; a beginning that all rows have, such as a system message,
    makes no group unless it is most of them. Groups, and the rows of each, come by their length, longest first: a
    chunk of rows then ends with short ones, and nothing long runs on alone.
    """
    by_prompt = sorted(range(len(extents)), key=lambda index: extents[index].prompt_ids)
    groups: list[list[int]] = []
    for index in by_prompt:
        if groups and _begin_alike(extents[groups[-1][-1]].prompt_ids, extents[index].prompt_ids, page_size):
            groups[-1].append(index)
        else:
            groups.append([index])
    for group in groups:
        group.sort(key=lambda index: (-_length(extents[index]), index))
    groups.sort(key=lambda group: (-_length(extents[group[0]]), group[0]))
    return [index for group in groups for index in group]


def _length(extent: Extent) -> int:
    return len(extent.prompt_ids) + extent.max_tokens


def _begin_alike(one: array[int], other: array[int], page_size: int) -> bool:
    needed = max(page_size, (min(len(one), len(other)) + 1) // 2)
    return min(len(one), len(other)) >= needed and one[:needed] == other[:needed]
