"""The agent in a terminal: what is shown, what the commands do, and what an interrupt leaves."""

from __future__ import annotations

import io
import json

import pytest

from jaxinfer import Agent
from jaxinfer.agent import session_file
from jaxinfer.agent.history import INTERRUPTED, Entry, History, Turn
from jaxinfer.agent.model import ModelFailed
from jaxinfer.agent.repl import Repl
from jaxinfer.agent.session_file import Session, SessionFileError
from jaxinfer.agent.terminal import Display, table
from tests.agent.scripted import Ending, ScriptedModel, Thought, Words, call


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


class Screen(io.StringIO):
    """What is written, by a terminal or by something else."""

    def __init__(self, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


def repl(*replies, tools=(double,), is_terminal=False, **options):
    screen = Screen(is_terminal)
    agent = Agent(ScriptedModel(*replies), tools)
    return agent, screen, Repl(agent, Display(screen), **options)


def run(made, *lines):
    _, screen, terminal = made
    terminal.run(iter(lines))
    return screen.getvalue()


def test_words_stream_and_tools_are_shown_on_lines_of_their_own():
    out = run(
        repl([Thought("hm"), Words("See"), call("double", '{"number": 4}')], [Words("It is"), Words(" 8.")]), "4?"
    )
    assert out.startswith('hm\nSee\n[double] {"number": 4}\n[double: 0.0 s] 8\nIt is 8.\n')


def test_colours_are_for_terminals_alone():
    replies = [[Thought("hm"), call("double", '{"number": 4}')], "8"]
    assert "\x1b[" not in run(repl(*replies), "4?")
    out = run(repl(*replies, is_terminal=True), "4?")
    assert "\x1b[2mhm\x1b[0m" in out and "\x1b[36m[double]" in out


def test_neither_the_model_nor_a_tool_can_write_over_the_screen():
    def evil() -> str:
        """Tries."""
        return "\x1b[2Jgone\r\x07 \u202ereversed"

    out = run(repl([Words("\x1b]0;title\x07"), call("evil")], "ok", tools=[evil]), "go")
    assert "\x1b" not in out and "\r" not in out and "\u202e" not in out
    assert "\\x1b]0;title\\x07" in out and "\\x1b[2Jgone" in out


def test_help_names_every_command_and_unknown_ones_are_told():
    made = repl()
    out = run(made, "/help", "/fly")
    for name in ("/help", "/reset", "/tools", "/model", "/stats", "/save", "/load", "/export", "/quit"):
        assert name in out
    assert "there is no command /fly; /help lists them" in out


@pytest.mark.parametrize("last", ["/quit", "quit", "exit", "/exit"])
def test_the_session_ends_when_told_and_blank_lines_ask_nothing(last):
    agent, *_ = made = repl("one")
    run(made, "", "  ", "first", last, "second")
    assert [entry.message["content"] for entry in agent.history.entries] == ["first", "one"]


def test_reset_tools_and_model():
    agent, *_ = made = repl("one")
    out = run(made, "first", "/tools", "/model", "/reset")
    assert "double: Doubles a number." in out and "\nscripted\n" in out and "is forgotten" in out
    assert agent.history.entries == []
    assert "there are no tools" in run(repl(tools=()), "/tools")


def test_stats_show_tokens_cache_and_times_of_every_turn():
    first = [Words("x"), call("double", '{"number": 4}'), Ending("tool_calls", 50, 0, 7)]
    out = run(repl(first, [Words("8"), Ending("stop", 70, 56, 2)]), "/stats", "4?", "/stats")
    assert out.startswith("there are no turns yet")
    rows = [line.split() for line in out.splitlines()[-4:]]
    assert rows[0][:4] == ["turn", "prompt", "cached", "reply"]
    assert [row[:4] for row in rows[1:]] == [["1", "50", "0", "7"], ["2", "70", "56", "2"], ["all", "120", "56", "9"]]
    assert rows[1][6] == "1" and float(rows[1][7]) >= 0


def test_a_count_that_the_model_does_not_say_is_a_dash_and_so_is_its_sum():
    rows = table([Turn(prompt_tokens=5), Turn(prompt_tokens=6, cached_tokens=3)]).splitlines()
    assert rows[1].split()[:3] == ["1", "5", "-"] and rows[-1].split()[:3] == ["all", "11", "-"]


def test_an_interrupt_stops_the_turn_and_keeps_the_session():
    agent, *_ = made = repl([Words("Once"), KeyboardInterrupt()], "two")
    out = run(made, "first", "second")
    assert "[stopped" not in out and "stopped; the session is kept" in out and out.endswith("two\n")
    assert [entry.message["content"] for entry in agent.history.entries] == [
        *("first", f"Once {INTERRUPTED}"),
        *("second", "two"),
    ]


def test_an_interrupt_while_words_are_written_stops_the_turn_too():
    agent, _, terminal = repl([Words("Once"), Words("upon")], "two")
    shown = terminal._display.show

    def show(event):
        shown(event)
        if event == Words("Once"):
            raise KeyboardInterrupt

    terminal._display.show = show
    terminal.run(iter(["first", "second"]))
    assert agent.history.entries[1].message["content"] == f"Once {INTERRUPTED}"
    assert agent.history.entries[-1].message["content"] == "two"


def test_a_failure_is_shown_and_the_session_goes_on():
    out = run(repl(ModelFailed("the server is gone"), "two"), "first", "second")
    assert "error: the server is gone\ntwo\n" in out


def test_a_session_is_saved_with_token_counts_and_gone_on_with(tmp_path):
    file = tmp_path / "session.jsonl"
    made = repl([call("double", '{"number": 4}')], [Words("8 é\u2028"), Ending("stop", 70, 56, 2)])
    out = run(made, "twice 4?", f"/save {file}", "/save")
    assert f"saved {file}" in out and "/save needs the name of a file" in out
    head, *lines = [json.loads(line) for line in file.read_text().rstrip().split("\n")]
    assert (head["format"], head["version"], head["model"]) == ("jaxinfer-agent-session", 1, "scripted")
    assert [line["message"]["role"] for line in lines] == ["user", "assistant", "tool", "assistant"]
    assert (lines[-1]["turn"]["prompt_tokens"], lines[-1]["turn"]["cached_tokens"]) == (70, 56)
    assert file.stat().st_mode & 0o777 == 0o600
    agent, *_ = other = repl("again")
    assert "loaded 4 messages, answered by scripted" in run(other, f"/load {file}", "and 5?")
    assert agent.history.entries[:4] == made[0].history.entries
    assert [message["content"] for message in agent.model.asked[0][-2:]] == ["8 é\u2028", "and 5?"]


def test_a_named_session_is_saved_after_every_answer(tmp_path):
    file = tmp_path / "session.jsonl"
    run(repl("one", ModelFailed("gone"), session=file), "first", "second")
    assert [entry.message["content"] for entry in session_file.load(file).history.entries] == ["first", "one"]


def test_an_export_shows_calls_and_results_in_fences_that_hold(tmp_path):
    def read() -> str:
        """Reads."""
        return "```\ncode"

    file = tmp_path / "talk.md"
    run(repl([Words("Look."), call("read")], "done", tools=[read]), "show", f"/export {file}")
    text = file.read_text()
    assert text.startswith("# Conversation with scripted\n\n**User**\n\nshow\n")
    assert "Calls `read`:\n\n```\n{}\n```\n" in text and "**Tool `read`**\n\n````\n```\ncode\n````\n" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: '' is no JSON object"),
        ('{"format": "other"}\n', "is no session of version 1"),
        ("HEAD\nnope\n", "line 2: 'nope' is no JSON object"),
        ('HEAD\n{"message": {"role": "king", "content": ""}}\n', "line 2: no message of user, assistant, tool"),
        ('HEAD\n{"message": {"role": "user", "content": 3}}\n', "line 2: its content is no text"),
        ('HEAD\n{"message": {"role": "user", "content": ""}, "turn": {"x": 1}}\n', "line 2: "),
    ],
)
def test_a_file_that_is_no_session_is_refused_with_its_line(tmp_path, text, told):
    file = tmp_path / "session.jsonl"
    file.write_text(text.replace("HEAD", json.dumps({"format": session_file.FORMAT, "version": 1})))
    with pytest.raises(SessionFileError) as caught:
        session_file.load(file)
    assert told in str(caught.value)
    assert "error: " in run(repl(), f"/load {file}")
    assert "No such file" in run(repl(), "/load /no/such/file")


def test_a_session_that_cannot_be_written_leaves_what_was_there(tmp_path):
    file = tmp_path / "session.jsonl"
    session_file.save(file, Session("m", None, History([Entry({"role": "user", "content": "kept"})])))
    with pytest.raises(TypeError):
        session_file.save(file, Session("m", None, History([Entry({"role": "user", "content": object()})])))
    assert [path.name for path in tmp_path.iterdir()] == ["session.jsonl"]
    assert session_file.load(file).history.entries[0].message["content"] == "kept"
