"""What a row asks for, and every way in which it can be at fault."""

from __future__ import annotations

import pytest

from tests.batch.made import CHAT, COMPLETIONS, CREATED_S, batch_row, read_lines, run_job, text_of, write_lines

GOOD = batch_row("good")
NO_REQUEST = {
    '{"custom_id": "broken", ': ("invalid_json", "line 1 is not valid JSON"),
    '{"custom_id": "\\ud800"}': ("invalid_json", "line 1 is not valid JSON"),
    "[" * 5000: ("invalid_json", "line 1 is not valid JSON"),
    "[1, 2]": ("invalid_json", "line 1 is a list; an object is needed"),
    '{"max_tokens": 3}': ("missing_field", "line 1: there is no prompt, no messages and no body"),
    '{"custom_id": 7, "prompt": "cat"}': ("invalid_custom_id", "line 1: custom_id is 7; some text is needed"),
    '{"custom_id": "", "prompt": "cat"}': ("invalid_custom_id", "line 1: custom_id is ''; some text is needed"),
}
WRONG_FIELDS = [
    ({"custom_id": None}, "missing_field", "custom_id is missing"),
    ({"method": None}, "missing_field", "method is missing"),
    ({"url": None}, "missing_field", "url is missing"),
    ({"body": None}, "missing_field", "body is missing"),
    ({"method": "GET"}, "invalid_method", "method is 'GET'; it must be 'POST'"),
    ({"url": "/v1/embeddings"}, "invalid_url", "url is '/v1/embeddings'; known: /v1/chat/completions, /v1/completions"),
    ({"url": ["/v1"]}, "invalid_url", "url is ['/v1']"),
    ({"body": "cat"}, "invalid_body", "body is a str; an object is needed"),
    ({"bodies": {}}, "unknown_field", "bodies is not a field of a batch's row"),
]
WRONG_BODIES = [
    ({"temperature": -1}, 400, "temperature", "temperature is -1.0"),
    ({"temperature": "hot"}, 400, "temperature", "temperature: expected float | null, got str"),
    ({"max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
    ({"colour": "red"}, 400, "colour", "colour is not a supported field"),
    ({"prompt": ""}, 400, "prompt", "prompt is empty"),
    ({"prompt": "the cat " * 100}, 400, "prompt", "the limit is 64 tokens"),
    ({"prompt": [1, 999999]}, 400, "prompt", "token id 999999"),
    ({"model": "gpt-4"}, 404, "model", "the model 'gpt-4' is not served here"),
    ({"stream": True}, 400, "stream", "stream is true; a row of a batch has one reply"),
    ({"n": 1000}, 400, "n", "at most 128 choices"),
]


def run_with_good_rows(tmp_path, row):
    """The line of a row between two others, which must be answered."""
    source = write_lines(tmp_path / "in.jsonl", [row, GOOD, batch_row("last")])
    journal = run_job(source, tmp_path / "out.jsonl")
    line, good, last = read_lines(tmp_path / "out.jsonl")
    assert [good["custom_id"], last["custom_id"]] == ["good", "last"]
    assert good["response"]["status_code"] == last["response"]["status_code"] == 200
    assert journal.counts.num_failed == 1
    assert line["id"].startswith("batch_req_")
    return line


@pytest.mark.parametrize("row", NO_REQUEST)
def test_a_row_that_is_no_request_becomes_an_error_that_names_its_line(tmp_path, row):
    code, message = NO_REQUEST[row]
    line = run_with_good_rows(tmp_path, row)
    assert line["response"] is None
    assert line["error"]["code"] == code
    assert message in line["error"]["message"]


@pytest.mark.parametrize(("change", "code", "message"), WRONG_FIELDS)
def test_a_row_with_a_wrong_field_becomes_an_error_that_names_the_field(tmp_path, change, code, message):
    row = {name: value for name, value in (batch_row("wrong") | change).items() if value is not None}
    line = run_with_good_rows(tmp_path, row)
    assert line["custom_id"] == row.get("custom_id")
    assert line["response"] is None
    assert line["error"]["code"] == code
    assert line["error"]["message"].startswith("line 1: ")
    assert message in line["error"]["message"]


@pytest.mark.parametrize(("change", "status", "param", "message"), WRONG_BODIES)
def test_a_row_that_the_server_would_refuse_has_the_reply_that_the_server_would_give(
    tmp_path, change, status, param, message
):
    line = run_with_good_rows(tmp_path, batch_row("wrong", **change))
    assert line["custom_id"] == "wrong"
    assert line["error"] is None
    assert line["response"]["status_code"] == status
    assert line["response"]["body"]["error"]["param"] == param
    assert message in line["response"]["body"]["error"]["message"]


def test_of_the_rows_with_one_custom_id_the_first_is_answered(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [batch_row("a"), batch_row("b"), batch_row("a"), batch_row("a")])
    run_job(source, tmp_path / "out.jsonl", options={"shuffle_seed": 1})
    lines = read_lines(tmp_path / "out.jsonl")
    answered = [line["custom_id"] for line in lines if line["response"]]
    errors = sorted(line["error"]["message"] for line in lines if line["error"])
    assert sorted(answered) == ["a", "b"]
    assert errors == [f"line {n}: custom_id is 'a', like that of row 1" for n in (3, 4)]


def test_a_url_other_than_that_of_the_whole_batch_is_an_error(tmp_path):
    chat = batch_row("chat", CHAT, messages=[{"role": "user", "content": "cat"}], max_tokens=2)
    run_job([chat, GOOD], tmp_path / "out.jsonl", url=COMPLETIONS)
    wrong, good = read_lines(tmp_path / "out.jsonl")
    assert wrong["error"]["code"] == "invalid_url"
    assert good["response"]["status_code"] == 200


def test_an_answered_row_has_the_reply_of_the_server_and_nothing_that_differs_from_run_to_run(tmp_path):
    messages = [{"role": "user", "content": "cat"}]
    rows = [batch_row("a"), batch_row("b", CHAT, messages=messages, max_tokens=3, logprobs=True, top_logprobs=1)]
    run_job(rows, tmp_path / "out.jsonl")
    text, chat = read_lines(tmp_path / "out.jsonl")
    for line, kind, prefix in ((text, "text_completion", "cmpl-"), (chat, "chat.completion", "chatcmpl-")):
        body = line["response"]["body"]
        name = line["id"].removeprefix("batch_req_")
        assert body["id"] == prefix + name
        assert line["response"]["request_id"] == f"req_{name}"
        assert (body["object"], body["created"]) == (kind, CREATED_S)
        assert body["usage"]["completion_tokens"] == 3
        assert "prompt_tokens_details" not in body["usage"]
        assert line["error"] is None
    assert text_of(text) == "the cat sat"
    assert len(chat["response"]["body"]["choices"][0]["logprobs"]["content"]) == 3


def test_a_row_without_the_batch_format_is_a_prompt_or_messages_with_fields_of_the_body(tmp_path):
    rows = [
        {"prompt": "the cat", "max_tokens": 2},
        {"custom_id": "mine", "messages": [{"role": "user", "content": "cat"}], "max_tokens": 1},
        {"prompt": [5, 6, 7], "max_tokens": 1, "n": 2},
    ]
    run_job(rows, tmp_path / "out.jsonl")
    text, chat, ids = read_lines(tmp_path / "out.jsonl")
    assert (text["custom_id"], text_of(text)) == (None, "the cat")
    assert (chat["custom_id"], text_of(chat)) == ("mine", "the")
    assert ids["response"]["body"]["usage"]["prompt_tokens"] == 3
    assert len(ids["response"]["body"]["choices"]) == 2
