"""OpenAI's own client, unchanged."""

import asyncio
import json
import typing

import openai
import pydantic
import pytest

from tests.api.test_serve import CAPITAL, MESSAGES, MODEL
from tests.http.test_tools import CALL, LOOK

pytestmark = pytest.mark.long

ASK = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
RESPOND = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 12}
STOP = {"stop": [","]}
"""Ends the answer in time: the client's helpers raise an error for one that is cut."""


@pytest.fixture(scope="module")
def client(model):
    with openai.OpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_whole_and_streamed_chats_are_what_plain_http_gives(client, model):
    whole = client.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == model.text and whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == model.text
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "length"
    with client.chat.completions.stream(**ASK, **STOP) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == model.text.partition(",")[0]
    assert final.choices[0].finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError), client.chat.completions.stream(**ASK) as stream:
        stream.get_final_completion()


def test_asynchronous_client_gets_the_same_from_many_at_once(model):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0) as client:

            async def streamed():
                stream = await client.chat.completions.create(**ASK, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async def whole():
                return (await client.chat.completions.create(**ASK)).choices[0].message.content

            async def helped():
                async with client.chat.completions.stream(**ASK, **STOP) as stream:
                    return (await stream.get_final_completion()).choices[0].message.content

            async def responded():
                return (await client.responses.create(**RESPOND)).output_text

            return await asyncio.gather(*(ask() for ask in (streamed, whole, helped, responded) * 2))

    text = model.text
    assert asyncio.run(ask()) == [text, text, text.partition(",")[0], text] * 2


def test_completions_choices_and_log_probabilities_are_read(client):
    ask = {"model": MODEL, "prompt": CAPITAL, "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**ask, logprobs=2)
    assert "Paris" in whole.choices[0].text and len(whole.choices[0].logprobs.tokens) == 6
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    chat = client.chat.completions.create(**ASK | {"n": 2, "max_tokens": 3}, logprobs=True, top_logprobs=2)
    assert [len(choice.logprobs.content[0].top_logprobs) for choice in chat.choices] == [2, 2]
    assert chat.choices[0].message.content == chat.choices[1].message.content


def test_responses_are_made_streamed_continued_shown_and_deleted(client, model):
    whole = client.responses.create(**RESPOND)
    assert whole.output_text == model.text and whole.status == "incomplete"
    with client.responses.stream(**RESPOND, extra_body=STOP) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == model.text.partition(",")[0]
    raw = [event.type for event in client.responses.create(**RESPOND, stream=True)]
    assert (raw[0], raw[-1]) == ("response.created", "response.incomplete")
    more = client.responses.create(**RESPOND | {"input": "Why?"}, previous_response_id=whole.id)
    turns = [*MESSAGES, {"role": "assistant", "content": model.text}, {"role": "user", "content": "Why?"}]
    assert more.output_text == model.chat(messages=turns, max_tokens=12)["message"]["content"]
    assert client.responses.retrieve(more.id).output_text == more.output_text
    client.responses.delete(more.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(more.id)


class Answer(pydantic.BaseModel):
    """The form of an answer."""

    capital: typing.Literal["Paris", "Rome"]
    is_large: bool
    neighbours: list[typing.Literal["Spain", "Italy"]] = pydantic.Field(max_length=1)


PARSE = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 100}
RESPOND_PARSED = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 100}


def test_answers_are_parsed_into_the_clients_own_type_whole_and_streamed(client):
    whole = client.beta.chat.completions.parse(**PARSE, response_format=Answer).choices[0].message
    answer = whole.parsed
    assert isinstance(answer, Answer) and Answer.model_validate_json(whole.content) == answer
    assert client.chat.completions.parse(**PARSE, response_format=Answer).choices[0].message.parsed == answer
    with client.beta.chat.completions.stream(**PARSE, response_format=Answer) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == answer and final.content == whole.content
    assert "content.done" in {event.type for event in events}
    assert "".join(event.delta for event in events if event.type == "content.delta") == whole.content


def test_responses_are_parsed_whole_and_streamed(client):
    answer = client.responses.parse(**RESPOND_PARSED, text_format=Answer).output_parsed
    assert isinstance(answer, Answer)
    with client.responses.stream(**RESPOND_PARSED, text_format=Answer) as stream:
        list(stream)
        assert stream.get_final_response().output_parsed == answer


def test_asynchronous_client_parses_the_same(client, model):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0) as client:

            async def whole():
                reply = await client.beta.chat.completions.parse(**PARSE, response_format=Answer)
                return reply.choices[0].message.parsed

            async def streamed():
                async with client.beta.chat.completions.stream(**PARSE, response_format=Answer) as stream:
                    async for _ in stream:
                        pass
                    return (await stream.get_final_completion()).choices[0].message.parsed

            async def responded():
                return (await client.responses.parse(**RESPOND_PARSED, text_format=Answer)).output_parsed

            return await asyncio.gather(whole(), streamed(), responded())

    first, second, third = asyncio.run(ask())
    assert first == second == client.chat.completions.parse(**PARSE, response_format=Answer).choices[0].message.parsed
    assert isinstance(third, Answer)


def test_arguments_of_calls_are_parsed_into_the_clients_own_type(script):
    class look(pydantic.BaseModel):  # noqa: N801
        """Looks."""

        x: int

    script.engine.reply = CALL
    ask = {"model": "models/fake", "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
    tools = [openai.pydantic_function_tool(look)]
    whole = script.openai.beta.chat.completions.parse(**ask, tools=tools).choices[0].message
    with script.openai.beta.chat.completions.stream(**ask, tools=tools) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (whole, streamed):
        assert message.tool_calls[0].function.parsed_arguments == look(x=1)


def test_models_are_listed_and_failures_are_the_clients_own_exceptions(client):
    assert [known.id for known in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(**ASK | {"model": "gpt-9"})
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as refusal:
        client.chat.completions.create(**ASK | {"temperature": -1}, stream=True)
    assert refusal.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="does not pool"):
        client.embeddings.create(model=MODEL, input="x")


def test_turns_of_tools_go_round(script):
    script.engine.reply = f"<think>why</think>So {CALL}"
    ask = {"model": "models/fake", "temperature": 0, "tools": [LOOK]}
    messages = [{"role": "user", "content": "Hello"}]
    with script.openai.chat.completions.stream(**ask, messages=messages) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in events
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"x": 1} and message.content == "So"
    script.engine.reply = "Sunny"
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    assert script.openai.chat.completions.create(**ask, messages=messages).choices[0].message.content == "Sunny"
    function = {"type": "function", "strict": False, **LOOK["function"]}
    respond = {"model": "models/fake", "temperature": 0, "tools": [function]}
    script.engine.reply = f"<think>why</think>{CALL}"
    first = script.openai.responses.create(**respond, input="Hello")
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    script.engine.reply = "Sunny"
    answer = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    second = script.openai.responses.create(**respond, input=[answer], previous_response_id=first.id)
    again = script.openai.responses.create(
        **respond, input=[{"role": "user", "content": "Hello"}, *first.output, answer]
    )
    assert second.output_text == again.output_text == "Sunny"
    one, other = (list(request.prompt_ids) for request in script.engine.requests[-2:])
    assert one == other
