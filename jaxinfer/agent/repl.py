"""The agent in a terminal: questions, and commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxinfer.agent import session_file
from jaxinfer.agent.loop import Agent
from jaxinfer.agent.model import ContextFull, ModelFailed
from jaxinfer.agent.session_file import Session, SessionFileError
from jaxinfer.agent.terminal import Display, table
from jaxinfer.types import InvalidRequest, QueueFull

PROMPT = "> "
_HELP = """\
/help          these lines
/reset         forget the conversation
/tools         what the model may call
/model         the model that answers
/stats         tokens, cache and times of every turn
/save FILE     write the session as JSON lines
/load FILE     go on with a session that was saved
/export FILE   write the conversation as Markdown
/quit          end; so do exit, quit and Ctrl-D
Ctrl-C stops an answer and keeps the session."""


class Repl:
    """Reads questions until the end of the input. `session` is a file that is saved after every answer."""

    def __init__(self, agent: Agent, display: Display, *, session: Path | None = None):
        self._agent = agent
        self._display = display
        self._session = session
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/tools": self._tools,
            "/model": self._model,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/export": self._export,
        }

    def run(self, lines: Iterator[str]) -> None:
        """Handles lines until they end, or one says so."""
        for line in lines:
            line = line.strip()
            if line in ("/quit", "/exit", "quit", "exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.ask(line)

    def ask(self, question: str) -> None:
        """Shows a run. What goes wrong in it is shown, too; the session goes on."""
        events = self._agent.run(question)
        try:
            for event in events:
                self._display.show(event)
        except KeyboardInterrupt:
            events.close()  # pyright: ignore[reportAttributeAccessIssue]
            self._display.line("stopped; the session is kept")
        except (InvalidRequest, ContextFull, ModelFailed, QueueFull) as error:
            self._display.line(f"error: {error}", "failed")
        if self._session is not None:
            session_file.save(self._session, self._as_session())

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._display.line(f"there is no command {name}; /help lists them", "failed")
            return
        try:
            command(argument.strip())
        except (OSError, SessionFileError, ModelFailed) as error:
            self._display.line(f"error: {error}", "failed")

    def _help(self, _: str) -> None:
        self._display.line(_HELP)

    def _reset(self, _: str) -> None:
        self._agent.reset()
        self._display.line("the conversation is forgotten")

    def _tools(self, _: str) -> None:
        if not len(self._agent.toolbox):
            self._display.line("there are no tools")
        for tool in self._agent.toolbox:
            self._display.line(f"{tool.name}: {tool.description.splitlines()[0] if tool.description else ''}")

    def _model(self, _: str) -> None:
        self._display.line(self._agent.model.name)

    def _stats(self, _: str) -> None:
        turns = self._agent.turns
        self._display.line(table(turns) if turns else "there are no turns yet")

    def _save(self, argument: str) -> None:
        if path := self._file("/save", argument):
            session_file.save(path, self._as_session())
            self._display.line(f"saved {path}")

    def _load(self, argument: str) -> None:
        if path := self._file("/load", argument):
            session = session_file.load(path)
            self._agent.history, self._agent.system = session.history, session.system
            self._display.line(f"loaded {len(session.history.entries)} messages, answered by {session.model}")

    def _export(self, argument: str) -> None:
        if path := self._file("/export", argument):
            session_file.export(path, self._as_session())
            self._display.line(f"exported {path}")

    def _file(self, command: str, argument: str) -> Path | None:
        if not argument:
            self._display.line(f"{command} needs the name of a file", "failed")
        return Path(argument).expanduser() if argument else None

    def _as_session(self) -> Session:
        return Session(self._agent.model.name, self._agent.system, self._agent.history)


def read_lines(display: Display) -> Iterator[str]:
    """Lines from the user: with history and editing at a terminal, as they are otherwise. Ctrl-C drops a line."""
    ask = _asker(display)
    while True:
        try:
            yield ask(PROMPT)
        except KeyboardInterrupt:
            display.line("/quit or Ctrl-D ends")
        except EOFError:
            print()  # the shell's prompt is not to stand behind ours
            return


def _asker(display: Display) -> Callable[[str], str]:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input
    try:
        import prompt_toolkit  # pyright: ignore[reportMissingImports]
    except ImportError:
        display.line("prompt_toolkit is not installed: no history and editing (pip install 'jaxinfer[agent]')")
        return input
    return prompt_toolkit.PromptSession().prompt
