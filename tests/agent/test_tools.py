"""Functions as tools: schemas from hints, arguments checked before the call, errors as text."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from jaxinfer.agent.tools import Tool, Toolbox, ToolError, from_function


@dataclasses.dataclass
class Place:
    city: str
    floor: int = 0


def find(what: str, place: Place, *, limit: int = 3, kind: Literal["near", "far"] | None = None) -> list[str]:
    """Finds things.

    Args:
        what: the thing to look for
        limit (int): the most results
    :param kind: how far away
    """
    return [what, place.city, str(place.floor), str(limit), str(kind)]


def test_the_schema_follows_the_hints_and_the_docstring():
    tool = from_function(find)
    assert (tool.name, tool.description.splitlines()[0]) == ("find", "Finds things.")
    properties = tool.parameters["properties"]
    assert tool.parameters["type"] == "object" and tool.parameters["required"] == ["what", "place"]
    assert properties["what"] == {"type": "string", "description": "the thing to look for"}
    assert properties["limit"] == {"type": "integer", "description": "the most results", "default": 3}
    assert properties["place"] == {"$ref": "#/$defs/Place"}
    assert properties["kind"]["anyOf"] == [{"enum": ["far", "near"]}, {"type": "null"}]
    assert tool.parameters["$defs"]["Place"]["required"] == ["city"]
    assert tool.definition()["function"] == {
        "name": "find",
        "description": tool.description,
        "parameters": tool.parameters,
    }


def test_arguments_are_converted_before_the_call_and_results_become_json():
    box = Toolbox([find])
    result = box.call("find", '{"what": "tea", "place": {"city": "Rome"}, "kind": "near"}')
    assert result == ('["tea","Rome","0","3","near"]', False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"what": "tea", "place": {"city": 3}}', "Expected `str`, got `int` - at `$.place.city`"),
        ('{"what": "tea", "place": {}}', "missing required field `city`"),
        ('{"what": "tea"}', "missing required field `place`"),
        ('{"what": "tea", "place": {"city": "Rome"}, "kind": "up"}', "Invalid enum value 'up'"),
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_function(arguments, told):
    called = []
    box = Toolbox([from_function(find)._replace(run=lambda v: called.append(v) or from_function(find).run(v))])
    result = box.call("find", arguments)
    assert result.failed and told in result.text and result.text.startswith("error: the arguments of find do not fit")


def test_a_default_that_can_change_is_fresh_for_every_call():
    def collect(item: str, into: list[str] = []) -> list[str]:  # noqa: B006
        """Collects."""
        into.append(item)
        return into

    box = Toolbox([collect])
    assert [box.call("collect", '{"item": "a"}').text for _ in range(2)] == ['["a"]', '["a"]']


def test_functions_that_a_model_could_not_call_are_refused_with_the_parameter():
    def untyped(x):
        """Does."""

    def many(*xs: int) -> None:
        """Does."""

    def silent(x: int) -> None: ...

    with pytest.raises(TypeError, match="the parameter 'x' of the tool 'untyped' has no type hint"):
        from_function(untyped)
    with pytest.raises(TypeError, match=r"the tool 'many' has the parameter \*xs: 'int'; only named ones"):
        from_function(many)
    with pytest.raises(TypeError, match="the tool 'silent' has no docstring"):
        from_function(silent)
    with pytest.raises(ValueError, match="a tool is named 'a b'; a name has 1 to 64 characters"):
        Toolbox([Tool("a b", "", {}, str)])
    with pytest.raises(ValueError, match="two tools are named 'x'"):
        Toolbox([Tool("x", "", {}, str), Tool("x", "", {}, str)])


def test_a_long_result_is_cut_and_half_a_surrogate_replaced():
    box = Toolbox([Tool("long", "", {}, lambda _: "é" * 9000), Tool("half", "", {}, lambda _: "a\ud800b")])
    assert box.call("long", "").text == "é" * 8000 + "\n[output cut: the first 8000 of 9000 characters are shown]"
    assert box.call("half", "{}").text == "a?b"


def test_an_error_that_the_tool_words_itself_is_told_as_it_is():
    def run(_):
        raise ToolError("error: try again")

    assert Toolbox([Tool("x", "", {}, run)]).call("x", "{}") == ("error: try again", True)
