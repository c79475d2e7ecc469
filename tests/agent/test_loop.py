"""The agent's loop with a scripted model: every way that a question can go."""

from __future__ import annotations

import pytest

from jaxinfer import Agent
from jaxinfer.agent.history import INTERRUPTED, STOPPED, UNREADABLE
from jaxinfer.agent.loop import Notice
from jaxinfer.agent.model import ModelFailed
from jaxinfer.types import InvalidRequest, SamplingParams
from tests.agent.scripted import Ending, ScriptedModel, Thought, Words, call


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def shout(text: str) -> str:
    """Repeats a text in capitals."""
    return text.upper()


def roles(agent):
    return [entry.message["role"] for entry in agent.history.entries]


def contents(agent):
    return [entry.message.get("content") for entry in agent.history.entries]


def test_a_question_without_calls_is_one_turn():
    model = ScriptedModel([Thought("hm"), Words("Par"), Words("is.")])
    agent = Agent(model, system="Be brief.")
    answer = agent.ask("Capital?")
    assert (answer.text, answer.finish, len(answer.turns)) == ("Paris.", "answer", 1)
    assert (answer.calls, answer.notices) == ((), ())
    assert model.asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}]]
    reply = agent.history.entries[-1].message
    assert reply == {"role": "assistant", "content": "Paris.", "reasoning_content": "hm"}


def test_calls_run_in_the_order_given_and_their_results_are_in_the_next_prompt():
    ran = []

    def note(what: str) -> str:
        """Notes something."""
        ran.append(what)
        return f"noted {what}"

    calls = [call("note", '{"what": "b"}', 0), call("note", '{"what": "a"}', 1)]
    model = ScriptedModel(calls, "done")
    answer = Agent(model, [note]).ask("Note b, then a.")
    assert ran == ["b", "a"]
    assert (answer.text, answer.finish, len(answer.turns)) == ("done", "answer", 2)
    asked, results = model.asked[1][-3], model.asked[1][-2:]
    assert [one["function"]["arguments"] for one in asked["tool_calls"]] == ['{"what": "b"}', '{"what": "a"}']
    assert "content" not in asked
    assert [(one["tool_call_id"], one["content"]) for one in results] == [
        ("call_note_0", "noted b"),
        ("call_note_1", "noted a"),
    ]


def test_events_come_in_the_order_in_which_things_happen():
    model = ScriptedModel([Words("Let me see."), call("double", '{"number": 4}')], "8")
    events = [type(event) for event in Agent(model, [double]).run("Twice 4?")]
    assert [kind.__name__ for kind in events] == ["Words", "Call", "ToolEnded", "Turn", "Words", "Turn", "Answer"]


def test_history_is_kept_across_questions_and_a_reset_forgets_it():
    model = ScriptedModel("one", "two", "three")
    agent = Agent(model)
    agent.ask("first")
    agent.ask("second")
    assert [message["content"] for message in model.asked[1]] == ["first", "one", "second"]
    assert len(agent.turns) == 2
    agent.reset()
    agent.ask("third")
    assert [message["content"] for message in model.asked[2]] == ["third"]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("triple", "{}", "there is no tool 'triple'; the tools are: double"),
        ("double", '{"number": "four"}', "Expected `int`, got `str` - at `$.number`"),
        ("double", "{}", "missing required field `number`"),
        ("double", '{"number": 1, "x": 2}', "unknown field `x`"),
        ("double", '{"number": 1', "not valid JSON"),
        ("double", "[1]", "must be a JSON object"),
    ],
)
def test_a_call_that_does_not_fit_is_told_to_the_model_which_goes_on(name, arguments, told):
    model = ScriptedModel([call(name, arguments)], [call("double", '{"number": 4}')], "8")
    answer = Agent(model, [double]).ask("Twice 4?")
    assert (answer.text, [ended.result.failed for ended in answer.calls]) == ("8", [True, False])
    result = model.asked[1][-1]["content"]
    assert result.startswith("error: ") and told in result


def test_arguments_that_are_no_object_are_not_shown_again_since_they_would_spoil_every_later_prompt():
    model = ScriptedModel([call("double", '{"number')], "sorry")
    Agent(model, [double]).ask("Twice 4?")
    assert model.asked[1][-2]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_tool_that_raises_is_told_and_the_loop_goes_on():
    def broken() -> str:
        """Never works."""
        raise KeyError("nothing here")

    answer = Agent(ScriptedModel([call("broken")], "too bad"), [broken]).ask("Try.")
    (ended,) = answer.calls
    assert (answer.text, ended.result.text) == ("too bad", "error: broken raised KeyError: 'nothing here'")


def test_a_malformed_call_is_shown_back_as_an_error_that_names_the_tools():
    model = ScriptedModel('<tool_call>{"name": double}</tool_call>', [call("double", '{"number": 4}')], "8")
    agent = Agent(model, [double])
    answer = agent.ask("Twice 4?")
    shown = model.asked[1][-1]
    assert shown["role"] == "user" and shown["content"].startswith(f"{UNREADABLE} error: ")
    assert "it is malformed" in shown["content"] and "(double)" in shown["content"]
    assert answer.text == "8" and "cannot be read" in answer.notices[0]


def test_a_call_cut_by_the_token_limit_is_said_to_be_cut():
    model = ScriptedModel([Words('<tool_call>{"na'), Ending("length", 9, 0, 5)], "ok")
    Agent(model, [double]).ask("Twice 4?")
    assert "cut at its token limit" in model.asked[1][-1]["content"]


def test_beside_a_malformed_call_the_good_one_runs():
    model = ScriptedModel([call("double", '{"number": 4}'), Words("<tool_call>{")], "8")
    answer = Agent(model, [double]).ask("Twice 4?")
    assert [message["role"] for message in model.asked[1][-3:]] == ["assistant", "tool", "user"]
    assert len(answer.calls) == 1


def test_without_tools_the_markup_of_a_call_is_only_text():
    answer = Agent(ScriptedModel("write <tool_call> to call")).ask("How?")
    assert (answer.text, answer.notices) == ("write <tool_call> to call", ())


def test_an_answer_that_was_cut_says_so():
    answer = Agent(ScriptedModel([Words("Once upon"), Ending("length", 9, 0, 2)])).ask("Tell.")
    assert (answer.text, answer.finish) == ("Once upon", "length")


def test_the_last_turn_runs_no_tool_and_says_that_the_turns_are_used_up():
    ran = []

    def again() -> str:
        """Goes on."""
        ran.append(1)
        return "more"

    model = ScriptedModel(*[[Words("going on"), call("again")]] * 3, "fine")
    agent = Agent(model, [again], max_turns=3)
    *_, notice, answer = agent.run("Go on.")
    assert notice == Notice("stopped after 3 turns (max_turns) with tool calls still to be made")
    assert (answer.finish, answer.text, len(answer.turns), len(ran)) == ("max_turns", "going on", 3, 2)
    assert "not run: the limit of 3 turns" in answer.calls[-1].result.text
    assert contents(agent)[-1] == STOPPED
    assert agent.ask("And now?").text == "fine"
    assert [message["role"] for message in model.asked[-1][-3:]] == ["tool", "assistant", "user"]


def test_the_oldest_outputs_are_shortened_first_when_the_context_is_full():
    def read(name: str) -> str:
        """Reads."""
        return name * 1000

    model = ScriptedModel([call("read", '{"name": "a"}')], [call("read", '{"name": "b"}')], "done", max_chars=1800)
    agent = Agent(model, [read])
    answer = agent.ask("Read both.")
    assert answer.notices == ("the context is full: shortened an output of read from 1000 to 200 characters",)
    shortened, whole = (entry.message["content"] for entry in agent.history.entries if entry.message["role"] == "tool")
    assert shortened == "a" * 200 + "\n[shortened: the first 200 of 1000 characters are kept]"
    assert whole == "b" * 1000


def test_then_the_oldest_exchanges_are_forgotten_but_never_the_system_message():
    model = ScriptedModel("a" * 60, "b" * 60, "c", max_chars=150)
    agent = Agent(model, system="S" * 20)
    agent.ask("first " * 3)
    agent.ask("second")
    answer = agent.ask("third " * 5)
    assert "forgot the exchange that began with 'first first first '" in answer.notices[0]
    assert [message["role"] for message in model.asked[-1]] == ["system", "user", "assistant", "user"]
    assert contents(agent)[0] == "second"


def test_a_question_that_alone_does_not_fit_is_refused_and_forgotten():
    model = ScriptedModel("hello", max_chars=50)
    agent = Agent(model)
    agent.ask("hi")
    with pytest.raises(InvalidRequest, match=r"more than 50 characters; nothing is left to be shortened"):
        agent.ask("x" * 60)
    assert contents(agent) == ["hi", "hello"]


def test_a_failure_of_the_model_leaves_the_history_as_it_was():
    agent = Agent(ScriptedModel("one", [call("double", '{"number": 1}')], ModelFailed("gone"), "two"), [double])
    agent.ask("first")
    with pytest.raises(ModelFailed, match="gone"):
        agent.ask("second")
    assert contents(agent) == ["first", "one"]
    assert agent.ask("third").text == "two"


def test_a_reply_without_an_ending_is_a_failure():
    model = ScriptedModel()
    model.reply = lambda *_: iter([Words("half")])
    with pytest.raises(ModelFailed, match="scripted ended a reply without a reason"):
        Agent(model).ask("first")


def test_an_interrupt_in_a_reply_keeps_what_was_said():
    agent = Agent(ScriptedModel([Words("Once upon"), KeyboardInterrupt()], "again"))
    with pytest.raises(KeyboardInterrupt):
        agent.ask("Tell.")
    assert contents(agent) == ["Tell.", f"Once upon {INTERRUPTED}"]
    assert agent.ask("Go on.").text == "again"


def test_closing_a_run_cancels_the_reply_and_keeps_what_was_said():
    model = ScriptedModel([Words("Once"), Words(" upon")])
    agent = Agent(model)
    run = agent.run("Tell.")
    assert next(run) == Words("Once")
    run.close()
    assert (contents(agent), model.num_closed) == (["Tell.", f"Once {INTERRUPTED}"], 1)


def test_an_interrupt_in_a_tool_answers_every_call_of_the_reply():
    def slow() -> str:
        """Takes long."""
        raise KeyboardInterrupt

    model = ScriptedModel([call("double", '{"number": 1}', 0), call("slow", number=1), call("slow", number=2)], "ok")
    agent = Agent(model, [double, slow])
    with pytest.raises(KeyboardInterrupt):
        agent.ask("Run.")
    assert roles(agent) == ["user", "assistant", "tool", "tool", "tool", "assistant"]
    assert contents(agent)[2:] == ["2", *[f"error: not run: {INTERRUPTED}"] * 2, INTERRUPTED]
    assert agent.ask("Next.").text == "ok"


def test_figures_of_every_turn_are_counted():
    model = ScriptedModel(
        [Words("x"), call("double", '{"number": 4}'), Ending("tool_calls", 50, 0, 7)],
        [Words("8"), Ending("stop", 70, 56, 2)],
    )
    agent = Agent(model, [double])
    first, second = agent.ask("Twice 4?").turns
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens, first.num_calls) == (50, 0, 7, 1)
    assert (second.prompt_tokens, second.cached_tokens, second.completion_tokens, second.num_calls) == (70, 56, 2, 0)
    assert first.first_token_s is not None and 0 <= first.first_token_s <= first.reply_s
    assert first.tool_s > 0 == second.tool_s
    assert agent.turns == [first, second]


def test_wrong_settings_are_refused_with_their_value():
    model = ScriptedModel()
    with pytest.raises(InvalidRequest, match="max_turns is 0; it must be at least 1"):
        Agent(model, max_turns=0)
    with pytest.raises(ValueError, match="two tools are named 'double'"):
        Agent(model, [double, double])
    with pytest.raises(InvalidRequest, match="the question is empty"):
        Agent(model).ask("  ")
    with pytest.raises(InvalidRequest, match="api_key is for a URL"):
        Agent(model, api_key="k")
    with pytest.raises(InvalidRequest, match="sampling is given to the model itself"):
        Agent(model, sampling=SamplingParams(temperature=0))
    model.tools_refusal = "its template shows none"
    with pytest.raises(InvalidRequest, match="tools cannot be used: its template shows none"):
        Agent(model, [double])


def test_tools_are_shown_to_the_model_in_the_order_given():
    model = ScriptedModel("hi")
    Agent(model, [shout, double]).ask("Hello")
    assert [tool["function"]["name"] for tool in model.tools] == ["shout", "double"]
