"""The embedded default model behind HTTP, asked by OpenAI's own client."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import re
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.test_serve_process import Serving
from tests.http.conftest import wait_for

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "default_model_tokens.json").read_text())
MESSAGES = RECORDED["chat_messages"]
CHAT = next(prompt for prompt in RECORDED["prompts"] if prompt["name"] == "chat")
MODEL = RECORDED["model"]
CONTEXT = 512
CAPITAL = "The capital of France is"
PROMPTS = [
    CAPITAL,
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "Water boils at",
    "The three primary colours are red, ",
    "Dear Sir or Madam,\n\nI am writing to you because " * 8,
    "É possível que",
]
EVERYTHING = {
    "max_tokens": 12,
    "n": 2,
    "seed": 11,
    "temperature": 0.8,
    "top_p": 0.9,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {"198": -5, "504": 2.5},
    "stop": ["never this", "nor that"],
    "user": "somebody",
}
EXTRA = {
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "min_tokens": 3,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}
"""What OpenAI's API does not have."""


class Server:
    """The server, and short ways to ask it."""

    def __init__(self, serving: Serving):
        self.url = serving.url
        self.http = httpx.Client(base_url=serving.url, timeout=60)
        self.client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=120)

    def close(self):
        self.client.close()
        self.http.close()

    def complete(self, prompt=CAPITAL, **options):
        options = {"temperature": 0, "max_tokens": 12} | options
        return self.client.completions.create(model=MODEL, prompt=prompt, **options)

    def chat(self, messages=MESSAGES, **options):
        options = {"temperature": 0, "max_tokens": 12} | options
        return self.client.chat.completions.create(model=MODEL, messages=messages, **options)

    def text(self, prompt, *, stream=False, **options):
        if not stream:
            return self.complete(prompt, **options).choices[0].text
        return "".join(
            choice.text for chunk in self.complete(prompt, stream=True, **options) for choice in chunk.choices
        )

    def metrics(self):
        """Every sample by its name, summed over labels."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0) + sample.value
        return samples


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    flags = ["--max-model-len", str(CONTEXT), "--compile-cache-dir", str(folder / "compiled")]
    # Optimised, unlike what other tests compile: hundreds of tokens are generated here.
    serving = Serving(folder / "log", MODEL, *flags, XLA_FLAGS="")
    try:
        server = Server(serving.wait_until_ready())
        yield server
        server.close()
    finally:
        serving.close()


def is_idle(server):
    metrics = server.metrics()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(metrics[f"jaxinfer:{name}"] == 0 for name in names)


@pytest.fixture(autouse=True)
def left_as_it_was(server):
    """Whatever a test asks: nothing is compiled for it, and nothing of it stays."""
    yield
    wait_for(lambda: is_idle(server), limit_s=5)
    assert server.metrics()["jaxinfer:xla_compilations_after_ready_total"] == 0


@pytest.fixture(scope="module")
def alone(server):
    """What each prompt gives when nothing else runs."""
    return {prompt: server.text(prompt) for prompt in PROMPTS}


def at_once(function, items):
    """Results of a call for every item, all in progress together."""
    with concurrent.futures.ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))


def joined(chunks, index=0):
    """Text and finish reason of one choice of a chat stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    (reason,) = [choice.finish_reason for choice in choices if choice.finish_reason]
    return "".join(choice.delta.content or "" for choice in choices), reason


def test_greedy_completion_knows_the_capital_of_france(alone):
    assert alone[CAPITAL].startswith(" Paris.")


@pytest.mark.parametrize("stream", [False, True])
def test_eight_prompts_at_once_give_byte_for_byte_what_each_gives_alone(server, alone, stream):
    texts = at_once(lambda prompt: server.text(prompt, stream=stream), PROMPTS)
    assert dict(zip(PROMPTS, texts, strict=True)) == alone


def test_list_of_prompts_gives_each_its_own_text_in_order(server, alone):
    reply = server.complete(PROMPTS[:3])
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.text for choice in reply.choices] == [alone[prompt] for prompt in PROMPTS[:3]]


def test_token_ids_are_the_same_prompt_as_their_text(server, alone):
    (plain,) = [prompt for prompt in RECORDED["prompts"] if prompt["text"] == CAPITAL]
    assert server.text(plain["prompt_ids"]) == alone[CAPITAL]


def test_chat_is_a_completion_of_what_the_models_own_template_writes(server):
    reply = server.chat()
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == server.text(CHAT["prompt_ids"])
    assert reply.usage.prompt_tokens == len(CHAT["prompt_ids"])


def test_chat_stream_joined_is_the_whole_answer_with_the_same_usage(server):
    whole, again = (server.chat(max_tokens=40) for _ in range(2))  # what the first finds in the cache is left to chance
    chunks = list(server.chat(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(CHAT["tokens"])
    assert again.usage.prompt_tokens_details.cached_tokens == len(CHAT["prompt_ids"]) - 1
    assert chunks[-1].usage == again.usage and not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_counts_the_prompt_once_and_every_sample(server):
    usage = server.complete(n=2, max_tokens=3).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)


def test_completion_log_probabilities_are_there_for_every_token(server):
    choice = server.complete(logprobs=3, max_tokens=6).choices[0]
    given = choice.logprobs
    assert "".join(given.tokens) == choice.text
    starts = itertools.accumulate((len(token) for token in given.tokens[:-1]), initial=0)
    assert given.text_offset == list(starts)
    for token, logprob, top in zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True):
        assert len(top) == 3 and max(top, key=top.get) == token
        assert top[token] == logprob <= 0
        assert sum(map(math.exp, top.values())) <= 1 + 1e-6


@pytest.mark.parametrize("stream", [False, True])
def test_chat_log_probabilities_are_there_for_every_token(server, stream):
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    if stream:
        chunks = list(server.chat(stream=True, **options))
        text, _ = joined(chunks)
        tokens = [
            token
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for token in choice.logprobs.content
        ]
    else:
        choice = server.chat(**options).choices[0]
        text, tokens = choice.message.content, choice.logprobs.content
    assert len(tokens) == 6
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == text
    for token in tokens:
        assert [top.token for top in token.top_logprobs][0] == token.token
        assert token.top_logprobs[0].logprob == token.logprob >= token.top_logprobs[1].logprob


def test_samples_differ_and_come_again_with_the_same_seed_and_not_with_another(server):
    def sample(seed):
        return [choice.text for choice in server.complete(n=2, seed=seed, temperature=1.2).choices]

    first = sample(5)
    assert first[0] != first[1]
    assert at_once(sample, [5, 5, 6])[:2] == [first, first]
    assert sample(6) != first


def test_stop_string_ends_the_text_before_it_streamed_or_not(server, alone):
    stop = alone[CAPITAL][4:9]  # begins and ends within tokens
    expected = alone[CAPITAL][:4]
    reply = server.complete(stop=[stop, "zzz"])
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (expected, "stop")
    assert reply.choices[0].stop_reason == stop
    assert server.text(CAPITAL, stop=stop, stream=True) == expected


def test_every_sampling_parameter_at_once_is_honoured_alike_streamed_or_not(server):
    whole = server.complete(**EVERYTHING, logprobs=2, extra_body=EXTRA)
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    chunks = list(server.complete(**EVERYTHING, logprobs=2, extra_body=EXTRA, stream=True))
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        logprobs = [logprob for part in parts if part.logprobs for logprob in part.logprobs.token_logprobs]
        # Two rows that began together need not do so again, and in another bucket sums round otherwise.
        assert logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4) and len(logprobs) == 12
    chat = server.chat(**EVERYTHING, logprobs=True, top_logprobs=20, extra_body=EXTRA)
    assert [len(choice.logprobs.content) for choice in chat.choices] == [12, 12]


def test_prompts_of_any_length_run_beside_each_other(server):
    lengths = [1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 129, 255, 256, 257, 299, 300]

    def ask(length):
        prompt = [504 + i % 90 for i in range(length)]
        options = {"logprobs": 1} if length % 3 == 0 else {"temperature": 1.0, "seed": 1} if length % 3 == 1 else {}
        return server.complete(prompt, max_tokens=2, **options).usage.prompt_tokens

    assert at_once(ask, lengths) == lengths


@pytest.mark.parametrize("chat", [False, True])
def test_closing_a_stream_midway_frees_its_slot_and_its_pages(server, chat):
    options = {"stream": True, "max_tokens": 400, "extra_body": {"ignore_eos": True}, "n": 2}
    before = server.metrics()
    with server.chat(**options) if chat else server.complete(**options) as stream:
        for _ in range(6):
            next(stream)
        during = server.metrics()
        assert during["jaxinfer:num_requests_running"] == 2
        assert during["jaxinfer:kv_cache_usage_perc"] > 0
    wait_for(lambda: is_idle(server), limit_s=3)
    generated = "jaxinfer:generation_tokens_total"
    assert server.metrics()[generated] - before[generated] < 100


def test_client_that_leaves_before_the_first_token_frees_its_slot(server):
    prompt = [504 + i % 90 for i in range(300)]
    for _ in range(3):
        with pytest.raises(openai.APITimeoutError):
            server.complete(prompt, max_tokens=200, timeout=0.05, extra_body={"ignore_eos": True})
    wait_for(lambda: is_idle(server), limit_s=3)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context_is_refused_with_both_numbers(server, stream):
    with pytest.raises(openai.BadRequestError, match="prompt has 600 tokens; the limit is 512 tokens") as refusal:
        server.complete([504] * 600, stream=stream)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "prompt"


def test_more_tokens_than_the_context_holds_are_cut_to_it(server):
    reply = server.complete([504] * 508, max_tokens=1000, extra_body={"ignore_eos": True})
    assert (reply.usage.total_tokens, reply.choices[0].finish_reason) == (CONTEXT, "length")


def test_models_are_listed_with_their_context_and_others_are_not_found(server):
    (model,) = server.client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, CONTEXT)
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; served: smollm2-135m"):
        server.client.chat.completions.create(model="gpt-4", messages=RECORDED["chat_messages"])


def test_metrics_count_tokens_and_requests_under_both_names(server):
    before = server.metrics()
    server.complete(max_tokens=4)
    after = server.metrics()
    for prefix in ("jaxinfer:", "vllm:"):
        grown = {
            name: after[prefix + name] - before[prefix + name]
            for name in (
                "prompt_tokens_total",
                "generation_tokens_total",
                "request_success_total",
                "time_to_first_token_seconds_count",
                "inter_token_latency_seconds_count",
                "e2e_request_latency_seconds_count",
            )
        }
        assert list(grown.values()) == [5, 4, 1, 1, 3, 1]


COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "colours", "schema": COLOURS, "strict": True}}


def test_a_schema_is_met_streamed_or_not_beside_prompts_that_give_what_they_give_alone(server, alone):
    def colours(stream):
        options = {"response_format": SCHEMA_FORMAT, "max_tokens": 60, "seed": 3, "temperature": 0.9}
        if stream:
            return joined(server.chat(stream=True, **options))
        (choice,) = server.chat(**options).choices
        return choice.message.content, choice.finish_reason

    asked = [True, False, *PROMPTS]
    whole, streamed, *texts = at_once(lambda a: colours(a) if isinstance(a, bool) else server.text(a), asked)
    assert whole == streamed and whole[1] == "stop"
    jsonschema.validate(json.loads(whole[0]), COLOURS)
    assert dict(zip(PROMPTS, texts, strict=True)) == alone


def test_fields_of_other_servers_constrain_completions_too(server):
    choice = server.complete(extra_body={"guided_choice": ["Rome", "Oslo"]}).choices[0]
    assert (choice.text in ("Rome", "Oslo"), choice.finish_reason) == (True, "stop")
    regex = {"structured_outputs": {"regex": " [A-Z]{3}"}}
    choices = server.complete(n=3, temperature=1.0, seed=1, logprobs=2, extra_body=regex).choices
    assert all(re.fullmatch(" [A-Z]{3}", choice.text) for choice in choices)
    assert len({choice.text for choice in choices}) > 1


def test_a_keyword_that_cannot_be_enforced_is_refused_with_its_name(server):
    schema = {"name": "s", "schema": {"type": "array", "contains": {"type": "integer"}}}
    with pytest.raises(openai.BadRequestError, match="contains") as refused:
        server.chat(response_format={"type": "json_schema", "json_schema": schema}, stream=True)
    assert refused.value.param == "response_format.json_schema.schema"
