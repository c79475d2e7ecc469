"""The same request gives the same tokens alone, in any batch, at any chunk size and after preemption."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.types import FinishReason, Request
from tests.engine.drive import GOLDEN, build, drive, num_equal

# Sliding windows and biases; a pool of 12 pages for four sequences of up to 8 pages each, so that preemption is common.
MODEL = GOLDEN / "qwen2"
OPTIONS = {"page_size": 8, "num_pages": 12, "max_num_seqs": 4}
VOCAB, LONGEST_PROMPT, MOST_TOKENS, LAST_ARRIVAL = 128, 30, 40, 15
# Fixed examples: with floats, one in very many draws falls between two tokens, and that is nobody's fault.
searching = settings(
    deadline=None, max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@pytest.fixture(scope="module")
def engine():
    engine = build(MODEL, max_num_batched_tokens=16, **OPTIONS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def wide_engine():
    """The same, with steps of twice the tokens: other chunks, other buckets."""
    engine = build(MODEL, max_num_batched_tokens=32, **OPTIONS)
    yield engine
    engine.close()


# By length: of lists most are short, and short sequences never fill the pool.
prompts = st.builds(
    lambda length, seed: tuple(random.Random(seed).choices(range(VOCAB), k=length)),
    st.integers(1, LONGEST_PROMPT),
    st.integers(0, 2**32),
)
greedy = st.fixed_dictionaries({"temperature": st.just(0.0), "logprobs": st.sampled_from([None, None, 1])})
penalties = {
    "repetition_penalty": st.sampled_from([1.0, 0.8, 1.4]),
    "frequency_penalty": st.sampled_from([0.0, 0.5, -0.3]),
    "presence_penalty": st.sampled_from([0.0, 0.7, -0.5]),
}
sampled = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.8, 1.5]),
        "seed": st.integers(0, 2**64 - 1),
        "top_p": st.sampled_from([1.0, 0.9, 0.5]),
        "top_k": st.sampled_from([0, 5, 40]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "logit_bias": st.sampled_from([{}, {3: 2.0, 100: -100.0}]),
        "min_tokens": st.sampled_from([0, 1]),
        "logprobs": st.sampled_from([None, 0, 3]),
        **penalties,
    }
)


@st.composite
def batches(draw, parameters):
    """Requests and the steps at which they arrive."""
    count = draw(st.integers(3, 7))
    requests = [
        Request(
            request_id=str(i),
            prompt_ids=draw(prompts),
            max_tokens=draw(st.integers(1, MOST_TOKENS)),
            stop_ids=(draw(st.integers(0, VOCAB - 1)),),
            **draw(parameters),
        )
        for i in range(count)
    ]
    return requests, [draw(st.integers(0, LAST_ARRIVAL)) for _ in requests]


def alone(engine, request: Request):
    """The request's output in an engine that runs nothing else."""
    return drive(engine, [request])[request.request_id]


def margins(output) -> list[float]:
    """How far ahead each greedy token was of the next likeliest."""
    return [logprobs.top[0][1] - logprobs.top[1][1] for logprobs in output.logprobs]


def check_equal(outputs, expected, record) -> None:
    """Equal, or parted at a tie between two greedy tokens."""
    for request_id, output in outputs.items():
        wanted = expected[request_id]
        if output.tokens == wanted.tokens:
            assert output.finish_reason == wanted.finish_reason
            record["tokens"] += len(output.tokens)
            continue
        count = min(len(output.tokens), len(wanted.tokens))
        equal, tied = num_equal(output.tokens[:count], wanted.tokens[:count], margins(wanted))
        assert tied, f"the output of {request_id} has {len(output.tokens)} tokens, not {len(wanted.tokens)}"
        record["tokens"] += equal
        record["ties"] += 1


@pytest.fixture(scope="module")
def record(record_testsuite_property):
    """Over the module: tokens compared, comparisons that ended at a tie, and preemptions, by the kind of test."""
    record = {"tokens": 0, "ties": 0, "preemptions": 0, "random_preemptions": 0}
    yield record
    for name, count in record.items():
        record_testsuite_property(f"batching_{name}", count)
    print(f"batching: {record}")


@searching
@given(batch=batches(greedy))
def test_greedy_tokens_do_not_depend_on_what_else_runs(batch, engine, wide_engine, record):
    requests, arrivals = batch
    before = engine.stats().num_preemptions
    together = drive(engine, requests, arrivals=arrivals)
    preemptions = engine.stats().num_preemptions - before
    record["random_preemptions"] += preemptions
    expected = {request.request_id: alone(engine, dataclasses.replace(request, logprobs=2)) for request in requests}
    check_equal(together, expected, record)
    check_equal(drive(wide_engine, requests, arrivals=arrivals), expected, record)


@searching
@given(batch=batches(st.one_of(greedy, sampled)))
def test_seeded_draws_do_not_depend_on_what_else_runs(batch, engine, wide_engine, record):
    requests, arrivals = batch
    before = engine.stats().num_preemptions
    together = drive(engine, requests, arrivals=arrivals)
    record["random_preemptions"] += engine.stats().num_preemptions - before
    wide = drive(wide_engine, requests, arrivals=arrivals)
    for request in requests:
        expected = alone(engine, request)
        for output in (together[request.request_id], wide[request.request_id]):
            assert output.tokens == expected.tokens
            assert output.finish_reason == expected.finish_reason
            check_logprobs(output.logprobs, expected.logprobs, request.logprobs, len(output.tokens))
        record["tokens"] += 2 * len(expected.tokens)


def check_logprobs(logprobs, expected, wanted, num_tokens) -> None:
    """One for each token, with as many alternatives as were asked for, and the same in any company."""
    assert len(logprobs) == len(expected) == (0 if wanted is None else num_tokens)
    for mine, theirs in zip(logprobs, expected, strict=True):
        assert len(mine.top) == len(theirs.top) == wanted
        assert mine.top == () or max(value for _, value in mine.top) == mine.top[0][1]
        assert all(0 <= token < VOCAB for token, _ in mine.top)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


@searching
@given(batch=batches(st.one_of(greedy, sampled)), data=st.data())
def test_aborted_requests_leave_no_trace(batch, data, engine, record):
    requests, arrivals = batch
    ids = [request.request_id for request in requests]
    doomed = data.draw(st.dictionaries(st.sampled_from(ids), st.integers(0, 30), min_size=1, max_size=len(ids)))
    outputs = drive(engine, requests, arrivals=arrivals, aborts=doomed)
    for request in requests:
        output, expected = outputs[request.request_id], alone(engine, request)
        if output.finish_reason == FinishReason.ABORT:
            assert output.tokens == expected.tokens[: len(output.tokens)]
        else:
            assert output.tokens == expected.tokens
        record["tokens"] += len(output.tokens)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}, {"presence_penalty": 1.5}, {}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_preemption_restores_what_penalties_have_counted(penalty, temperature, engine, record):
    requests = [
        Request(
            request_id=str(i),
            prompt_ids=[(7 * i + j) % 5 for j in range(17 + i)],
            max_tokens=40,
            temperature=temperature,
            seed=i,
            logit_bias={token: 3.0 for token in range(6)},
            **penalty,
        )
        for i in range(4)
    ]
    before = engine.stats().num_preemptions
    together = drive(engine, requests)
    preemptions = engine.stats().num_preemptions - before
    assert preemptions > 0
    record["preemptions"] += preemptions
    for request in requests:
        assert together[request.request_id].tokens == alone(engine, request).tokens


def test_penalties_of_one_request_are_not_those_of_the_next_in_its_slot(engine):
    plain = Request(request_id="plain", prompt_ids=[5, 6, 7], max_tokens=20, temperature=0.9, seed=4)
    expected = alone(engine, plain).tokens
    strange = dataclasses.replace(
        plain,
        request_id="strange",
        repetition_penalty=3.0,
        presence_penalty=2.0,
        logit_bias={token: 50.0 for token in range(9)},
        min_tokens=20,
        stop_ids=tuple(range(30)),
    )
    assert set(alone(engine, strange).tokens) <= {*range(30, VOCAB)}
    assert alone(engine, plain).tokens == expected
    other = dataclasses.replace(plain, frequency_penalty=1.0)
    first = alone(engine, other).tokens
    alone(engine, strange)
    assert alone(engine, other).tokens == first


def test_every_length_limit_is_met_exactly(engine):
    longest = engine.info.max_model_len
    for prompt_len in (1, 7, 8, 9, longest - 1):
        room = longest - prompt_len
        for max_tokens in {min(limit, room) for limit in (1, 2, 9, room)}:
            request = Request(request_id="r", prompt_ids=[3] * prompt_len, max_tokens=max_tokens, temperature=0.0)
            output = alone(engine, request)
            assert (len(output.tokens), output.finish_reason) == (max_tokens, FinishReason.LENGTH)


def test_preemption_was_exercised_and_ties_were_rare(record):
    assert record["preemptions"] >= 8 and record["random_preemptions"] >= 8
    assert record["tokens"] > 1000
    assert record["ties"] <= 3
