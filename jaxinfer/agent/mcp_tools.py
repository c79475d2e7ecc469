"""Tools of MCP servers that run as child processes, through the official `mcp` package."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import shlex
import threading
from typing import Any, Self

from jaxinfer.agent.tools import Tool, ToolError

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 120.0


class McpUnavailable(RuntimeError):
    """A server cannot be used; the message says why."""


class McpServer:
    """One server, spoken to over its standard input and output, and its tools.

    command: as a shell would read it; it runs as the user, outside of any sandbox. It gets of the environment what the
    `mcp` package thinks harmless, and `environment` besides. Raises McpUnavailable.
    """

    def __init__(self, command: str, *, environment: dict[str, str] | None = None):
        try:
            import mcp  # pyright: ignore[reportMissingImports]
            from mcp.client import stdio  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise McpUnavailable("MCP servers need the package mcp: pip install 'jaxinfer[agent]'") from None
        self._mcp, self._stdio = mcp, stdio
        self._command = command
        words = shlex.split(command)
        if not words:
            raise McpUnavailable("the command of an MCP server is empty")
        variables = None if environment is None else {**stdio.get_default_environment(), **environment}
        self._parameters = mcp.StdioServerParameters(command=words[0], args=words[1:], env=variables)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._session: Any = None
        self._ready: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, name="mcp", daemon=True)
        self._thread.start()
        try:
            listed = self._ready.result(START_TIMEOUT_S)
        except Exception as error:
            self.close()
            raise McpUnavailable(f"the MCP server {command!r} did not start: {_innermost(error)}") from error
        self.tools: list[Tool] = [self._tool(one) for one in listed]

    def close(self) -> None:
        """Ends the server."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """The thread that has the server: the package wants it opened and closed in one task."""
        try:
            self._loop.run_until_complete(self._converse())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _converse(self) -> None:
        with open(os.devnull, "w") as nowhere:
            async with self._stdio.stdio_client(self._parameters, errlog=nowhere) as (read, write):
                async with self._mcp.ClientSession(read, write) as session:
                    await session.initialize()
                    tools, cursor = [], None
                    while True:
                        params = self._mcp.types.PaginatedRequestParams(cursor=cursor) if cursor else None
                        page = await session.list_tools(params=params)
                        tools += page.tools
                        if (cursor := page.next_cursor) is None:
                            break
                    self._session = session
                    self._ready.set_result(tools)
                    await self._stop.wait()

    def _tool(self, listed: Any) -> Tool:
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", listed.name)[:64]

        def run(values: dict[str, Any]) -> str:
            work = self._session.call_tool(listed.name, values)
            try:
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:
                work.close()
                raise ToolError(f"error: the MCP server {self._command!r} has ended") from None
            try:
                result = future.result(CALL_TIMEOUT_S)
            except concurrent.futures.TimeoutError:
                future.cancel()
                raise ToolError(f"error: {name} was ended by the time limit of {CALL_TIMEOUT_S:g} s") from None
            except BaseException:
                future.cancel()
                raise
            text = "\n".join(_text(part) for part in result.content)
            if result.is_error:
                raise ToolError(f"error: {text}")
            return text

        return Tool(name, listed.description or "", listed.input_schema, run)


def _text(part: Any) -> str:
    """A part of a result; what is no text is named."""
    return part.text if getattr(part, "type", None) == "text" else f"[{getattr(part, 'type', 'content')} not shown]"


def _innermost(error: BaseException) -> str:
    """What is wrong, out of the groups in which task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
