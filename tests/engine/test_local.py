"""LocalEngine: threads share an engine that none of them owns, and every request ends in an event all the same."""

from __future__ import annotations

import collections
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from jaxinfer.engine.local import LocalEngine
from jaxinfer.types import (
    EngineDead,
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    SessionAction,
    TokenEvent,
    UnknownSession,
)


class CountingEngine:
    """Gives each running request one token a step, as an Engine would; two requests at most may wait."""

    def __init__(self, *, num_slots=3, step_s=0.0):
        self.num_slots, self.step_s = num_slots, step_s
        self.unfinished: dict[str, int] = {}  # tokens still to come
        self.aborted: list[str] = []
        self.saves: list[tuple[str, Future, int]] = []  # id, future, the step in which it is done
        self.num_steps = 0
        self.stepping = False

    def submit(self, request):
        if len(self.unfinished) >= self.num_slots + 2:
            raise QueueFull("full")
        self.unfinished[request.request_id] = request.max_tokens

    def abort(self, request_id):
        if self.unfinished.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def session(self, action, session_id):
        assert not self.stepping, "a command comes during a step"
        done = Future()
        kind, _, num_steps = session_id.partition("-")
        if kind == "unknown":
            done.set_exception(UnknownSession(f"there is no session {session_id!r}"))
        elif kind == "now":
            done.set_result((action, session_id))
        else:
            self.saves.append((session_id, done, self.num_steps + int(num_steps)))
        return done

    @property
    def has_work(self):
        return bool(self.unfinished or self.saves)

    def step(self):
        assert not self.stepping, "two threads step at once"
        self.stepping = True
        self.num_steps += 1
        time.sleep(self.step_s)
        for save in [save for save in self.saves if save[2] <= self.num_steps]:
            self.saves.remove(save)
            save[1].set_result(save[0])
        events = []
        for request_id in list(self.unfinished)[: self.num_slots]:
            self.unfinished[request_id] -= 1
            last = self.unfinished[request_id] == 0
            if last:
                del self.unfinished[request_id]
            events.append(TokenEvent(request_id, (1,), finish_reason=FinishReason.LENGTH if last else None))
        self.stepping = False
        return events

    def close(self):
        pass


def ask(name, max_tokens=3):
    return Request(request_id=name, prompt_ids=(1,), max_tokens=max_tokens)


def counts(events):
    """Tokens and last events by request."""
    tokens, ends = collections.Counter(), collections.Counter()
    for event in events:
        assert not ends[event.request_id], "an event came after the last"
        tokens[event.request_id] += len(event.token_ids)
        ends[event.request_id] += event.finish_reason is not None
    return tokens, ends


def in_threads(jobs):
    """Runs callables at once; the first error of any is raised."""
    errors = []

    def guarded(job):
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_requests_that_find_the_queue_full_are_held_back_and_run_later():
    engine = CountingEngine()
    tokens, ends = counts(LocalEngine(engine).run([ask(str(i), 1 + i % 4) for i in range(40)]))
    assert tokens == {str(i): 1 + i % 4 for i in range(40)}
    assert set(ends.values()) == {1}


def test_closing_early_cancels_what_still_runs_and_nothing_else():
    engine = CountingEngine(num_slots=4)
    local = LocalEngine(engine)
    mine, other = local.run([ask("a", 9), ask("b", 9), ask("c", 1)]), local.run([ask("d", 5)])
    assert next(other).request_id == "d"
    assert next(mine)
    mine.close()
    assert not engine.unfinished.keys() - {"d"} and "d" not in engine.aborted
    assert counts(other)[0]["d"] + 1 == 5
    assert not engine.unfinished


def test_a_cancelled_request_gives_no_further_event_and_its_run_ends():
    engine = CountingEngine()
    local = LocalEngine(engine)
    events = local.run([ask("a", 50), ask("b", 2)])
    first = next(events)
    local.cancel("a")
    local.cancel("a")
    tokens, _ = counts(events)
    assert first.request_id == "a" and tokens == {"b": 2}
    assert engine.aborted == ["a"]
    local.cancel("nobody")


def test_every_event_arrives_however_threads_interleave():
    local = LocalEngine(CountingEngine())
    rounds = 150

    def job(name):
        for i in range(rounds):
            wanted = {f"{name}.{i}.{j}": 1 + (i + j) % 3 for j in range(1 + i % 2)}
            tokens, ends = counts(local.run([ask(*item) for item in wanted.items()]))
            assert tokens == wanted and set(ends.values()) == {1}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads([lambda name=name: job(name) for name in "abcd"])
    finally:
        sys.setswitchinterval(interval)


def test_the_last_event_arrives_although_another_thread_delivers_it_after_the_caller_found_none():
    engine = CountingEngine()
    local = LocalEngine(engine)

    class Events(collections.deque):
        """Found empty once, it is filled as a thread would that holds the lock meanwhile."""

        filled = False

        def __bool__(self):
            found = len(self) > 0
            if not found and not self.filled:
                self.filled = True
                local._deliver(engine.step())
            return found

    events = local.run([ask("a", 2)])
    first = next(events)
    local._runs["a"].events = Events()
    assert counts([first, *events]) == ({"a": 2}, {"a": 1})


def test_a_thread_that_steps_does_not_keep_others_waiting():
    engine = CountingEngine(step_s=0.001)
    local = LocalEngine(engine)
    waited = []
    started = threading.Event()

    def long():
        for _ in local.run([ask("long", 2000)]):
            started.set()

    def short():
        started.wait()
        for i in range(10):
            before = engine.num_steps
            list(local.run([ask(f"short {i}", 1)]))
            if "long" in engine.unfinished:
                waited.append(engine.num_steps - before)

    in_threads([long, short])
    assert sorted(waited)[len(waited) // 2] <= 20


def test_a_session_is_done_at_once_or_after_as_many_steps_as_it_takes():
    engine = CountingEngine()
    local = LocalEngine(engine)
    assert local.session(SessionAction.LOAD, "now") == ("load", "now")
    assert engine.num_steps == 0
    assert local.session(SessionAction.SAVE, "save-7") == "save-7"
    assert engine.num_steps == 7
    with pytest.raises(UnknownSession, match="there is no session 'unknown'"):
        local.session(SessionAction.DELETE, "unknown")
    with pytest.raises(InvalidRequest, match="session_id is '../x'"):
        local.session(SessionAction.SAVE, "../x")


def test_threads_save_sessions_while_the_requests_of_others_run():
    local = LocalEngine(CountingEngine(step_s=1e-4))

    def saves(name):
        for i in range(20):
            session_id = f"{name}-{1 + i % 9}"
            assert local.session(SessionAction.SAVE, session_id) == session_id

    def runs(name):
        for i in range(20):
            wanted = {f"{name}.{i}": 1 + i % 7}
            assert counts(local.run([ask(*item) for item in wanted.items()]))[0] == wanted

    in_threads([lambda job=job, name=name: job(name) for job in (saves, runs) for name in "ab"])


def test_a_session_that_is_pending_when_the_engine_is_closed_is_finished():
    engine = CountingEngine(step_s=0.002)
    local = LocalEngine(engine)
    results = []
    save = threading.Thread(target=lambda: results.append(local.session(SessionAction.SAVE, "save-50")))
    save.start()
    while not engine.saves:
        time.sleep(0.001)
    local.close()
    save.join(10)
    assert results == ["save-50"]
    with pytest.raises(EngineDead, match="the engine was closed"):
        local.session(SessionAction.SAVE, "now")
