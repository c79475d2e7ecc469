"""What happens in a run, as lines in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TextIO

from jaxinfer.agent.history import Turn
from jaxinfer.agent.loop import Answer, Notice, ToolEnded
from jaxinfer.text.message import Call, Thought, Words

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What moves a cursor, and what turns text around: neither a model nor a tool may write over what is on the screen."""
_SHOWN_CHARS = 300
"""Of the arguments and of the result of a call."""
_COLOURS = {"thought": "2", "tool": "36", "failed": "31", "notice": "33"}


def visible(text: str) -> str:
    """The text with its control characters spelled out."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Display:
    """Writes the events of runs: words to `out`, everything else to `aside`, in colours where that is a terminal."""

    def __init__(self, out: TextIO, aside: TextIO | None = None, *, colours: bool | None = None):
        self._out, self._aside = out, aside or out
        self._colours = self._aside.isatty() if colours is None else colours
        self._at_start = True  # of a line
        self._last: type | None = None

    def show(self, event: Any) -> None:
        """One event of `Agent.run`."""
        match event:
            case Words(text):
                if self._last is Thought:
                    self._break()
                self._write(self._out, visible(text))
            case Thought(text):
                if self._last is Words:
                    self._break()
                self._write(self._aside, self._coloured(visible(text), "thought"), text)
            case Call(_, _, name, arguments):
                self.line(f"[{name}] {_short(arguments)}", "tool")
            case ToolEnded(call, result, seconds):
                kind = "failed" if result.failed else "tool"
                self.line(f"[{call.name}: {seconds:.1f} s] {_short(result.text)}", kind)
            case Notice(text):
                self.line(f"[{text}]", "notice")
            case Answer():
                self._break()
            case Turn():
                pass
        self._last = type(event)

    def line(self, text: str, kind: str = "notice") -> None:
        """A line of its own beside the words."""
        self._break()
        self._write(self._aside, self._coloured(visible(text), kind) + "\n", "\n")

    def _break(self) -> None:
        if not self._at_start:
            self._write(self._out, "\n")

    def _write(self, stream: TextIO, text: str, raw: str | None = None) -> None:
        if text:
            stream.write(text)
            stream.flush()
            self._at_start = (raw or text).endswith("\n")

    def _coloured(self, text: str, kind: str) -> str:
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self._colours and text else text


def _short(text: str) -> str:
    """The beginning, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."


def table(turns: Sequence[Turn]) -> str:
    """A row for every reply, and the sums. Times in ms and s; `-` where the model does not say."""
    rows: list[tuple[str, ...]] = [("turn", "prompt", "cached", "reply", "TTFT ms", "reply s", "calls", "tools s")]
    for number, turn in enumerate(turns, 1):
        first = None if turn.first_token_s is None else f"{turn.first_token_s * 1e3:.0f}"
        counts = (turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens, first)
        times = (f"{turn.reply_s:.2f}", str(turn.num_calls), f"{turn.tool_s:.2f}")
        rows.append((str(number), *map(_cell, counts), *times))
    sums = [_sum([getattr(turn, name) for turn in turns]) for name in ("prompt_tokens", "cached_tokens")]
    replies = _sum([turn.completion_tokens for turn in turns])
    seconds = [f"{sum(getattr(turn, name) for turn in turns):.2f}" for name in ("reply_s", "tool_s")]
    calls = str(sum(turn.num_calls for turn in turns))
    rows.append(("all", *map(_cell, (*sums, replies)), "", seconds[0], calls, seconds[1]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
