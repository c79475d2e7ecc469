"""A request runs as soon as it is read, however its bytes come and whatever came before it on its connection."""

import asyncio

import pytest
import uvicorn

from jaxinfer.http.protocol import Protocol

HEAD = b"POST /here HTTP/1.1\r\nContent-Length: 4\r\n\r\n"


class Transport(asyncio.Transport):
    """Takes all that is written, and is never full."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Echo:
    """An application that keeps what it read, and replies with it once it may."""

    def __init__(self):
        self.read = []
        self.may_reply = asyncio.Event()
        self.may_reply.set()

    async def __call__(self, scope, receive, send):
        del scope
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.read.append("gone")
                return
            body, more = body + message["body"], message["more_body"]
        self.read.append(body)
        await self.may_reply.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": body})


def serve(scenario):
    async def main():
        application = Echo()
        config = uvicorn.Config(application, http=Protocol, lifespan="off", log_config=None)
        config.load()
        config.loaded_app = application
        server = uvicorn.Server(config)
        protocol, transport = Protocol(config, server.server_state, {}), Transport()
        protocol.connection_made(transport)
        await scenario(protocol, transport, application)
        protocol.connection_lost(None)
        await asyncio.sleep(0.01)
        assert not server.server_state.tasks

    asyncio.run(main())


def test_a_request_that_comes_in_one_piece_is_read_by_the_application_in_the_same_call():
    async def scenario(protocol, transport, application):
        protocol.data_received(HEAD + b"body")
        assert application.read == [b"body"] and transport.written.endswith(b"\r\n\r\nbody")

    serve(scenario)


@pytest.mark.parametrize("cut", range(1, len(HEAD) + 4, 7))
def test_a_request_that_comes_in_two_pieces_is_read_whole(cut):
    async def scenario(protocol, transport, application):
        data = HEAD + b"body"
        protocol.data_received(data[:cut])
        assert not application.read
        protocol.data_received(data[cut:])
        await asyncio.sleep(0.01)
        assert application.read == [b"body"] and transport.written.endswith(b"\r\n\r\nbody")

    serve(scenario)


@pytest.mark.parametrize("waits", [False, True])
def test_requests_that_come_in_one_piece_are_answered_one_after_the_other(waits):
    async def scenario(protocol, transport, application):
        if waits:
            application.may_reply.clear()
        protocol.data_received(HEAD + b"one1" + HEAD + b"two2" + HEAD + b"six6")
        assert application.read[0] == b"one1" and (len(application.read) == 1 or not waits)
        application.may_reply.set()
        await asyncio.sleep(0.01)
        assert application.read == [b"one1", b"two2", b"six6"]
        replies = transport.written.split(b"HTTP/1.1 200 OK")
        assert [reply[-4:] for reply in replies[1:]] == [b"one1", b"two2", b"six6"]

    serve(scenario)


def test_a_client_that_leaves_amid_its_body_ends_the_request():
    async def scenario(protocol, _, application):
        protocol.data_received(HEAD + b"bo")
        protocol.connection_lost(ConnectionResetError())
        await asyncio.sleep(0.01)
        assert application.read == ["gone"]

    serve(scenario)


def test_what_is_no_http_behind_a_head_is_refused_once():
    async def scenario(protocol, transport, _):
        protocol.data_received(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno length")
        assert transport.closed and transport.written.count(b"\r\n\r\n") == 1
        assert transport.written.startswith(b"HTTP/1.1 400")

    serve(scenario)
