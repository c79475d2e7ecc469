"""scripts/load_client.py: one connection against servers that behave in every way that HTTP allows."""

import asyncio
import json

import pytest
from load_client import Connection, Workload

TOKEN = b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
ANSWER = [CHUNKED, TOKEN, TOKEN, USAGE, b""]


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def parts(answer):
    """What is sent: a head as it stands, then chunks; the empty one ends the body."""
    return [answer[0], *map(chunk, answer[1:])]


async def talk(serve, num_requests, pause_s=0.0):
    """Requests one after another on one Connection; `serve(number, writer)` answers, numbered over all connections."""
    numbers = iter(range(100))
    connections = []

    async def on_connect(reader, writer):
        connections.append(writer)
        while head := (await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            if await serve(next(numbers), writer):
                writer.close()
                return

    async def guarded(reader, writer):
        try:
            await on_connect(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    connection = Connection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    measured = []
    for _ in range(num_requests):
        measured.append(await asyncio.wait_for(connection.complete(b"{}"), 10))
        await asyncio.sleep(pause_s)
    connection.close()
    server.close()
    for writer in connections:
        writer.close()
    await asyncio.sleep(0.01)
    return measured, len(connections)


def send(pieces, *, close=False):
    async def serve(_, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        return close

    return serve


def assert_good(one):
    assert one.error is None and not one.cut
    assert (len(one.events_s), one.prompt_tokens, one.completion_tokens) == (2, 5, 2)
    assert one.sent_s < one.events_s[0] <= one.events_s[1]


def test_a_connection_is_used_again():
    measured, num_connections = asyncio.run(talk(send(parts(ANSWER)), 3))
    assert num_connections == 1
    for one in measured:
        assert_good(one)


def test_events_may_be_split_anywhere():
    whole = b"".join(parts(ANSWER))
    for size in (1, 7, 60, 1000):
        (one,), _ = asyncio.run(talk(send([whole[i : i + size] for i in range(0, len(whole), size)]), 1))
        assert_good(one)


def test_a_server_may_close_after_every_answer():
    measured, num_connections = asyncio.run(talk(send(parts(ANSWER), close=True), 3, pause_s=0.05))
    assert num_connections == 3
    for one in measured:
        assert_good(one)


def test_a_request_that_met_an_idle_connection_being_closed_is_sent_again():
    async def serve(number, writer):
        if number == 1:
            return True  # closed without an answer
        return await send(parts(ANSWER))(number, writer)

    measured, num_connections = asyncio.run(talk(serve, 2))
    assert num_connections == 2
    for one in measured:
        assert_good(one)


def test_an_answer_may_end_with_its_connection():
    pieces = [HEAD + b"connection: close\r\n\r\n", TOKEN, TOKEN, USAGE]
    (one,), _ = asyncio.run(talk(send(pieces, close=True), 1))
    assert_good(one)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"], "HTTP 503: busy"),
        (parts([CHUNKED, TOKEN, b'data: {"error": {"message": "NaN"}}\n\n', b""]), "{'message': 'NaN'}"),
        (parts([CHUNKED, b"data: [DONE]\n\n", b""]), "the stream held no event"),
        (parts([CHUNKED, TOKEN]), "the server closed the connection"),
        ([b"garbage\r\n\r\n"], "not HTTP: "),
    ],
)
def test_what_goes_wrong_is_in_the_result(pieces, error):
    (one,), _ = asyncio.run(talk(send(pieces, close=True), 1))
    assert one.error is not None and one.error.startswith(error)


def test_prompts_have_no_prefix_in_common_and_are_the_same_in_every_run():
    workload = Workload(
        base_url="http://127.0.0.1:1",
        model="m",
        input_len=50,
        output_len=100,
        num_prompts=3,
        warmup=0,
        concurrency=1,
        request_rate=None,
        vocab_size=32000,
        seed=0,
        max_seconds=1.0,
        extra_body={"top_k": 1},
    )
    bodies = [json.loads(workload.payload(number)) for number in (0, 1, -1)]
    assert len({body["prompt"][0] for body in bodies}) == 3
    assert all(len(body["prompt"]) == 50 and body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    assert (bodies[0]["model"], bodies[0]["top_k"], bodies[0]["max_tokens"]) == ("m", 1, 100)
    assert workload.payload(0) == workload.payload(0)
    short = json.loads(workload.payload(0, short=True))
    assert (len(short["prompt"]), short["max_tokens"]) == (16, 16)
