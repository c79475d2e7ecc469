"""The gated delta rule against its recurrence in float64, a token and a head at a time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule.api import TAPS, DeltaPools, DeltaWeights, SlotRows, delta_rule, plan
from pallas_kernels.delta_rule.cases import CASES, TINY, Arrays, Case, make, place
from pallas_kernels.delta_rule.chunks import CHUNK, Chunks, cut
from pallas_kernels.dispatch import CPU
from tests.capture import environment

LAYER = 1
EPS = 1e-5
TOLERANCE = 2e-5
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Stepped(NamedTuple):
    """Results [T, Hk, r, dv] and the pools afterwards."""

    out: np.ndarray
    state_pool: np.ndarray
    conv_pool: np.ndarray


@functools.partial(jax.jit, static_argnames="max_query_len")
def step(a: Arrays, layer: jax.Array, max_query_len: int) -> tuple[jax.Array, ...]:
    pools = DeltaPools(jax.new_ref(a.state_pool), jax.new_ref(a.conv_pool))
    weights = DeltaWeights(a.conv, a.a_log, a.dt_bias, a.norm)
    how = {"max_query_len": max_query_len, "target": CPU}
    out = delta_rule(a.x, weights, pools, layer, a.rows, eps=EPS, plan=plan(a.rows, **how), **how)
    return out, jax.freeze(pools.state), jax.freeze(pools.conv)


def run(case: Case, arrays: Arrays) -> Stepped:
    found = step(jax.tree.map(jnp.asarray, arrays), jnp.int32(LAYER), max_query_len=case.max_query_len)
    return Stepped(*map(np.asarray, found))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def expected(case: Case, arrays: Arrays) -> Stepped:
    """What the contract says; zeros for the tokens of no row. Of slot N it is what was there."""
    x, conv, norm, a_log, dt_bias, state_pool, conv_pool = (
        np.array(getattr(arrays, name), np.float64)
        for name in ("x", "conv", "norm", "a_log", "dt_bias", "state_pool", "conv_pool")
    )
    dk, dv, group, channels = case.key_width, case.value_width, case.group, case.channels
    out = np.zeros((case.num_tokens, case.key_heads, group, dv))
    token = 0
    for row, (new, old) in enumerate(case.rows):
        slot = arrays.rows.slot[row]
        for head in range(case.key_heads):
            ring = conv_pool[LAYER, slot, :, head]
            before = [ring[(old - back) % TAPS] if old - back >= 0 else np.zeros(channels) for back in (3, 2, 1)]
            inputs = np.stack([*before, *x[token : token + new, head, :channels]])
            for i in range(new):
                mixed = (inputs[i : i + TAPS] * conv[LAYER, head].T).sum(0)
                mixed *= sigmoid(mixed)
                q, k = mixed[:dk], mixed[dk : 2 * dk]
                q = q / np.sqrt((q * q).sum() + 1e-6) / np.sqrt(dk)
                k = k / np.sqrt((k * k).sum() + 1e-6)
                z, b, a = np.split(x[token + i, head, channels:], [group * dv, group * dv + group])
                for h in range(group):
                    state = state_pool[LAYER, slot, head, h] if i or old else np.zeros((dk, dv))
                    state = state * np.exp(-np.exp(a_log[LAYER, head, h]) * softplus(a[h] + dt_bias[LAYER, head, h]))
                    v = mixed[2 * dk + h * dv : 2 * dk + (h + 1) * dv]
                    state = state + np.outer(k, sigmoid(b[h]) * (v - k @ state))
                    o = q @ state
                    gate = z[h * dv : (h + 1) * dv]
                    out[token + i, head, h] = norm[LAYER] * o / np.sqrt((o * o).mean() + EPS) * gate * sigmoid(gate)
                    state_pool[LAYER, slot, head, h] = state
            for i in range(max(0, new - TAPS), new):
                conv_pool[LAYER, slot, (old + i) % TAPS, head] = inputs[i + TAPS - 1]
        token += new
    return Stepped(out, state_pool, conv_pool)


def others(case: Case, arrays: Arrays) -> np.ndarray:
    """[L, N + 1]: slots that no row of the step has, but for slot N."""
    found = np.ones(arrays.state_pool.shape[:2], bool)
    found[LAYER, arrays.rows.slot] = False
    found[LAYER, case.num_slots] = False
    return found


@by_name
def test_results_and_states_are_what_the_recurrence_says(case):
    arrays = make(case)
    found, wanted = run(case, arrays), expected(case, arrays)
    real = case.num_tokens - case.pad_tokens
    mine = arrays.rows.slot[: len(case.rows)]
    np.testing.assert_allclose(found.out[:real], wanted.out[:real], atol=TOLERANCE)
    np.testing.assert_allclose(found.state_pool[LAYER, mine], wanted.state_pool[LAYER, mine], atol=TOLERANCE)
    for row, (new, old) in enumerate(case.rows):
        known = [p % TAPS for p in range(max(0, old + new - TAPS), old + new)]
        np.testing.assert_array_equal(
            found.conv_pool[LAYER, mine[row], known], wanted.conv_pool[LAYER, mine[row], known].astype(np.float32)
        )


@by_name
def test_slots_of_no_row_keep_what_they_hold_and_padding_is_finite(case):
    arrays = make(case)
    found, kept = run(case, arrays), others(case, arrays)
    np.testing.assert_array_equal(found.state_pool[kept], arrays.state_pool[kept])
    np.testing.assert_array_equal(found.conv_pool[kept], arrays.conv_pool[kept])
    assert np.isfinite(found.out).all()


def test_what_the_slot_of_a_row_that_begins_holds_does_not_matter():
    case = Case(name="", **TINY, rows=((70, 0), (1, 0), (2, 0)), pad_tokens=1)
    arrays = make(case)
    assert np.isnan(arrays.state_pool[:, arrays.rows.slot]).all()
    fresh = arrays._replace(state_pool=np.zeros_like(arrays.state_pool), conv_pool=np.full_like(arrays.conv_pool, 7.0))
    lost, clean = run(case, arrays), run(case, fresh)
    np.testing.assert_array_equal(lost.out, clean.out)
    mine = arrays.rows.slot[: len(case.rows)]
    np.testing.assert_array_equal(lost.state_pool[LAYER, mine], clean.state_pool[LAYER, mine])


@pytest.mark.parametrize("size", [1, 3, 63, 64, 65])
def test_a_sequence_in_chunks_of_any_size_is_the_same_as_in_one(size):
    total = 130
    whole = Case(name="", **TINY, rows=((total, 0),), free_slots=1)
    arrays = make(whole)
    at_once = run(whole, arrays)
    pools, parts = (arrays.state_pool, arrays.conv_pool), []
    for start in range(0, total, size):
        new = min(size, total - start)
        part = Case(name="", **TINY, rows=((new, start),), free_slots=1)
        rows = make(part).rows._replace(slot=arrays.rows.slot)
        now = arrays._replace(x=arrays.x[start : start + new], state_pool=pools[0], conv_pool=pools[1], rows=rows)
        out, *pools = run(part, now)
        parts.append(out)
    slot = arrays.rows.slot[0]
    np.testing.assert_allclose(np.concatenate(parts), at_once.out, atol=1e-5)
    np.testing.assert_allclose(pools[0][LAYER, slot], at_once.state_pool[LAYER, slot], atol=1e-5)
    np.testing.assert_array_equal(pools[1][LAYER, slot], at_once.conv_pool[LAYER, slot])


def test_rows_do_not_see_each_other():
    together = next(case for case in CASES if case.name == "mixed, decode rows and a chunk")
    arrays = make(together)
    found, token = run(together, arrays), 0
    for row, (new, old) in enumerate(together.rows):
        alone = Case(name="", **TINY, rows=((new, old),), free_slots=together.num_slots - 1)
        rows = make(alone).rows._replace(slot=arrays.rows.slot[row : row + 1])
        mine = run(alone, arrays._replace(x=arrays.x[token : token + new], rows=rows))
        np.testing.assert_allclose(mine.out, found.out[token : token + new], atol=1e-5)
        token += new


@pytest.mark.parametrize("name", ["decode, padded rows", "prefill, several prompts"])
def test_narrow_values_give_a_narrow_result_as_near_as_its_dtype_allows(name):
    case = next(case for case in CASES if case.name == name)
    arrays = make(case)
    narrow = arrays._replace(
        **{name: np.asarray(getattr(arrays, name), jnp.bfloat16) for name in ("x", "conv", "a_log", "dt_bias", "norm")}
    )
    found, exact = run(case, narrow), expected(case, narrow)
    assert found.out.dtype == jnp.bfloat16
    error = np.linalg.norm(found.out.astype(np.float64) - exact.out) / np.linalg.norm(exact.out)
    assert error < 2e-3


def test_every_token_of_a_longer_row_is_in_one_chunk_and_chunks_follow_each_other_from_the_rows_start():
    rng, num_tokens, num_rows = np.random.default_rng(0), 1024, 8
    jitted = jax.jit(cut)
    for _ in range(20):
        lens = rng.integers(0, rng.choice([3, 66, 128]), num_rows)
        case = Case(name="", **TINY, rows=tuple((n, 5) for n in lens), pad_tokens=int(num_tokens - lens.sum()))
        rows = place(case)
        found = Chunks(*map(np.asarray, jitted(SlotRows(*map(jnp.asarray, rows)))))
        longer = [row for row in range(num_rows) if lens[row] > 1]
        assert found.num_rows == len(longer)
        np.testing.assert_array_equal(found.rows[: len(longer)], longer)
        n = 0
        for row, first in zip(longer, found.first, strict=False):
            assert first == n
            for offset in range(0, lens[row], CHUNK):
                assert (found.row[n], found.offset[n]) == (row, offset)
                assert found.count[n] == min(CHUNK, lens[row] - offset)
                n += 1
        assert not found.count[n:].any()


def test_the_cases_meet_every_edge():
    assert {case.group for case in CASES} >= {1, 2, 3}
    assert {case.key_width for case in CASES} >= {16, 64, 128, 256}
    assert {case.value_width for case in CASES} >= {16, 64, 128, 256}
    assert {new for case in CASES for new, _ in case.rows} >= {1, 2, 64, 129}
    assert {old for case in CASES for _, old in case.rows} >= {0, 1, 2, 3, 65}
    assert len({case.name for case in CASES}) == len(CASES)


SHAPES = {
    "x": (3, 2, 70),
    "conv": (1, 2, 40, 4),
    "a_log": (1, 2, 3),
    "dt_bias": (1, 2, 3),
    "norm": (1, 8),
    "state_pool": (1, 5, 2, 3, 8, 8),
    "conv_pool": (1, 5, 4, 2, 40),
    "slot": (2,),
    "query_len": (2,),
    "token_row": (3,),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (3, 2, 68)}, r"x \(3, 2, 68\) \[T, Hk, .*\] does not fit states \(1, 5, 2, 3, 8, 8\)"),
        ({"x": (3, 1, 70)}, r"x \(3, 1, 70\) .* does not fit states"),
        ({"conv": (1, 2, 40, 3)}, r"conv \(1, 2, 40, 3\) does not fit states .*; it must be \(1, 2, 40, 4\)"),
        ({"a_log": (1, 3, 2)}, r"a_log \(1, 3, 2\) does not fit states .*; it must be \(1, 2, 3\)"),
        ({"dt_bias": (2, 2, 3)}, r"dt_bias \(2, 2, 3\) does not fit"),
        ({"norm": (1, 16)}, r"norm \(1, 16\) does not fit states .*; it must be \(1, 8\)"),
        ({"conv_pool": (1, 4, 4, 2, 40)}, r"inputs \(1, 4, 4, 2, 40\) .* do not fit states \(1, 5, 2, 3, 8, 8\)"),
        ({"state_pool": (1, 5, 6, 8, 8)}, r"states \(1, 5, 6, 8, 8\) are not \[L, N \+ 1, Hk, r, dk, dv\]"),
        ({"query_len": (3,)}, r"rows \{'slot': \(2,\), .*'query_len': \(3,\).*\} must be one \[R\]"),
        ({"token_row": (2,)}, r"tokens of rows \(2,\) and \(3,\) \[T\] do not fit x \(3, 2, 70\)"),
        ({"max_query_len": 0}, r"max_query_len 0; it must be 1 at least"),
        ({"max_query_len": 1}, r"max_query_len 1 is for a token to each row; x \(3, 2, 70\) has not one for 2"),
        ({"dtype": jnp.bfloat16}, r"pools of bfloat16 and bfloat16; both must be float32"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_sizes(change, message):
    shapes = {**SHAPES, **change}
    pools = (jnp.zeros(shapes[name], shapes.get("dtype", jnp.float32)) for name in ("state_pool", "conv_pool"))
    weights = DeltaWeights(*(jnp.zeros(shapes[name]) for name in ("conv", "a_log", "dt_bias", "norm")))
    places = ("slot", "slot", "query_len", "slot", "token_row")
    rows = SlotRows(*(jnp.zeros(shapes[name], jnp.int32) for name in places), jnp.zeros(3, jnp.int32))
    how = {"eps": EPS, "max_query_len": shapes.get("max_query_len", 3), "target": CPU}
    with pytest.raises(ValueError, match=message):
        delta_rule(jnp.zeros(shapes["x"]), weights, DeltaPools(*map(jax.new_ref, pools)), jnp.int32(0), rows, **how)


COMPILED = {
    "decode, 1 row": (ROWS := ["_one_token", "_norm_heads"], 1),
    "decode, 64 rows": (ROWS, 4),
    "decode, 64 rows, group of 3": (ROWS, 4),
    "8192 tokens, 8 rows": (CHUNKED := [*ROWS, "_prepare_chunks", "states_of_chunks", "outputs_of_tokens"], 500),
    "2048 tokens, 256 rows": (CHUNKED, 500),
    "2048 tokens, 8 rows, group of 1": (CHUNKED, 150),
    "2048 tokens, 8 rows, group of 3": (CHUNKED, 250),
}
"""Kernels of a layer, and room for what passes between them in MB. The pools are 16 GB in the heads of Qwen3.5-4B."""
of_every_call = pytest.mark.parametrize("call", COMPILED)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    dump = tmp_path_factory.mktemp("xla")
    flags = f"--xla_dump_to={dump}"
    return environment.run("tests/pallas_kernels/delta_compile.py", environment.H200, dump, XLA_FLAGS=flags)


@pytest.mark.capture
@pytest.mark.long
@pytest.mark.timeout(600)
@of_every_call
def test_on_an_h200_the_layers_are_one_graph_of_few_kernels_and_no_pool_is_copied(compiled, call):
    found, (kernels, temp_mb) = compiled[call], COMPILED[call]
    assert found["top_level"] == ["kCommandBuffer"]
    assert found["aliases"] == 2
    assert sorted(found["calls"]) == sorted(kernels)
    assert found["temp_bytes"] / 1e6 < temp_mb


@pytest.mark.capture
@pytest.mark.long
@of_every_call
def test_on_an_h200_no_kernel_lives_in_local_memory_and_chunks_are_multiplied_by_tensor_cores(compiled, call):
    """A few scalars do in the first kernel of the chunks, a thread's part of a tile is 64 bytes and more."""
    found = compiled[call]
    assert {name: size for name, size in found["spilled_bytes"].items() if size > 32} == {}
    assert found["spilled_bytes"]["_one_token"] == 0
    for name in set(COMPILED[call][0]).difference(ROWS):
        assert found["tensor_core_instructions"][name] > 0
