"""`jaxinfer agent`: from what the command line says to a session in the terminal, or one answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.agent import session_file
from jaxinfer.agent.loop import MAX_TURNS, Agent, Answer
from jaxinfer.agent.mcp_tools import McpServer, McpUnavailable
from jaxinfer.agent.model import AgentModel, ModelFailed
from jaxinfer.agent.repl import Repl, read_lines
from jaxinfer.agent.sandbox import Limits, Sandbox, SandboxUnavailable
from jaxinfer.agent.session_file import Session, SessionFileError
from jaxinfer.agent.terminal import Display
from jaxinfer.agent.tools import Tool, sandbox_tools
from jaxinfer.types import InvalidRequest

REFUSALS = (ModelFailed, SandboxUnavailable, McpUnavailable, SessionFileError)
"""Errors whose message says it all."""
EXIT_STATUS = {"answer": 0, "max_turns": 3, "length": 4}
"""Of one question, by how its answer ended; 1 is for failures, 2 for wrong usage."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """What the command line asks for, besides the model."""

    prompt: str | None = None
    """One question; None: a session in the terminal."""
    json: bool = False
    """Print the answer as one JSON object."""
    system: str | None = None
    max_turns: int = MAX_TURNS
    no_tools: bool = False
    mcp: Sequence[str] = ()
    """Commands of MCP servers."""
    workspace: str | None = None
    unsafe_no_sandbox: bool = False
    tool_timeout_s: float = 30.0
    tool_memory_mib: int = 512
    session: str | None = None
    """A file to go on from, if it is there, and to save after every answer."""

    def check(self) -> None:
        """InvalidRequest for what does not go together."""
        if self.json and self.prompt is None:
            raise InvalidRequest("--json is for one question; give --prompt, too")
        if self.no_tools and (self.mcp or self.unsafe_no_sandbox or self.workspace is not None):
            raise InvalidRequest("--no-tools goes with none of --mcp, --workspace and --unsafe-no-sandbox")
        for name in ("max_turns", "tool_timeout_s", "tool_memory_mib"):
            if not (value := getattr(self, name)) > 0:
                raise InvalidRequest(f"--{name.replace('_', '-')} is {value}; it must be above 0")


def run(command: AgentCommand, make_model: Callable[[], contextlib.AbstractContextManager[AgentModel]]) -> int:
    """Runs the command, and gives its exit status. The model is made once everything else is known to be right."""
    command.check()
    out, aside = sys.stdout, sys.stdout if command.prompt is None else sys.stderr
    display = Display(out, aside)
    session = None
    if command.session is not None and Path(command.session).exists():
        session = session_file.load(command.session)
    with contextlib.ExitStack() as stack:
        tools: list[Tool] = []
        for server in command.mcp:
            tools += stack.enter_context(McpServer(server)).tools
        built_in = [] if command.no_tools else _built_in(command, stack, display)
        model = stack.enter_context(make_model())
        if built_in and model.tools_refusal is not None:
            display.line(f"the tools are off: {model.tools_refusal}")
            built_in = []
        agent = Agent(model, [*built_in, *tools], system=command.system, max_turns=command.max_turns)
        if session is not None:
            agent.history = session.history
            agent.system = command.system or session.system
        if command.prompt is not None:
            return _answer(command, agent, display)
        display.line(f"{model.name}; /help lists the commands")
        path = None if command.session is None else Path(command.session)
        Repl(agent, display, session=path).run(read_lines(display))
    return 0


def _built_in(command: AgentCommand, stack: contextlib.ExitStack, display: Display) -> list[Tool]:
    """`shell` and `python`; none, with the reason said, where there is no sandbox for them."""
    limits = Limits(time_s=command.tool_timeout_s, memory_bytes=command.tool_memory_mib << 20)
    sandbox = Sandbox(command.workspace, limits=limits, bare=command.unsafe_no_sandbox)
    stack.callback(sandbox.close)
    if sandbox.bare:
        display.line("no sandbox: the model's commands run as you, with all that you may do", "failed")
    try:
        return sandbox_tools(sandbox)
    except SandboxUnavailable as error:
        display.line(f"{error}; --unsafe-no-sandbox would run them without one")
        return []


def _answer(command: AgentCommand, agent: Agent, display: Display) -> int:
    assert command.prompt is not None
    question = sys.stdin.read() if command.prompt == "-" else command.prompt
    answer = None
    for event in agent.run(question):
        if isinstance(event, Answer):
            answer = event
        if not command.json:
            display.show(event)
    assert answer is not None
    if command.session is not None:
        session_file.save(command.session, Session(agent.model.name, agent.system, agent.history))
    if command.json:
        print(json.dumps(as_json(agent, answer), ensure_ascii=False))
    return EXIT_STATUS[answer.finish]


def as_json(agent: Agent, answer: Answer) -> dict[str, Any]:
    """An answer for programs."""
    calls = [
        {
            "name": ended.call.name,
            "arguments": ended.call.arguments,
            "result": ended.result.text,
            "failed": ended.result.failed,
            "seconds": round(ended.seconds, 4),
        }
        for ended in answer.calls
    ]
    turns = [dataclasses.asdict(turn) for turn in answer.turns]
    head = {"model": agent.model.name, "answer": answer.text, "finish": answer.finish}
    return head | {"turns": turns, "tool_calls": calls, "notices": list(answer.notices)}
