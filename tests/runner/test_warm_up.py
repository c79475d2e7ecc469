"""The full steps that a runner times."""

import jax.numpy as jnp
import pytest

from jaxinfer.models.model import CacheShape
from jaxinfer.runner import inputs
from jaxinfer.runner.buckets import Bucket, make_buckets
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.warm_up import FEW, full_plan

VOCAB = 120
BUCKETS = make_buckets("gpu", 16, 1024)


@pytest.fixture(params=[7, 4000], ids=["few pages", "many pages"])
def shape(request):
    return StateShape(
        cache=CacheShape(num_layers=1, num_kv_heads=1, head_width=64),
        num_pages=request.param,
        page_size=16,
        num_slots=16,
        max_model_len=100,
        vocab_rows=128,
        dtype=jnp.dtype("float32"),
    )


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_full_step_fills_its_bucket_with_what_a_request_may_be(shape, bucket: Bucket):
    plan = full_plan(bucket, shape, VOCAB, 1)
    most = bucket.rows * shape.max_model_len
    assert min(bucket.tokens, most) - plan.num_rows < plan.num_tokens <= bucket.tokens
    rows = (*plan.decodes, *plan.prefills)
    assert plan.num_rows == bucket.rows if bucket.decode else FEW <= plan.num_rows <= bucket.rows
    assert {row.slot for row in rows} == set(range(plan.num_rows))
    for chunk in plan.prefills:
        length = len(chunk.token_ids)
        assert 0 < length <= shape.max_model_len
        assert all(0 <= token < VOCAB for token in chunk.token_ids)
        assert len(set(chunk.token_ids)) == min(length, VOCAB)
        assert len(chunk.new_pages) * shape.page_size >= length
        assert all(1 <= page <= shape.num_pages for page in chunk.new_pages)
    sizes = {"page_size": shape.page_size, "num_slots": shape.num_slots}
    assert inputs.pack(plan, bucket, **sizes).size == inputs.packed_size(bucket, shape.page_size)


def test_each_group_has_a_step_of_its_own(shape):
    plan = full_plan(BUCKETS[-1], shape, VOCAB, 3)
    assert len(plan.parts) == 3
    assert plan.parts[0].num_tokens == plan.num_tokens
