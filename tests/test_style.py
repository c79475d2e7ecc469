"""Rules of style that a linter does not know."""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "checkpoints")
MAX_LINES = 420
MAX_LINES_WITHOUT_DOCSTRING = 8
"""A public function or class so short that its name and types say it all."""

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PYTHON = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]

SAYS_NOTHING = re.compile(r"(^|_)(utils?|base|misc|new|v\d+)(_|$)")

# In comments and docstrings: what only its writer, or only the day of writing, can understand.
BANNED = {
    "unfinished work": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "the history of the code": re.compile(r"\b(previously|formerly|no longer|used to be|backwards?[- ]compat)", re.I),
    "an issue number": re.compile(r"\bissue #?\d+|(?<![\w&])#\d+\b", re.I),
    "a path of one machine": re.compile(r"(?<![\w.])/(work|root|home)/"),
    "a page outside the repository": re.compile(r"\bdesign\.md\b|\bfacts/|\bdesign section\b"),
}

# Config class -> what a variable that holds one is called (its last word).
CONFIGS = {"EngineConfig": "config", "ServerConfig": "config", "SchedulerLimits": "limits"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def listed(wrong: list[str]) -> str:
    return "\n  ".join(["", *wrong])


@functools.cache
def prose(path: Path) -> list[tuple[int, str]]:
    """Line and text of every comment and docstring."""
    return list(find_prose(path))


def find_prose(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix != ".py":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.lstrip().startswith("#") and not line.startswith("#!"):
                yield number, line.lstrip().lstrip("#")
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("#")
    for node in ast.walk(parse(path)):
        # A string that stands alone is the docstring of what is around or above it.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_files_stay_short():
    lengths = {name(path): len(path.read_text().splitlines()) for path in PYTHON}
    wrong = [f"{path}: {length} lines" for path, length in lengths.items() if length > MAX_LINES]
    assert not wrong, listed(wrong)


def test_file_names_say_what_is_inside():
    wrong = [name(path) for path in PYTHON if any(map(SAYS_NOTHING.search, Path(name(path)).with_suffix("").parts))]
    assert not wrong, listed(wrong)


@pytest.mark.parametrize("what", BANNED)
def test_comments_do_not_speak_of(what):
    wrong = [
        f"{name(path)}:{line}: {found.group()}"
        for path in [*PYTHON, *SCRIPTS]
        for line, text in prose(path)
        if (found := BANNED[what].search(text))
    ]
    assert not wrong, listed(wrong)


def test_requirements_hold_no_address():
    found = [
        f"{name(path)}: {line}"
        for path in sorted((ROOT / "requirements").glob("*.txt"))
        for line in path.read_text().splitlines()
        if re.search(r"[a-z]+://|--(extra-)?index-url|--find-links", line)
    ]
    assert not found, listed(found)


def config_fields(config: str) -> list[str]:
    tree = parse(ROOT / "jaxinfer" / "config.py")
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == config)
    return [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_of_a_config_is_read(config):
    read = set()
    for path in SOURCES:
        if path.name == "config.py":
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = ast.unparse(node.value).split(".")[-1]
                if holder.split("_")[-1] == CONFIGS[config]:
                    read.add(node.attr)
    unread = sorted(set(config_fields(config)) - read)
    assert not unread, f"fields of {config} that nothing reads: {', '.join(unread)}"


def test_every_module_has_a_docstring():
    wrong = [name(path) for path in SOURCES if not ast.get_docstring(parse(path))]
    assert not wrong, listed(wrong)


def test_public_functions_and_classes_have_docstrings():
    wrong = []
    for path in SOURCES:
        for node in parse(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            length = node.end_lineno - node.lineno + 1
            if node.name.startswith("_") or length <= MAX_LINES_WITHOUT_DOCSTRING or ast.get_docstring(node):
                continue
            wrong.append(f"{name(path)}:{node.lineno} {node.name} ({length} lines)")
    assert not wrong, listed(wrong)
