"""The processes of one engine: how they meet, and how each knows, within seconds, that another has ended.

Process 0 listens at the coordinator's address, and at no other. What is said there is neither encrypted nor signed: who
reaches that address can pass for one of the processes, so it is to be in a network of their hosts alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from jaxinfer.config import ConfigError
from jaxinfer.engine.channel import Channel
from jaxinfer.engine.messages import Agree, Hello, Launch, Left, Message, Ping, Reset, Sample, ToDo, Welcome, decode
from jaxinfer.types import EngineDead

PING_S = 1.0
SILENCE_S = 20.0
"""A process that says nothing for so long has hung, or its host or the way to it is gone. One that ends is known at
once, by the end of its connection."""
STUCK_S = 5.0
"""What a call of JAX gets to return once a process is lost: one that waits for it never does."""
REASON_S = 1.0
"""How soon it is known that a process has ended, once a step failed for it."""
RETRY_S = 0.2
CONNECT_S = 5.0
WELCOME_S = 5.0
"""How much longer than process 0 the others wait, so that they hear from it why it gave up."""
MAX_DIFFERENCES = 4
MAX_HELLO_BYTES = 1 << 20
"""Of a process that is not known yet."""
log = logging.getLogger(__name__)


class ProcessLost(EngineDead):
    """One of the engine's processes ended, so that none can go on. The message says which, and why."""


class Place(NamedTuple):
    """Of a process among those of its engine."""

    host: str
    port: int
    process_id: int
    num_processes: int
    timeout_s: float  # to meet

    @classmethod
    def of(cls, coordinator: str, process_id: int, num_processes: int, timeout_s: float) -> Place:
        """coordinator: HOST:PORT, where HOST may be an IPv6 address in brackets."""
        host, _, port = coordinator.rpartition(":")
        return cls(host.strip("[]"), int(port), process_id, num_processes, timeout_s)


class Met(NamedTuple):
    """What a process has once all are there."""

    channels: Mapping[int, Channel]  # to process 0 the others, to these process 0, by their ids
    port: int  # of JAX's service on process 0's host


def meet(place: Place, facts: Mapping[str, str]) -> Met:
    """Waits until all processes are there. ConfigError with the ids of those that are not in time.

    facts: what has to be the same in all of them. ConfigError with what is not, in process 0 and in that which differs.
    """
    return _gather(place, facts) if place.process_id == 0 else _join(place, facts)


def _gather(place: Place, facts: Mapping[str, str]) -> Met:
    limit_s = time.monotonic() + place.timeout_s
    found: dict[int, Channel] = {}
    with _listen(place) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        try:
            while len(found) < place.num_processes - 1:
                left_s = limit_s - time.monotonic()
                if left_s <= 0:
                    missing = sorted(set(range(1, place.num_processes)) - set(found))
                    raise ConfigError(
                        f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {place.num_processes} "
                        f"did not come to {place.host}:{place.port} within {place.timeout_s:g} s "
                        "(initialization_timeout_s)"
                    )
                for key, _ in selector.select(left_s):
                    if key.data is None:
                        channel = _channel(listener.accept()[0])
                        selector.register(channel, selectors.EVENT_READ, channel)
                    else:
                        _hear(key.data, place, facts, found, selector)
        except ConfigError as error:
            _tell_all(found, Left(str(error)))
            found.clear()
            raise
        finally:
            for key in list(selector.get_map().values()):
                if key.data is not None and key.data not in found.values():
                    key.data.close()
    with socket.create_server((place.host, 0), family=_family(place)) as free:
        port = free.getsockname()[1]
    _tell_all(found, Welcome(port))
    return Met(found, port)


def _hear(
    channel: Channel,
    place: Place,
    facts: Mapping[str, str],
    found: dict[int, Channel],
    selector: selectors.BaseSelector,
) -> None:
    """Takes what has come on a channel while the processes meet."""
    try:
        said = [decode(data) for data in channel.receive(MAX_HELLO_BYTES)]
    except (EOFError, msgspec.DecodeError) as error:
        selector.unregister(channel)
        for number in [number for number, one in found.items() if one is channel]:
            log.warning("process %d of %d has left again; it is waited for", number, place.num_processes)
            del found[number]
        if not isinstance(error, EOFError):
            log.warning("a connection to %s:%d is none of a process of this engine", place.host, place.port)
        channel.close()
        return
    for hello in said:
        if not isinstance(hello, Hello):
            continue
        number = hello.process_id
        if not 0 < number < place.num_processes or number in found:
            why = "there is one already" if number in found else "there is none such"
            refusal = f"process_id is {number} of {place.num_processes}: {why}; each has an id of its own, from 1 on"
            log.warning("a process was turned away: %s", refusal)
            _tell_all({number: channel}, Left(refusal))
        elif differing := _differences(number, hello.facts, facts):
            _tell_all({number: channel}, Left(differing))
            raise ConfigError(differing)
        else:
            found[number] = channel


def _differences(number: int, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What is not the same; empty where all is."""
    names = [name for name in [*ours, *(theirs.keys() - ours.keys())] if theirs.get(name) != ours.get(name)]
    if not names:
        return ""
    told = [f"{name} is {theirs.get(name)}, not {ours.get(name)}" for name in names[:MAX_DIFFERENCES]]
    more = f", and {len(names) - MAX_DIFFERENCES} more" if len(names) > MAX_DIFFERENCES else ""
    return f"process {number} differs from process 0, and all must be alike: {'; '.join(told)}{more}"


def _join(place: Place, facts: Mapping[str, str]) -> Met:
    limit_s = time.monotonic() + place.timeout_s
    where, limit = f"process 0 at {place.host}:{place.port}", f"{place.timeout_s:g} s (initialization_timeout_s)"
    while True:
        try:
            sock = socket.create_connection((place.host, place.port), timeout=CONNECT_S)
            break
        except OSError as error:
            if time.monotonic() > limit_s:
                raise ConfigError(f"{where} was not reached within {limit}: {error}") from error
            time.sleep(RETRY_S)
    channel = _channel(sock)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(channel.close)
        _tell_all({0: channel}, Hello(place.process_id, facts))
        met = Met({0: channel}, _wait_for_welcome(place, channel, limit_s))
        on_failure.pop_all()
    return met


def _wait_for_welcome(place: Place, channel: Channel, limit_s: float) -> int:
    """The port that process 0 tells."""
    where, limit = f"process 0 at {place.host}:{place.port}", f"{place.timeout_s:g} s (initialization_timeout_s)"
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while selector.select(max(limit_s + WELCOME_S - time.monotonic(), 0)):
            try:
                said = [decode(data) for data in channel.receive()]
            except (EOFError, msgspec.DecodeError) as error:
                raise ConfigError(f"{where} ended before all processes were there") from error
            for message in said:
                if isinstance(message, Left):
                    raise ConfigError(message.reason or f"{where} ended")
                if isinstance(message, Welcome):
                    return message.port
    raise ConfigError(f"{where} did not say within {limit} that all processes are there")


def _family(place: Place) -> socket.AddressFamily:
    return socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0][0]


def _listen(place: Place) -> socket.socket:
    try:
        return socket.create_server((place.host, place.port), family=_family(place))
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen at {place.host}:{place.port} ({error.strerror or error}); the coordinator's "
            "address is one of its own host, with a free port"
        ) from error


def _channel(sock: socket.socket) -> Channel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(sock)


def _tell_all(channels: Mapping[int, Channel], message: msgspec.Struct) -> None:
    for channel in channels.values():
        with contextlib.suppress(OSError):  # it is gone, which is heard of elsewhere
            channel.put(message)


def exit_before_jax() -> None:
    """When this process ends, it ends with status 1 before JAX would wait for those that are gone, and abort then."""

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)

    atexit.register(end)


class Group:
    """The other processes, from when all are there. A thread of its own listens, and says every second that it does."""

    def __init__(self, place: Place, channels: Mapping[int, Channel], on_lost: Callable[[str], None] | None = None):
        """on_lost: told why none can go on, in that thread, and to end this process.

        None: `check` and all that waits here raise it; a call that does not return is ended with the process.
        """
        self.process_id = place.process_id
        self.num_processes = place.num_processes
        self._channels = channels
        self._on_lost = on_lost or self._end_if_stuck
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[int, Agree | ToDo] | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._leaving = False
        self._left = threading.Event()
        self._working = False
        self._thread = threading.Thread(target=self._watch, name="jaxinfer-processes", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why none can go on; None while all live."""
        return self._failure

    def parted(self, error: Exception) -> ProcessLost:
        """What to raise for a step that failed here, and told to the others, which may wait in that step for ever.

        Where another process ended, that is why, and it is known a moment later.
        """
        limit_s = time.monotonic() + REASON_S
        while self._failure is None and time.monotonic() < limit_s:
            time.sleep(REASON_S / 20)
        if self._failure is not None:
            return ProcessLost(self._failure)
        reason = f"a step failed in process {self.process_id}: {type(error).__name__}: {error}"
        self.leave(reason)
        return ProcessLost(reason)

    def check(self) -> None:
        """Raises ProcessLost if a process is lost."""
        if self._failure is not None:
            raise ProcessLost(self._failure)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around what waits for the other processes by ways other than this."""
        self.check()
        self._working = True
        try:
            yield
        finally:
            self._working = False

    def tell(self, message: ToDo | Agree | Left) -> None:
        """Tells all others, or process 0, and waits until the system has taken it."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # the thread that listens knows, too
                with self._sending:
                    sent = channel.put(message)
                while not sent and self._failure is None:
                    time.sleep(1e-3)
                    with self._sending:
                        sent = channel.flush()

    def agree(self, name: str, number: int = 0) -> int:
        """Waits until every process has come to this point, and returns the least of their numbers."""
        if self.process_id:
            self.tell(Agree(name, number))
            return self._agreed(name)[1].number
        waiting = set(self._channels)
        while waiting:
            who, answer = self._agreed(name)
            waiting.discard(who)
            number = min(number, answer.number)
        self.tell(Agree(name, number))
        return number

    def to_do(self) -> Iterator[ToDo]:
        """What process 0 tells to do, until it ends. Raises ProcessLost."""
        while (item := self._inbox.get()) is not None:
            if isinstance(item[1], Agree):
                raise ProcessLost(f"process 0 waits at {item[1].name!r}, which process {self.process_id} has passed")
            yield item[1]
        self.check()

    def leave(self, reason: str | None = None) -> bool:
        """Tells the others that this process ends, and why if they could have gone on. Whether they were all there."""
        if self._leaving or self._failure is not None:
            return False
        self._leaving = True
        self.tell(Left(reason))
        for channel in self._channels.values():
            channel.end()
        self._left.set()  # only now: the thread closes the channels
        return True

    def _agreed(self, name: str) -> tuple[int, Agree]:
        item = self._inbox.get()
        if item is None:
            raise ProcessLost(self._failure or "process 0 has ended")
        who, answer = item
        if not isinstance(answer, Agree) or answer.name != name:
            raise ProcessLost(f"process {self.process_id} waits at {name!r}, but process {who} says {answer}")
        return who, answer

    def _watch(self) -> None:
        now_s = time.monotonic()
        heard = dict.fromkeys(self._channels, now_s)
        with selectors.DefaultSelector() as selector:
            for number, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, number)
            while not self._left.is_set() and self._failure is None:
                before_s = now_s
                ready = selector.select(PING_S)
                now_s = time.monotonic()
                if now_s - before_s > SILENCE_S / 2:  # it was this process that stood still
                    heard = dict.fromkeys(heard, now_s)
                for key, _ in ready:
                    heard[key.data] = now_s
                    self._receive(key.data)
                with self._sending:
                    _tell_all(self._channels, Ping())
                for number, then_s in heard.items():
                    if now_s - then_s > SILENCE_S:
                        self._lose(f"{self._called(number)} has said nothing for {SILENCE_S:g} s")
        with self._sending:
            for channel in self._channels.values():
                channel.close()

    def _receive(self, number: int) -> None:
        try:
            for data in self._channels[number].receive():
                self._take(number, decode(data))
        except EOFError:
            self._lose(f"{self._called(number)} is gone: its connection ended")
        except msgspec.DecodeError as error:
            self._lose(f"{self._called(number)} said what cannot be understood: {error}")

    def _called(self, number: int) -> str:
        return f"process {number} of {self.num_processes}"

    def _take(self, number: int, message: Message) -> None:
        match message:
            case Left(reason=None) if number == 0:
                self._leaving = True
                self._left.set()
                self._inbox.put(None)
            case Left(reason=reason):
                self._lose(f"{self._called(number)} ended: {reason or 'it was told to'}")
            case Agree() | Launch() | Sample() | Reset():
                self._inbox.put((number, message))

    def _lose(self, reason: str) -> None:
        if self._failure is not None or self._leaving:
            return
        self._failure = reason
        with self._sending:
            _tell_all(self._channels, Left(reason))
        self._inbox.put(None)
        self._on_lost(reason)

    def _end_if_stuck(self, reason: str) -> None:
        exit_before_jax()
        time.sleep(STUCK_S)
        if self._working:
            print(f"jaxinfer: {reason}; process {self.process_id} waits for it, and ends", file=sys.stderr, flush=True)
            os._exit(1)
