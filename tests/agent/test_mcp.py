"""Tools of an MCP server that runs as a process of its own."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from pathlib import Path

import pytest

from jaxinfer import Agent
from jaxinfer.agent.mcp_tools import McpServer, McpUnavailable
from tests.agent.scripted import ScriptedModel, call

COMMAND = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"
needs_mcp = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed (extra: agent)")


@needs_mcp
def test_its_tools_are_called_and_their_errors_told():
    with McpServer(COMMAND) as server:
        assert [(tool.name, tool.description) for tool in server.tools] == [
            ("add", "Add two numbers."),
            ("fail", "Always fails."),
        ]
        assert server.tools[0].parameters["required"] == ["a", "b"]
        model = ScriptedModel([call("add", '{"a": 2, "b": 3}', 0), call("fail", number=1)], "5")
        answer = Agent(model, server.tools).ask("2 + 3?")
        assert [ended.result.text.split(":")[0] for ended in answer.calls] == ["5", "error"]
        tools = server.tools
    ended = Agent(ScriptedModel([call("add", '{"a": 2, "b": 3}')], "ok"), tools).ask("Again?").calls[0]
    assert ended.result.failed and ended.result.text.endswith("has ended")


@needs_mcp
@pytest.mark.parametrize("command", ["/no/such/program", f"{sys.executable} -c 1"])
def test_a_server_that_does_not_start_is_named(command):
    with pytest.raises(McpUnavailable, match="did not start: "):
        McpServer(command)


@needs_mcp
def test_an_empty_command_is_refused():
    with pytest.raises(McpUnavailable, match="the command of an MCP server is empty"):
        McpServer(" ")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "mcp":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(McpUnavailable, match=r"need the package mcp: pip install 'jaxinfer\[agent\]'"):
        McpServer(COMMAND)
