"""Structured output of the embedded default model, with its own tokenizer."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import jsonschema
import pytest

from jaxinfer.api import LLM
from jaxinfer.structured import StructuredOutputs
from jaxinfer.types import FinishReason, InvalidRequest, SamplingParams

SUITE = json.loads((Path(__file__).parents[1] / "data" / "json_schema_suite.json").read_text())["groups"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "🍵"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe a person as a JSON object."}]
GREEDY = {"temperature": 0, "max_tokens": 64}


@pytest.fixture(scope="module")
def llm():
    options = {"max_model_len": 448, "max_num_seqs": 4, "max_num_batched_tokens": 64, "compile_cache_dir": ""}
    with LLM("smollm2-135m", dtype="float32", show_progress=False, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompt(llm):
    return llm.chat_prompt(QUESTION)


def params(**fields) -> SamplingParams:
    form = {name: fields.pop(name) for name in ("json", "regex", "choice", "grammar", "json_object") if name in fields}
    return SamplingParams(**(GREEDY | fields), structured_outputs=StructuredOutputs(**form) if form else None)


def test_every_form_is_matched_beside_outputs_without_one(llm, prompt):
    """Which have the tokens that they have alone."""
    free = params(max_tokens=24)
    alone = llm.generate([prompt], free)[0].outputs[0]
    asked = [
        params(json=PERSON),
        params(choice=["certainly", "certainly not"]),
        params(regex=r"\d{4}-\d{2}-\d{2}"),
        params(grammar='root ::= "yes" | "no" ", " root'),
        params(json_object=True, max_tokens=16),
    ]
    outputs = [output.outputs[0] for output in llm.generate([prompt] * 6, [*asked, free])]
    person, choice, date, word, cut, beside = outputs
    jsonschema.validate(json.loads(person.text), PERSON)
    assert choice.text in ("certainly", "certainly not")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date.text)
    assert re.fullmatch(r"(no, )*yes", word.text) or word.finish_reason == FinishReason.LENGTH
    assert cut.text.startswith("{")
    assert {output.finish_reason for output in (person, choice, date)} == {FinishReason.STOP}
    assert beside == alone
    assert llm.stats().compilations_after_ready == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.2, "seed": 3, "n": 2},
        *(
            pytest.param(fields, marks=pytest.mark.long)
            for fields in (
                {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 2},
                {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logprobs": 0},
                {"min_tokens": 60, "logit_bias": {2: 50.0}},
                {"ignore_eos": True},
            )
        ),
    ],
)
def test_other_parameters_do_not_break_the_form(llm, prompt, fields):
    outputs = llm.generate([prompt], params(json=PERSON, **fields))[0].outputs
    for output in outputs:
        assert output.finish_reason == FinishReason.STOP, output.text
        jsonschema.validate(json.loads(output.text), PERSON)
        if "logprobs" in fields:
            assert len(output.logprobs) == len(output.token_ids)
            assert b"".join(entry.bytes for entry in output.logprobs).decode() == output.text
    if len(outputs) > 1:
        assert outputs[0].text != outputs[1].text
    # Its prompt is cached now, so that log-probabilities are rounded otherwise.
    again = llm.generate([prompt], params(json=PERSON, **fields))[0].outputs
    assert [(output.text, output.token_ids) for output in again] == [(o.text, o.token_ids) for o in outputs]


def test_a_stop_string_ends_an_output_within_its_form(llm, prompt):
    whole = llm.generate([prompt], params(json=PERSON))[0].outputs[0].text
    output = llm.generate([prompt], params(json=PERSON, stop=['"age"']))[0].outputs[0]
    assert output.text == whole[: whole.index('"age"')] and output.stop_reason == '"age"'


SAMPLED = {"temperature": 1.0, "seed": 5, "logprobs": 1, "stop": ["never"]}


@pytest.mark.parametrize("fields", [{}, pytest.param(SAMPLED, marks=pytest.mark.long)])
def test_a_stream_gives_what_generate_gives(llm, prompt, fields):
    asked = params(json=PERSON, **fields)
    whole = llm.generate([prompt], asked)[0].outputs[0]
    deltas = list(llm.stream(prompt, asked))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert deltas[-1].finish_reason == whole.finish_reason == FinishReason.STOP


def test_what_cannot_be_enforced_is_refused_before_anything_runs(llm, prompt):
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequest, match=r'structured_outputs: is not supported: .*"uniqueItems"'):
        llm.generate([prompt], params(json={"type": "array", "uniqueItems": True}))
    with pytest.raises(InvalidRequest, match="special token"):
        llm.generate([prompt], params(grammar="start: <|nobody|>"))
    assert llm.stats().num_steps == steps


def test_a_special_token_may_stand_in_a_grammar(llm, prompt):
    output = llm.generate([prompt], params(grammar='start: "a" <|im_start|> "b"', skip_special_tokens=False))[0]
    assert output.outputs[0].text == "a<|im_start|>b"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_outputs_for_schemas_of_the_published_suite_validate_and_mostly_end():
    """100 drawn schemas, 256 tokens each. With penalties, as this small model repeats itself where it may."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"schemas drawn with seed {seed}")
    drawn = [group["schema"] for group in random.Random(seed).sample(SUITE, 100)]
    fields = {"max_tokens": 256, "temperature": 0.5, "frequency_penalty": 0.5, "presence_penalty": 0.2}
    asked = [params(json=schema, seed=seed, **fields) for seed, schema in enumerate(drawn)]
    options = {"max_model_len": 448, "max_num_seqs": 25, "max_num_batched_tokens": 64, "compile_cache_dir": ""}
    with LLM("smollm2-135m", dtype="float32", show_progress=False, **options) as llm:
        text = 'Give a very short JSON value, such as 3, "yes" or {"a": 1}.'
        prompt = llm.chat_prompt([{"role": "user", "content": text}])
        outputs = [output.outputs[0] for output in llm.generate([prompt] * len(drawn), asked)]
    ended = [output.finish_reason == FinishReason.STOP for output in outputs]
    for schema, output, has_ended in zip(drawn, outputs, ended, strict=True):
        if has_ended:
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
        else:
            assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 256)
    assert sum(ended) >= 80, f"{sum(ended)} of 100 outputs for the schemas of seed {seed} ended"
