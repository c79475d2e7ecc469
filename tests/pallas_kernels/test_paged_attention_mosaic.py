"""The Hopper route of paged attention: run by the interpreter on the CPU, and compiled for an H200 without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_prefill
from pallas_kernels.paged_attention.cases import Arrays, Case, make
from pallas_kernels.paged_attention.mosaic_prefill import FIELDS, ROW_ALIGNMENT, cut
from pallas_kernels.paged_attention.mosaic_schedule import Tuning
from tests.capture import environment
from tests.pallas_kernels import oracle

LAYER = 1
PAIRED = {"num_heads": 2, "num_kv_heads": 1, "head_width": 64}
SINGLE = {"num_heads": 1, "num_kv_heads": 1, "head_width": 64}
CASES = (
    Case(name="a fresh prompt of three tiles", **PAIRED, rows=((150, 0),), pad_tokens=10),
    Case(name="decode rows, prompts and a chunk", **PAIRED, rows=((1, 64), (21, 50), (3, 0), (1, 0)), pad_tokens=6),
    Case(name="warpgroups of other tokens", **SINGLE, rows=((5, 40), (140, 0)), pad_tokens=15, pad_rows=1),
)
UNWRITTEN = -7.0
TOLERANCE = 0.02
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def narrow(case: Case) -> Arrays:
    """A case in bfloat16."""
    arrays = make(case)
    half = {name: jnp.asarray(getattr(arrays, name), jnp.bfloat16) for name in ("q", "k_pool", "v_pool")}
    return arrays._replace(rows=jax.tree.map(jnp.asarray, arrays.rows), **half)


def interpreted(case: Case, arrays: Arrays, *, planned: bool = False, single_too: bool = True) -> np.ndarray:
    """[T, H, E] float32, UNWRITTEN where nothing was written.

    Two programs and two stages of 64 positions go around often.
    """
    out = jax.new_ref(jnp.full(arrays.q.shape, UNWRITTEN, arrays.q.dtype))
    tuning, params = Tuning(block_kv=64, programs=2), plgpu.InterpretGPUParams(detect_races=True)
    how = {"scale": case.head_width**-0.5, "tuning": tuning, "interpret": params}
    pools = jnp.asarray(arrays.k_pool), jnp.asarray(arrays.v_pool)
    if planned:
        how["plan"] = mosaic_prefill.make_plan(
            arrays.q.shape, pools[0], arrays.rows, single_too=single_too, tuning=tuning
        )
    mosaic_prefill.attend_rows((arrays.q, out), pools, jnp.int32(LAYER), arrays.rows, **how)
    result = np.asarray(jax.freeze(out), np.float32)
    assert not interpret_pallas_call.get_races().races_found
    return result


def expected(case: Case, arrays: Arrays, *, single_too: bool = True) -> np.ndarray:
    """[T, H, E] float64; UNWRITTEN for the tokens of no row, and without `single_too` for rows of one token."""
    out, token = oracle.attention(case, arrays, LAYER), 0
    for new, _ in case.rows:
        if new == 1 and not single_too:
            out[token] = UNWRITTEN
        token += new
    out[token:] = UNWRITTEN
    return out


@by_name
def test_every_token_sees_all_of_its_sequence_up_to_itself_and_no_other_place_is_written(case):
    arrays = narrow(case)
    np.testing.assert_allclose(interpreted(case, arrays), expected(case, arrays), atol=TOLERANCE)


def test_a_plan_without_rows_of_one_token_leaves_them_as_they_are():
    case = named("decode rows, prompts and a chunk")
    arrays = narrow(case)
    found = interpreted(case, arrays, planned=True, single_too=False)
    np.testing.assert_allclose(found, expected(case, arrays, single_too=False), atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_pages_hold_past_a_rows_tokens_does_not_matter():
    case = named("decode rows, prompts and a chunk")
    arrays = narrow(case)
    table = np.array(arrays.rows.page_table)
    for row, (new, old) in enumerate(case.rows):
        table[row, -(-(new + old) // case.page_size) :] = 1 << 30
    others = oracle.without_others(case, arrays, LAYER)
    others = others._replace(rows=arrays.rows._replace(page_table=jnp.asarray(table)))
    np.testing.assert_array_equal(interpreted(case, others), interpreted(case, arrays))


jitted_cut = jax.jit(cut, static_argnums=(1, 2), static_argnames="single_too")


@pytest.mark.parametrize(("block_tokens", "single_too"), [(64, False), (128, True)])
def test_every_token_is_in_one_block_and_the_longest_contexts_come_first(block_tokens, single_too):
    rng, num_tokens = np.random.default_rng(0), 2048
    for _ in range(20):
        lens = rng.integers(0, rng.choice([3, 40, 256]), (8, 2))
        lens[lens[:, 0] == 0] = 0
        case = Case(name="", **PAIRED, rows=tuple(map(tuple, lens)), pad_tokens=int(num_tokens - lens[:, 0].sum()))
        rows = make(case).rows
        rows = rows._replace(page_table=rows.page_table[:, :1])  # Of no matter, and else of another shape each time.
        *blocks, count = np.asarray(jitted_cut(rows, num_tokens, block_tokens, single_too=single_too))
        blocks = np.reshape(blocks, (-1, FIELDS))[:count]
        seen = np.zeros(case.num_tokens, int)
        for row, token, position, low, high in blocks:
            assert token % ROW_ALIGNMENT == 0
            assert 0 <= low < high <= block_tokens
            places = np.arange(low, high)
            seen[token + places] += 1
            np.testing.assert_array_equal(rows.token_row[token + places], row)
            np.testing.assert_array_equal(rows.token_position[token + places], position + places)
        wanted = [new > 1 or (new and single_too) for new, _ in case.rows for _ in range(new)]
        np.testing.assert_array_equal(seen, wanted + [0] * case.pad_tokens)
        work = blocks[:, 2] + blocks[:, 4]
        assert (np.diff(work) <= 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float32}, "queries float32 and pools float32"),
        ({"width": 256}, "head width 256"),
        ({"page_size": 8}, "8 tokens per page"),
        ({"num_tokens": 12}, "12 tokens are no multiple of 8"),
        ({"scale": -1.0}, "scale -1.0 is not positive"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_the_reason(change, message):
    call = {"dtype": jnp.bfloat16, "width": 64, "page_size": 16, "num_tokens": 8, "scale": 1.0, **change}
    pools = [jnp.zeros((1, 2, call["page_size"], 1, call["width"]), call["dtype"])] * 2
    q = jax.new_ref(jnp.zeros((call["num_tokens"], 1, call["width"]), call["dtype"]))
    rows = make(Case(name="", **SINGLE, rows=((4, 0),))).rows
    with pytest.raises(NotImplementedError, match=message):
        mosaic_prefill.attend_rows(q, pools, jnp.int32(0), rows, scale=call["scale"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    dump = tmp_path_factory.mktemp("xla")
    dumps = {"XLA_FLAGS": f"--xla_dump_to={dump}", "MOSAIC_GPU_DUMP_TO": str(dump)}
    return environment.run("tests/pallas_kernels/mosaic_compile.py", environment.H200, dump, **dumps)


@pytest.mark.capture
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", ["8192 tokens", "2048 tokens"])
def test_on_an_h200_the_kernel_is_part_of_one_graph_and_no_pool_is_copied(compiled, call):
    found = compiled[call]
    assert found["top_level"] == ["kCommandBuffer"]
    assert found["copies"] == 0
    assert found["temp_bytes"] < 1e6  # A pool is 4.7 GB, the queries are 67 MB.


@pytest.mark.capture
@pytest.mark.long
@pytest.mark.parametrize("call", ["8192 tokens", "2048 tokens"])
def test_on_an_h200_no_tile_lives_in_local_memory(compiled, call):
    """One scalar does, stored once and loaded once a block. A thread's part of a tile is 128 bytes and more."""
    assert compiled[call]["spilled_bytes"] <= 8
    assert compiled[call]["wgmma"] == 48  # Three pairs of products, 8 instructions each.
