"""Which step sizes are compiled, and which of them a plan runs in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.runner.buckets import Bucket, choose, make_buckets

PLATFORMS = st.sampled_from(["cpu", "gpu"])
SEQS = st.integers(1, 300)


@given(st.data(), PLATFORMS, SEQS, st.integers(0, 9000))
def test_every_legal_step_has_a_bucket(data, platform, max_seqs, extra):
    most = max(16, 2 * max_seqs) + extra
    buckets = make_buckets(platform, max_seqs, most)
    rows = data.draw(st.integers(1, max_seqs))
    decode = choose(buckets, decode=True, tokens=rows, rows=rows)
    assert decode.decode and decode.tokens == decode.rows >= rows
    tokens = data.draw(st.integers(rows, most))
    mixed = choose(buckets, decode=False, tokens=tokens, rows=rows)
    assert not mixed.decode and mixed.tokens >= tokens and mixed.rows >= rows


@given(st.data(), PLATFORMS, SEQS, st.integers(0, 9000))
def test_the_chosen_bucket_is_the_smallest_that_holds_the_step(data, platform, max_seqs, extra):
    most = max(16, 2 * max_seqs) + extra
    buckets = make_buckets(platform, max_seqs, most)
    rows = data.draw(st.integers(1, max_seqs))
    tokens = data.draw(st.integers(rows, most))
    for decode, wanted in ((True, rows), (False, tokens)):
        chosen = choose(buckets, decode=decode, tokens=wanted, rows=rows)
        fitting = [b for b in buckets if b.decode == decode and b.tokens >= wanted and b.rows >= rows]
        assert (chosen.tokens, chosen.rows) == min((b.tokens, b.rows) for b in fitting)


@given(PLATFORMS, SEQS, st.integers(0, 9000))
def test_no_bucket_is_compiled_twice_or_exceeds_the_limits(platform, max_seqs, extra):
    most = max(16, 2 * max_seqs) + extra
    buckets = make_buckets(platform, max_seqs, most)
    assert len(set(buckets)) == len(buckets)
    assert max(b.rows for b in buckets) == max_seqs
    assert buckets[-1] == Bucket(False, most, max_seqs)
    assert max(b.tokens for b in buckets) == most


def test_a_step_beyond_the_largest_bucket_is_refused_with_its_size():
    buckets = make_buckets("cpu", 4, 16)
    with pytest.raises(ValueError, match="no compiled step holds 17 tokens in 2 rows"):
        choose(buckets, decode=False, tokens=17, rows=2)
    with pytest.raises(ValueError, match=r"no compiled step holds 5 tokens in 5 rows \(decode: True\)"):
        choose(buckets, decode=True, tokens=5, rows=5)
