"""Every family against the logits of transformers in float32: full forward, chunked prefill, paged decode."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import safetensors
from checkpoints.load import load
from jaxinfer.models import registry
from jaxinfer.models.model import Placement
from jaxinfer.runner.step import paged_attend
from jaxinfer.sharding import rules
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.api import PagedRows

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
TOLERANCE = 1e-4
PAGE, WIDTH, TOKENS = 8, 8, 40
PLACE = Placement(Target.of(jax.devices()[0]))
CHUNKS = {"full": [39], "odd chunks": [7, 1, 13, 5, 3, 10], "decode": [1] * 39}


class Paged:
    """A model that computes given chunks of one sequence over a paged cache, every token's logits returned."""

    def __init__(self, folder: Path):
        self.model = registry.from_config(json.loads((folder / "config.json").read_text()))
        mesh = rules.make_mesh(1)
        source = safetensors.open_folder(folder)
        self.params = load(source, self.model.specs, jnp.float32, rules.shardings(self.model.specs, mesh))
        c = self.model.cache
        self.pool_shape = (c.num_layers, WIDTH + 1, PAGE, c.num_kv_heads, c.head_width)
        self.step = jax.jit(self._step, static_argnames="max_query_len")

    def _step(self, params, pools, tokens, length, start, *, max_query_len):
        """`length` of the tokens are real; the rest pad them to the size that is compiled."""
        real = jnp.arange(tokens.shape[0]) < length
        position = jnp.where(real, start + jnp.arange(tokens.shape[0]), 0)
        # Pages in an order of their own, so that a wrong table shows.
        table = (jnp.arange(WIDTH)[::-1] + 1)[None]
        one = jnp.ones(1, jnp.int32)
        row = jnp.zeros(tokens.shape[0], jnp.int32)
        page = jnp.where(real, table[row, position // PAGE], 0)
        rows = PagedRows(table, one * 0, one * length, one * start, row, position, page)
        refs = tuple(jax.new_ref(pool) for pool in pools)

        attend = paged_attend(refs, rows, PLACE, num_heads=self.model.num_heads, max_query_len=max_query_len)
        hidden = self.model.forward(params, tokens, position, attend, PLACE)
        return tuple(jax.freeze(ref) for ref in refs), self.model.logits(params, hidden, PLACE)

    def logits(self, tokens: np.ndarray, chunks: list[int]) -> np.ndarray:
        pools = (jnp.zeros(self.pool_shape), jnp.zeros(self.pool_shape))
        out, start = [], 0
        for size in chunks:
            chunk = tokens[start : start + size]
            if len(chunk):
                padded = np.zeros(1 if size == 1 else TOKENS, np.int32)
                padded[: len(chunk)] = chunk
                pools, logits = self.step(self.params, pools, padded, len(chunk), start, max_query_len=len(padded))
                out.append(np.asarray(logits)[: len(chunk)])
            start += size
        return np.concatenate(out)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, Paged(GOLDEN / request.param), np.load(GOLDEN / request.param / "expected.npz")


@pytest.mark.parametrize("chunks", CHUNKS)
def test_logits_equal_those_of_transformers_in_float32(family, chunks, record_property):
    name, paged, expected = family
    worst = 0.0
    for i in range(3):
        logits = paged.logits(expected[f"prompt_{i}"], CHUNKS[chunks])
        worst = max(worst, float(np.abs(logits - expected[f"logits_{i}"]).max()))
    record_property("largest_difference", worst)
    print(f"{name}, {chunks}: largest difference {worst:.1e}")
    assert worst <= TOLERANCE
