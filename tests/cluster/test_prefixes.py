"""Which engine a request goes to."""

from __future__ import annotations

import json
import random

from jaxinfer.cluster.prefixes import CHUNK_BYTES, MAX_LEAD, Prefixes, prompt_keys


def keys(**body):
    return prompt_keys(json.dumps(body).encode())


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def among(*names):
    prefixes = Prefixes()
    prefixes.update(names)
    return prefixes


def test_the_next_turn_of_a_conversation_begins_with_the_keys_of_the_turn_before():
    first = keys(messages=turns("a" * 300))
    second = keys(messages=turns("a" * 300, "b" * 300, "c"))
    assert 4 <= len(first) < len(second)
    assert second[: len(first) - 1] == first[:-1]
    other = keys(messages=turns("a" * 200 + "z" * 100))
    assert other[:3] == first[:3]
    assert other[4:] != first[4:]


def test_keys_are_apart_where_caches_are():
    plain = {"model": "m", "messages": turns("a" * 300)}
    alike = [keys(**plain | more) for more in ({}, {"temperature": 0}, {"stream": True}, {"max_tokens": 5})]
    assert all(one == alike[0] for one in alike)
    for more in ({"cache_salt": "s"}, {"model": "n"}, {"tools": [{"type": "function"}]}, {"system": "you are"}):
        assert not set(keys(**plain | more)) & set(alike[0]), more


def test_every_kind_of_prompt_has_keys_and_what_is_none_has_none():
    for body in (
        {"prompt": "x" * 200},
        {"prompt": list(range(100))},
        {"prompt": [list(range(100)), [1]]},
        {"prompt": ["y" * 200, "z"]},
        {"input": "x" * 200},
        {"input": turns("x" * 200)},
    ):
        assert len(keys(**body)) >= 200 // CHUNK_BYTES, body
    for data in (b"", b"{", b"[1]", b'{"model": 1}', b"\xff\xfe", b"[" * 100_000, b'{"prompt": 5}', b'{"prompt": []}'):
        assert len(prompt_keys(data)) == 0, data


def test_requests_go_to_the_engine_that_has_the_longest_beginning():
    prefixes = among("a", "b")
    prefixes.sent("a", [1, 2, 3])
    prefixes.ended("a")
    prefixes.sent("b", [1, 2, 9, 10])
    prefixes.ended("b")
    assert prefixes.choose([1, 2, 3, 4]) == ["a", "b"]
    assert prefixes.choose([1, 2, 9, 11]) == ["b", "a"]
    assert prefixes.choose([7, 8]) == ["a", "b"]  # neither has any: the one that remembers less


def test_an_engine_that_is_far_ahead_gets_no_more_until_the_others_have_caught_up():
    prefixes = among("a", "b")
    for _ in range(MAX_LEAD):
        prefixes.sent("a", [1, 2])
    assert prefixes.choose([1, 2]) == ["a", "b"]
    assert prefixes.choose([1, 2, 3, 4]) == ["b", "a"]  # of which it has a half
    prefixes.sent("a", [1, 2])
    assert prefixes.choose([1, 2]) == ["b", "a"]
    prefixes.ended("a")
    assert prefixes.choose([1, 2]) == ["a", "b"]
    prefixes.sent("b", [1, 2])
    assert prefixes.choose([1, 2]) == ["b", "a"], "both have it, and b has less to do"


def test_a_short_beginning_that_many_prompts_share_does_not_draw_them_to_one_engine():
    prefixes = among("a", "b")
    prefixes.sent("a", range(10))
    mine = [0, 1, *range(100, 120)]
    assert prefixes.choose(mine) == ["b", "a"]
    prefixes.sent("b", mine)
    assert prefixes.choose([*mine, 200]) == ["b", "a"]


def test_an_engine_that_is_gone_is_forgotten_and_one_to_avoid_is_the_last_resort():
    prefixes = among("a", "b")
    prefixes.sent("a", [1, 2])
    assert prefixes.choose([1, 2], avoid=["a"]) == ["b"]
    prefixes.update(["a", "c"])
    assert prefixes.choose([1, 2]) == ["a", "c"]
    prefixes.update(["c"])
    prefixes.ended("a")
    prefixes.sent("a", [1])  # of a router that has not heard of it
    prefixes.update(["a", "c"])
    assert prefixes.matched("a", [1, 2]) == 0
    assert prefixes.choose([1], avoid=["a", "c"]) == ["a", "c"]
    assert Prefixes().choose([1]) == []


def test_what_was_not_used_for_long_is_forgotten_from_its_end():
    prefixes = Prefixes(max_remembered=6)
    prefixes.update(["a"])
    prefixes.sent("a", [1, 2, 3, 4])
    prefixes.sent("a", [1, 2, 5, 6])
    prefixes.sent("a", [7])
    assert prefixes.matched("a", [1, 2, 3, 4]) == 3
    assert prefixes.matched("a", [1, 2, 5, 6]) == 4


def test_turns_of_many_conversations_stay_where_they_began_and_the_load_is_even():
    """Closed loop of 40 conversations of 8 turns over 4 engines; each turn ends at a random time."""
    places = random.Random(0)
    names = ["a", "b", "c", "d"]
    prefixes = among(*names)
    system = "You are a helpful assistant, who answers briefly. " * 4
    talks = {number: [f"{system} I am number {number}. " + "word " * 30] for number in range(40)}
    homes, stayed, moved, running, most = {}, 0, 0, [], 0
    while talks or running:
        if talks and (len(running) < 30 or not running):
            number = places.choice([n for n in talks if n not in {one for one, _ in running}] or [None])
            if number is not None:
                asked = keys(messages=turns(*talks[number]))
                name = prefixes.choose(asked)[0]
                prefixes.sent(name, asked)
                if number in homes:
                    stayed, moved = stayed + (name == homes[number]), moved + (name != homes[number])
                homes[number] = name
                running.append((number, name))
                loads = [sum(at == one for _, at in running) for one in names]
                most = max(most, max(loads) - min(loads))
                continue
        number, name = running.pop(places.randrange(len(running)))
        prefixes.ended(name)
        talks[number] += [f"an answer to {number} " * 10, f"and what of {len(talks[number])}?"]
        if len(talks[number]) > 15:
            del talks[number]
    assert stayed + moved == 40 * 7
    assert stayed / (stayed + moved) >= 0.9
    assert {homes[number] for number in homes} == set(names)
    assert most <= MAX_LEAD // 2
