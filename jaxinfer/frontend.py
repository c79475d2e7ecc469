"""A front end's process: joins HTTP, text and the engine's channel. Never loads JAX: that would take 2 s and 150 MB."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import uvloop

from jaxinfer.allocator import keep_freed_memory
from jaxinfer.engine.client import EngineClient
from jaxinfer.http.control import Control, Setup
from jaxinfer.http.counters import Counters
from jaxinfer.http.response_store import ResponseStore
from jaxinfer.http.server import create_app
from jaxinfer.http.supervisor import FrontEnds
from jaxinfer.http.worker import Worker
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class Descriptors(NamedTuple):
    """What a front end inherits, besides its control socket."""

    engine: int
    setup: int
    counters: int
    row: int  # of the counters
    num_rows: int
    responses_path: str  # of the file in which all of them keep responses


def start(setup: Setup, channels: Sequence[socket.socket]) -> FrontEnds:
    """Starts a front end for each channel to the engine; closes the channels here."""
    counters = Counters.make_file(len(channels))
    scratch = tempfile.TemporaryDirectory(prefix="jaxinfer-", dir=_in_memory())
    responses_path = os.path.join(scratch.name, "responses")
    described = os.memfd_create("jaxinfer-setup")
    try:
        with open(described, "wb", closefd=False) as file:
            file.write(_encode(setup))
        commands, fds = [], []
        for row, channel in enumerate(channels):
            inherited = Descriptors(channel.fileno(), described, counters, row, len(channels), responses_path)
            commands.append([sys.executable, "-m", __name__, _encode(inherited).decode()])
            fds.append([channel.fileno(), described, counters])
        return FrontEnds(commands, fds, scratch)
    except BaseException:
        scratch.cleanup()
        raise
    finally:
        for channel in channels:
            channel.close()
        os.close(counters)
        os.close(described)


def main(descriptors: str, control_fd: str) -> None:
    """Serves until the supervisor wishes it to stop."""
    # A terminal and a service manager send their signals to every process of a server; the supervisor passes them on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    inherited = msgspec.json.decode(descriptors, type=Descriptors)
    setup = _read_setup(inherited.setup)
    worker = Worker(Control(socket.socket(fileno=int(control_fd))))
    tokenizer = None if setup.tokenizer_json is None else Tokenizer(setup.tokenizer_json, setup.tokenizer_config)
    template = ChatTemplate.from_config(setup.tokenizer_config, setup.server.chat_template)
    responses = ResponseStore(inherited.responses_path)  # now: once all have started its name is gone
    info = worker.wait_for_engine()
    app = create_app(
        EngineClient(socket.socket(fileno=inherited.engine), info, lambda: worker.engine_failure),
        tokenizer,
        template,
        setup.server,
        counters=Counters(inherited.counters, inherited.num_rows, inherited.row),
        created_s=setup.created_s,
        responses=responses,
    )
    # What was made until now stays: looked through again by every full collection, it would hold up all streams.
    gc.collect()
    gc.freeze()
    keep_freed_memory()
    asyncio.run(worker.serve(app, setup.grace_s), loop_factory=uvloop.new_event_loop)


def _in_memory() -> str | None:
    """A folder whose files are in memory; None: where temporary files are otherwise."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def _read_setup(fd: int) -> Setup:
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:  # not read(): all front ends share the file's position
        return msgspec.json.decode(data, type=Setup)


if __name__ == "__main__":
    main(*sys.argv[1:])
