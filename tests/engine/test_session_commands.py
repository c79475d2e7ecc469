"""Commands for sessions on the channel, to an engine in a process of its own that does what the session's id says."""

import asyncio
import os
import signal
import sys

import pytest

from jaxinfer.engine import client as client_module
from jaxinfer.engine.channel import SessionError
from jaxinfer.engine.process import EngineProcess
from jaxinfer.types import EngineDead, InvalidRequest, SessionAction, SessionInfo, UnknownSession
from tests.engine.test_process import request, run

PROGRAM = """
import os, sys, time
from concurrent.futures import Future
from jaxinfer.engine.loop import engine_main
from jaxinfer.types import (EngineInfo, EngineStats, FinishReason, InvalidRequest, SessionInfo, TokenEvent,
                            UnknownSession)

class Scripted:
    info = EngineInfo(model="scripted", max_model_len=10**6, vocab_size=10, eos_ids=(), sampling_defaults={},
                      page_size=8, num_pages=8, max_num_seqs=8)
    def __init__(self):
        self.left = {}  # tokens of requests
        self.pending = []  # future, steps that are left, what is done then
        self.num_done = 0
        self.num_steps = 0
    @property
    def has_work(self):
        return bool(self.left or self.pending)
    def submit(self, request):
        self.left[request.request_id] = request.max_tokens
    def abort(self, request_id):
        self.left.pop(request_id, None)
    def session(self, action, session_id):
        kind, _, number = session_id.partition("-")
        future = Future()
        if kind == "raises":
            raise ZeroDivisionError("at once")
        if kind == "waits":
            self.pending.append([future, int(number), action, session_id])
        elif kind == "dies":
            self.pending.append([future, int(number), action, session_id])
        else:
            self.resolve(future, action, session_id)
        return future
    def resolve(self, future, action, session_id):
        self.num_done += 1
        errors = {
            "unknown": UnknownSession("there is no session 'unknown'"),
            "refused": InvalidRequest("no disk tier", param="session_id", code="no_disk_tier"),
            "full": OSError(28, "No space left on device"),
            "runtime": RuntimeError("page 7 is damaged"),
        }
        if session_id in errors:
            return future.set_exception(errors[session_id])
        future.set_result(SessionInfo(session_id=session_id, model=action, num_tokens=self.num_done, num_pages=2,
            num_bytes=3, saved=True, saved_at_s=self.num_steps, num_cached_tokens=4))
    def step(self):
        self.num_steps += 1
        time.sleep(0.001)
        for entry in list(self.pending):
            entry[1] -= 1
            if entry[1] <= 0:
                self.pending.remove(entry)
                if entry[3].startswith("dies"):
                    raise OSError(5, "Input/output error")
                self.resolve(entry[0], *entry[2:])
        events = []
        for name in list(self.left):
            self.left[name] -= 1
            last = self.left[name] == 0
            events.append(TokenEvent(name, (self.left[name] % 10,), None, FinishReason.LENGTH if last else None))
            if last:
                del self.left[name]
        return events
    def stats(self):
        return EngineStats(num_running=len(self.left), num_sessions=self.num_done, num_restoring=len(self.pending),
                           num_steps=self.num_steps)

engine_main(sys.argv[1], Scripted)
"""
SAVE = SessionAction.SAVE


@pytest.fixture
def start():
    """Starts the engine's process for a number of front ends."""
    started = []

    def start(num_front_ends=1):
        started.append(EngineProcess([sys.executable, "-c", PROGRAM], num_front_ends))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def engine(start):
    return start().client()


async def until(condition):
    while not await condition():
        await asyncio.sleep(0.002)


def test_reply_says_what_the_engine_said_whether_at_once_or_steps_later(engine):
    async def main():
        for action in SessionAction:
            for session_id in ("now", "waits-5"):
                info = await engine.session(action, session_id)
                assert isinstance(info, SessionInfo)
                assert (info.session_id, info.model, info.num_bytes, info.saved) == (session_id, action, 3, True)
        assert not engine._commands

    asyncio.run(main())


@pytest.mark.parametrize(
    ("session_id", "kind", "message"),
    [
        ("unknown", UnknownSession, "there is no session 'unknown'"),
        ("refused", InvalidRequest, "no disk tier"),
        ("full", RuntimeError, r"OSError: \[Errno 28\] No space left on device"),
        ("runtime", RuntimeError, "^page 7 is damaged$"),
        ("raises", RuntimeError, "ZeroDivisionError: at once"),
    ],
)
def test_error_of_the_engine_is_raised_here_and_ends_nothing_else(engine, session_id, kind, message):
    async def main():
        stream = asyncio.create_task(run(engine, request("a", max_tokens=30)))
        with pytest.raises(kind, match=message) as caught:
            await engine.session(SAVE, session_id)
        if kind is InvalidRequest:
            assert (caught.value.param, caught.value.code) == ("session_id", "no_disk_tier")
        assert len(await stream) == 30
        assert (await engine.session(SAVE, "now")).saved

    asyncio.run(main())


def test_error_that_is_no_runtime_error_tells_its_kind():
    assert str(SessionError.of(KeyError("x")).exception()) == "KeyError: 'x'"
    assert SessionError.of(EngineDead("gone")).exception().args == ("gone",)


def test_streams_go_on_and_requests_are_taken_while_a_session_is_saved(engine):
    async def main():
        stream = asyncio.create_task(run(engine, request("long", max_tokens=150)))
        save = asyncio.create_task(engine.session(SAVE, "waits-100"))
        for i in range(5):
            assert len(await run(engine, request(f"short {i}", max_tokens=3))) == 3
        assert not save.done() and (await engine.stats()).num_restoring == 1
        assert (await save).session_id == "waits-100"
        tokens = [token for event in await stream for token in event.token_ids]
        assert tokens == [i % 10 for i in reversed(range(150))]

    asyncio.run(main())


def test_replies_find_their_commands_in_whatever_order_they_come(start):
    process = start(2)
    clients = [process.client(), process.client()]

    async def main():
        delays = (60, 5, 30, 1, 45)
        jobs = [(client, f"waits-{steps}") for steps in delays for client in clients]
        done = []

        async def ask(client, session_id):
            info = await client.session(SAVE, session_id)
            assert info.session_id == session_id
            done.append(session_id)

        await asyncio.gather(*(ask(*job) for job in jobs))
        assert done != [session_id for _, session_id in jobs] and len(done) == len(jobs)

    asyncio.run(main())


def test_front_end_that_leaves_during_a_save_harms_nobody_and_the_save_is_finished(start):
    process = start(2)
    leaves, stays = process.client(), process.client()

    async def main():
        lost = asyncio.create_task(leaves.session(SAVE, "waits-60"))
        kept = asyncio.create_task(stays.session(SAVE, "waits-80"))
        stream = asyncio.create_task(run(stays, request("kept", max_tokens=150)))

        async def both_pend():
            return (await stays.stats()).num_restoring == 2

        await until(both_pend)
        leaves.close()
        with pytest.raises(EngineDead, match="the channel to the engine is closed"):
            await lost
        assert (await kept).session_id == "waits-80"
        assert (await stays.stats()).num_sessions == 2
        assert len(await stream) == 150

    asyncio.run(main())


def test_all_front_ends_may_leave_during_a_save(start):
    process = start(2)
    leaves, later = process.client(), process.client()

    async def main():
        lost = asyncio.create_task(leaves.session(SAVE, "waits-20"))
        await asyncio.sleep(0.01)
        leaves.close()
        await asyncio.gather(lost, return_exceptions=True)

        async def is_finished():
            return (await later.stats()).num_sessions == 1

        await until(is_finished)
        assert process.failure is None

    asyncio.run(main())


def test_engine_that_dies_during_a_save_tells_every_front_end_why(start):
    process = start(2)
    clients = [process.client(), process.client()]

    async def main():
        waiting = [clients[0].session(SAVE, "waits-10000"), clients[1].session(SAVE, "dies-20")]
        waiting += [run(client, request(str(i), max_tokens=10**6)) for i, client in enumerate(clients)]
        for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10):
            assert isinstance(error, EngineDead) and str(error) == "OSError: [Errno 5] Input/output error"
        with pytest.raises(EngineDead, match="Input/output error"):
            await clients[0].session(SAVE, "now")
        assert not any(client._commands for client in clients)

    asyncio.run(main())


def test_engine_that_is_killed_during_a_save_tells_whoever_waits(start):
    process = start()
    client = process.client()

    async def main():
        save = asyncio.create_task(client.session(SAVE, "waits-100000"))
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"the engine's process ended \(exit code -9\)"):
            await asyncio.wait_for(save, 5)

    asyncio.run(main())


def test_engine_that_is_closed_during_a_save_tells_whoever_waits(start):
    process = start()
    client = process.client()

    async def main():
        save = asyncio.create_task(client.session(SAVE, "waits-100000"))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(process.close)
        with pytest.raises(EngineDead, match="the engine was shut down"):
            await asyncio.wait_for(save, 5)

    asyncio.run(main())


def test_reply_that_comes_after_the_time_is_over_concerns_nobody(engine, monkeypatch):
    monkeypatch.setattr(client_module, "SESSION_TIMEOUT_S", 0.02)

    async def main():
        with pytest.raises(TimeoutError):
            await engine.session(SAVE, "waits-60")
        given_up = asyncio.create_task(engine.session(SAVE, "waits-50"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert not engine._commands

        async def both_are_done():
            return (await engine.stats()).num_sessions == 2

        await until(both_are_done)
        assert (await engine.session(SAVE, "now")).session_id == "now"
        assert len(await run(engine, request("a", max_tokens=3))) == 3

    asyncio.run(main())


@pytest.mark.parametrize("session_id", ["", "../x", ".a", "x" * 129])
def test_id_that_is_none_is_refused_before_it_is_sent(engine, session_id):
    async def main():
        with pytest.raises(InvalidRequest, match="1 to 128 characters"):
            await engine.session(SAVE, session_id)
        assert (await engine.stats()).num_sessions == 0

    asyncio.run(main())
