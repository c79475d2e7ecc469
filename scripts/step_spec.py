"""How the steps that profile_step.py measures are named."""

from __future__ import annotations

import re
from typing import NamedTuple


class StepSpec(NamedTuple):
    """A step to measure: `rows` sequences that each decode after `context` tokens, beside a new chunk of `chunk`."""

    rows: int
    context: int
    chunk: int

    def __str__(self) -> str:
        decode = f"{self.rows}x{self.context}" if self.rows else ""
        return decode + (f"+{self.chunk}" if self.chunk else "")

    @property
    def file_name(self) -> str:
        """Of letters, digits and dashes."""
        return str(self).replace("+", "-chunk").removeprefix("-")


def parse_specs(text: str) -> list[StepSpec]:
    """ROWSxCONTEXT, +CHUNK, or both, between commas. ValueError for anything else."""
    return [_parse(part) for part in text.split(",")]


def _parse(text: str) -> StepSpec:
    found = re.fullmatch(r"(?:([1-9]\d*)x(\d+))?(?:\+([1-9]\d*))?", text)
    if not text or found is None:
        raise ValueError(f"step {text!r} is not ROWSxCONTEXT, +CHUNK or ROWSxCONTEXT+CHUNK")
    rows, context, chunk = (int(number or 0) for number in found.groups())
    return StepSpec(rows, context, chunk)
