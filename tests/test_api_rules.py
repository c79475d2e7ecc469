"""Every rule of the client contract has a test: one that has its id in the docstring's first line."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

TESTS = Path(__file__).parent
RULES = json.loads((TESTS / "data" / "api_rules.json").read_text())
_ID = re.compile(r"\bB\d+(?:\.\d+)?\b")


@functools.cache
def names_by_rule() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for rule in _ID.findall((ast.get_docstring(node) or "").partition("\n")[0]):
                    found.setdefault(rule, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_every_rule_of_the_contract_has_a_test_that_names_it():
    assert not {rule: RULES[rule] for rule in RULES.keys() - names_by_rule().keys()}


def test_no_test_names_a_rule_that_is_not_in_the_contract():
    found = names_by_rule()
    chapters = {rule.partition(".")[0] for rule in RULES}
    assert not {rule: found[rule] for rule in found.keys() - RULES.keys() - chapters}
