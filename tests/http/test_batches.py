"""/v1/files and /v1/batches: as OpenAI's client uses them, over restarts, cancelled, and refused."""

import gzip
import http.client
import json

import openai
import pytest

from jaxinfer.config import ConfigError, ServerConfig
from jaxinfer.http import batches
from jaxinfer.http.batch_store import BatchStore
from tests.batch.made import batch_row
from tests.http.conftest import Server, wait_for
from tests.http.fake_engine import FakeEngine


@pytest.fixture
def start(text_parts, tmp_path):
    """Starts servers over one folder; they end with the test."""
    servers = []

    def start(**behaviour):
        tokenizer, template = text_parts
        engine = FakeEngine(tokenizer, **behaviour)
        config = ServerConfig(port=0, batch_dir=str(tmp_path / "batches"))
        servers.append(Server(engine, tokenizer, template, config))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def upload(server, rows):
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return server.openai.files.create(file=("rows.jsonl", lines.encode()), purpose="batch")


def begin(server, rows, endpoint="/v1/completions", **options):
    return server.openai.batches.create(
        input_file_id=upload(server, rows).id, endpoint=endpoint, completion_window="24h", **options
    )


def wait_for_state(server, batch, *states):
    wait_for(lambda: server.openai.batches.retrieve(batch.id).status in states, limit_s=20)
    return server.openai.batches.retrieve(batch.id)


def lines_of(server, file_id):
    return [json.loads(line) for line in server.openai.files.content(file_id).text.splitlines()]


def rows(count, **body):
    return [batch_row(f"row-{i}", **body) for i in range(count)]


def test_a_batch_is_answered_in_one_file_and_its_bad_rows_in_another(start):
    server = start()
    batch = begin(server, [*rows(20), "{broken", batch_row("wrong", temperature=-1), *rows(1)], metadata={"a": "b"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"a": "b"})
    done = wait_for_state(server, batch, "completed", "failed")
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (23, 20, 3)
    answers = lines_of(server, done.output_file_id)
    assert [line["custom_id"] for line in answers] == [f"row-{i}" for i in range(20)]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == "the cat sat"
    errors = lines_of(server, done.error_file_id)
    assert [line["custom_id"] for line in errors] == [None, "wrong", "row-0"]
    assert errors[1]["response"]["body"]["error"]["param"] == "temperature"
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.expires_at == done.created_at + 24 * 3600
    assert list((server.app.batches._store.folder / "jobs").iterdir()) == []


def test_a_line_of_the_output_has_the_fields_that_openai_gives_it(start):
    """B12.3."""
    server = start()
    done = wait_for_state(server, begin(server, [*rows(1), batch_row("wrong", temperature=-1)]), "completed", "failed")
    (line,) = lines_of(server, done.output_file_id)
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert (line["custom_id"], line["error"]) == ("row-0", None) and line["id"].startswith("batch_req_")
    assert line["response"].keys() == {"status_code", "request_id", "body"}
    assert line["response"]["status_code"] == 200 and line["response"]["body"]["object"] == "text_completion"
    (error,) = lines_of(server, done.error_file_id)
    assert error.keys() == line.keys() and error["response"]["status_code"] == 400


@pytest.mark.parametrize("content", [b"\x1f\x8bnonsense", gzip.compress(b'{"prompt": "Hello"}\n' * 50)[:40]])
def test_a_file_that_cannot_be_unpacked_fails_its_batch_without_a_path_of_the_server(start, tmp_path, content):
    server = start()
    file = server.openai.files.create(file=("rows.jsonl.gz", content), purpose="batch")
    batch = server.openai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    (error,) = wait_for_state(server, batch, "failed").errors.data
    assert error.code == "invalid_file" and f"{file.id} is no whole gzip file" in error.message
    assert str(tmp_path) not in server.http.get(f"/v1/batches/{batch.id}").text


def test_a_batch_goes_on_after_a_restart_and_each_row_is_answered_once(start):
    first = start()
    first.engine.gate.clear()
    held = begin(first, rows(300))
    wait_for(lambda: len(first.engine.running) == 2 * first.engine.info.max_num_seqs)
    waiting = begin(first, rows(2))
    first.engine.gate.set()
    wait_for(lambda: len(first.engine.requests) > 100)
    first.engine.gate.clear()
    first.close()
    second = start()
    done = wait_for_state(second, held, "completed")
    assert [line["custom_id"] for line in lines_of(second, done.output_file_id)] == [f"row-{i}" for i in range(300)]
    assert 0 < len(second.engine.requests) < 300 + 2, "nothing was kept of what was done"
    assert wait_for_state(second, waiting, "completed").request_counts.completed == 2


def test_a_cancelled_batch_keeps_what_is_done(start):
    server = start()
    server.engine.gate.clear()
    batch = begin(server, rows(40))
    wait_for(lambda: len(server.engine.running) > 0)
    server.engine.step_s = 0.002
    server.engine.gate.set()
    wait_for(lambda: len(server.engine.requests) > 20)
    server.engine.gate.clear()
    assert server.openai.batches.cancel(batch.id).status == "cancelling"
    done = wait_for_state(server, batch, "cancelled")
    assert server.engine.running == set()
    counts = done.request_counts
    assert 0 < counts.completed < counts.total == 40
    assert [line["custom_id"] for line in lines_of(server, done.output_file_id)] == [
        f"row-{i}" for i in range(counts.completed)
    ]
    with pytest.raises(openai.ConflictError, match="the batch is cancelled and cannot be cancelled"):
        server.openai.batches.cancel(batch.id)


def test_rows_of_a_batch_wait_behind_those_of_clients(start):
    server = start()
    batch = begin(server, [*rows(1), batch_row("first", priority=-5)])
    wait_for_state(server, batch, "completed")
    server.complete()
    assert [request.priority for request in server.engine.requests] == [1, -5, 0]


def test_a_batch_whose_file_has_no_rows_fails_and_says_so(start):
    server = start()
    done = wait_for_state(server, begin(server, []), "failed")
    assert done.errors.data[0].code == "empty_file"


def test_rows_for_another_endpoint_are_errors(start):
    server = start()
    batch = begin(server, rows(1), endpoint="/v1/chat/completions")
    done = wait_for_state(server, batch, "completed")
    assert done.output_file_id is None
    assert lines_of(server, done.error_file_id)[0]["error"]["code"] == "invalid_url"


def test_of_two_servers_over_one_folder_one_runs_the_batches_and_both_show_them(start):
    first, second = start(), start()
    batch = begin(second, rows(10))
    done = wait_for_state(second, batch, "completed")
    assert len(first.engine.requests) + len(second.engine.requests) == 10
    assert [] in (first.engine.requests, second.engine.requests)
    assert lines_of(first, done.output_file_id) == lines_of(second, done.output_file_id)


def test_files_are_listed_newest_first_shown_and_deleted(start):
    server = start()
    files = [upload(server, rows(i + 1)) for i in range(3)]
    listed = server.openai.files.list(limit=2)
    assert [file.id for file in listed.data] == [files[2].id, files[1].id]
    assert [file.id for file in listed] == [file.id for file in reversed(files)], "the pages do not join"
    assert server.openai.files.retrieve(files[0].id) == files[0]
    assert files[0].bytes == len(json.dumps(rows(1)[0])) + 1
    assert server.openai.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        server.openai.files.retrieve(files[0].id)
    assert [file.id for file in server.openai.files.list(purpose="batch_output").data] == []


def test_batches_are_listed_newest_first(start):
    server = start()
    begun = [begin(server, rows(1)) for _ in range(3)]
    assert [batch.id for batch in server.openai.batches.list(limit=2).data] == [begun[2].id, begun[1].id]
    assert [batch.id for batch in server.openai.batches.list(limit=2)] == [batch.id for batch in reversed(begun)]


def error_of(reply):
    return reply.json()["error"]


GOOD_BODY = {"endpoint": "/v1/completions", "completion_window": "24h"}
WRONG_BATCHES = [
    ({"endpoint": "/v1/embeddings"}, "endpoint", "endpoint is '/v1/embeddings'; supported: "),
    ({"completion_window": "1h"}, "completion_window", "completion_window is '1h'; supported: 24h"),
    ({"input_file_id": "file-none"}, "input_file_id", "there is no file 'file-none'"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "metadata has 17 entries; at most 16"),
    ({"colour": "red"}, None, "unknown field `colour`"),
    ({"endpoint": 7}, None, "Expected `str`, got `int`"),
]


@pytest.mark.parametrize(("change", "param", "message"), WRONG_BATCHES)
def test_a_batch_that_cannot_be_run_is_refused(start, change, param, message):
    server = start()
    body = GOOD_BODY | {"input_file_id": upload(server, rows(1)).id} | change
    reply = server.http.post("/v1/batches", json=body)
    assert reply.status_code == 400
    error = error_of(reply)
    assert error["param"] == param
    assert message in error["message"]


def test_uploads_that_are_none_are_refused(start):
    server = start()
    post = server.http.post
    assert (
        "purpose is 'fine-tune'"
        in error_of(post("/v1/files", files={"file": b""}, data={"purpose": "fine-tune"}))["message"]
    )
    assert "purpose is None" in error_of(post("/v1/files", files={"file": b""}))["message"]
    assert "file is missing" in error_of(post("/v1/files", files={"other": b""}, data={"purpose": "batch"}))["message"]
    assert post("/v1/files", json={}).status_code == 415
    assert post("/v1/files", content=iter([b"x"])).status_code == 411
    assert post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data"}).status_code == 400
    connection = http.client.HTTPConnection(server.http.base_url.host, server.http.base_url.port, timeout=10)
    big = {"Content-Length": str(2**40), "Content-Type": "multipart/form-data; boundary=x"}
    connection.request("POST", "/v1/files", body=b"x", headers=big)
    assert connection.getresponse().status == 413
    connection.close()
    assert server.openai.files.list().data == []


@pytest.mark.parametrize("path", ["/v1/files/none", "/v1/files/none/content", "/v1/batches/none", "/v1/files/..%2Fx"])
def test_what_is_not_there_is_not_found(start, path):
    assert start().http.get(path).status_code == 404


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "²"])
def test_a_limit_out_of_range_is_refused(start, limit):
    server = start()
    for path in ("/v1/files", "/v1/batches"):
        assert server.http.get(path, params={"limit": limit}).status_code == 400


def test_without_a_folder_the_server_has_neither_files_nor_batches(text_parts):
    tokenizer, template = text_parts
    server = Server(FakeEngine(tokenizer), tokenizer, template)
    try:
        assert server.http.get("/v1/files").status_code == 404
        assert server.http.get("/v1/batches").status_code == 404
    finally:
        server.close()


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="batch_dir is .* and cannot be used"):
        BatchStore(tmp_path / "file")


def test_what_is_not_begun_when_the_time_is_over_expires(start, monkeypatch):
    monkeypatch.setitem(batches.WINDOWS_S, "24h", 0)
    server = start()
    done = wait_for_state(server, begin(server, rows(3)), "expired", "completed", "failed")
    assert done.status == "expired"
    assert (done.output_file_id, done.request_counts.failed) == (None, 3)
    assert {line["error"]["code"] for line in lines_of(server, done.error_file_id)} == {"batch_expired"}
    assert server.engine.requests == []
