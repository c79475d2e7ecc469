"""Each sampling parameter on the device against a plain float64 oracle: what may be drawn, and how often."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
import scipy.stats

from jaxinfer.runner import sampling
from jaxinfer.runner.inputs import sampling_fields
from jaxinfer.types import MAX_LOGPROBS, Request
from pallas_kernels.dispatch import CPU

ROWS, VOCAB = 4096, 48
"""One compiled shape for all tests; a request's draws are rows that differ in position alone."""
PROMPT, OUTPUT = (1, 2, 3, 5, 5), (2, 7, 7, 7, 9)
SIGNIFICANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: what the model says and what the request asks."""

    logits: np.ndarray  # [V]
    request: Request
    position: int = 10
    active: bool = True


def ask(**params) -> Request:
    return Request(**{"request_id": "r", "prompt_ids": PROMPT, "max_tokens": 100, **params})


@functools.cache
def step():
    def run(logits, fields, counts, in_prompt, bias, position, active):
        rows = sampling.SamplingRows.from_fields(fields)
        history = sampling.History(counts, in_prompt, bias)
        places = sampling.Places(np.arange(ROWS, dtype=np.int32), position, active)
        return sampling.sample(logits, rows, history, places, target=CPU)

    return jax.jit(run)


def run(cases: list[Case]) -> tuple[np.ndarray, sampling.Logprobs]:
    """Tokens and log-probabilities of up to ROWS cases; rows without a case are as those that pad a bucket."""
    num = len(cases)
    logits, fields = np.zeros((ROWS, VOCAB), np.float32), np.zeros((ROWS, len(fields_of(ask()))), np.int32)
    bias, position, active = np.zeros((ROWS, VOCAB), np.float32), np.zeros(ROWS, np.int32), np.zeros(ROWS, bool)
    for i, case in enumerate(cases):
        logits[i], fields[i], position[i], active[i] = (
            case.logits,
            fields_of(case.request),
            case.position,
            case.active,
        )
        for token, value in case.request.logit_bias.items():
            bias[i, token] += value
    counts = np.tile(np.bincount(OUTPUT, minlength=VOCAB).astype(np.int32), (ROWS, 1))
    in_prompt = np.tile(np.isin(np.arange(VOCAB), PROMPT), (ROWS, 1))
    tokens, logprobs = step()(logits, fields, counts, in_prompt, bias, position, active)
    return np.asarray(tokens)[:num], sampling.Logprobs(*(np.asarray(a)[:num] for a in logprobs))


def fields_of(request: Request) -> np.ndarray:
    return sampling_fields(request, len(PROMPT))


def draws(logits: np.ndarray, request: Request) -> np.ndarray:
    """[ROWS] tokens at as many positions."""
    return run([Case(logits, request, position) for position in range(100, 100 + ROWS)])[0]


def adjusted(logits: np.ndarray, request: Request) -> np.ndarray:
    """Bias and penalties, in float64."""
    x = np.asarray(logits, np.float64).copy()
    for token, value in request.logit_bias.items():
        x[token] += value
    for token in set(PROMPT) | set(OUTPUT):
        x[token] = x[token] / request.repetition_penalty if x[token] > 0 else x[token] * request.repetition_penalty
    for token in set(OUTPUT):
        x[token] -= request.presence_penalty + request.frequency_penalty * OUTPUT.count(token)
    return x


def probabilities(logits: np.ndarray, request: Request) -> np.ndarray:
    """[V] float64: temperature, then top_k, then top_p of what that leaves; min_p of the whole distribution."""
    x = adjusted(logits, request) / request.temperature
    by_rank = sorted(range(VOCAB), key=lambda token: (-x[token], token))
    if request.top_k:
        by_rank = by_rank[: request.top_k]
    weights = np.exp(x - x.max())
    if request.top_p < 1:
        share = np.cumsum(weights[by_rank]) / weights[by_rank].sum()
        by_rank = by_rank[: int(np.argmax(share >= request.top_p)) + 1]
    kept = np.zeros(VOCAB, bool)
    kept[by_rank] = True
    kept &= weights >= request.min_p * weights.max()
    return np.where(kept, weights, 0) / weights[kept].sum()


def check_distribution(tokens: np.ndarray, expected: np.ndarray) -> None:
    """No token outside the support, and a chi-square test of the rest; rare tokens count as one."""
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any(), f"drawn though excluded: {np.flatnonzero(counts * (expected == 0))}"
    common = expected * len(tokens) >= 10
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * len(tokens)
    if wanted[-1] < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert scipy.stats.chisquare(observed, wanted).pvalue > SIGNIFICANCE


def peaked(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.5, VOCAB).astype(np.float32)


TIES = np.repeat(np.float32([3, 2, 2, 1]), VOCAB // 4)
DRAWN = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k of one": {"top_k": 1},
    "top_k": {"top_k": 7, "temperature": 2.0},
    "top_k of all": {"top_k": VOCAB},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6},
    "top_p near one": {"top_p": 0.999},
    "top_k and top_p": {"top_k": 9, "top_p": 0.8, "temperature": 1.5},
    "min_p": {"min_p": 0.2},
    "min_p of one": {"min_p": 1.0},
    "every filter": {"min_p": 0.05, "top_k": 12, "top_p": 0.9, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.7},
    "repetition wanted": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.1},
    "presence": {"presence_penalty": 1.9},
    "presence wanted": {"presence_penalty": -2.0},
    "every penalty": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.7, "top_p": 0.9},
    "bias": {"logit_bias": {3: 4.0, 40: -100.0, 41: 5.0}},
    "bias and penalties": {"logit_bias": {7: 3.0}, "frequency_penalty": 1.0, "top_k": 5},
}


@pytest.mark.parametrize("shape", ["peaked", "ties"])
@pytest.mark.parametrize("name", DRAWN)
def test_draws_follow_the_distribution_that_the_parameters_leave(name, shape):
    request = ask(seed=2**63 + 12345, **DRAWN[name])
    logits = peaked() if shape == "peaked" else TIES
    check_distribution(draws(logits, request), probabilities(logits, request))


@pytest.mark.parametrize("k", [1, 3, 12, 13, 20, 47])
def test_top_k_keeps_exactly_k_tokens_and_the_lower_ids_of_equal_ones(k):
    logits = np.zeros(VOCAB, np.float32)
    assert set(draws(logits, ask(top_k=k))) == set(range(k))


def test_draws_of_neighbouring_seeds_are_independent():
    rng = np.random.default_rng(1)
    for seeds in (range(ROWS), (i << 32 for i in range(ROWS)), rng.integers(0, 2**64, ROWS, np.uint64).tolist()):
        tokens, _ = run([Case(peaked(), ask(seed=int(seed))) for seed in seeds])
        check_distribution(tokens, probabilities(peaked(), ask()))
        pairs = tokens[:-1].astype(np.int64) * VOCAB + tokens[1:]
        joint = np.outer(probabilities(peaked(), ask()), probabilities(peaked(), ask())).ravel()
        common = joint * len(pairs) >= 10
        observed = np.append(np.bincount(pairs, minlength=VOCAB**2)[common], 0)
        observed[-1] = len(pairs) - observed.sum()
        assert scipy.stats.chisquare(
            observed, np.append(joint[common], 1 - joint[common].sum()) * len(pairs)
        ).pvalue > (SIGNIFICANCE)


def test_all_64_bits_of_the_seed_reach_the_draw():
    base = 0x0123456789ABCDEF
    seeds = [base] + [base ^ (1 << bit) for bit in range(64)]
    cases = [Case(np.zeros(VOCAB), ask(seed=seed), position) for seed in seeds for position in range(8)]
    streams = {tuple(stream) for stream in run(cases)[0].reshape(len(seeds), 8)}
    assert len(streams) == len(seeds)


@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 3, "seed": 9}])
def test_temperature_zero_is_the_exact_argmax_whatever_the_filters_say(filters):
    close = np.nextafter(np.float32(5), np.float32(6))
    logits = np.full(VOCAB, 5, np.float32)
    logits[31] = close
    assert set(draws(logits, ask(temperature=0.0, **filters))) == {31}
    assert set(draws(np.full(VOCAB, 5, np.float32), ask(temperature=0.0, **filters))) == {0}


@pytest.mark.parametrize("name", ["repetition", "frequency", "presence wanted", "every penalty", "bias"])
def test_penalties_and_bias_hold_for_greedy_requests_too(name):
    cases = [Case(peaked(seed), ask(temperature=0.0, **DRAWN[name])) for seed in range(200)]
    expected = [int(np.argmax(adjusted(case.logits, case.request))) for case in cases]
    tokens, _ = run(cases)
    np.testing.assert_array_equal(tokens, expected)


def test_greedy_rows_are_the_same_beside_rows_that_draw():
    greedy = [Case(peaked(seed), ask(temperature=0.0)) for seed in range(50)]
    alone, _ = run(greedy)
    mixed, _ = run(greedy + [Case(peaked(seed), ask(top_p=0.5, frequency_penalty=1.0)) for seed in range(50)])
    np.testing.assert_array_equal(alone, mixed[:50])
    np.testing.assert_array_equal(alone, [np.argmax(case.logits) for case in greedy])


def test_a_draw_depends_on_neither_the_other_rows_nor_its_place_among_them():
    rng = np.random.default_rng(3)
    params = list(DRAWN.values())
    cases = [
        Case(peaked(i), ask(seed=int(rng.integers(2**63)), **params[i % len(params)]), int(rng.integers(1, 500)))
        for i in range(400)
    ]
    expected, _ = run(cases)
    order = rng.permutation(len(cases))
    moved, _ = run([cases[i] for i in order])
    np.testing.assert_array_equal(moved, expected[order])
    few, _ = run(cases[::7])
    np.testing.assert_array_equal(few, expected[::7])
    for i in (0, 5, 17):
        np.testing.assert_array_equal(run([cases[i]])[0], expected[i : i + 1])


def test_rows_that_do_not_sample_change_nothing():
    cases = [Case(peaked(i), ask(seed=i, temperature=float(i % 2))) for i in range(40)]
    asking = ask(top_k=3, top_p=0.5, logprobs=3, frequency_penalty=1.0)
    idle = [Case(peaked(i), asking, active=False) for i in range(40)]
    expected, _ = run(cases)
    tokens, logprobs = run(cases + idle)
    np.testing.assert_array_equal(tokens[:40], expected)
    assert not logprobs.top.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_barred_until_min_tokens_are_out(temperature):
    request = ask(min_tokens=4, stop_ids=(7, 11), temperature=temperature)
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 11]] = 50
    barred = [Case(logits, request, position) for position in range(len(PROMPT), len(PROMPT) + 4)]
    free = [Case(logits, request, position) for position in range(len(PROMPT) + 4, 40)]
    tokens, _ = run(barred + free)
    assert not set(tokens[:4]) & {7, 11}
    assert set(tokens[4:]) <= {7, 11}


def test_stop_ids_are_not_barred_without_min_tokens():
    logits = np.zeros(VOCAB, np.float32)
    logits[7] = 50
    assert set(draws(logits, ask(stop_ids=(7,)))) == {7}


@pytest.mark.parametrize("params", [{}, {"top_k": VOCAB}, {"top_p": 0.9999}, {"min_p": 1e-6}, {"temperature": 50.0}])
def test_a_token_of_the_padded_vocabulary_is_never_drawn(params):
    logits = peaked()
    logits[40:] = -np.inf
    assert draws(logits, ask(**params)).max() < 40


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 100.0])
def test_the_only_possible_token_is_drawn(temperature, params):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[7] = -3
    assert set(draws(logits, ask(temperature=temperature, **params))) == {7}


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_p": 0.999999}])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_tiny_temperature_is_the_argmax(scale, params):
    logits = np.linspace(-1, 1, VOCAB, dtype=np.float32) * np.float32(scale)
    np.random.default_rng(0).shuffle(logits)
    logits[3] = -np.inf
    assert set(draws(logits, ask(temperature=1e-6, **params))) == {int(np.argmax(logits))}


def test_logprobs_are_those_of_the_raw_logits():
    asks = [{}, {"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}, DRAWN["every penalty"], DRAWN["bias"]]
    cases = [Case(peaked(i) * 3, ask(logprobs=5, **asks[i % len(asks)])) for i in range(50)]
    tokens, logprobs = run(cases)
    for i, case in enumerate(cases):
        x = case.logits.astype(np.float64)
        expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
        np.testing.assert_allclose(logprobs.chosen[i], expected[tokens[i]], atol=1e-5)
        order = np.argsort(-expected, kind="stable")[:MAX_LOGPROBS]
        np.testing.assert_array_equal(logprobs.top_ids[i], order)
        np.testing.assert_allclose(logprobs.top[i], expected[order], atol=1e-5)


def test_logprobs_do_not_change_the_tokens():
    cases = [Case(peaked(i), ask(seed=i, temperature=i % 3 / 2)) for i in range(60)]
    asking = [dataclasses.replace(case, request=dataclasses.replace(case.request, logprobs=20)) for case in cases]
    np.testing.assert_array_equal(run(cases)[0], run(asking)[0])


def test_rows_that_ask_for_no_logprobs_have_zeros_beside_rows_that_do():
    cases = [Case(peaked(i), ask(logprobs=3 if i % 2 else None)) for i in range(40)]
    _, logprobs = run(cases)
    for array in logprobs:
        assert not array[::2].any()
    assert (logprobs.chosen[1::2] < 0).all()
    assert (logprobs.top[1::2] < 0).all()


def test_logprobs_survive_being_packed_bit_by_bit():
    _, logprobs = run([Case(peaked(i), ask(logprobs=20)) for i in range(50)])
    chosen, ids, top = sampling.unpack_logprobs(np.asarray(logprobs.pack()))
    for unpacked, array in zip((chosen, ids, top), logprobs, strict=True):
        np.testing.assert_array_equal(unpacked, array)


@pytest.mark.parametrize("bad", [[0], [VOCAB - 1], [3, 17], range(VOCAB)], ids=str)
def test_the_likeliest_token_of_a_row_with_a_nan_is_no_token_and_of_the_other_rows_what_it_always_is(bad):
    logits = np.stack([peaked(seed) for seed in range(4)]).astype(np.float32)
    logits[2, bad] = np.nan
    expected = [sampling.NO_TOKEN if row == 2 else np.argmax(logits[row]) for row in range(4)]
    assert jax.jit(sampling.likeliest)(logits).tolist() == expected


def test_a_row_without_any_token_to_choose_has_no_token_and_one_with_a_single_finite_logit_has_that():
    logits = np.full((3, VOCAB), -np.inf, np.float32)
    logits[1, 7] = -1e30
    logits[2, 5], logits[2, 9] = -np.inf, 3.0
    assert jax.jit(sampling.likeliest)(logits).tolist() == [sampling.NO_TOKEN, 7, 9]
