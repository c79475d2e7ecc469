"""The agent's loop: the model replies, its tool calls run, their results are appended, and it is asked again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

from jaxinfer.agent.history import INTERRUPTED, STOPPED, Entry, History, Turn, as_shown
from jaxinfer.agent.local import LocalModel
from jaxinfer.agent.model import AgentModel, ContextFull, Ending, ModelFailed
from jaxinfer.agent.remote import RemoteModel
from jaxinfer.agent.tools import Tool, Toolbox, ToolResult
from jaxinfer.text.message import Call, Thought, Words
from jaxinfer.types import InvalidRequest, SamplingParams

MAX_TURNS = 10


class ToolEnded(NamedTuple):
    """A call has run, or was refused."""

    call: Call
    result: ToolResult
    seconds: float


class Notice(NamedTuple):
    """Something that a user should know: the context was full, the turns are used up."""

    text: str


class Answer(NamedTuple):
    """What a question came to."""

    text: str
    """The words of the last reply."""
    finish: str
    """`answer`; `length`: the reply was cut; `max_turns`: the model still wanted to call tools."""
    turns: tuple[Turn, ...]
    calls: tuple[ToolEnded, ...]
    notices: tuple[str, ...]


type Event = Thought | Words | Call | ToolEnded | Notice | Turn | Answer


class Agent:
    """A model that calls tools, and remembers.

        agent = Agent(LLM("Qwen/Qwen3-4B"), tools=[get_weather])
        print(agent.ask("Is it raining in Lisbon?").text)

    model: an LLM, the URL of a server that speaks OpenAI's chat completions, or an AgentModel. tools: functions with
    type hints and docstrings, and Tools. A question gets at most `max_turns` replies. The history is kept from question
    to question, so that the prefix cache has all of a prompt but what is new.

    When the context is full, the oldest outputs of tools are shortened first, then the oldest exchanges are forgotten,
    and both are reported as a Notice; the system message and the question that is being answered stay, and if these
    alone do not fit, InvalidRequest is raised. What is shortened is computed again once, from there on.

    sampling, and api_key with a URL, are given to the model that is made of `model`.
    """

    def __init__(
        self,
        model: Any,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        system: str | None = None,
        max_turns: int = MAX_TURNS,
        sampling: SamplingParams | None = None,
        api_key: str | None = None,
    ):
        if max_turns < 1:
            raise InvalidRequest(f"max_turns is {max_turns}; it must be at least 1", param="max_turns")
        self.model = as_model(model, sampling, api_key)
        self.toolbox = Toolbox(tools)
        if len(self.toolbox) and self.model.tools_refusal is not None:
            raise InvalidRequest(f"tools cannot be used: {self.model.tools_refusal}", param="tools")
        self.system = system
        self.max_turns = max_turns
        self.history = History()

    @property
    def turns(self) -> list[Turn]:
        """What every reply took that is still in the history."""
        return [entry.turn for entry in self.history.entries if entry.turn is not None]

    def ask(self, question: str) -> Answer:
        """The answer, when it is there."""
        for event in self.run(question):
            if isinstance(event, Answer):
                return event
        raise AssertionError("a run ends with its answer")

    def run(self, question: str) -> Iterator[Event]:
        """Everything as it happens; the last event is the Answer, and the Turn of a reply follows its words and calls.

        Closing the iterator, or an interrupt, stops the turn and keeps the session: what was said stays in the history,
        and calls that did not run are noted as interrupted. Raises InvalidRequest, ModelFailed and what an LLM raises;
        the history is then as it was before.
        """
        if not question.strip():
            raise InvalidRequest("the question is empty; ask something", param="question")
        return _Run(self, question).events()

    def reset(self) -> None:
        """Forgets the conversation."""
        self.history = History()

    def close(self) -> None:
        """Closes the model's connection; an LLM stays open."""
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_model(model: Any, sampling: SamplingParams | None, api_key: str | None) -> AgentModel:
    """The AgentModel that Agent's first argument stands for."""
    if isinstance(model, str):
        return RemoteModel(model, sampling, api_key=api_key)
    if api_key is not None:
        raise InvalidRequest("api_key is for a URL; the model is none", param="api_key")
    if not hasattr(model, "reply"):
        return LocalModel(model, sampling)
    if sampling is not None:
        raise InvalidRequest("sampling is given to the model itself where that is made already", param="sampling")
    return model


class _Run:
    """One question on its way to its answer."""

    def __init__(self, agent: Agent, question: str):
        self._agent = agent
        self._question = question
        self._history = agent.history
        self._turns: list[Turn] = []
        self._ended: list[ToolEnded] = []
        self._notices: list[str] = []
        # Of the reply that is being read.
        self._thought = self._words = ""
        self._calls: list[Call] = []
        self._num_answered: int | None = None  # of the calls in the history; None: the reply is not there yet

    def events(self) -> Iterator[Event]:
        history = self._history
        before = list(history.entries)
        history.ask(self._question)
        try:
            yield from self._loop()
        except (KeyboardInterrupt, GeneratorExit):
            self._keep_what_was_said()
            raise
        except BaseException:
            history.entries[:] = before
            raise

    def _loop(self) -> Iterator[Event]:
        history, limit = self._history, self._agent.max_turns
        for number in range(1, limit + 1):
            turn = yield from self._reply()
            history.reply(self._thought, self._words, as_shown(self._calls), turn)
            self._num_answered = 0
            self._turns.append(turn)
            unreadable = self._unreadable(turn)
            if not self._calls and unreadable is None:
                yield turn
                yield self._answer("length" if turn.finish_reason == "length" else "answer")
                return
            yield from self._call_tools(turn, runs=number < limit)
            yield turn
            if unreadable is not None:
                history.show_unreadable(unreadable)
                yield self._notice("the model wrote a tool call that cannot be read; it is told so")
        yield self._notice(f"stopped after {limit} turns (max_turns) with tool calls still to be made")
        self._close_exchange(STOPPED)
        yield self._answer("max_turns")

    def _reply(self) -> Iterator[Any]:
        """Reads one reply, making room first where the context is full; gives its Turn."""
        self._thought = self._words = ""
        self._calls, self._num_answered = [], None
        turn = Turn()
        start_s = time.monotonic()
        while True:
            messages = self._history.messages(self._agent.system)
            try:
                for part in self._agent.model.reply(messages, self._agent.toolbox.definitions()):
                    if turn.first_token_s is None:
                        turn.first_token_s = time.monotonic() - start_s
                    self._take(part, turn)
                    if not isinstance(part, Ending):
                        yield part
                break
            except ContextFull as error:
                done = self._history.make_room()
                if done is None:
                    raise InvalidRequest(f"{error}; nothing is left to be shortened", param="messages") from error
                yield self._notice(f"the context is full: {done}")
        if turn.finish_reason is None:
            raise ModelFailed(f"{self._agent.model.name} ended a reply without a reason")
        turn.reply_s = time.monotonic() - start_s
        return turn

    def _take(self, part: Any, turn: Turn) -> None:
        match part:
            case Thought(text):
                self._thought += text
            case Words(text):
                self._words += text
            case Call():
                self._calls.append(part)
                turn.num_calls += 1
            case Ending(reason, prompt_tokens, cached_tokens, completion_tokens):
                turn.finish_reason = reason
                turn.prompt_tokens, turn.cached_tokens = prompt_tokens, cached_tokens
                turn.completion_tokens = completion_tokens

    def _unreadable(self, turn: Turn) -> str | None:
        """What the model is told where its words hold the beginning of a call. None: they hold none."""
        opening = next((one for one in self._agent.model.openings if one in self._words), None)
        if opening is None or not len(self._agent.toolbox):
            return None
        why = "the reply was cut at its token limit" if turn.finish_reason == "length" else "it is malformed"
        names = ", ".join(tool.name for tool in self._agent.toolbox)
        return (
            f"error: what you wrote after {opening!r} is no tool call: {why}. Write the call again, with the name of a "
            f"tool ({names}) and arguments that are one valid JSON object, or answer without it."
        )

    def _call_tools(self, turn: Turn, *, runs: bool) -> Iterator[Event]:
        """Runs the calls one after another, in the order given. In the last turn none runs: nobody would read it."""
        for shown, call in zip(as_shown(self._calls), self._calls, strict=True):
            start_s = time.monotonic()
            if runs:
                result = self._agent.toolbox.call(call.name, call.arguments)
            else:
                result = ToolResult(f"error: not run: the limit of {self._agent.max_turns} turns is reached", True)
            ended = ToolEnded(call, result, time.monotonic() - start_s)
            turn.tool_s += ended.seconds
            self._history.answer(shown, result)
            assert self._num_answered is not None
            self._num_answered += 1
            self._ended.append(ended)
            yield ended

    def _keep_what_was_said(self) -> None:
        """The run was interrupted: the history becomes one that can be gone on with."""
        if self._num_answered is None:
            self._history.reply(self._thought, f"{self._words} {INTERRUPTED}".strip(), [], None)
            return
        for call in self._calls[self._num_answered :]:
            self._history.answer(call, ToolResult(f"error: not run: {INTERRUPTED}", True))
        if self._history.entries[-1].message["role"] != "assistant":
            self._close_exchange(INTERRUPTED)

    def _close_exchange(self, words: str) -> None:
        """A reply after the last results: templates want turns that alternate."""
        self._history.entries.append(Entry({"role": "assistant", "content": words}))

    def _notice(self, text: str) -> Notice:
        self._notices.append(text)
        return Notice(text)

    def _answer(self, finish: str) -> Answer:
        return Answer(self._words, finish, tuple(self._turns), tuple(self._ended), tuple(self._notices))
