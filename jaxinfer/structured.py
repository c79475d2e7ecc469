"""The form that a user may ask an output to have. Standard library only, as are the types that hold it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

MAX_GRAMMAR_CHARS = 2**18
"""Longest form, as the text of its grammar: of this length, a schema of 4,200 properties compiles in 0.5 s."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of the first five: every output of the request matches it whole, unless max_tokens cuts it short.

    Names and meanings are those of vLLM. What cannot be enforced (an unsupported keyword of JSON Schema, a look-ahead)
    is refused with its name before anything runs.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON Schema (2020-12), as an object or as its text. Properties come in the order of the schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression in the syntax of Rust's `regex`, for the whole output: without look-around."""
    choice: Sequence[str] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A context-free grammar: Lark as llguidance reads it (its first rule is `start`), or GBNF (`root ::= ...`)."""
    disable_any_whitespace: bool = False
    """JSON without white space between its parts. Otherwise a space, or a line break and an indent, may stand there."""
    whitespace_pattern: str | None = None
    """What may stand between the parts of JSON instead, as a regular expression."""
    thought_begun: bool | None = None
    """A thought, which ends with `</think>`, comes before: True, the prompt has begun it; False, the output may, with
    `<think>`. None: there is none."""
    param: str = "structured_outputs"
    """What the client calls it: the parameter that an error names."""

    @property
    def given(self) -> Sequence[str]:
        """Which of the first five are set."""
        fields = ("json", "json_object", "regex", "choice", "grammar")
        return [
            name for name in fields if getattr(self, name) not in (None, False) or name == "json" and self.json is False
        ]

    def problem(self) -> str | None:
        """What is wrong with it, as far as that can be told without compiling it; None: nothing."""
        name, given = self.param, self.given
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "is empty"
            return f"{name} {found}; it must have exactly one of json, json_object, regex, choice and grammar"
        if not isinstance(self.json, str | Mapping | bool | None):
            return f"{name} has the JSON Schema {self.json!r:.60}; it must be an object, or its text"
        for field in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, field)
            if text is not None and (not isinstance(text, str) or not text):
                return f"{name} has the {field} {text!r:.60}; it must be a string of at least one character"
        if self.choice is not None and (
            isinstance(self.choice, str) or not self.choice or not all(isinstance(c, str) and c for c in self.choice)
        ):
            return f"{name} has the choice {self.choice!r:.60}; it must be a list of strings that are not empty"
        if (self.disable_any_whitespace or self.whitespace_pattern) and not given[0].startswith("json"):
            return f"{name} says what white space may stand in JSON, but asks for {given[0]}"
        if self.disable_any_whitespace and self.whitespace_pattern:
            return f"{name} has both disable_any_whitespace and whitespace_pattern; give one of them"
        return None
