"""HTTP as uvicorn reads it, but for requests that ask to leave HTTP/1.1 and for what is no HTTP at all."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxinfer.http.errors import HttpError, problem


class Protocol(HttpToolsProtocol):
    """Reads a request with an Upgrade header as if it had none, which is what a server without upgrades has to do.

    httptools takes what follows such a head for another protocol, and so drops the body. Java's HttpClient sends
    `Upgrade: h2c` with every request unless told otherwise.

    A request runs as soon as all that came with its head is read, up to where it has to wait: a task that waits for its
    turn, and then for the body, begins 0.1 ms later in a server with nothing else to do.
    """

    _asks_for_upgrade = False
    _is_reading = False
    _read: tuple[RequestResponseCycle, Any] | None = None  # a request whose head has come, and the application

    def on_headers_complete(self) -> None:
        self._asks_for_upgrade = self.parser.should_upgrade()
        if not self._asks_for_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._asks_for_upgrade:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._is_reading = True
        try:
            self._feed(data)
        finally:
            self._is_reading = False
        if self._read is not None:
            (cycle, application), self._read = self._read, None
            task = asyncio.Task(cycle.run_asgi(application), loop=self.loop, eager_start=True)
            if not task.done():
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._is_reading:
            self._read = cycle, app
        else:  # it waited for the reply to the one before
            super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while True:
                try:
                    return self.parser.feed_data(rest)
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
                    self._read_head_again()
        except httptools.HttpParserError:
            self.send_400_response("this is not an HTTP/1.1 request")

    def _read_head_again(self) -> None:
        """Without the Upgrade header, in a parser that goes on with the body."""
        if self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("this is not a proxy")
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def send_400_response(self, msg: str) -> None:
        body = problem(HttpError(400, msg, code="invalid_http")).body
        head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
        head += b"x-request-id: %s\r\ncontent-length: %d"
        self.transport.write(head % (uuid.uuid4().hex.encode(), len(body)) + b"\r\n\r\n" + body)
        self.transport.close()
