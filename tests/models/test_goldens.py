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
from jaxinfer.models.model import Memory, Placement
from jaxinfer.runner import cache
from jaxinfer.runner.step_memory import paged_attend, slot_recur
from jaxinfer.sharding import rules
from pallas_kernels.delta_rule.api import DeltaPools, SlotRows
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.api import PagedRows

GOLDEN = Path(__file__).parents[1] / "golden"
LONG = ("qwen3_5_moe_fused", "qwen3_moe_all", "qwen3_next")
"""What the other families nearly cover."""
FAMILIES = [
    pytest.param(path.name, marks=pytest.mark.long) if path.name in LONG else path.name
    for path in sorted(GOLDEN.iterdir())
    if path.is_dir()
]
TOLERANCE = 1e-4
PAGE, WIDTH = 8, 20
SLOT = 1
PLACE = Placement(Target.of(jax.devices()[0]))
CHUNKS = {"full": [160], "odd chunks": [1, 3, 63, 64, 65], "few tokens": [7, 1, 13, 5, 3, 10, 160], "decode": [1] * 160}
"""Tokens of the steps that compute a prompt, until it ends."""


class Paged:
    """A model that computes given chunks of one sequence over a paged cache, every token's logits returned."""

    def __init__(self, folder: Path):
        source = safetensors.open_folder(folder)
        config = json.loads((folder / "config.json").read_text())
        self.model = model = registry.from_config(config, source.shapes().keys())
        mesh = rules.make_mesh(1)
        shardings = rules.shardings(model.specs, mesh)
        self.params = load(source, model.specs, jnp.float32, shardings, ignore=model.ignored)
        shape = cache.StateShape(
            cache=model.cache,
            recurrent=model.recurrent,
            num_pages=WIDTH,
            page_size=PAGE,
            num_slots=2,
            max_model_len=PAGE * WIDTH,
            vocab_rows=model.vocab_rows,
            dtype=jnp.dtype(jnp.float32),
        )
        self.state = cache.zeros(shape.abstract(mesh, rules.TENSOR_PARALLEL))
        self.step = jax.jit(self._step, static_argnames="max_query_len")

    def _step(self, params, state, tokens, length, start, *, max_query_len):
        """`length` of the tokens are real; the rest pad them to the size that is compiled."""
        real = jnp.arange(tokens.shape[0]) < length
        position = jnp.where(real, start + jnp.arange(tokens.shape[0]), 0)
        # Pages in an order of their own, so that a wrong table shows.
        table = (jnp.arange(WIDTH)[::-1] + 1)[None]
        one = jnp.ones(1, jnp.int32)
        row = jnp.zeros(tokens.shape[0], jnp.int32)
        page = jnp.where(real, table[row, position // PAGE], 0)
        rows = PagedRows(table, one * 0, one * length, one * start, row, position, page)
        pools = {name: jax.new_ref(getattr(state, name)) for name in self.pools}
        kv = pools["k_pages"], pools["v_pages"]
        attend = paged_attend(kv, rows, PLACE, num_heads=self.model.num_heads, max_query_len=max_query_len)
        memory = Memory(attend, page > 0)
        if self.model.recurrent is not None:
            states, of_slots = DeltaPools(pools["recurrent"], pools["conv"]), SlotRows(one * SLOT, *rows[1:-1])
            memory = memory._replace(recur=slot_recur(states, of_slots, PLACE, max_query_len=max_query_len))
        hidden = self.model.forward(params, tokens, position, memory, PLACE)
        state = state.replace(**{name: jax.freeze(pool) for name, pool in pools.items()})
        return state, self.model.logits(params, hidden, PLACE)

    @property
    def pools(self) -> tuple[str, ...]:
        """What a step changes of the state, by its names."""
        return ("k_pages", "v_pages") + (("recurrent", "conv") if self.model.recurrent else ())

    def logits(self, tokens: np.ndarray, chunks: list[int]) -> np.ndarray:
        # What a former sequence left in the slot is of no account.
        state = jax.tree.map(lambda a: a + 1 if a.dtype == jnp.float32 else a, self.state)
        out, start = [], 0
        for size in chunks:
            chunk = tokens[start : start + size]
            if len(chunk):
                padded = np.zeros(1 if size == 1 else 160 if size > 65 else 72, np.int32)
                padded[: len(chunk)] = chunk
                state, logits = self.step(self.params, state, padded, len(chunk), start, max_query_len=len(padded))
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
    for i in range(sum(key.startswith("prompt_") for key in expected)):
        logits = paged.logits(expected[f"prompt_{i}"], CHUNKS[chunks])
        worst = max(worst, float(np.abs(logits - expected[f"logits_{i}"]).max()))
    record_property("largest_difference", worst)
    print(f"{name}, {chunks}: largest difference {worst:.1e}")
    assert worst <= TOLERANCE
