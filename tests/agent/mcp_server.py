"""An MCP server of two tools, run as a process by the tests."""

import sys

from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("this one never works")


if __name__ == "__main__":
    print("hello from the server", file=sys.stderr)
    server.run("stdio")
