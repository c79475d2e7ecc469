"""`jaxinfer agent`: one question with an exit status that means something, and what does not go together."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys

import pytest

from jaxinfer import cli
from jaxinfer.agent import command
from jaxinfer.agent.command import AgentCommand
from jaxinfer.types import InvalidRequest
from tests.agent.scripted import Ending, ScriptedModel, Words, call


def run(model, **options):
    return command.run(AgentCommand(**options), lambda: contextlib.nullcontext(model))


def test_an_answer_is_on_standard_output_and_all_else_beside_it(capsys):
    model = ScriptedModel([Words("Look."), call("python", '{"code": "print(6 * 7)"}')], "42")
    assert run(model, prompt="6 * 7?") == 0
    out, err = capsys.readouterr()
    assert out == "Look.\n42\n"
    assert '[python] {"code": "print(6 * 7)"}' in err and "s] 42" in err
    assert [tool["function"]["name"] for tool in model.tools] == ["shell", "python"]


def test_json_is_one_object_with_the_answer_its_calls_and_its_turns(capsys):
    model = ScriptedModel([call("shell", '{"command": "exit 3"}')], [Words("no"), Ending("stop", 70, 56, 2)])
    assert run(model, prompt="Try.", json=True) == 0
    out, _ = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["model"], answer["answer"], answer["finish"], answer["notices"]) == ("scripted", "no", "answer", [])
    (ended,) = answer["tool_calls"]
    assert (ended["name"], ended["result"], ended["failed"]) == ("shell", "[error: exit status 3]", True)
    assert (answer["turns"][1]["prompt_tokens"], answer["turns"][1]["cached_tokens"]) == (70, 56)


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        ([call("shell", '{"command": "true"}')], 3),
        ([Words("cut"), Ending("length", 1, 1, 1)], 4),
        ("whole", 0),
    ],
)
def test_the_exit_status_tells_how_an_answer_ended(reply, status, capsys):
    assert run(ScriptedModel(reply), prompt="Go.", max_turns=1) == status
    assert ("max_turns" in capsys.readouterr().err) == (status == 3)


def test_without_tools_the_model_is_shown_none(capsys):
    model = ScriptedModel("hi")
    assert run(model, prompt="Hello", no_tools=True) == 0
    assert model.tools == [] and capsys.readouterr() == ("hi\n", "")


def test_without_a_sandbox_the_tools_are_off_and_it_says_why(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    model = ScriptedModel("hi")
    assert run(model, prompt="Hello") == 0
    assert model.tools == []
    told = "tools shell and python are off: bubblewrap (bwrap) is not installed; --unsafe-no-sandbox would run them"
    assert told in capsys.readouterr().err


def test_running_bare_is_asked_for_and_warned_of(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    model = ScriptedModel([call("shell", '{"command": "echo bare"}')], "ok")
    assert run(model, prompt="Run.", unsafe_no_sandbox=True) == 0
    err = capsys.readouterr().err
    assert "no sandbox: the model's commands run as you" in err and "s] bare" in err


def test_a_model_that_cannot_be_shown_tools_answers_without_and_says_so(capsys):
    model = ScriptedModel("hi")
    model.tools_refusal = "its template shows none"
    assert run(model, prompt="Hello") == 0
    assert model.tools == [] and "the tools are off: its template shows none" in capsys.readouterr().err


def test_a_question_can_come_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    model = ScriptedModel("ok")
    assert run(model, prompt="-", no_tools=True) == 0
    assert model.asked[0][-1]["content"] == "from a pipe" and capsys.readouterr().out == "ok\n"


def test_a_session_file_is_gone_on_with(capsys, tmp_path):
    file = str(tmp_path / "session.jsonl")
    assert run(ScriptedModel("one"), prompt="first", no_tools=True, session=file, system="Be brief.") == 0
    model = ScriptedModel("two")
    assert run(model, prompt="second", no_tools=True, session=file) == 0
    assert [message["content"] for message in model.asked[0]] == ["Be brief.", "first", "one", "second"]
    assert capsys.readouterr().out == "one\ntwo\n"


def test_lines_from_a_pipe_are_questions_too(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n/stats\n"))
    assert run(ScriptedModel("one"), no_tools=True) == 0
    out = capsys.readouterr().out
    assert "scripted; /help lists the commands" in out and "one\n" in out and "turn  prompt  cached" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"json": True}, "--json is for one question; give --prompt, too"),
        ({"no_tools": True, "workspace": "x"}, "--no-tools goes with none of"),
        ({"max_turns": 0}, "--max-turns is 0; it must be above 0"),
        ({"tool_timeout_s": -1.0}, "--tool-timeout-s is -1.0; it must be above 0"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_model_is_made(options, told):
    with pytest.raises(InvalidRequest, match=told):
        command.run(AgentCommand(**options), lambda: pytest.fail("a model was made"))


def test_the_command_line_refuses_what_is_not_for_a_url(capsys):
    url = ["agent", "--no-tools", "--prompt", "x", "--url", "http://127.0.0.1:9"]
    assert cli.main([*url, "--page-size", "8"]) == 1
    assert "--page-size is for an engine in this process; with --url there is none" in capsys.readouterr().err
    assert cli.main(["agent", "--no-tools", "--prompt", "x", "--api-key", "k"]) == 1
    assert "--api-key is for the server at --url" in capsys.readouterr().err
    assert cli.main(url) == 1
    out, err = capsys.readouterr()
    assert err.startswith("jaxinfer agent: http://127.0.0.1:9: ") and out == "" and "Traceback" not in err
