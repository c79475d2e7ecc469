"""Outputs that have to match a grammar: alone and in company, through preemption, with every sampling parameter."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from concurrent.futures import Future

import jsonschema
import pytest

from jaxinfer.types import FinishReason, InvalidRequest, Request
from tests.engine.drive import GOLDEN, build, check_idle, drive
from tests.engine.grammars import EOS, VOCAB, give_grammars, grammar, text
from tests.engine.test_nan import POISON, poisoned

REGEXES = (r"[0-9]{1,30}", r"(yes|no)( [a-z]{1,5}){0,6}\.", r"(ab|c)*d?")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NO_SPACE = grammar(json=SCHEMA, disable_any_whitespace=True)


@pytest.fixture(scope="module", params=["tensor=1", "tensor=2", pytest.param("data=2", marks=pytest.mark.long)])
def engine(request):
    """A pool of 12 pages for four sequences of up to 8 pages each, so that preemption is common."""
    options = {"page_size": 8, "num_pages": 12, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    yield from give_grammars(build(GOLDEN / "qwen2", mesh=request.param, **options))


def ask(name: str, form: str = "", prompt_len: int = 9, **fields) -> Request:
    prompt = random.Random(name).choices(range(VOCAB), k=prompt_len)
    given = {"max_tokens": 40, "temperature": 0.0, "stop_ids": (EOS,), "grammar": form} | fields
    return Request(request_id=name, prompt_ids=prompt, **given)


def every_kind() -> list[Request]:
    """Three requests for each way of sampling, of which one is not constrained."""
    asks = (
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.5, "seed": 6, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "logprobs": 2},
        {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"logit_bias": {ord("7"): 6.0, ord("o"): -50.0}, "logprobs": 0},
        {"min_tokens": 3, "temperature": 1.0, "seed": 2},
    )
    requests = []
    for i, fields in enumerate(asks):
        form = grammar(regex=REGEXES[i % len(REGEXES)])
        requests.append(ask(f"regex {i}", form, 5 + i, **fields))
        requests.append(ask(f"json {i}", NO_SPACE, 20, **fields))
        requests.append(ask(f"free {i}", "", 12 + i, **fields))
    return requests


def check_form(request: Request, output) -> None:
    """A whole match, or the beginning of one that max_tokens cut short."""
    found = text(output.tokens)
    if output.finish_reason == FinishReason.LENGTH:
        assert len(output.tokens) == request.max_tokens
    elif request.request_id.startswith("json"):
        jsonschema.validate(json.loads(found), SCHEMA)
    elif request.request_id.startswith("regex"):
        pattern = REGEXES[int(request.request_id.split()[1]) % len(REGEXES)]
        assert re.fullmatch(pattern, found), found


def test_outputs_match_their_grammars_and_do_not_depend_on_what_else_runs(engine):
    requests = every_kind()
    before = engine.stats().num_preemptions
    together = drive(engine, requests, arrivals=[i // 2 for i in range(len(requests))])
    assert engine.stats().num_preemptions > before
    for request in requests:
        alone = drive(engine, [request])[request.request_id]
        output = together[request.request_id]
        assert output.tokens == alone.tokens and output.finish_reason == alone.finish_reason
        check_form(request, output)
    ends = {together[request.request_id].finish_reason for request in requests if request.grammar}
    assert FinishReason.STOP in ends


def test_an_output_ends_with_the_token_behind_which_nothing_may_follow(engine):
    """Also before min_tokens, past an EOS that is ignored, and at the length limit, where it counts as stopped."""
    form = grammar(choice=["abc"])
    asks = ({}, {"min_tokens": 9}, {"stop_ids": ()}, {"max_tokens": 3}, {"temperature": 2.0, "seed": 1})
    outputs = drive(engine, [ask(str(i), form, **fields) for i, fields in enumerate(asks)])
    for output in outputs.values():
        assert (text(output.tokens), len(output.tokens), output.finish_reason) == ("abc", 3, FinishReason.STOP)


def test_an_output_may_end_by_eos_only_where_its_grammar_may(engine):
    """The bias makes EOS the likeliest wherever it is allowed."""
    form, eager = grammar(regex="[a-c]{4}(d[a-c])*"), {"logit_bias": {EOS: 100.0}}
    asks = {
        "eager": eager,
        "later": {**eager, "min_tokens": 6},  # four letters are enough, but not yet: it is to go on with a pair
        "past": {**eager, "stop_ids": (), "max_tokens": 11},
    }
    outputs = drive(engine, [ask(name, form, **fields) for name, fields in asks.items()])
    lengths = {name: len(text(output.tokens)) for name, output in outputs.items()}
    assert lengths == {"eager": 4, "later": 6, "past": 11}
    assert outputs["eager"].tokens[-1] == outputs["later"].tokens[-1] == EOS
    assert outputs["past"].finish_reason == FinishReason.LENGTH


def test_an_output_ends_without_a_token_where_only_a_barred_one_could_follow(engine):
    """After "a", only EOS may follow or a "b", which the request takes for a stop id, and both come too soon."""
    request = ask("r", grammar(regex="ab?"), stop_ids=(EOS, ord("b")), min_tokens=5)
    other = ask("other", "", max_tokens=20)
    expected = drive(engine, [other])["other"].tokens
    outputs = drive(engine, [request, other])
    assert (text(outputs["r"].tokens), outputs["r"].finish_reason) == ("a", FinishReason.STOP)
    assert outputs["other"].tokens == expected
    stuck = dataclasses.replace(request, stop_ids=(ord("a"),))
    assert drive(engine, [stuck])["r"].finish_reason == FinishReason.ERROR


def test_log_probabilities_are_of_the_logits_before_the_mask(engine):
    free = ask("free", "", max_tokens=1, logprobs=20)
    bound = ask("bound", grammar(regex="[xyz]"), max_tokens=1, logprobs=20)
    bound = dataclasses.replace(bound, prompt_ids=free.prompt_ids)
    outputs = drive(engine, [free, bound])
    (expected,), (found,) = outputs["free"].logprobs, outputs["bound"].logprobs
    assert dict(found.top) == pytest.approx(dict(expected.top), abs=1e-5)
    assert found.logprob <= expected.logprob and chr(outputs["bound"].tokens[0]) in "xyz"


def test_a_mask_is_not_left_to_the_next_request_in_the_slot(engine):
    free = ask("free", "", temperature=1.0, seed=3, logprobs=1)
    biased = dataclasses.replace(free, request_id="biased", logit_bias={5: 2.0})
    expected = {r.request_id: drive(engine, [r])[r.request_id].tokens for r in (free, biased)}
    for request in (free, biased):
        drive(engine, [ask(str(i), grammar(regex="[0-9]{20}")) for i in range(4)])
        assert drive(engine, [request])[request.request_id].tokens == expected[request.request_id]


def test_aborted_requests_leave_no_trace(engine):
    requests = every_kind()
    expected = {request.request_id: drive(engine, [request])[request.request_id] for request in requests}
    aborts = {request.request_id: 3 * i % 25 for i, request in enumerate(requests) if i % 2}
    for request_id, output in drive(engine, requests, aborts=aborts).items():
        tokens = expected[request_id].tokens
        if output.finish_reason == FinishReason.ABORT:
            assert output.tokens == tokens[: len(output.tokens)]
        else:
            assert output.tokens == tokens


class Slow:
    """Grammars that are compiled when a test says so."""

    def __init__(self):
        self.futures: list[Future] = []

    def compile(self, _grammar: str) -> Future:
        self.futures.append(Future())
        return self.futures[-1]

    def prepare(self, matchers) -> None:
        pass

    def close(self) -> None:
        pass


def test_others_run_while_a_grammar_is_compiled(engine, monkeypatch):
    free, bound, gone = ask("free", "", max_tokens=30), ask("bound", NO_SPACE), ask("gone", NO_SPACE)
    expected = drive(engine, [free])["free"].tokens
    compiled = engine._grammars.compile(NO_SPACE).result()
    slow = Slow()
    monkeypatch.setattr(engine, "_grammars", slow)
    for request in (bound, gone, free):
        engine.submit(request)
    events = []
    while not any(event.finish_reason for event in events):
        events += engine.step()
    assert [token for event in events for token in event.token_ids] == expected
    assert engine.stats().num_waiting == 2 and engine.stats().num_running == 0
    assert engine.abort("gone").finish_reason == FinishReason.ABORT
    for future in slow.futures:
        future.set_result(compiled)
    events = []
    while engine.has_work:
        events += engine.step()
    jsonschema.validate(json.loads(text([token for event in events for token in event.token_ids])), SCHEMA)
    assert {event.request_id for event in events} == {"bound"}
    check_idle(engine.stats())


def test_a_grammar_that_does_not_compile_ends_its_request_alone(engine):
    output = drive(engine, [ask("bad", "no grammar {"), ask("good", NO_SPACE)])
    assert output["bad"].finish_reason == FinishReason.ERROR and not output["bad"].tokens
    assert output["good"].finish_reason == FinishReason.STOP


def test_a_grammar_is_refused_where_there_is_no_tokenizer(engine, monkeypatch):
    monkeypatch.setattr(engine, "_grammars", None)
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        engine.submit(ask("r", NO_SPACE))
    assert not engine.has_work


def test_a_constrained_row_takes_part_in_every_step(engine):
    """One token a step, as for other rows: the masks cost no step."""
    request = ask("r", grammar(regex="[0-9]{30}"))
    before = engine.stats().num_steps
    drive(engine, [request])
    assert engine.stats().num_steps - before <= 31


def digits(name: str) -> Request:
    """Thirty of them, after a prompt without the token that is poisoned below."""
    return dataclasses.replace(ask(name, grammar(regex="[0-9]{30}")), prompt_ids=[len(name) * i % 90 for i in range(9)])


def test_constrained_rows_go_on_when_a_neighbours_logits_are_no_numbers(engine):
    requests = [digits("one"), digits("three")]
    expected = drive(engine, requests)
    bad = ask("bad", "", temperature=0.0)
    bad = dataclasses.replace(bad, prompt_ids=[*range(5), POISON])
    with poisoned(engine):
        found = drive(engine, [*requests, bad], arrivals=[0, 1, 6])
    assert found["bad"].finish_reason == FinishReason.ERROR
    for request in requests:
        assert found[request.request_id].tokens == expected[request.request_id].tokens


def test_a_step_whose_sampling_fails_ends_what_runs_and_nothing_else(engine, monkeypatch):
    """What ended by its grammar before, in the same turn, ended well."""
    ends = ask("ends", grammar(regex="ab?"), stop_ids=(EOS, ord("b")), min_tokens=5)  # after "a", by the mask alone
    masks, sample, failed = engine._scheduler.masks, engine._runner.sample, []

    def ask_masks(prepare):
        found = masks(prepare)
        if found.events:
            failed.append(found.events[0].request_id)
        return found

    def fail_once(launched, rows):
        if failed == ["ends"]:
            failed.append("")
            raise RuntimeError("no sampling today")
        return sample(launched, rows)

    monkeypatch.setattr(engine._scheduler, "masks", ask_masks)
    monkeypatch.setattr(engine._runner, "sample", fail_once)
    found = drive(engine, [ends, digits("one")])
    assert failed == ["ends", ""]
    assert (found["ends"].finish_reason, text(found["ends"].tokens)) == (FinishReason.STOP, "a")
    assert found["one"].finish_reason == FinishReason.ERROR
    assert drive(engine, [digits("one")])["one"].finish_reason == FinishReason.STOP
