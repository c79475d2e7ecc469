"""Flags of `jaxinfer agent`, and the model that they name."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jaxinfer.config import ConfigError
from jaxinfer.types import InvalidRequest, SamplingParams

API_KEY_VARIABLE = "JAXINFER_API_KEY"
"""Of the environment: a key that does not show in the list of processes."""


def add(parser: argparse.ArgumentParser) -> None:
    """All but those of the engine and of sampling."""
    group = parser.add_argument_group("agent")
    group.add_argument("--prompt", help="answer this question and end; - reads it from standard input")
    group.add_argument("--json", action="store_true", help="with --prompt: print the answer as a JSON object")
    group.add_argument("--url", help="ask this server, which speaks OpenAI's chat completions, instead of an engine")
    group.add_argument("--api-key", metavar="KEY", help=f"key for it (default: that of {API_KEY_VARIABLE}, or none)")
    group.add_argument("--system", help="system message")
    group.add_argument("--max-turns", type=int, help="most replies to a question (default: 10)")
    group.add_argument("--no-tools", action="store_true", help="let the model only talk")
    group.add_argument("--mcp", action="append", default=[], metavar="COMMAND", help="MCP server to take tools from")
    group.add_argument("--workspace", help="folder that tools may write to (default: a new one, removed at the end)")
    group.add_argument("--tool-timeout-s", type=float, help="of one command (default: 30)")
    group.add_argument("--tool-memory-mib", type=int, help="of one command (default: 512)")
    group.add_argument(
        "--unsafe-no-sandbox", action="store_true", help="run the model's commands as yourself, without any sandbox"
    )
    group.add_argument("--session", metavar="FILE", help="go on with this session, and save it after every answer")


def refusals() -> tuple[type[Exception], ...]:
    """The errors whose message says it all, besides those of an engine."""
    from jaxinfer.agent import command

    return (*command.REFUSALS, ConfigError)


def run(args: argparse.Namespace, options: dict[str, Any], sampling: SamplingParams) -> int:
    """Runs the command. `options` are the fields of EngineConfig that were given, the model always."""
    from jaxinfer.agent import command

    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(command.AgentCommand)}
    asked = command.AgentCommand(**{name: value for name, value in given.items() if value is not None})
    return command.run(asked, lambda: _model(args, options, sampling))


@contextlib.contextmanager
def _model(args: argparse.Namespace, options: dict[str, Any], sampling: SamplingParams) -> Iterator[Any]:
    """The model behind --url, or one in this process."""
    if args.url is not None:
        from jaxinfer.agent.remote import RemoteModel

        if unused := [f"--{name.replace('_', '-')}" for name in options if name != "model"]:
            raise InvalidRequest(f"{', '.join(unused)} is for an engine in this process; with --url there is none")
        named = args.model if args.model is not None else args.model_name
        key = args.api_key or os.environ.get(API_KEY_VARIABLE)
        yield RemoteModel(args.url, sampling, api_key=key, model=named)
        return
    if args.api_key is not None:
        raise InvalidRequest("--api-key is for the server at --url; give that, too")
    from jaxinfer import api
    from jaxinfer.agent.local import LocalModel

    with api.LLM(**options) as llm:
        yield LocalModel(llm, sampling)
