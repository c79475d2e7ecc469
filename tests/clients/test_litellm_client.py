"""LiteLLM, unchanged, by the names under which it knows such servers."""

import asyncio

import pytest

from tests.api.test_serve import CAPITAL, MESSAGES, MODEL
from tests.clients import installed
from tests.http.test_tools import CALL, LOOK

litellm = installed.client("litellm")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

OPENAI_LIKE = ("openai", "hosted_vllm")


def options(url, provider, model=MODEL):
    base = url if provider == "anthropic" else f"{url}/v1"
    return {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "temperature": 0, "max_retries": 0}


@pytest.mark.parametrize("provider", [*OPENAI_LIKE, "anthropic"])
def test_whole_and_streamed_answers_are_what_plain_http_gives(model, provider):
    ask = options(model.url, provider) | {"messages": MESSAGES, "max_tokens": 12}
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == model.text and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(litellm.completion(**ask, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == model.text
    answer = asyncio.run(litellm.acompletion(**ask))
    assert answer.choices[0].message.content == model.text


def test_completions_and_responses_are_read(model):
    done = litellm.text_completion(**options(model.url, "text-completion-openai"), prompt=CAPITAL, max_tokens=4)
    assert "Paris" in done.choices[0].text
    ask = options(model.url, "openai") | {"input": MESSAGES, "max_output_tokens": 16}  # it asks for no fewer
    response = litellm.responses(**ask)
    text = "".join(part.text for item in response.output for part in item.content)
    assert text == model.chat(max_tokens=16)["message"]["content"]


@pytest.mark.parametrize("provider", [*OPENAI_LIKE, "anthropic"])
def test_turns_of_tools_go_round(script, provider):
    ask = options(script.url, provider, "models/fake") | {"tools": [LOOK], "max_tokens": 400}
    turns = [{"role": "user", "content": "Hello"}]
    script.engine.reply = f"<think>why</think>So {CALL}"
    chunks = list(litellm.completion(**ask, messages=turns, stream=True))
    streamed = litellm.stream_chunk_builder(chunks, messages=turns)
    for reply in (litellm.completion(**ask, messages=turns), streamed):
        message = reply.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments.replace(" ", "")) == ("look", '{"x":1}')
        assert message.content == "So" and message.reasoning_content == "why"
        assert reply.choices[0].finish_reason == "tool_calls"
    script.engine.reply = "Sunny"
    turns += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    assert litellm.completion(**ask, messages=turns).choices[0].message.content == "Sunny"


def test_failures_are_its_own_exceptions(model):
    with pytest.raises(litellm.BadRequestError, match="temperature is -1"):
        litellm.completion(**options(model.url, "openai") | {"temperature": -1}, messages=MESSAGES)
