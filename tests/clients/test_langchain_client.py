"""LangChain's ChatOpenAI, unchanged."""

import asyncio

import pytest

from tests.api.test_serve import MESSAGES, MODEL
from tests.clients import installed
from tests.http.test_tools import CALL, LOOK

langchain_openai = installed.client("langchain_openai")
messages = installed.client("langchain_core.messages")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

QUESTION = MESSAGES[0]["content"]


def chat(url, model=MODEL, **options):
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_retries=0, **options
    )


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def api(request):
    """Which of the two APIs it uses."""
    return {"use_responses_api": request.param}


def test_whole_streamed_and_batched_answers_are_what_plain_http_gives(model, api):
    llm = chat(model.url, max_tokens=12, **api)
    whole = llm.invoke(QUESTION)
    assert whole.text == model.text and whole.usage_metadata["output_tokens"] == 12
    assert "".join(chunk.text for chunk in llm.stream(QUESTION)) == model.text
    assert [answer.text for answer in llm.batch([QUESTION] * 3)] == [model.text] * 3


def test_asynchronous_answers_are_the_same(model):
    async def ask(use_responses_api):
        llm = chat(model.url, max_tokens=12, use_responses_api=use_responses_api)
        streamed = "".join([chunk.text async for chunk in llm.astream(QUESTION)])
        return streamed, (await llm.ainvoke(QUESTION)).text

    async def ask_both():
        return await asyncio.gather(ask(False), ask(True))  # in one loop, to which its connections belong

    assert asyncio.run(ask_both()) == [(model.text, model.text)] * 2


def test_turns_of_tools_go_round(script, api):
    llm = chat(script.url, "models/fake", **api).bind_tools([LOOK])
    script.engine.reply = f"<think>why</think>So {CALL}"
    whole = llm.invoke("Hello")
    streamed = None
    for chunk in llm.stream("Hello"):
        streamed = chunk if streamed is None else streamed + chunk
    for answer in (whole, streamed):
        (call,) = answer.tool_calls
        assert (call["name"], call["args"], answer.text) == ("look", {"x": 1}, "So")
    script.engine.reply = "Sunny"
    result = messages.ToolMessage("sun", tool_call_id=call["id"])
    assert llm.invoke([messages.HumanMessage("Hello"), streamed, result]).text == "Sunny"
