"""scripts/bench_kernels.py: what its cases compute, and what it keeps."""

import functools
import json
from types import SimpleNamespace

import bench_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import results_file
from step_timing import Rates

from pallas_kernels.delta_rule import api as delta_api
from pallas_kernels.delta_rule.cases import TINY
from pallas_kernels.dispatch import CPU
from pallas_kernels.sample import api as sample_api

REFERENCE = sample_api.ROUTES[-1]


@pytest.mark.parametrize("what", bench_kernels.ASKS)
def test_a_sampler_case_draws_anew_in_every_layer_as_it_asks(what):
    case = bench_kernels.sample_case("x", 3, 500, bench_kernels.ASKS[what], 4)
    arrays = case.arrays()

    def tokens(layer):
        counters = jax.new_ref(jnp.zeros(4, jnp.int32))
        return case.call(REFERENCE, layer, counters, arrays, CPU)

    drawn = np.array([jax.jit(tokens)(layer) for layer in range(8)])
    assert drawn.shape == (8, 3) and len(np.unique(drawn)) > 3
    if what == "top-k and top-p":
        likely = np.argsort(-np.asarray(arrays.logits[:3]))[:, :20]
        assert all(token in likely[row] for layer in drawn for row, token in enumerate(layer))
    total, _ = jax.jit(lambda: bench_kernels.loop(case, REFERENCE, CPU, arrays, ()))()
    assert total == drawn[: case.layers, 0].sum()


def test_there_is_a_sampler_case_for_each_number_of_rows_and_what_they_ask():
    names = [case.name for case in bench_kernels.cases() if case.name.startswith("sample")]
    assert len(names) == len(set(names)) == 6
    assert "sample by top-k and top-p, 64 rows" in names


def test_a_delta_rule_case_takes_the_states_of_its_rows_further_in_every_layer_and_hands_them_back():
    case = bench_kernels.delta_case("x", ((3, 0), (1, 5)), 3, TINY)
    assert case.layer_bytes > 8 * 2 * 4 * 16 * 16 and case.layer_flops > 0
    pools = case.pools()
    total, after = jax.jit(functools.partial(bench_kernels.loop, case, delta_api.ROUTES[-1], CPU))(case.arrays(), pools)
    assert jnp.isfinite(total)
    assert after.state.shape == pools.state.shape == (3, 3, 2, 2, 16, 16)
    assert (jnp.abs(after.state[:, :2]).max(axis=(2, 3, 4, 5)) > 0).all()


def test_times_become_rates_and_shares_of_the_nearer_limit(monkeypatch):
    case = bench_kernels.Case("x", 2, (), lambda *_: jnp.zeros(1), lambda: None, layer_bytes=2e6, layer_flops=8e6)
    monkeypatch.setattr(bench_kernels, "GPU_OPTIONS", {})
    monkeypatch.setattr(bench_kernels, "seconds", lambda *_: 4e-6)
    found = bench_kernels.measure(case, REFERENCE, CPU, None, Rates(copy_bytes_per_s=4e12, matrix_flops=8e12))
    assert found == {"us": 2.0, "share_of_limit": 0.5, "tb_per_s": 1.0, "tflop_per_s": 4.0}


def test_figures_are_kept_by_case_and_route_and_a_route_that_refuses_is_left_out(tmp_path, monkeypatch):
    def measure(case, route, *_):
        if route.name == "mosaic_gpu":
            raise NotImplementedError
        return {"us": float(len(case.name))}

    monkeypatch.setattr(bench_kernels, "measure", measure)
    routes = [SimpleNamespace(name=name) for name in ("mosaic_gpu", "triton", "cublas")]
    cases = [SimpleNamespace(name=name, routes=routes, arrays=lambda: ()) for name in ("a", "bb")]
    results = results_file.Results(tmp_path / "gpu.json", "x", {})
    for route in ("triton", "", "cublas"):
        bench_kernels.bench(cases, route, CPU, Rates(1.0, 1.0), results)
    rows = json.loads((tmp_path / "gpu.json").read_text())["kernels"]["x"]
    assert [(row["case"], row["route"], row["us"]) for row in rows] == [
        ("a", "triton", 1.0),
        ("bb", "triton", 2.0),
        ("a", "cublas", 1.0),
        ("bb", "cublas", 2.0),
    ]
