"""Anthropic's own client, unchanged."""

import asyncio
import typing

import pytest

from tests.api.test_serve import MESSAGES, MODEL
from tests.clients import installed
from tests.http.test_tools import CALL, PARAMETERS

anthropic = installed.client("anthropic")
pydantic = installed.client("pydantic")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ASK = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12}
GREEDY = {"temperature": 0}
TOOL = {"name": "look", "description": "Looks.", "input_schema": PARAMETERS}
HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def client(model):
    with anthropic.Anthropic(base_url=model.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(script):
    with anthropic.Anthropic(base_url=script.url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def test_whole_and_streamed_messages_are_what_plain_http_gives(client, model):
    whole = client.messages.create(**ASK, extra_body=GREEDY)
    assert text_of(whole) == model.text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**ASK, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text_of(final) == model.text and final.usage.output_tokens == 12
    events = [event.type for event in client.messages.create(**ASK, stream=True, extra_body=GREEDY)]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


def test_asynchronous_client_gets_the_same(model):
    async def ask():
        async with anthropic.AsyncAnthropic(base_url=model.url, api_key="none", max_retries=0) as client:
            async with client.messages.stream(**ASK, extra_body=GREEDY) as stream:
                streamed = await stream.get_final_message()
            return text_of(streamed), text_of(await client.messages.create(**ASK, extra_body=GREEDY))

    assert asyncio.run(ask()) == (model.text, model.text)


def test_messages_are_parsed_into_the_clients_own_type_whole_and_streamed(client):
    class Answer(pydantic.BaseModel):
        capital: typing.Literal["Paris", "Rome"]
        is_large: bool

    ask = ASK | {"max_tokens": 100}
    whole = client.messages.parse(**ask, output_format=Answer, extra_body=GREEDY)
    assert isinstance(whole.parsed_output, Answer)
    with client.messages.stream(**ask, output_format=Answer, extra_body=GREEDY) as stream:
        assert stream.get_final_message().parsed_output == whole.parsed_output
    beta = client.beta.messages.parse(**ask, output_format=Answer, extra_body=GREEDY)
    assert beta.parsed_output == whole.parsed_output
    with pytest.raises(anthropic.BadRequestError, match="output_config.effort"):
        client.messages.create(**ask, output_config={"effort": "low"})


def test_tokens_are_counted_and_failures_are_the_clients_own_exceptions(client):
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be kind")
    usage = client.messages.create(**ASK | {"max_tokens": 1}, system="Be kind").usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ASK | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="empty string"):
        client.messages.create(**ASK, stop_sequences=[""])


def test_turns_of_tools_go_round(scripted, script):
    script.engine.reply = f"<think>why</think>So {CALL}"
    ask = {"model": "models/fake", "max_tokens": 400, "tools": [TOOL], "extra_body": GREEDY}
    whole = scripted.messages.create(**ask, messages=[HELLO])
    with scripted.messages.stream(**ask, messages=[HELLO]) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"x": 1} and message.stop_reason == "tool_use"
    script.engine.reply = "Sunny"
    result = {"type": "tool_result", "tool_use_id": streamed.content[2].id, "content": "sun"}
    turns = [HELLO, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    assert text_of(scripted.messages.create(**ask, messages=turns)) == "Sunny"


def test_tool_runner_runs_the_function_and_ends_with_the_answer(scripted, script):
    asked = []

    @anthropic.beta_tool
    def look(x: int) -> str:
        """Looks.

        Args:
            x: where
        """
        asked.append(x)
        script.engine.reply = "Sunny"
        return "sun"

    script.engine.reply = CALL
    runner = scripted.beta.messages.tool_runner(
        model="models/fake", max_tokens=400, tools=[look], messages=[HELLO], extra_body=GREEDY
    )
    assert text_of(runner.until_done()) == "Sunny" and asked == [1]
