"""Logits that are no numbers end the request they are of, and nobody else can tell."""

from __future__ import annotations

import contextlib
import dataclasses

import jax.numpy as jnp
import pytest

from jaxinfer.engine.engine import MAX_FAILURES
from jaxinfer.types import FinishReason, Request
from tests.engine.drive import GOLDEN, Output, build, check_idle, drive

POISON = 100
"""A token whose row of the embedding is NaN in these tests; no other request comes upon it."""
PROMPT = tuple(7 * i % 90 for i in range(20))
ERROR = (
    "the model's logits for it were not numbers (NaN, or minus infinity for every token), so no token could be chosen"
)


@pytest.fixture(scope="module", params=["tensor=1", "tensor=2", pytest.param("data=2", marks=pytest.mark.long)])
def engine(request):
    options = {"num_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64, "mesh": request.param}
    engine = build(GOLDEN / "qwen3", page_size=8, **options)
    yield engine
    engine.close()


@contextlib.contextmanager
def poisoned(engine, name="embed", index=POISON):
    """The model with NaN in a row of a weight."""
    runner = engine._runner
    whole = runner._params
    array = whole[name].at[index].set(jnp.nan)
    runner._params = {**whole, name: array}
    yield
    runner._params = whole


def ask(name, prompt, **fields) -> Request:
    return Request(**{"request_id": name, "prompt_ids": tuple(prompt), "max_tokens": 12, "temperature": 0.0} | fields)


def innocents() -> list[Request]:
    """Of every kind: plain, drawn, with log-probabilities, with penalties; some begin alike."""
    return [
        ask("plain", PROMPT),
        ask("drawn", (*PROMPT[:12], 3), temperature=1.0, seed=5),
        ask("told", (*PROMPT, 4, 5), logprobs=3),
        ask("penalised", range(9), repetition_penalty=1.3, frequency_penalty=0.5, seed=9, temperature=0.8),
        ask("long", (*PROMPT, *PROMPT, *PROMPT), top_p=0.9, temperature=0.7, seed=1, logprobs=0),
    ]


def run(engine, requests, arrivals=None) -> tuple[dict[str, Output], dict[str, str]]:
    """Outputs, and the errors of those that ended with one."""
    errors, real = {}, engine.step

    def step():
        events = real()
        errors.update({event.request_id: event.error for event in events if event.error})
        return events

    engine.step = step
    try:
        return drive(engine, requests, arrivals=arrivals), errors
    finally:
        del engine.step


def assert_same(found: Output, expected: Output) -> None:
    assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)
    assert len(found.logprobs) == len(expected.logprobs)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.fixture(scope="module")
def undisturbed(engine):
    outputs, errors = run(engine, innocents())
    assert not errors and not any(POISON in output.tokens for output in outputs.values())
    return outputs


@pytest.mark.parametrize("arrival", [0, 2, 7])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 3}, {"logprobs": 2}, {"max_tokens": 1}], ids=str)
def test_a_request_without_numbers_errors_and_the_others_get_what_they_always_get(engine, undisturbed, how, arrival):
    before = engine.stats()
    bad = ask("bad", (*PROMPT, POISON), **how)
    with poisoned(engine):
        found, errors = run(engine, [bad, *innocents()], [arrival, 0, 0, 1, 2, 3])
    assert errors == {"bad": ERROR}
    assert found["bad"].tokens == []
    for name, output in undisturbed.items():
        assert_same(found[name], output)
    after = engine.stats()
    assert after.num_nan_requests == before.num_nan_requests + 1
    assert after.num_failed_steps == before.num_failed_steps
    for name, output in run(engine, innocents())[0].items():  # what is cached now is whole
        assert_same(output, undisturbed[name])
    assert run(engine, [dataclasses.replace(bad, request_id="cured")])[1] == {}


def test_a_request_that_loses_its_numbers_on_the_way_keeps_the_tokens_before(engine, undisturbed):
    poison = next(token for token in undisturbed["plain"].tokens[4:] if token > max(PROMPT))
    hit = {name for name, output in undisturbed.items() if poison in output.tokens[:-1]}
    assert "plain" in hit and len(hit) < len(undisturbed)
    with poisoned(engine, index=poison):
        found, errors = run(engine, innocents())
    assert set(errors) == hit
    for name, output in undisturbed.items():
        if name not in hit:
            assert_same(found[name], output)
    first = undisturbed["plain"].tokens.index(poison)
    assert found["plain"].tokens == undisturbed["plain"].tokens[: first + 1]


def test_whoever_began_with_pages_of_another_is_computed_anew_before_it_is_blamed(engine, undisturbed):
    """A weight of 0 does not silence NaN, so attention carries it back to the page before, of which others get a share
    in the same step."""
    bad = [ask(f"bad{i}", (*PROMPT[:12], POISON, *range(i)), max_tokens=3) for i in range(2)]
    engine._scheduler.clear_prefix_cache()
    with poisoned(engine):
        found, errors = run(engine, [bad[0], *innocents(), bad[1]])
    assert set(errors) == {"bad0", "bad1"}
    for name, output in undisturbed.items():
        assert_same(found[name], output)


def test_what_an_aborted_request_left_in_the_cache_harms_nobody(engine, undisturbed):
    engine._scheduler.clear_prefix_cache()
    with poisoned(engine):
        engine.submit(ask("gone", (*PROMPT, *PROMPT, *PROMPT[:15], POISON, *range(90))))
        for _ in range(2):
            engine.step()
        assert engine.abort("gone") is not None and engine.stats().num_pages_cached > 0
        found, errors = run(engine, innocents())
    assert errors == {}
    for name, output in undisturbed.items():
        assert_same(found[name], output)


def test_a_model_of_nan_ends_every_request_with_its_error_and_the_engine_goes_on(engine, undisturbed):
    before = engine.stats()
    with poisoned(engine, "final_norm", slice(None)):
        for _ in range(MAX_FAILURES + 2):
            found, errors = run(engine, innocents())
            assert set(errors) == set(found) and {output.finish_reason for output in found.values()} == {
                FinishReason.ERROR
            }
    assert engine.stats().num_nan_requests == before.num_nan_requests + len(innocents()) * (MAX_FAILURES + 2)
    check_idle(engine.stats())
    for name, output in run(engine, innocents())[0].items():
        assert_same(output, undisturbed[name])
