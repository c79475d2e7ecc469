"""Every family through the whole engine: the greedy tokens are those of transformers in float32."""

import numpy as np
import pytest

from jaxinfer.types import Request
from tests.engine.drive import GOLDEN, TIE, build, drive, num_equal

FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


LONG = ("qwen2_moe", "qwen3_5", "qwen3_5_moe_fused", "qwen3_moe_all", "qwen3_tied")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in FAMILIES]
)
def test_greedy_tokens_equal_those_of_transformers(family, golden, record_property):
    expected = golden(family)
    # One row, steps of 16 tokens: prompts of 39 tokens take three chunks, and the second prompt waits for the first.
    engine = build(expected.folder, page_size=8, num_pages=22, max_num_seqs=1, max_num_batched_tokens=16)
    requests = [
        Request(request_id=str(i), prompt_ids=prompt.tolist(), max_tokens=16, temperature=0.0)
        for i, prompt in enumerate(expected.prompts)
    ]
    outputs = drive(engine, requests)
    engine.close()
    compared, ties = 0, 0
    for i, request in enumerate(requests):
        count, tied = num_equal(outputs[request.request_id].tokens, expected.tokens[i].tolist(), expected.margins[i])
        compared, ties = compared + count, ties + tied
    close = sum(int(np.sum(margins < TIE)) for margins in expected.margins)
    record_property("tokens_compared", compared)
    record_property("ties", ties)
    print(f"{family}: {compared} tokens equal, {ties} comparisons ended at a tie, {close} close calls")
    assert ties <= 1 and compared >= 32
