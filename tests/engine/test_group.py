"""The processes of an engine, as threads on loopback: how they meet, what they tell, how each knows that one ended."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxinfer.config import ConfigError
from jaxinfer.engine import group as groups
from jaxinfer.engine.channel import encode
from jaxinfer.engine.group import Group, Met, Place, ProcessLost, meet
from jaxinfer.engine.messages import UNSENT, Launch, Reset, Sample, decode
from jaxinfer.scheduler.plan import (
    CachedPrefix,
    DecodeRow,
    KeptState,
    LastToken,
    Offload,
    PrefillChunk,
    StepPlan,
    TokenMask,
)
from jaxinfer.types import Request

FACTS = {"jax": "1", "page_size": "8"}
LIMIT_S = 10.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def places(count: int, timeout_s: float = LIMIT_S) -> list[Place]:
    address = f"127.0.0.1:{free_port()}"
    return [Place.of(address, number, count, timeout_s) for number in range(count)]


def wait_until(condition) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.005)


def close(*met: Met) -> None:
    for one in met:
        for channel in one.channels.values():
            channel.close()


class Members:
    """The groups of all processes, and why each was lost."""

    def __init__(self, count: int):
        where = places(count)
        with ThreadPoolExecutor(count) as pool:
            met = [pool.submit(meet, place, FACTS) for place in where]
            self.met = [one.result() for one in met]
        self.lost: list[list[str]] = [[] for _ in range(count)]
        self.groups = [
            Group(place, one.channels, reasons.append)
            for place, one, reasons in zip(where, self.met, self.lost, strict=True)
        ]

    def kill(self, number: int) -> None:
        """Ends the connections of a process without a word, as the system does."""
        self.groups[number]._leaving = True
        self.groups[number]._left.set()
        self.groups[number]._thread.join(LIMIT_S)


@pytest.fixture
def members(monkeypatch):
    monkeypatch.setattr(groups, "PING_S", 0.02)
    made = []

    def make(count: int) -> Members:
        made.append(Members(count))
        return made[-1]

    yield make
    for one in made:
        for group in one.groups:
            group.leave()
            group._thread.join(LIMIT_S)
        close(*one.met)


def test_processes_meet_in_any_order_and_hear_of_one_port(members):
    assert len({one.port for one in members(3).met}) == 1


def test_a_process_that_does_not_come_is_named_within_the_bound():
    first, second, _ = places(3, timeout_s=0.4)
    start_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, place, FACTS) for place in (first, second)]
        for one in met:
            with pytest.raises(ConfigError, match=r"^process 2 of 3 did not come to 127.0.0.1:\d+ within 0.4 s"):
                one.result()
    assert time.monotonic() - start_s < 5


def test_without_process_0_the_others_give_up_within_the_bound():
    with pytest.raises(ConfigError, match=r"^process 0 at 127.0.0.1:\d+ was not reached within 0.1 s"):
        meet(places(2, timeout_s=0.1)[1], FACTS)


def test_an_address_of_another_host_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^process 0 cannot listen at 192.0.2.1:7 .* one of its own host"):
        meet(Place.of("192.0.2.1:7", 0, 2, 1.0), FACTS)


def test_what_differs_is_named_in_both_processes():
    first, second = places(2)
    differing = FACTS | {"jax": "2", "mesh": "'tensor=2'"}
    with ThreadPoolExecutor(2) as pool:
        met = pool.submit(meet, first, FACTS), pool.submit(meet, second, differing)
        for one in met:
            with pytest.raises(ConfigError, match="jax is 2, not 1; mesh is 'tensor=2', not None$"):
                one.result()


def test_an_id_that_is_taken_is_refused_and_the_others_meet():
    first, second, third = places(3)
    with ThreadPoolExecutor(4) as pool:
        met = [pool.submit(meet, first, FACTS), pool.submit(meet, second, FACTS)]
        time.sleep(0.2)
        with pytest.raises(ConfigError, match="^process_id is 1 of 3: there is one already"):
            meet(second, FACTS)
        met.append(pool.submit(meet, third, FACTS))
        found = [one.result() for one in met]
    assert [sorted(one.channels) for one in found] == [[1, 2], [0], [0]]
    close(*found)


def test_an_id_that_there_is_not_is_refused_by_the_number_of_processes():
    first, second = places(2)
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, first, FACTS)]
        with pytest.raises(ConfigError, match="^process_id is 7 of 2: there is none such"):
            meet(second._replace(process_id=7), FACTS)
        met.append(pool.submit(meet, second, FACTS))
        found = [one.result() for one in met]
    assert [sorted(one.channels) for one in found] == [[1], [0]]
    close(*found)


@contextlib.contextmanager
def stranger() -> Iterator[socket.socket]:
    """A connection to process 0 while it waits. Then process 1 comes, and the two meet all the same."""
    first, second = places(2)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(meet, first, FACTS)
        wait_until(lambda: connects(first))
        with socket.create_connection((first.host, first.port)) as one:
            yield one
            found = [meet(second, FACTS), met.result()]
    assert [sorted(one.channels) for one in found] == [[0], [1]]
    close(*found)


def test_a_stranger_that_announces_a_long_message_is_not_listened_to():
    with stranger() as one, pytest.raises(OSError):
        one.sendall(b"\xff\xff\xff\xff")
        for _ in range(1000):
            one.sendall(bytes(1 << 20))


def test_a_stranger_at_the_coordinators_address_keeps_nobody_from_meeting():
    with stranger() as one:
        one.sendall(b"\x00\x00\x00\x04GET ")


def connects(place: Place) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port)):
        return True
    return False


def test_all_agree_on_the_least_number(members):
    made = members(3)
    with ThreadPoolExecutor(3) as pool:
        told = [pool.submit(group.agree, "pages", 7 - group.process_id) for group in made.groups]
        assert [one.result(LIMIT_S) for one in told] == [5, 5, 5]


def test_what_process_0_tells_comes_in_order_until_it_ends(members):
    first, *others = members(3).groups
    for mask in (b"a", b"b"):
        first.tell(Sample([TokenMask(1, mask, {2: 0.5})]))
    first.tell(Reset())
    first.leave()
    for other in others:
        a, b, reset = other.to_do()
        assert [one.masks[0].words for one in (a, b)] == [b"a", b"b"] and isinstance(reset, Reset)
        assert other.failure is None


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_ends_without_a_word_is_named_in_all_others(members, number):
    made = members(3)
    made.kill(number)
    others = [one for one in range(3) if one != number]
    wait_until(lambda: all(made.lost[one] for one in others))
    for one in others:
        assert f"process {number} of 3 is gone: its connection ended" in made.lost[one][0]
        with pytest.raises(ProcessLost, match=f"process {number} of 3"):
            made.groups[one].check()
        with pytest.raises(ProcessLost, match=f"process {number} of 3"):
            made.groups[one].agree("anything")


def test_what_waits_for_a_lost_process_raises(members):
    made = members(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.groups[0].agree, "programs")
        made.groups[1].leave("no room for a KV cache")
        with pytest.raises(ProcessLost, match="^process 1 of 2 ended: no room for a KV cache$"):
            waiting.result(LIMIT_S)


def test_a_process_that_says_nothing_is_lost_and_one_that_pings_is_not(members, monkeypatch):
    monkeypatch.setattr(groups, "SILENCE_S", 1.0)
    monkeypatch.setattr(groups, "PING_S", 0.02)
    made, lost = members(2), []
    first, second = places(2)
    with ThreadPoolExecutor(2) as pool:
        met, silent = (one.result() for one in [pool.submit(meet, place, FACTS) for place in (first, second)])
    group = Group(first, met.channels, lost.append)
    wait_until(lambda: lost)
    assert lost == ["process 1 of 2 has said nothing for 1 s"]
    assert made.lost == [[], []]
    group._thread.join(LIMIT_S)
    close(silent)


def test_a_call_that_does_not_return_is_ended_with_the_process(members, monkeypatch):
    made, ended = members(2), threading.Event()
    monkeypatch.setattr(groups, "STUCK_S", 0.01)
    monkeypatch.setattr(groups, "exit_before_jax", lambda: None)
    monkeypatch.setattr(groups.os, "_exit", lambda _: ended.set())
    group = made.groups[0]
    group._on_lost = group._end_if_stuck
    with group.working():
        made.kill(1)
        assert ended.wait(LIMIT_S)


REQUEST = Request(
    request_id="a", prompt_ids=(1, 2, 3), max_tokens=3, logit_bias={3: 1.5}, stop_ids=(4,), seed=2**64 - 1
)
PLAN = StepPlan(
    3,
    [DecodeRow(0, 5, None, plain=False, logprobs=True)],
    [PrefillChunk(1, 0, [1, 2, 3], [3], 0, True, REQUEST, 3, [1, 2, 3])],
    [CachedPrefix(2, [4], 5, 1, LastToken(2, 7, REQUEST, 2, [1])), CachedPrefix(3, [6], None)],
    kept_states=[KeptState(1, 2)],
    constrained=True,
)


def test_a_plan_is_the_same_after_it_was_sent_but_for_prompts():
    sent = decode(encode(Launch.of(PLAN)))
    assert isinstance(sent, Launch)
    empty = dataclasses.replace(REQUEST, prompt_ids=[], stop_ids=[4])
    (chunk,), (prefix, shared) = PLAN.prefills, PLAN.prefixes
    assert prefix.last is not None
    assert sent.plan() == dataclasses.replace(
        PLAN,
        prefills=[dataclasses.replace(chunk, request=empty)],
        prefixes=[prefix._replace(last=prefix.last._replace(request=empty)), shared],
    )


def test_every_field_of_a_plan_is_sent_or_refused():
    assert {"transfers", "long"} <= set(UNSENT) <= {"transfers", "long", "groups"}
    with pytest.raises(ValueError, match="the plan has transfers, which one process alone can have"):
        Launch.of(dataclasses.replace(PLAN, transfers=[Offload(0, [1])]))
