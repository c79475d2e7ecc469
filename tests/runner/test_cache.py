"""What the state costs, and how many pages fit beside the rest."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.model import CacheShape
from jaxinfer.runner import cache
from jaxinfer.sharding import rules


def make_shape(**changes) -> cache.StateShape:
    sizes = {
        "cache": CacheShape(num_layers=3, num_kv_heads=2, head_width=16),
        "num_pages": 7,
        "page_size": 8,
        "num_slots": 5,
        "max_model_len": 45,
        "vocab_rows": 100,
        "dtype": jnp.dtype(jnp.bfloat16),
    }
    return cache.StateShape(**{**sizes, **changes})


def page_bytes_of(shape: cache.StateShape) -> int:
    return cache.token_bytes(shape.cache, shape.dtype) * shape.page_size


@pytest.mark.parametrize("changes", [{}, {"vocab_rows": 7}, {"num_slots": 1}, {"max_model_len": 48}])
def test_pages_and_slots_together_are_all_the_bytes_of_the_state(changes):
    shape = make_shape(**changes)
    abstract = shape.abstract(rules.make_mesh(1), rules.TENSOR_PARALLEL)
    page_bytes = cache.page_bytes(abstract)
    assert page_bytes == page_bytes_of(shape)
    state_bytes = sum(array.nbytes for array in jax.tree.leaves(cache.zeros(abstract)))
    assert page_bytes * (shape.num_pages + 1) + cache.slot_bytes(abstract) == state_bytes


def test_there_is_a_slot_and_a_page_more_than_sequences_may_own():
    state = make_shape().abstract(rules.make_mesh(1), rules.TENSOR_PARALLEL)
    assert state.k_pages.shape == state.v_pages.shape == (3, 8, 8, 2, 16)
    assert state.page_table.shape == (6, 6)
    by_slot = (state.last_token, state.sampling, state.output_counts, state.in_prompt, state.logit_bias)
    assert {array.shape[0] for array in by_slot} == {6}


def test_a_new_state_is_all_zeros_in_its_shardings():
    abstract = make_shape().abstract(rules.make_mesh(1), rules.TENSOR_PARALLEL)
    for array, wanted in zip(jax.tree.leaves(cache.zeros(abstract)), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
        assert not np.asarray(array).any()


def test_the_pool_is_no_larger_than_all_slots_at_their_full_length_need():
    shape = make_shape()
    pages = cache.pool_pages(shape, rules.make_mesh(1), page_bytes_of(shape), used_bytes=0, temp_bytes=0)
    assert pages == shape.num_slots * shape.table_width


def test_a_gpus_memory_is_taken_whole_whatever_the_slots_need():
    shape = make_shape()
    page_bytes = page_bytes_of(shape)

    def pages(fitting: int) -> int:
        stats = {"bytes_limit": cache.GPU_RESERVE_BYTES + 5 * page_bytes + (fitting + 1) * page_bytes}
        device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
        mesh = SimpleNamespace(size=1, local_devices=[device])
        return cache.pool_pages(shape, mesh, page_bytes, used_bytes=2 * page_bytes, temp_bytes=3 * page_bytes)

    assert shape.num_slots * shape.table_width < 1000
    assert pages(1000) == 1000
    assert pages(2 * cache.MAX_PAGES) == cache.MAX_PAGES


def test_memory_that_holds_no_page_is_refused_with_the_sizes():
    shape = make_shape(cache=CacheShape(num_layers=1000, num_kv_heads=100, head_width=100), page_size=256)
    message = r"no room for a KV cache: \d+ MiB are left beside 3 MiB of weights .* a page takes 9765.62 MiB"
    with pytest.raises(cache.PoolError, match=message):
        cache.pool_pages(shape, rules.make_mesh(1), page_bytes_of(shape), used_bytes=3 * 2**20, temp_bytes=0)


def test_temporaries_have_a_hole_that_no_frame_fits_in_and_frames_have_some_of_just_their_size():
    small, frame = 3 * 2**18, 76_000_000
    sizes = cache.hole_sizes(small, [700_000, 39_000_000, 20_000_000, 400_000_000], frame, 8)
    assert sizes.count(small) == cache.NUM_HOLES and sizes.count(frame) == 8
    assert [size for size in sizes if size not in (small, frame)] == [39_000_000]
    assert cache.hole_sizes(5, [700_000], 0, 8) == [cache.HOLE_BYTES] * cache.NUM_HOLES


def test_what_is_returned_with_holes_lies_behind_each_of_them():
    kept = cache.make_holes([10, 20, 30])
    assert [array.nbytes for array in kept] == [cache.HOLE_BYTES] * 3
